"""The pinner over real files: what a broker deletes before it is durable stays, within a budget."""

from __future__ import annotations

import asyncio
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.fakes.log_writer import LogWriter, _Segment
from tests.fakes.virtual_loop import virtually
from tieringd.archiving.observer import Observation
from tieringd.archiving.pinner import PinFacts, Pinner
from tieringd.broker.pins import PinDirectory
from tieringd.errors import CorruptDataError
from tieringd.model.manifest_parts import Gap
from tieringd.policies.pinning import NO_PINS, judged

AMPLE = 10**9


@pytest.fixture
def log_dir(tmp_path):
    return tmp_path / "logs"


@pytest.fixture
def writer(log_dir):
    """Give a log with three closed segments, 0 to 2, 3 to 5 and 6 to 8, and an active one."""
    writer = LogWriter(log_dir)
    for _ in range(3):
        writer.closed_segment()
    return writer


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "pins"
    path.mkdir()
    return path


@pytest.fixture
def make_pinner(log_dir, root, metrics):
    def make(budget_bytes: int = AMPLE) -> Pinner:
        directory = PinDirectory(str(root))
        return Pinner({str(log_dir): directory}, budget_bytes=budget_bytes, metrics=metrics)

    return make


@pytest.fixture
def pinner(make_pinner):
    return make_pinner()


def facts_of(pinner: Pinner, writer: LogWriter, next_offset: int | None = None) -> PinFacts:
    found = pinner.pins_of(writer.partition)
    return PinFacts(*judged(writer.local_log(), found), next_offset)


async def step(pinner, *writers, next_offset=None, is_complete=True) -> None:
    facts = [facts_of(pinner, each, next_offset) for each in writers]
    await pinner.step(facts, is_complete=is_complete)


def held(pinner: Pinner, writer: LogWriter) -> list[tuple[int, bool]]:
    """Return each pin's base and whether only the pin holds its bytes."""
    found = pinner.pins_of(writer.partition)
    return sorted((each.segment.base_offset, each.is_held) for each in found.all_pins)


def contents(segments) -> list[bytes]:
    return [Path(each.path).read_bytes() for each in segments]


def is_same_file(one, other) -> bool:
    return Path(one).samefile(other)


def names_below(directory: Path) -> list[str]:
    return sorted(str(each) for each in directory.rglob("*"))


def value(metrics, name: str) -> float:
    found = metrics.registry.get_sample_value(f"tieringd_{name}")
    assert found is not None
    return found


async def test_pinner_holds_what_the_broker_deletes_until_it_is_durable(pinner, writer, metrics, root):
    """
    Every closed segment is pinned from the first scan on.

    A file that the broker deleted stays until its commit.
    """
    await step(pinner, writer)
    assert held(pinner, writer) == [(0, False), (3, False), (6, False)]
    assert (value(metrics, "pinned_bytes"), value(metrics, "pinned_segments")) == (0, 0)

    writer.drop_head()
    writer.drop_head()
    await step(pinner, writer)
    assert held(pinner, writer) == [(0, True), (3, True), (6, False)]
    size_bytes = len(writer.data_of(0)) + len(writer.data_of(3))
    assert (value(metrics, "pinned_bytes"), value(metrics, "pinned_segments")) == (size_bytes, 2)

    await step(pinner, writer, next_offset=3)
    assert held(pinner, writer) == [(3, True), (6, False)]
    await step(pinner, writer, next_offset=9)
    assert list(root.iterdir()) == []
    assert (value(metrics, "pinned_bytes"), value(metrics, "pinned_segments")) == (0, 0)


async def test_pinned_segments_can_be_uploaded_after_the_broker_deleted_them(pinner, writer):
    """An observation with pins has the log that was, byte for byte."""
    before = contents(writer.local_log().closed_segments)
    await step(pinner, writer)
    writer.drop_head()
    writer.drop_head()
    seen = Observation(
        writer.local_log(), writer.bounds(), None, pinner.pins_of(writer.partition).pins, scan_number=1
    )
    assert [each.base_offset for each in seen.log.segments] == [6, 9]
    assert [each.base_offset for each in seen.uploadable.segments] == [0, 3, 6, 9]
    assert contents(seen.uploadable.closed_segments) == before


async def test_pinner_follows_a_growing_log(pinner, writer):
    """Each scan pins what has closed since, and nothing twice."""
    await step(pinner, writer, next_offset=6)
    assert held(pinner, writer) == [(6, False)]
    writer.closed_segment()
    for _ in range(2):
        await step(pinner, writer, next_offset=6)
        assert held(pinner, writer) == [(6, False), (9, False)]


async def test_pinner_takes_up_the_pins_of_the_process_before(make_pinner, writer):
    """Pins are found again after a crash, and released when they are durable."""
    await step(make_pinner(), writer)
    writer.drop_head()
    again = make_pinner()
    assert held(again, writer) == [(0, True), (3, False), (6, False)]
    await step(again, writer, next_offset=6)
    assert held(again, writer) == [(6, False)]


async def test_pinner_lets_truncated_segments_go_and_pins_what_takes_their_place(pinner, writer):
    """A file that is active again is pinned once it closes anew, with its new end."""
    await step(pinner, writer)
    writer.truncate(3)
    await step(pinner, writer)
    assert held(pinner, writer) == [(0, False)]
    writer.append(b"other")
    writer.roll()
    await step(pinner, writer)
    found = pinner.pins_of(writer.partition).pins
    assert [(each.segment.base_offset, each.segment.next_offset) for each in found] == [(0, 3), (3, 4)]
    assert is_same_file(found[1].segment.path, writer.log_path(3))


async def test_pinner_pins_a_file_that_was_replaced_in_the_same_step(pinner, writer):
    """Compaction puts another file under the same name: its pin takes the place of the old one at once."""
    await step(pinner, writer)
    cleaned = writer.path / "cleaned"
    cleaned.write_bytes(b"fewer records")
    cleaned.rename(writer.log_path(3))
    await step(pinner, writer)
    assert held(pinner, writer) == [(0, False), (3, False), (6, False)]
    pinned = pinner.pins_of(writer.partition).pins[1].segment
    assert is_same_file(pinned.path, writer.log_path(3))
    stem = pinned.path.removesuffix(".log")
    assert is_same_file(f"{stem}.index", writer.log_path(3).with_suffix(".index"))
    snapshot = f"{6:020d}.snapshot"
    assert is_same_file(f"{pinned.path.rpartition('/')[0]}/{snapshot}", writer.path / snapshot)


async def test_pin_of_a_grown_active_segment_gets_its_new_name_without_the_broker_s_file(
    pinner, log_dir, metrics
):
    """The broker deletes the segment after the scan that saw it closed: the pin is the same file."""
    writer = LogWriter(log_dir)
    writer.append()
    await pinner.step([replace(facts_of(pinner, writer), expiring_end=3)], is_complete=True)
    writer.append()
    writer.roll()
    data = writer.data_of(0)
    seen = facts_of(pinner, writer)
    assert seen.log.segments[0].next_offset == 6
    writer.drop_head()
    await pinner.step([seen], is_complete=True)
    (pin,) = pinner.pins_of(writer.partition).pins
    assert (pin.segment.base_offset, pin.segment.next_offset, pin.is_open) == (0, 6, False)
    assert contents([pin.segment]) == [data]
    assert value(metrics, "pin_failures_total") == 0


def name_as_before_the_mark(root: Path) -> None:
    """Name pins of active segments as the releases did that had no mark for them."""
    for path in list(root.rglob("*-open.*")):
        path.rename(path.with_name(path.name.replace("-open", "")))


@pytest.mark.parametrize("is_old", [False, True])
async def test_pin_of_a_grown_active_segment_that_is_durable_in_part_stays(pinner, log_dir, root, is_old):
    """The archive holds what the segment had when it was pinned; only the pin has the rest."""
    writer = LogWriter(log_dir)
    writer.append()
    await pinner.step([replace(facts_of(pinner, writer), expiring_end=3)], is_complete=True)
    if is_old:
        name_as_before_the_mark(root)
    writer.append()
    writer.roll()
    data = writer.data_of(0)
    seen = facts_of(pinner, writer, next_offset=3)
    writer.drop_head()
    await pinner.step([seen], is_complete=True)
    assert contents(one.segment for one in pinner.pins_of(writer.partition).pins) == [data]


async def test_pins_that_are_set_aside_are_named_where_what_replaces_them_cannot_be_pinned(
    pinner, writer, root, metrics
):
    """A full disk may take no link. Other segments are pinned all the same, and the failure counts once."""
    await step(pinner, writer)
    data = writer.data_of(0)
    writer.compact(0, 3)
    writer.closed_segment()
    writer.closed_segment()
    directory = root / f"{writer.name}_{writer.partition.topic_id}"
    obstacles = [directory / f"{base:020d}-{end:020d}.index" for base, end in ((0, 6), (9, 12))]
    for path in obstacles:
        path.mkdir()
    with capture_logs() as lines:
        await step(pinner, writer)
    assert [line["base_offset"] for line in lines if "set aside" in line["event"]] == [0, 3]
    (failure,) = [line for line in lines if line["event"].startswith("pin failed")]
    assert str(writer.log_path(0)) in failure["error"]
    assert value(metrics, "pin_failures_total") == 1
    assert value(metrics, "stray_pins") == 2
    found = pinner.pins_of(writer.partition).pins
    assert [(one.segment.base_offset, one.is_stray) for one in found] == [
        (0, True),
        (3, True),
        (6, False),
        (12, False),
    ]
    assert contents(one.segment for one in found[:1]) == [data]

    for path in obstacles:
        path.rmdir()
    with capture_logs() as lines:
        await step(pinner, writer)
    assert lines == []
    assert [base for base, _ in held(pinner, writer)] == [0, 0, 3, 6, 9, 12]


async def test_pin_of_a_cleaned_segment_stays_where_the_broker_deletes_the_new_file(pinner, writer, metrics):
    """What replaces a pin may be gone when the step begins. Nothing shows that a cleaner wrote it."""
    await step(pinner, writer)
    data = writer.data_of(0)
    writer.compact(0, 3)
    seen = facts_of(pinner, writer)
    assert [one.base_offset for one in seen.log.closed_segments] == [0, 6]
    writer.drop_head()
    with capture_logs() as lines:
        await pinner.step([seen], is_complete=True)
    found = pinner.pins_of(writer.partition).pins
    assert [(one.segment.base_offset, one.is_stray) for one in found] == [(0, True), (3, True), (6, False)]
    assert contents(one.segment for one in found[:1]) == [data]
    asides = [line["base_offset"] for line in lines if "set aside" in line["event"]]
    assert asides == [0, 3]
    assert value(metrics, "stray_pins") == 2
    await step(pinner, writer, next_offset=6)
    assert held(pinner, writer) == [(6, False)]


async def test_pins_of_cleaned_segments_go_when_the_new_file_is_pinned(pinner, writer):
    """A cleaner makes one file of two: its pin takes the place of both in the same step."""
    await step(pinner, writer)
    writer.compact(0, 3)
    with capture_logs() as lines:
        await step(pinner, writer)
    assert lines == []
    found = pinner.pins_of(writer.partition).pins
    assert [(one.segment.base_offset, one.segment.next_offset, one.is_stray) for one in found] == [
        (0, 6, False),
        (6, 9, False),
    ]
    assert is_same_file(found[0].segment.path, writer.log_path(0))


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("links", range(6))
@pytest.mark.parametrize("is_deleted", [False, True])
async def test_process_that_ends_while_it_replaces_a_pin_leaves_the_bytes(
    log_dir, root, metrics, links, is_deleted
):
    """A pin is made whole before the one in whose place it is goes, wherever the process ends."""

    class Mortal(PinDirectory):
        """Ends the process before one of its changes."""

        left = links

        def _count(self) -> None:
            if Mortal.left == 0:
                raise Killed
            Mortal.left -= 1

        def set_aside(self, partition, pins):
            self._count()
            return super().set_aside(partition, pins)

        def note(self, log):
            self._count()
            super().note(log)

        def make(self, partition, segment, *, is_open=False):
            self._count()
            return super().make(partition, segment, is_open=is_open)

        def release(self, partition, pins):
            self._count()
            super().release(partition, pins)

    writer = LogWriter(log_dir)
    writer.closed_segment()
    writer.closed_segment()
    pinner = Pinner({str(log_dir): PinDirectory(str(root))}, budget_bytes=AMPLE, metrics=metrics)
    await step(pinner, writer)
    data = writer.data_of(0)
    writer.compact(0)
    facts = facts_of(pinner, writer)
    if is_deleted:
        writer.drop_head()
    mortal = Pinner({str(log_dir): Mortal(str(root))}, budget_bytes=AMPLE, metrics=metrics)
    try:
        await mortal.step([facts], is_complete=True)
    except Killed:
        assert Mortal.left == 0
    pins = [one for one in pinner.pins_of(writer.partition).pins if one.segment.base_offset == 0]
    assert data in contents(one.segment for one in pins)
    # The process that starts next finds the rest, and the pin of the log's own file.
    await step(pinner, writer)
    pins = [one for one in pinner.pins_of(writer.partition).pins if one.segment.base_offset == 0]
    assert data in contents(one.segment for one in pins)


async def test_pin_elsewhere_goes_when_what_the_moved_log_has_is_pinned(tmp_path, two_disks):
    """It stays where the broker deletes the moved file before it is pinned, and is uploaded."""
    writer, pinner = LogWriter(tmp_path / "a"), two_disks("a", "b")
    for _ in range(2):
        writer.closed_segment()
    data = writer.data_of(0)
    await step(pinner, writer)
    moved(writer, tmp_path / "b")
    facts = facts_of(pinner, writer)
    drop_head(writer)
    await pinner.step([facts], is_complete=True)
    assert held(pinner, writer) == [(0, True), (3, False)]
    assert contents(upload_of(pinner, writer)[:1]) == [data]


async def test_pinner_gives_up_the_oldest_held_bytes_at_its_limit(make_pinner, log_dir, root, metrics):
    """The oldest held files go first, across partitions, until the rest fits. Each is logged and counted."""
    writers = [LogWriter(log_dir, "clicks", number) for number in range(2)]
    for each in writers:
        each.closed_segment()
        each.closed_segment()
    size_bytes = len(writers[0].data_of(0))
    pinner = make_pinner(budget_bytes=2 * size_bytes)
    await step(pinner, *writers)
    for each in writers:
        each.drop_head()
    await step(pinner, *writers)
    assert [held(pinner, each) for each in writers] == [[(0, True), (3, False)]] * 2
    writers[1].drop_head()
    with capture_logs() as lines:
        await step(pinner, *writers)
    assert [held(pinner, each) for each in writers] == [[(3, False)], [(0, True), (3, True)]]
    assert value(metrics, "pins_given_up_total") == 1
    assert value(metrics, "pinned_bytes") == 2 * size_bytes
    (line,) = [each for each in lines if "given up" in each["event"]]
    assert (line["partition"], line["base_offset"], line["log_level"]) == ("clicks-0", 0, "error")
    assert (line["size_bytes"], line["limit_bytes"]) == (size_bytes, 2 * size_bytes)


async def test_pinner_without_a_budget_holds_nothing_but_keeps_its_links(make_pinner, writer, metrics):
    """A limit of nothing still pins what the broker has, and lets it go when the broker does."""
    pinner = make_pinner(budget_bytes=0)
    await step(pinner, writer)
    assert len(held(pinner, writer)) == 3
    writer.drop_head()
    await step(pinner, writer)
    assert held(pinner, writer) == [(3, False), (6, False)]
    assert value(metrics, "pins_given_up_total") == 1


async def test_pins_of_a_deleted_partition_go_after_two_complete_scans(pinner, writer, log_dir, root):
    """One scan may be mistaken, and an incomplete one says nothing."""
    other = LogWriter(log_dir, "payments", 0)
    other.closed_segment()
    await step(pinner, writer, other)
    await step(pinner, other)
    assert len(held(pinner, writer)) == 3
    for _ in range(3):
        await step(pinner, other, is_complete=False)
    assert len(held(pinner, writer)) == 3
    with capture_logs() as lines:
        await step(pinner, other)
    assert held(pinner, writer) == []
    assert len(list(root.iterdir())) == 1
    assert len(held(pinner, other)) == 1
    assert [each["event"] for each in lines] == ["pins of a partition that is gone are removed"]


async def test_pins_of_a_deleted_partition_count_as_lost_where_they_alone_hold_it(pinner, writer, metrics):
    """A partition may be moved to other brokers while pins hold what its log lacks."""
    await step(pinner, writer)
    sizes_bytes = [len(writer.data_of(each)) for each in (0, 3)]
    writer.drop_head()
    writer.drop_head()
    with capture_logs() as lines:
        for _ in range(2):
            await step(pinner)
    assert held(pinner, writer) == []
    (line,) = lines
    assert line["event"] == "pins of a partition that is gone are removed, and what they alone held is lost"
    assert (line["log_level"], line["base_offsets"], line["size_bytes"]) == (
        "error",
        [0, 3],
        sum(sizes_bytes),
    )
    assert value(metrics, "pins_given_up_total") == 2


async def test_pins_of_a_partition_that_is_not_archived_stay_within_the_budget(
    make_pinner, writer, root, log_dir, metrics
):
    """Archiving may be switched off by mistake. The pins are counted, and the oldest are given up first."""
    sizes_bytes = {each: len(writer.data_of(each)) for each in (0, 3)}
    pinner = make_pinner(budget_bytes=sizes_bytes[3])
    other = LogWriter(log_dir, "payments")
    await step(pinner, writer)
    writer.drop_head()

    async def idle_step():
        with capture_logs() as lines:
            await pinner.step([facts_of(pinner, other)], idle=[writer.partition], is_complete=True)
        return lines

    (line,) = await idle_step()
    assert line["event"].startswith("pins stay while their topic is not archived")
    assert (line["log_level"], line["partition"], line["segments"]) == ("warning", "orders-0", 3)
    assert is_same_file(line["path"], root / f"{writer.name}_{writer.partition.topic_id}")
    for _ in range(3):
        assert await idle_step() == []
    assert held(pinner, writer) == [(0, True), (3, False), (6, False)]
    assert value(metrics, "pinned_bytes") == sizes_bytes[0]

    writer.drop_head()
    (line,) = await idle_step()
    assert (line["log_level"], line["base_offset"]) == ("error", 0)
    assert held(pinner, writer) == [(3, True), (6, False)]
    assert value(metrics, "pins_given_up_total") == 1

    await step(pinner, writer, other, next_offset=6)
    assert held(pinner, writer) == [(6, False)]
    assert [each["segments"] for each in await idle_step()] == [1]


async def test_pins_of_a_partition_that_is_not_archived_and_cannot_be_read_are_a_failure(
    pinner, writer, root, log_dir, metrics
):
    """The step goes on for the other partitions."""
    other = LogWriter(log_dir, "payments")
    other.closed_segment()
    (root / f"{writer.name}_{writer.partition.topic_id}").write_bytes(b"a file in a directory's place")
    with capture_logs() as lines:
        await pinner.step([facts_of(pinner, other)], idle=[writer.partition], is_complete=True)
    assert [line["event"] for line in lines] == ["pin failed: the broker may delete what is not durable"]
    assert value(metrics, "pin_failures_total") == 1
    assert len(held(pinner, other)) == 1


async def test_pins_of_a_partition_that_is_seen_again_stay(pinner, writer, log_dir):
    """Two scans without it count only when they follow each other."""
    other = LogWriter(log_dir, "payments", 0)
    for _ in range(3):
        await step(pinner, writer, other)
        await step(pinner, other)
        assert len(held(pinner, writer)) == 3


async def test_pins_of_a_recreated_topic_s_former_self_go(pinner, writer):
    """The new incarnation has pins of its own, and the old one's are those of a deleted partition."""
    await step(pinner, writer)
    again = replace(writer.partition, topic_id="another-incarnation-id")
    for _ in range(2):
        log = replace(writer.local_log(), partition=again)
        await pinner.step([PinFacts(log, pinner.pins_of(again).pins, None)], is_complete=True)
    assert len(pinner.pins_of(again).pins) == 3
    assert pinner.pins_of(writer.partition).pins == ()


async def test_pins_of_a_partition_that_is_on_disk_stay_although_the_broker_does_not_name_it(pinner, writer):
    """A cluster whose answer lacks a partition has not deleted it."""
    await step(pinner, writer)
    for _ in range(3):
        await pinner.step([], others=[writer.partition], is_complete=True)
    assert len(pinner.pins_of(writer.partition).pins) == 3


async def test_log_directories_have_pins_and_budgets_of_their_own(tmp_path, metrics):
    """The pins of one disk do not count for another, and a directory without a pin root is not pinned."""
    writers = [LogWriter(tmp_path / name, "orders", number) for number, name in enumerate(("a", "b", "c"))]
    for each in writers:
        each.closed_segment()
        each.closed_segment()
    size_bytes = len(writers[0].data_of(0))
    roots = {name: tmp_path / f"{name}-pins" for name in ("a", "b")}
    directories = {str(tmp_path / name): PinDirectory(str(root)) for name, root in roots.items()}
    for root in roots.values():
        root.mkdir()
    pinner = Pinner(directories, budget_bytes=size_bytes, metrics=metrics)
    for _ in range(3):
        await step(pinner, *writers)
    assert [len(pinner.pins_of(each.partition).pins) for each in writers] == [2, 2, 0]
    for each in writers:
        each.drop_head()
    await step(pinner, *writers)
    assert [held(pinner, each) for each in writers] == [[(0, True), (3, False)], [(0, True), (3, False)], []]
    assert value(metrics, "pinned_bytes") == 2 * size_bytes
    assert value(metrics, "pins_given_up_total") == 0


@pytest.fixture
def two_disks(tmp_path, metrics):
    """Give a function that makes a pinner of the log directories a and b, and their pins, by name."""
    roots = {name: tmp_path / f"{name}-pins" for name in ("a", "b")}
    for root in roots.values():
        root.mkdir()

    def make(*names, budget_bytes=AMPLE):
        directories = {str(tmp_path / name): PinDirectory(str(roots[name])) for name in names}
        left = [PinDirectory(str(root)) for name, root in roots.items() if name not in names]
        return Pinner(directories, budget_bytes=budget_bytes, metrics=metrics, left=left)

    return make


def moved(writer, log_dir):
    """Let the broker move a partition to another log directory; return it there, with files of its own."""
    there = log_dir / str(writer.name)
    shutil.copytree(writer.path, there)
    shutil.rmtree(writer.path)
    writer.path, writer.partition = there, replace(writer.partition, path=str(there), log_dir=str(log_dir))


def drop_head(writer):
    """Let retention delete the first segment, and let the broker write down where its first epoch begins."""
    writer.drop_head()
    first_offset = writer.local_log().first_offset
    writer.epochs = [(epoch, max(start_offset, first_offset)) for epoch, start_offset in writer.epochs]
    writer._write_epochs()


def upload_of(pinner, writer):
    """Return what an observation of a log would upload."""
    log, pins = judged(writer.local_log(), pinner.listed()(writer.partition))
    return Observation(log, writer.bounds(), None, pins, scan_number=1).uploadable.segments


async def test_pins_of_a_partition_that_was_moved_to_another_disk_stay_until_they_are_durable(
    tmp_path, two_disks, metrics
):
    """
    Only they hold what the broker's retention has deleted while the store was away.

    What the moved log has is pinned there.
    """
    writer, pinner = LogWriter(tmp_path / "a"), two_disks("a", "b")
    for _ in range(3):
        writer.closed_segment()
    before = contents(writer.local_log().closed_segments)
    await step(pinner, writer)
    drop_head(writer)
    await step(pinner, writer)
    moved(writer, tmp_path / "b")
    for _ in range(3):
        await step(pinner, writer)
    assert held(pinner, writer) == [(0, True), (3, False), (6, False)]
    drop_head(writer)
    await step(pinner, writer)
    assert held(pinner, writer) == [(0, True), (3, True), (6, False)]
    assert contents(upload_of(pinner, writer)[:3]) == before
    assert value(metrics, "pinned_segments") == 2

    await step(pinner, writer, next_offset=6)
    assert held(pinner, writer) == [(6, False)]
    assert list((tmp_path / "a-pins").iterdir()) == []
    await step(pinner, writer, next_offset=9)
    assert list((tmp_path / "b-pins").iterdir()) == []


async def test_pins_of_before_a_move_are_set_aside_where_the_log_began_anew(tmp_path, two_disks):
    """Inodes of another disk prove nothing, and no leader epoch is in both histories."""
    writer, pinner = LogWriter(tmp_path / "a"), two_disks("a", "b")
    writer.closed_segment()
    await step(pinner, writer)
    shutil.rmtree(writer.path)
    other = LogWriter(tmp_path / "b", first_offset=30)
    other.begin_epoch(7)
    other.closed_segment()
    with capture_logs() as lines:
        await step(pinner, other)
    assert "pinned segment set aside: nothing shows that it is of the log that is there now" in [
        line["event"] for line in lines
    ]
    assert [each.base_offset for each in upload_of(pinner, other)] == [30, 33]


async def test_pins_of_an_earlier_configuration_are_archived_and_go(tmp_path, two_disks):
    """No pin is made there, also where nothing is pinned any more."""
    writer = LogWriter(tmp_path / "a")
    for _ in range(2):
        writer.closed_segment()
    before = contents(writer.local_log().closed_segments)
    await step(two_disks("a"), writer)
    drop_head(writer)
    drop_head(writer)
    pinner = two_disks()
    assert pinner.is_used
    for _ in range(3):
        await step(pinner, writer)
    assert held(pinner, writer) == [(0, True), (3, True)]
    assert contents(upload_of(pinner, writer)[:2]) == before
    writer.closed_segment()
    await step(pinner, writer, next_offset=6)
    assert held(pinner, writer) == []
    assert list((tmp_path / "a-pins").iterdir()) == []


async def test_each_disk_has_the_budget_of_its_own_pins(tmp_path, two_disks, metrics):
    """The pins that a moved partition has left behind take no room on the other disk."""
    writer = LogWriter(tmp_path / "a")
    for _ in range(3):
        writer.closed_segment()
    pinner = two_disks("a", "b", budget_bytes=len(writer.data_of(0)))
    await step(pinner, writer)
    drop_head(writer)
    await step(pinner, writer)
    moved(writer, tmp_path / "b")
    await step(pinner, writer)
    drop_head(writer)
    await step(pinner, writer)
    assert held(pinner, writer) == [(0, True), (3, True), (6, False)]
    assert value(metrics, "pins_given_up_total") == 0


async def test_pin_that_fails_is_counted_and_stops_no_other_pin(pinner, writer, log_dir, root, metrics):
    """One partition's pins cannot be made; the others' are, and the step ends well."""
    other = LogWriter(log_dir, "payments", 0)
    other.closed_segment()
    (root / f"{writer.name}_{writer.partition.topic_id}").write_bytes(b"a file in a directory's place")
    facts = [PinFacts(writer.local_log(), (), None), facts_of(pinner, other)]
    with capture_logs() as lines:
        await pinner.step(facts, is_complete=True)
    assert len(held(pinner, other)) == 1
    assert value(metrics, "pin_failures_total") == 2
    assert {line["event"] for line in lines} == {"pin failed: the broker may delete what is not durable"}
    assert [str(writer.path) in line["error"] for line in lines] == [True, True]
    assert str(writer.log_path(0)) in lines[1]["error"]


async def test_pin_directory_that_fails_is_counted_and_the_round_goes_on(tmp_path, log_dir, writer, metrics):
    """A root that is no directory costs the pins, and nothing else of the round."""
    root = tmp_path / "a-file"
    root.write_bytes(b"")
    pinner = Pinner({str(log_dir): PinDirectory(str(root))}, budget_bytes=AMPLE, metrics=metrics)
    await pinner.step([PinFacts(writer.local_log(), (), None)], is_complete=True)
    assert value(metrics, "pin_failures_total") == 3
    assert value(metrics, "pinned_segments") == 0


async def test_nothing_of_the_pinner_is_ever_inside_the_log_directory(pinner, writer, log_dir):
    """Kafka refuses to start when it finds a name that it does not know."""
    names = names_below(log_dir)
    await step(pinner, writer)
    assert names_below(log_dir) == names
    for _ in range(2):
        await step(pinner)
    assert names_below(log_dir) == names


def replace_file(path: Path) -> None:
    """Put another file with the same bytes in the place of the one at *path*."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def begin_anew(writer: LogWriter, *, leader_epoch: int) -> int:
    """Let the broker drop its whole log and begin anew at a higher offset, as a follower that lags may."""
    for base_offset in writer.bases_on_disk:
        writer.trim_file(base_offset)
    writer.next_offset += 10
    writer._segments.append(_Segment(writer.next_offset))
    writer.epochs = []
    writer.log_start_offset = writer.next_offset
    writer.log_path(writer.next_offset).write_bytes(b"")
    writer.begin_epoch(leader_epoch)
    return writer.next_offset


def uploadable(pinner: Pinner, writer: LogWriter) -> list[int]:
    """Return the bases of what would be uploaded."""
    log, pins = judged(writer.local_log(), pinner.pins_of(writer.partition))
    return [
        each.base_offset
        for each in Observation(log, writer.bounds(), None, pins, scan_number=1).uploadable.segments
    ]


async def test_pins_of_a_log_that_was_given_up_do_not_stand_before_the_one_in_its_place(
    pinner, make_pinner, writer, metrics
):
    """Pins of a log that was given up are not uploaded. They are kept, counted and reported."""
    await step(pinner, writer)
    data = [writer.data_of(each) for each in (0, 3, 6)]
    base_offset = begin_anew(writer, leader_epoch=5)
    assert uploadable(pinner, writer) == [base_offset]

    with capture_logs() as lines:
        await step(pinner, writer)
    reported = [each for each in lines if "set aside" in each["event"]]
    assert [(each["log_level"], each["base_offset"]) for each in reported] == [
        ("error", 0),
        ("error", 3),
        ("error", 6),
    ]
    assert value(metrics, "stray_pins") == 3
    for again in (pinner, make_pinner()):
        writer.append()
        writer.roll()
        with capture_logs() as lines:
            await step(again, writer)
        assert lines == []
        assert uploadable(again, writer)[0] == base_offset
    found = [each for each in pinner.pins_of(writer.partition).pins if each.is_stray]
    assert contents(each.segment for each in found) == data


async def test_pins_wait_while_the_epochs_may_be_those_of_the_log_before(pinner, writer):
    """
    A log that begins anew has the old file of epochs for a moment: its pins are judged by the next one.

    Where the pins were judged by the old file, the new log was noted as theirs, and they were uploaded.
    """
    await step(pinner, writer)
    earlier = writer.epochs
    base_offset = begin_anew(writer, leader_epoch=5)
    newer, writer.epochs = writer.epochs, earlier
    writer._write_epochs()
    with pytest.raises(CorruptDataError, match="has not written the file of epochs since"):
        await step(pinner, writer)
    writer.epochs = newer
    writer._write_epochs()
    await step(pinner, writer)
    writer.closed_segment()
    await step(pinner, writer)
    assert uploadable(pinner, writer)[0] == base_offset
    found = pinner.pins_of(writer.partition).pins
    assert [each.segment.base_offset for each in found if each.is_stray] == [0, 3, 6]


async def test_pins_set_aside_go_when_the_archive_holds_their_offsets(pinner, writer, root, metrics):
    """Offsets that the archive has as lost may be in pins alone, so those pins stay for an operator."""
    await step(pinner, writer)
    begin_anew(writer, leader_epoch=5)
    await step(pinner, writer)
    gaps = (Gap(3, 5, "deleted", 0),)
    await pinner.step([replace(facts_of(pinner, writer, 19), gaps=gaps)], is_complete=True)
    assert held(pinner, writer) == [(3, True)]
    assert value(metrics, "stray_pins") == 1
    await step(pinner, writer, next_offset=19)
    assert list(root.iterdir()) == []


async def test_pins_set_aside_count_as_held(make_pinner, writer, metrics):
    """Pins that are set aside take room like others, and are given up at the limit like others."""
    pinner = make_pinner(budget_bytes=2 * len(writer.data_of(0)))
    await step(pinner, writer)
    begin_anew(writer, leader_epoch=5)
    await step(pinner, writer)
    await step(pinner, writer)
    assert held(pinner, writer) == [(3, True), (6, True)]
    assert value(metrics, "pins_given_up_total") == 1
    assert value(metrics, "stray_pin_bytes") == 2 * len(writer.data_of(0))
    assert value(metrics, "pinned_bytes") == 0, "nothing of it waits for the store"


@pytest.mark.parametrize("steps_between", [0, 1, 2])
async def test_pins_of_a_log_that_expired_as_a_whole_stay_before_it(make_pinner, writer, steps_between):
    """Kafka forgets the epochs of what it deletes; what follows in the same log shows that it is the same."""
    pinner = make_pinner()
    await step(pinner, writer)
    for _ in range(3):
        writer.drop_head()
    writer.epochs = [(0, 9)]
    writer._write_epochs()
    for _ in range(steps_between):
        await step(pinner, writer)
        assert uploadable(pinner, writer) == [0, 3, 6, 9]
    # Nothing was written under the epoch that was left, so the next one takes its place.
    writer.begin_epoch(4)
    assert uploadable(pinner, writer) == [0, 3, 6, 9]
    again = make_pinner()
    await step(again, writer)
    log, pins = judged(writer.local_log(), again.pins_of(writer.partition))
    assert log.epochs == ((0, 0), (4, 9))
    assert not any(each.is_stray for each in pins)

    writer.closed_segment()
    await step(again, writer)
    writer.drop_head()
    writer.epochs = [(4, 12)]
    writer._write_epochs()
    assert uploadable(again, writer) == [0, 3, 6, 9, 12]


async def test_active_segment_that_is_closed_and_deleted_in_one_go_stays_before_its_log(pinner, writer):
    """The active segment is never seen closed, and only its leader epoch is left in the log."""
    writer.append()
    await pinner.step([replace(facts_of(pinner, writer), expiring_end=12)], is_complete=True)
    writer.roll()
    for _ in range(4):
        writer.drop_head()
    writer.epochs = [(0, 12)]
    writer._write_epochs()
    assert uploadable(pinner, writer) == [0, 3, 6, 9, 12]
    await step(pinner, writer)
    writer.begin_epoch(1)
    assert uploadable(pinner, writer) == [0, 3, 6, 9, 12]


async def test_pins_are_made_although_nothing_can_be_noted(pinner, writer, root, metrics):
    """A full disk takes no note and still takes links."""
    directory = root / f"{writer.name}_{writer.partition.topic_id}"
    (directory / "leader-epoch-checkpoint.new").mkdir(parents=True)
    await step(pinner, writer)
    assert [base for base, _ in held(pinner, writer)] == [0, 3, 6]
    assert value(metrics, "pin_failures_total") == 1


async def test_pins_that_cannot_be_set_aside_keep_others_from_being_made(pinner, writer, root, metrics):
    """New pins must not lie beside old ones that might be taken for the head of their log."""
    await step(pinner, writer)
    begin_anew(writer, leader_epoch=5)
    writer.closed_segment()
    facts = facts_of(pinner, writer)
    pinner_s_directory = root / f"{writer.name}_{writer.partition.topic_id}"
    shutil.rmtree(pinner_s_directory)
    await pinner.step([facts], is_complete=True)
    assert pinner.pins_of(writer.partition).pins == ()
    assert value(metrics, "pin_failures_total") == 1


@virtually
async def test_pins_are_not_released_by_a_scan_of_long_ago(make_pinner, log_dir, root):
    """A process that was stopped after its scan does not know what is durable or deleted by now."""
    writer = LogWriter(log_dir)
    writer.closed_segment()
    pinner = make_pinner()
    await step(pinner, writer)
    durable = facts_of(pinner, writer, next_offset=3)
    now = asyncio.get_running_loop().time()
    await asyncio.sleep(1)
    await pinner.step([replace(durable, good_until=now)], is_complete=True)
    assert held(pinner, writer) == [(0, False)]
    await pinner.step([replace(durable, good_until=now + 2)], is_complete=True)
    assert held(pinner, writer) == []


async def test_durable_pins_go_first_at_the_limit_by_a_scan_of_long_ago(make_pinner, writer, metrics):
    """They are removed at the limit alone, and are no loss. Older ones that are not durable stay."""
    other = LogWriter(Path(writer.partition.log_dir), "payments")
    other.closed_segment()
    sizes_bytes = [len(writer.data_of(each)) for each in (0, 3)]
    pinner = make_pinner(budget_bytes=sum(sizes_bytes))
    await step(pinner, writer, other)
    for each in (writer, writer, other):
        each.drop_head()

    async def late_step():
        facts = (facts_of(pinner, writer), facts_of(pinner, other, next_offset=3))
        with capture_logs() as lines:
            await pinner.step([replace(each, good_until=-1.0) for each in facts], is_complete=True)
        return [line for line in lines if "limit" in line["event"]]

    assert len(other.data_of(0)) <= sum(sizes_bytes)
    (line,) = await late_step()
    assert (line["log_level"], line["partition"], line["base_offset"]) == ("info", "payments-0", 0)
    assert held(pinner, writer) == [(0, True), (3, True), (6, False)]
    assert held(pinner, other) == []
    assert value(metrics, "pins_given_up_total") == 0
    assert value(metrics, "pinned_bytes") == sum(sizes_bytes)
    writer.drop_head()
    (line,) = await late_step()
    assert (line["log_level"], line["base_offset"]) == ("error", 0)
    assert value(metrics, "pins_given_up_total") == 1


@virtually
async def test_segments_are_pinned_by_a_scan_of_long_ago(make_pinner, log_dir, root):
    """A broker that answers slowly may delete them before the next scan, and a pin too many does no harm."""
    writer = LogWriter(log_dir)
    writer.closed_segment()
    pinner = make_pinner()
    facts = facts_of(pinner, writer)
    now = asyncio.get_running_loop().time()
    await asyncio.sleep(1)
    await pinner.step([replace(facts, good_until=now)], is_complete=True)
    assert held(pinner, writer) == [(0, False)]


async def test_pin_of_a_replaced_file_outlives_an_old_scan(pinner, writer):
    """The log has another file of the same bounds by that scan; the pin may be the only copy by now."""
    await step(pinner, writer)
    facts = facts_of(pinner, writer)
    replace_file(Path(facts.log.segments[0].path))
    facts = facts_of(pinner, writer)
    pins = [pin.segment.inode for pin in pinner.pins_of(writer.partition).pins]
    await pinner.step([replace(facts, good_until=-1.0)], is_complete=True)
    assert [pin.segment.inode for pin in pinner.pins_of(writer.partition).pins] == pins


async def test_pins_stay_while_the_log_has_no_segment(pinner, writer, metrics):
    """Pins stay while a log has no segment, as when a broker replaces it, and nothing fails."""
    await step(pinner, writer)
    facts = facts_of(pinner, writer)
    before = held(pinner, writer)
    empty = replace(facts, log=replace(facts.log, segments=()))
    await pinner.step([empty], is_complete=True)
    assert held(pinner, writer) == before
    assert value(metrics, "pin_failures_total") == 0


async def test_stray_pins_keep_an_old_scan_from_pinning(pinner, writer):
    """Nothing is pinned beside them before they are set aside."""
    await step(pinner, writer)
    begin_anew(writer, leader_epoch=5)
    writer.closed_segment()
    facts = facts_of(pinner, writer)
    before = held(pinner, writer)
    await pinner.step([replace(facts, good_until=-1.0)], is_complete=True)
    assert held(pinner, writer) == before


async def test_scan_of_many_partitions_lists_the_pins_once_and_sees_those_of_a_step_meanwhile(
    pinner, writer, log_dir
):
    """A partition without pins is asked for only after a step that may have made some."""
    other = LogWriter(log_dir, "payments")
    before = pinner.listed()
    assert before(writer.partition) == NO_PINS
    await step(pinner, writer)
    pins = pinner.pins_of(writer.partition)
    assert len(pins.pins) == 3
    assert before(writer.partition) == pins
    assert [pinner.listed()(one.partition) for one in (writer, other)] == [pins, NO_PINS]


async def test_pins_are_seen_that_a_step_makes_after_the_list_though_it_began_before(
    tmp_path, writer, log_dir, metrics
):
    """A segment may be closed in the middle of a step: its scan finds a deleted file among the pins."""
    is_between, goes_on = threading.Event(), threading.Event()

    class First(PinDirectory):
        """The directory after which the step pauses."""

        def others(self, partitions):
            is_between.set()
            assert goes_on.wait(60)
            return super().others(partitions)

    first, second = First(str(tmp_path / "pins 1")), PinDirectory(str(tmp_path / "pins 2"))
    directories = {str(tmp_path / "another"): first, str(log_dir): second}
    pinner = Pinner(directories, budget_bytes=AMPLE, metrics=metrics)
    stepping = asyncio.create_task(step(pinner, writer))
    assert await asyncio.to_thread(is_between.wait, 60)
    listed = pinner.listed()
    assert listed(writer.partition) == NO_PINS
    goes_on.set()
    await stepping
    assert len(listed(writer.partition).pins) == 3


async def test_segment_that_is_deleted_before_its_pin_is_made_leaves_no_note(pinner, log_dir, root):
    """A note without a pin would hold the active segment's file, and no later step would remove it."""
    writer = LogWriter(log_dir)
    writer.closed_segment()
    facts = facts_of(pinner, writer)
    writer.drop_head()
    for path in writer.path.glob("*.deleted"):
        path.unlink()
    await pinner.step([facts], is_complete=True)
    assert list(root.iterdir()) == []
