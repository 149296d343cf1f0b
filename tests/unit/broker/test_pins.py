"""Pins on a real filesystem, beside a log that a broker deletes from, truncates and replaces."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.log_writer import LogWriter
from tests.support.unprivileged import unprivileged
from tieringd.broker.pins import PinDirectory, pin_root, with_true_ends
from tieringd.broker.segment_file import FileEnds, OpenSegment, read_broker_indexes, scan_segment_file
from tieringd.errors import ConfigError, LocalFileError
from tieringd.formats.log_names import LogFileKind, encode_file_name
from tieringd.model.local_log import LocalPartition
from tieringd.model.partition import TopicPartition
from tieringd.model.segment import SegmentSlice
from tieringd.policies.pinning import PinnedLog

if TYPE_CHECKING:
    from tieringd.policies.pinning import Pin


@pytest.fixture
def log_dir(tmp_path):
    return tmp_path / "logs"


@pytest.fixture
def writer(log_dir):
    """Give a log with two closed segments, 0 to 2 and 3 to 5, and an active one."""
    writer = LogWriter(log_dir)
    writer.closed_segment()
    writer.closed_segment()
    return writer


@pytest.fixture
def pins(tmp_path, writer):
    """Give the pin directory of that log's directory; nothing is in it."""
    return PinDirectory(pin_root(str(tmp_path / "logs"), [str(tmp_path / "pins")]))


@pytest.fixture
def pinned(pins, writer):
    """Give the pin directory with a pin of each closed segment."""
    for segment in writer.local_log().closed_segments:
        pins.make(writer.partition, segment)
    return pins


def tree(root: Path) -> dict[str, int]:
    """Return every file below *root* with its inode."""
    return {str(each.relative_to(root)): each.stat().st_ino for each in root.rglob("*") if each.is_file()}


def delete_as_kafka_does(
    writer: LogWriter, base_offset: int, next_offset: int, *, step: str = "both"
) -> None:
    """Rename a segment's files, and unlink them after the delay; *step* is one of these, or both."""
    names = [
        encode_file_name(base_offset, kind)
        for kind in LogFileKind
        if kind is not LogFileKind.PRODUCER_SNAPSHOT
    ]
    for name in (*names, encode_file_name(next_offset, LogFileKind.PRODUCER_SNAPSHOT)):
        file, doomed = writer.path / name, writer.path / f"{name}.deleted"
        if step in ("both", "rename") and file.exists():
            file.rename(doomed)
        if step in ("both", "unlink"):
            doomed.unlink(missing_ok=True)


def bounds(found: tuple[Pin, ...]) -> list[tuple[int, int | None, bool]]:
    return [(each.segment.base_offset, each.segment.next_offset, each.is_held) for each in found]


def test_pin_is_the_same_file_under_another_name(pinned, writer):
    """A pin has the inode, size, times and bounds of the broker's file, and takes no space beside it."""
    found = pinned.found(writer.partition).pins
    assert bounds(found) == [(0, 3, False), (3, 6, False)]
    assert [replace(each.segment, path="") for each in found] == [
        replace(each, path="") for each in writer.local_log().closed_segments
    ]
    assert [
        Path(each.segment.path).samefile(writer.log_path(each.segment.base_offset)) for each in found
    ] == [
        True,
        True,
    ]


def test_pin_brings_its_side_files(pinned, writer):
    """The indexes and the producer snapshot are found beside a pin as they are beside the broker's file."""
    for pin, segment in zip(
        pinned.found(writer.partition).pins, writer.local_log().closed_segments, strict=True
    ):
        found = read_broker_indexes(pin.segment)
        assert found == read_broker_indexes(segment)
        assert found.offset_index is not None
        assert found.producer_snapshot == b"producer state"


def test_pin_keeps_every_byte_when_the_broker_deletes_the_segment(pinned, writer):
    """
    Data and side files of a pin stay readable through the broker's rename and unlink.

    Every batch is checked.
    """
    before = [read_broker_indexes(each) for each in writer.local_log().closed_segments]
    delete_as_kafka_does(writer, 0, 3, step="rename")
    assert bounds(pinned.found(writer.partition).pins) == [(0, 3, False), (3, 6, False)], "two names are left"
    delete_as_kafka_does(writer, 0, 3, step="unlink")
    delete_as_kafka_does(writer, 3, 6)

    found = pinned.found(writer.partition).pins
    assert bounds(found) == [(0, 3, True), (3, 6, True)]
    assert writer.bases_on_disk == [6]
    assert [Path(each.segment.path).read_bytes() for each in found] == [writer.data_of(0), writer.data_of(3)]
    assert [read_broker_indexes(each.segment) for each in found] == before
    for each in found:
        file = OpenSegment.open(each.segment)
        try:
            file.require_unchanged()
            assert scan_segment_file(file.fd, SegmentSlice.whole(each.segment)).record_count == 3
        finally:
            file.close()


def pinned_open(pins: PinDirectory, writer: LogWriter, end: int) -> Pin:
    """Pin the active segment, whose end the broker is said to have told, and return the pin."""
    pins.make(writer.partition, replace(writer.local_log().segments[-1], next_offset=end), is_open=True)
    (pin,) = pins.found(writer.partition).pins
    assert (pin.is_open, pin.segment.next_offset) == (True, end)
    return pin


def ended(pins: PinDirectory, writer: LogWriter) -> Pin:
    """Return the pin as a scan does: the pins are read, then the log, and then the pin's file."""
    found = pins.found(writer.partition)
    (pin,) = with_true_ends(writer.local_log(), found).pins
    return pin


@pytest.mark.parametrize("told_end", [9, 12, 15])
def test_pin_of_an_active_segment_ends_where_its_file_does(pins, writer, told_end):
    """The broker appends after the pin is made, or rolls before it is asked for the log's end."""
    writer.append()
    pinned_open(pins, writer, told_end)
    assert ended(pins, writer).segment.next_offset == told_end, "the log has the file"
    writer.append()
    data = writer.data_of(6)
    writer.roll()
    for _ in range(3):
        writer.drop_head()
    pin = ended(pins, writer)
    assert (pin.segment.base_offset, pin.segment.next_offset, pin.is_held) == (6, 12, True)
    assert Path(pin.segment.path).read_bytes() == data
    assert pin.segment.size_bytes == len(data)


def test_file_that_grows_after_its_pin_was_listed_is_measured_anew(pins, writer):
    """The broker may append, roll and delete between a scan's read of the pins and that of the log."""
    writer.append()
    pinned_open(pins, writer, 9)
    found = pins.found(writer.partition)
    writer.append()
    writer.roll()
    for _ in range(3):
        writer.drop_head()
    (pin,) = with_true_ends(writer.local_log(), found).pins
    assert pin.segment.next_offset == 12
    (now,) = pins.found(writer.partition).pins
    assert pin.segment.identity == now.segment.identity


def test_pin_of_an_active_segment_on_another_disk_is_read_whatever_its_number(pins, writer):
    """A file of the moved log may have the number that the pinned one has on its own disk."""
    writer.append()
    pinned_open(pins, writer, 15)
    elsewhere = replace(pins.found(writer.partition), is_elsewhere=True)
    found = with_true_ends(writer.local_log(), PinnedLog(elsewhere=(elsewhere,)))
    assert [pin.segment.next_offset for pin in found.all_pins] == [9]


def test_pin_of_an_active_segment_goes_with_its_side_files(pins, writer, tmp_path):
    """A broker that was restarted has a snapshot of where the active segment ended then."""
    writer.append()
    (writer.path / f"{9:020d}.snapshot").write_bytes(b"producer state")
    pinned_open(pins, writer, 9)
    assert f"{9:020d}.snapshot" in {Path(name).name for name in tree(tmp_path / "pins")}
    writer.append()
    writer.roll()
    for _ in range(3):
        writer.drop_head()
    pin = ended(pins, writer)
    assert pin.segment.next_offset == 12
    pins.release(writer.partition, [pin])
    assert list((tmp_path / "pins").iterdir()) == []


OFFSET_BYTES = 8
"""A batch begins with its offset, and its length follows."""
IMPOSSIBLE_LENGTH = b"\xff\xff\xff\xff"
LENGTH_OF_MORE_THAN_THE_FILE = b"\x00\x10\x00\x00"


@pytest.mark.parametrize(
    ("told_end", "damaged", "expected"),
    [
        pytest.param(9, (2, IMPOSSIBLE_LENGTH), 13, id="behind whole batches that the name lacks"),
        pytest.param(9, (2, LENGTH_OF_MORE_THAN_THE_FILE), 13, id="as if a batch were torn"),
        pytest.param(9, (0, IMPOSSIBLE_LENGTH), 9, id="before the end of the name"),
        pytest.param(18, (2, IMPOSSIBLE_LENGTH), 15, id="in a file whose name reaches into the log"),
        pytest.param(9, (3, IMPOSSIBLE_LENGTH), 15, id="behind the last batch"),
    ],
)
def test_damaged_pin_of_an_active_segment_ends_past_the_damage(pins, writer, told_end, damaged, expected):
    """A pin is not durable before an upload has come to the damage, and has reported it."""
    batch, length = damaged
    for _ in range(3):
        writer.append()
    pin = pinned_open(pins, writer, told_end)
    size_bytes = len(writer.data_of(6)) // 3
    writer.roll()
    for _ in range(3):
        writer.drop_head()
    with Path(pin.segment.path).open("r+b") as file:
        file.seek(batch * size_bytes + OFFSET_BYTES)
        file.write(length)
    assert ended(pins, writer).segment.next_offset == expected


@pytest.mark.parametrize("told_end", [9, 15])
@pytest.mark.parametrize("step", ["rename", "both"])
def test_pin_of_an_active_segment_without_the_mark_ends_where_its_file_does(pins, writer, told_end, step):
    """Earlier releases made it, and the broker may have renamed its file before it unlinks that."""
    writer.append()
    pins.make(writer.partition, replace(writer.local_log().segments[-1], next_offset=told_end))
    writer.append()
    writer.roll()
    for _ in range(2):
        writer.drop_head()
    delete_as_kafka_does(writer, 6, 12, step=step)
    pin = ended(pins, writer)
    assert (pin.segment.next_offset, pin.is_open, pin.is_held) == (12, False, step == "both")


def test_pin_of_a_closed_segment_before_a_hole_ends_where_its_name_does(pins, writer):
    """A cleaner may have removed its last records, and its snapshot has the name of its end."""
    writer.append()
    writer.append()
    writer.roll()
    writer.closed_segment()
    writer.compact(6, without=[9])
    (segment,) = [one for one in writer.local_log().closed_segments if one.base_offset == 6]
    pins.make(writer.partition, segment)
    for _ in range(4):
        writer.drop_head()
    assert writer.local_log().first_offset == 15
    assert ended(pins, writer).segment.next_offset == 12


def test_pin_that_another_follows_is_not_read(pinned, writer):
    """Thousands may wait for a store that is away; the next pin or segment begins where each ends."""
    for _ in range(2):
        writer.drop_head()
    found = pinned.found(writer.partition)

    def end_of(segment):
        raise AssertionError(segment)

    assert with_true_ends(writer.local_log(), found, end_of) == found


def test_ends_of_files_are_read_once_whatever_their_number(pins, writer):
    """A store may be away for long, with many pins. An end is dropped where a scan does not ask for it."""
    writer.append()
    segment = pinned_open(pins, writer, 9).segment
    many = [replace(segment, modified_ns=number) for number in range(10_000)]
    ends = FileEnds()
    for one in many:
        ends.of(one)
    Path(segment.path).unlink()
    for _ in range(2):
        ends.begin_scan()
        assert {ends.of(one) for one in many} == {(9, True)}
    ends.begin_scan()
    ends.of(many[0])
    ends.begin_scan()
    assert ends.of(many[0]) == (9, True)
    with pytest.raises(LocalFileError):
        ends.of(many[1])


def test_pin_of_an_active_segment_keeps_its_mark_when_it_is_set_aside(pins, writer):
    """Its end is found in the file as before: it decides when the pin goes."""
    writer.append()
    (aside,) = pins.set_aside(writer.partition, [pinned_open(pins, writer, 9)])
    writer.append()
    writer.roll()
    for _ in range(3):
        writer.drop_head()
    pin = ended(pins, writer)
    assert (pin.segment.path, pin.is_stray, pin.segment.next_offset) == (aside.segment.path, True, 12)
    pins.release(writer.partition, [pin])
    assert pins.found(writer.partition).pins == ()


def test_truncation_in_place_shows_through_a_pin_and_is_noticed(pinned, writer):
    """A pin is the same file: what a follower cuts off is gone from it, and an earlier scan gets an error."""
    (before, _) = pinned.found(writer.partition).pins
    file = OpenSegment.open(before.segment)
    try:
        writer.truncate(0)
        with pytest.raises(LocalFileError, match="changed after it was listed"):
            file.require_unchanged()
    finally:
        file.close()
    after = pinned.found(writer.partition).pins[0].segment
    assert (after.size_bytes, after.inode) == (0, before.segment.inode)
    assert after.identity != before.segment.identity


def test_pin_keeps_the_old_bytes_when_the_broker_replaces_the_file(pinned, writer):
    """Compaction puts another file in a segment's place; the pin has the one it was made of."""
    cleaned = writer.path / f"{encode_file_name(0, LogFileKind.LOG)}.cleaned"
    cleaned.write_bytes(b"other bytes")
    cleaned.rename(writer.log_path(0))
    (pin, _) = pinned.found(writer.partition).pins
    assert pin.is_held
    assert Path(pin.segment.path).read_bytes() == writer.data_of(0)
    assert pin.segment.inode != writer.local_log().segments[0].inode


def test_pin_can_be_made_twice(pinned, writer, tmp_path):
    """A second round, or one after a crash, finds its pins made."""
    before = tree(tmp_path / "pins")
    for segment in writer.local_log().closed_segments:
        pinned.make(writer.partition, segment)
    assert tree(tmp_path / "pins") == before


def test_pin_of_another_file_under_the_same_name_stays(pinned, writer, tmp_path):
    """It may be the only copy of its bytes: a step sets it aside before it makes another pin."""
    writer.compact(0)
    before = tree(tmp_path / "pins")
    assert not pinned.make(writer.partition, writer.local_log().segments[0])
    assert tree(tmp_path / "pins") == before


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_side_files_that_a_crash_left_are_not_taken_for_those_of_a_later_pin(pinned, writer, has_snapshot):
    """A process may end before it links the log, or after it unlinked that. Another lineage may follow."""
    snapshot = writer.path / f"{3:020d}.snapshot"
    for pin in pinned.found(writer.partition).pins:
        Path(pin.segment.path).unlink()
    assert pinned.found(writer.partition).pins == ()
    writer.truncate(0)
    writer.begin_epoch(1)
    # Another length of the batch, so that the index differs.
    writer.append(b"another leader's")
    writer.append(b"two", b"records")
    writer.roll()
    snapshot.unlink()
    if has_snapshot:
        snapshot.write_bytes(b"another leader's producers")
    (segment,) = writer.local_log().closed_segments
    assert pinned.make(writer.partition, segment)
    (pin,) = pinned.found(writer.partition).pins
    assert read_broker_indexes(pin.segment) == read_broker_indexes(segment)
    assert read_broker_indexes(pin.segment).producer_snapshot == (
        b"another leader's producers" if has_snapshot else None
    )


@pytest.mark.parametrize("gone", [".log", ".index", ".snapshot"])
def test_pin_without_a_side_file_is_a_pin_and_without_its_log_is_nothing(pins, writer, gone, tmp_path):
    """A broker that deletes meanwhile leaves no half of a pin: it is known by its log alone."""
    segment = writer.local_log().closed_segments[0]
    for each in writer.path.glob(f"*{gone}"):
        each.unlink()
    pins.make(writer.partition, segment)
    found = pins.found(writer.partition).pins
    if gone == ".log":
        assert (found, list((tmp_path / "pins").iterdir())) == ((), [])
    else:
        assert bounds(found) == [(0, 3, False)]


def test_lost_race_for_one_segment_leaves_the_pins_of_others(pinned, writer):
    """Only the segment of the lost race is cleared, and its neighbours keep their pins."""
    writer.closed_segment()
    gone = writer.local_log().closed_segments[2]
    writer.log_path(gone.base_offset).unlink()
    before = tree(Path(pinned.root))
    pinned.make(writer.partition, gone)
    assert tree(Path(pinned.root)) == before


def test_release_removes_a_pin_with_its_side_files_and_leaves_the_others(pinned, writer, tmp_path):
    """Each pin goes with all that belongs to it, and the last one takes the directory along."""
    first, second = pinned.found(writer.partition).pins
    pinned.release(writer.partition, [first])
    assert pinned.found(writer.partition).pins == (second,)
    left = {Path(name).name for name in tree(tmp_path / "pins")}
    assert left == {
        f"{3:020d}-{6:020d}.log",
        f"{3:020d}-{6:020d}.index",
        f"{3:020d}-{6:020d}.timeindex",
        f"{6:020d}.snapshot",
    }
    pinned.release(writer.partition, [second])
    assert list((tmp_path / "pins").iterdir()) == []
    assert pinned.found(writer.partition).pins == ()


def test_snapshot_goes_with_the_last_pin_that_ends_there(pinned, writer):
    """A pin of an active segment may be named by an end that another pin has in truth."""
    active = replace(writer.local_log().segments[0], next_offset=6)
    pinned.make(writer.partition, active, is_open=True)
    (wrong,) = [pin for pin in pinned.found(writer.partition).pins if pin.is_open]
    pinned.release(writer.partition, [wrong])
    _, second = pinned.found(writer.partition).pins
    assert read_broker_indexes(second.segment).producer_snapshot == b"producer state"


def test_pin_s_file_can_get_another_name_when_the_broker_has_deleted_it(pinned, writer):
    """The pin of a segment is made of another pin of the same file, with its indexes."""
    before = writer.data_of(0)
    delete_as_kafka_does(writer, 0, 3)
    pin, _ = pinned.found(writer.partition).pins
    assert pinned.make(writer.partition, replace(pin.segment, next_offset=6))
    assert not pinned.make(
        writer.partition, replace(pin.segment, path=str(writer.log_path(0)), next_offset=1)
    )
    pinned.release(writer.partition, [pin])
    named, other = pinned.found(writer.partition).pins
    assert (named.segment.next_offset, Path(named.segment.path).read_bytes()) == (6, before)
    assert read_broker_indexes(named.segment).offset_index is not None
    assert read_broker_indexes(other.segment).producer_snapshot == b"producer state"


def test_release_of_a_pin_that_is_gone_is_nothing(pinned, writer):
    """A crash in the middle of a release is made good by the next."""
    found = pinned.found(writer.partition).pins
    for _ in range(2):
        pinned.release(writer.partition, found)
    assert pinned.found(writer.partition).pins == ()


def test_release_frees_what_only_a_pin_held_and_nothing_of_the_broker(pinned, writer):
    """The held file is gone for good, and one that the broker has stays whole."""
    delete_as_kafka_does(writer, 0, 3)
    pinned.release(writer.partition, pinned.found(writer.partition).pins)
    assert writer.log_path(3).read_bytes() == writer.data_of(3)
    assert writer.log_path(3).stat().st_nlink == 1


def test_pins_are_listed_oldest_first_and_nothing_else_is_taken_for_one(pinned, writer):
    """Names of another shape are left alone, in the listing and on disk."""
    directory = Path(pinned.found(writer.partition).pins[0].segment.path).parent
    for name in ("notes.txt", f"{0:020d}.log", f"{0:020d}-{3:020d}.log.tmp", f"x{0:020d}-{9:020d}.log"):
        (directory / name).write_bytes(b"")
    found = pinned.found(writer.partition).pins
    assert bounds(found) == [(0, 3, False), (3, 6, False)]
    pinned.release(writer.partition, found)
    assert (directory / "notes.txt").exists(), "a directory that is not empty stays"


def test_note_says_what_the_log_was_like(pinned, writer):
    """A note has the log's leader epochs and a link to its last file. A newer note replaces it."""
    assert (pinned.found(writer.partition).epochs, pinned.found(writer.partition).anchor) == (None, None)
    for _ in range(2):
        log = writer.local_log()
        for _ in range(2):
            pinned.note(log)
            found = pinned.found(writer.partition)
            assert (found.epochs, found.anchor) == (log.epochs, log.segments[-1].inode)
            assert bounds(found.pins)[:2] == [(0, 3, False), (3, 6, False)]
        writer.begin_epoch(writer.epochs[-1][0] + 1)
        writer.closed_segment()


def test_noted_segment_is_held_by_its_pin_alone_once_the_broker_deleted_it(pins, writer):
    """The link that remembers which file was the last is one of ours, and not the broker's."""
    log = writer.local_log()
    last = replace(log.segments[-1], next_offset=9)
    pins.note(log)
    pins.make(writer.partition, last)
    assert bounds(pins.found(writer.partition).pins) == [(6, 9, False)]
    writer.log_path(6).unlink()
    assert bounds(pins.found(writer.partition).pins) == [(6, 9, True)]


def test_note_keeps_the_inode_of_a_deleted_file_from_being_used_again(pins, writer):
    """No other file gets the inode number of a file while the note of it exists."""
    log = writer.local_log()
    pins.note(log)
    writer.log_path(6).unlink()
    assert pins.found(writer.partition).anchor == log.segments[-1].inode
    for _ in range(50):
        writer.log_path(6).write_bytes(b"")
        assert writer.log_path(6).stat().st_ino != log.segments[-1].inode
        writer.log_path(6).unlink()


def test_note_that_was_cut_short_is_none(pinned, writer):
    """A note that a crash left empty counts as none: the epochs are unknown then, and the pins stay."""
    pinned.note(writer.local_log())
    (checkpoint,) = Path(pinned.root).rglob("leader-epoch-checkpoint")
    checkpoint.write_bytes(b"")
    assert pinned.found(writer.partition).epochs is None
    assert len(pinned.found(writer.partition).pins) == 2
    pinned.note(writer.local_log())
    assert pinned.found(writer.partition).epochs == ((0, 0),)


def test_note_that_cannot_be_written_leaves_none(pinned, writer):
    """An older one may be of another log than what is pinned next."""
    pinned.note(writer.local_log())
    (checkpoint,) = Path(pinned.root).rglob("leader-epoch-checkpoint")
    checkpoint.with_name("leader-epoch-checkpoint.new").mkdir()
    writer.begin_epoch(1)
    with pytest.raises(LocalFileError, match=r"cannot be recorded in .*Is a directory"):
        pinned.note(writer.local_log())
    assert pinned.found(writer.partition).epochs is None


def test_note_goes_with_the_last_pin(pinned, writer):
    """Nothing is left of a partition that has nothing pinned."""
    pinned.note(writer.local_log())
    first, second = pinned.found(writer.partition).pins
    pinned.release(writer.partition, [first])
    assert pinned.found(writer.partition).epochs == ((0, 0),)
    pinned.release(writer.partition, [second])
    assert list(Path(pinned.root).iterdir()) == []


def test_note_goes_when_all_is_set_aside(pinned, writer):
    """The link to the last segment would hold what the broker deletes, for pins that nothing is asked of."""
    pinned.note(writer.local_log())
    assert writer.log_path(6).stat().st_nlink == 2
    first, second = pinned.found(writer.partition).pins
    pinned.set_aside(writer.partition, [first])
    assert writer.log_path(6).stat().st_nlink == 2
    pinned.set_aside(writer.partition, [second])
    assert writer.log_path(6).stat().st_nlink == 1
    assert [each.is_stray for each in pinned.found(writer.partition).pins] == [True, True]


def test_what_is_set_aside_keeps_its_data_and_gives_its_name_free(pinned, writer):
    """A pin of the same offsets, of another file, can be made beside it; both are found and released."""
    first, second = pinned.found(writer.partition).pins
    data = writer.data_of(0)
    (aside,) = pinned.set_aside(writer.partition, [first])
    assert pinned.found(writer.partition).pins == (replace(aside, is_stray=True), second)
    assert pinned.set_aside(writer.partition, [aside]) == (aside,)
    assert sorted(each.suffix for each in Path(aside.segment.path).parent.glob(f"{0:020d}*")) == [".stray"]

    writer.log_path(0).unlink()
    writer.log_path(0).write_bytes(b"another log's")
    pinned.make(writer.partition, writer.local_log().segments[0])
    found = pinned.found(writer.partition).pins
    assert {(each.is_stray, Path(each.segment.path).read_bytes()) for each in found[:2]} == {
        (True, data),
        (False, b"another log's"),
    }
    pinned.release(writer.partition, [each for each in found if each.is_stray])
    assert [each.is_stray for each in pinned.found(writer.partition).pins] == [False, False]
    assert len(list(Path(aside.segment.path).parent.glob(f"{0:020d}*"))) == 3


def test_file_that_took_a_segment_s_place_is_not_pinned_as_that(pins, writer, tmp_path):
    """A file that took a segment's name between scan and link is not pinned: it is of another lineage."""
    log = writer.local_log()
    for base_offset in (0, 6):
        writer.log_path(base_offset).rename(writer.path / f"{base_offset}.deleted")
        writer.log_path(base_offset).write_bytes(b"other records")
    pins.make(writer.partition, log.segments[0])
    assert list((tmp_path / "pins").iterdir()) == []
    pins.note(log)
    assert pins.found(writer.partition).anchor is None


def test_partitions_and_incarnations_have_directories_of_their_own(pinned, writer, log_dir):
    """A topic that was created again under the same name has no pins yet."""
    again = replace(writer.partition, topic_id="another-incarnation-id")
    neighbour = replace(writer.partition, topic_partition=TopicPartition("orders", 1))
    assert pinned.found(again).pins == pinned.found(neighbour).pins == ()
    assert pinned.others([writer.partition]) == set()
    (path,) = pinned.others([again, neighbour])
    assert Path(path) == Path(pinned.found(writer.partition).pins[0].segment.path).parent


def test_others_are_removed_with_everything_in_them(pinned, writer, tmp_path):
    """The pins of a deleted partition go as a whole; a file beside them is none of a partition."""
    (tmp_path / "pins" / "README").write_text("not a partition's")
    for path in pinned.others([]):
        pinned.remove(path)
    assert [each.name for each in (tmp_path / "pins").iterdir()] == ["README"]
    assert pinned.others([]) == set()
    assert writer.log_path(0).exists()


def test_root_that_is_gone_has_no_pins_and_is_made_again(pins, writer, tmp_path):
    """Pins are lost with the pin directory, and later pins are made as before."""
    (tmp_path / "pins").rmdir()
    assert pins.others([]) == set()
    assert pins.found(writer.partition).pins == ()
    pins.make(writer.partition, writer.local_log().segments[0])
    assert bounds(pins.found(writer.partition).pins) == [(0, 3, False)]


def test_nothing_is_ever_written_inside_the_log_directory(pins, writer, log_dir):
    """The log directory has the same names and files from the first pin to the last release."""
    before = tree(log_dir), sorted(each.name for each in log_dir.iterdir())

    def seen():
        return tree(log_dir), sorted(each.name for each in log_dir.iterdir())

    for segment in writer.local_log().closed_segments:
        pins.make(writer.partition, segment)
        assert seen() == before
    pins.release(writer.partition, pins.found(writer.partition).pins[:1])
    assert seen() == before
    for path in pins.others([]):
        pins.remove(path)
    assert seen() == before


def test_pin_that_may_not_be_made_names_the_file_and_the_way_out(pins, writer, tmp_path):
    """A pin without the right to make it fails with a reason, and the broker's file stays as it was."""
    segment = writer.local_log().segments[0]
    (tmp_path / "pins").chmod(0o555)
    with (
        unprivileged(),
        pytest.raises(LocalFileError, match=r"cannot be pinned in .*broker's user") as caught,
    ):
        pins.make(writer.partition, segment)
    assert caught.value.path == segment.path
    assert writer.log_path(0).stat().st_nlink == 1


def test_pin_directory_that_cannot_be_used_is_a_local_fault(pinned, writer, tmp_path):
    """A file in a directory's place, or one that may not be changed, is named in the error."""
    found = pinned.found(writer.partition).pins
    directory = Path(found[0].segment.path).parent
    directory.chmod(0o555)
    (tmp_path / "pins").chmod(0o555)
    with unprivileged():
        with pytest.raises(LocalFileError, match="cannot be changed: Permission denied") as caught:
            pinned.release(writer.partition, found)
        assert caught.value.path == str(directory)
        with pytest.raises(LocalFileError, match="cannot be removed: Permission denied"):
            pinned.remove(str(directory))
    assert pinned.found(writer.partition).pins == found

    file = tmp_path / "a-file"
    file.write_bytes(b"")
    with pytest.raises(LocalFileError, match="cannot be read: Not a directory"):
        PinDirectory(str(file)).others([])
    with pytest.raises(LocalFileError, match="cannot be read: Not a directory"):
        PinDirectory(str(file)).found(writer.partition)


@pytest.fixture
def elsewhere(tmp_path):
    """Give a directory on another filesystem; the tests need a tmpfs at /dev/shm that is not /tmp's."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        assert Path(path).stat().st_dev != tmp_path.stat().st_dev, "needs two filesystems"
        yield path


def test_root_is_the_first_directory_on_the_log_s_filesystem(tmp_path, log_dir, writer, elsewhere):
    """Hard links reach no other filesystem, so a candidate there is passed over; one here is made."""
    first, second = str(tmp_path / "a" / "b"), str(tmp_path / "c")
    assert pin_root(str(log_dir), [f"{elsewhere}/pins", first, second]) == first
    assert Path(first).is_dir()
    assert not Path(second).exists()


def test_root_that_cannot_be_made_is_passed_over(tmp_path, log_dir, writer):
    """A candidate below a file is none, and the next one is taken."""
    file = tmp_path / "a-file"
    file.write_bytes(b"")
    assert pin_root(str(log_dir), [f"{file}/pins", str(tmp_path / "pins")]) == str(tmp_path / "pins")


def test_root_on_another_filesystem_is_refused(log_dir, writer, elsewhere):
    """Nothing can be pinned on another filesystem, and the error names the setting to change."""
    with pytest.raises(ConfigError, match=r"on the filesystem of .*Set broker\.pin_directory") as caught:
        pin_root(str(log_dir), [f"{elsewhere}/pins"])
    assert elsewhere in str(caught.value)
    assert str(log_dir) in str(caught.value)


def test_root_for_a_log_directory_that_is_not_there_is_refused(tmp_path):
    """A broker that never started has no filesystem to link on yet."""
    with pytest.raises(ConfigError, match=r"logs cannot be read: No such file.*Start the broker first"):
        pin_root(str(tmp_path / "logs"), [str(tmp_path / "pins")])
    assert not (tmp_path / "pins").exists()


def test_link_to_another_filesystem_fails_by_name(writer, elsewhere):
    """The pin fails by name if a filesystem has changed under the root, and copies nothing."""
    segment = writer.local_log().segments[0]
    with pytest.raises(LocalFileError, match="cannot be pinned in"):
        PinDirectory(elsewhere).make(writer.partition, segment)


def test_partition_of_another_log_directory_may_have_the_same_name(tmp_path, pinned, writer):
    """Each log directory has a root of its own, so what is held here says nothing of there."""
    there = LocalPartition(writer.name, writer.partition.topic_id, "/other/orders-0", "/other")
    other = PinDirectory(pin_root(str(tmp_path / "logs"), [str(tmp_path / "other-pins")]))
    assert other.found(there).pins == ()
    assert len(pinned.found(writer.partition).pins) == 2


@pytest.mark.parametrize("length", [229, 230, 231, 249])
def test_topics_with_the_longest_names_have_pins(log_dir, tmp_path, length):
    """Topics with the longest names have pins, even two that differ in their last character only."""
    pins = PinDirectory(pin_root(str(log_dir.parent), [str(tmp_path / "pins")]))
    writers = [LogWriter(log_dir, "t" * (length - 1) + end) for end in "ab"]
    for writer in writers:
        writer.closed_segment()
        (closed,) = writer.local_log().closed_segments
        pins.make(writer.partition, closed)
    for writer in writers:
        (pin,) = pins.found(writer.partition).pins
        assert Path(pin.segment.path).read_bytes() == writer.data_of(0)
    assert pins.others([one.partition for one in writers]) == set()
    assert len(pins.others([writers[0].partition])) == 1


def test_root_on_another_mount_of_the_same_filesystem_is_refused_with_the_cause(tmp_path):
    """
    A root on another mount of the same filesystem is refused with the cause, and the next candidate is taken.

    systemd and containers mount so: a bind mount has the same device number, and refuses the link. Nothing of
    the trial stays.
    """
    program = tmp_path / "choose.py"
    program.write_text(
        "import sys\n"
        "from tieringd.broker.pins import pin_root\n"
        "from tieringd.errors import ConfigError\n"
        "log_dir, bound, beside = sys.argv[1:]\n"
        "print(pin_root(log_dir, [bound + '/pins', beside]))\n"
        "try:\n"
        "    pin_root(log_dir, [bound + '/pins'])\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    log_dir, bound, beside = tmp_path / "kafka/data", tmp_path / "state", tmp_path / "kafka/pins"
    (log_dir / "orders-0").mkdir(parents=True)
    (log_dir / "orders-0/00000000000000000000.log").write_bytes(b"")
    bound.mkdir()
    done = subprocess.run(
        [
            *("unshare", "--mount", "--map-root-user", "sh", "-ec"),
            'mount --bind "$1" "$1"; exec "$2" "$3" "$4" "$1" "$5"',
            *("sh", bound, sys.executable, program, log_dir, beside),
        ],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    assert done.returncode == 0, done.stderr
    chosen, _, refused = done.stdout.partition("\n")
    assert chosen == str(beside)
    assert "another mount" in refused
    assert str(bound) in refused
    assert list(beside.iterdir()) == []
    assert (log_dir / "orders-0/00000000000000000000.log").stat().st_nlink == 1


def test_a_log_directory_without_files_is_compared_by_device(tmp_path):
    """A broker that has not started yet has nothing to link."""
    (tmp_path / "logs").mkdir()
    assert pin_root(str(tmp_path / "logs"), [str(tmp_path / "pins")]) == str(tmp_path / "pins")
