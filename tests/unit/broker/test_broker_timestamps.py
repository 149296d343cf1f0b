"""The time of the broker's last append to a segment, as a layout gives it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from tests.redpanda_builders import ARCHIVAL, RedpandaLog, base_index
from tests.unit.formats.damage import flipped, truncations
from tieringd.broker.layout import KafkaLayout, RedpandaLayout
from tieringd.model.local_log import LocalPartition
from tieringd.model.partition import TopicPartition

if TYPE_CHECKING:
    from tieringd.model.segment import LocalSegment

FIRST_TIME_MS = 1_750_000_000_000
SECOND_TIME_MS = 1_750_000_360_000


@pytest.fixture
def log():
    """Give two closed segments with bookkeeping in them, an election's that is empty, an active one."""
    log = RedpandaLog().roll(term=1).data([b"a", b"b"]).bookkeeping(ARCHIVAL, records=2).data([b"c"])
    log.roll().data([b"d"]).roll(term=2).roll(term=3).data([b"e"]).allocated()
    log.segments[0].broker_time_ms = FIRST_TIME_MS
    log.segments[1].broker_time_ms = SECOND_TIME_MS
    log.segments[3].broker_time_ms = SECOND_TIME_MS
    return log


@pytest.fixture
def layout(tmp_path):
    return RedpandaLayout(str(tmp_path / "spool"))


@pytest.fixture
def segments(log, layout, tmp_path):
    """Give the segments as a scan of the directory finds them."""
    directory = tmp_path / "0_27"
    log.write_to(directory)
    partition = LocalPartition(TopicPartition("orders", 0), "id", str(directory), str(tmp_path))
    return layout.read_log(partition, ()).segments


def index_path(segment: LocalSegment) -> Path:
    return Path(segment.path).with_suffix(".base_index")


def asked(layout: RedpandaLayout, segment: LocalSegment) -> tuple[int | None, list[str]]:
    """Return the answer, and the reasons that were logged for it."""
    with capture_logs() as logs:
        found = layout.broker_timestamp_ms(segment)
    assert {(entry["event"], entry["segment"]) for entry in logs} <= {
        ("no broker timestamp for segment", segment.path)
    }
    return found, [entry["error"] for entry in logs]


def test_broker_timestamp_is_that_of_the_index_beside_a_closed_segment(layout, segments):
    """Each segment has its own; one behind which only an election was recorded has it too."""
    first, second, _ = segments
    assert asked(layout, first) == (FIRST_TIME_MS, [])
    assert asked(layout, second) == (SECOND_TIME_MS, [])


def test_active_segment_has_no_broker_timestamp_yet(layout, segments):
    """The index of an active segment is not read: later appends change it. That is not logged."""
    assert segments[-1].is_active
    assert asked(layout, segments[-1]) == (None, [])


@pytest.mark.parametrize("version", [4, 5, 9])
def test_sound_index_without_the_time_is_no_reason_to_complain(layout, log, segments, version):
    """Older versions did not note it, and an index that was made again cannot know it."""
    first = segments[0]
    end = log.segments[1].raw_base_offset - 1
    index_path(first).write_bytes(base_index(max_offset=end, version=version))
    assert asked(layout, first) == (None, [])


def missing(path: Path) -> None:
    path.unlink()


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def oversized(path: Path) -> None:
    os.truncate(path, (16 << 20) + 1)


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def stale(path: Path) -> None:
    path.write_bytes(base_index(max_offset=3, broker_time_ms=FIRST_TIME_MS))


def too_long(path: Path) -> None:
    path.write_bytes(base_index(max_offset=99, broker_time_ms=FIRST_TIME_MS))


def foreign(path: Path) -> None:
    path.write_bytes(base_index(base_offset=1, max_offset=5, broker_time_ms=FIRST_TIME_MS))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (missing, "cannot be read: No such file"),
        (directory, "cannot be read: Is a directory"),
        (empty, "the index is cut short: 0 bytes (in {path}, position 0)"),
        (oversized, "is larger than 16777216 bytes"),
        (damaged, "index CRC is"),
        (stale, "is stale: it covers raw offsets 0 to 3, but the segment has 0 to 5"),
        (too_long, "is stale: it covers raw offsets 0 to 99, but the segment has 0 to 5"),
        (foreign, "is stale: it covers raw offsets 1 to 5, but the segment has 0 to 5"),
    ],
)
def test_unusable_index_gives_no_timestamp_and_says_why_once(layout, log, segments, spoil, words):
    """The reason names the file; asked again, the answer is the same and nothing is logged."""
    first, second, _ = segments
    assert log.segments[1].raw_base_offset == 6
    spoil(index_path(first))
    found, reasons = asked(layout, first)
    assert found is None
    assert [words.format(path=index_path(first)) in reason for reason in reasons] == [True]
    assert str(index_path(first)) in reasons[0]
    assert asked(layout, first) == (None, [])
    assert asked(layout, second) == (SECOND_TIME_MS, [])


def test_each_reason_is_logged(layout, segments):
    """Another segment's index, and another fault of the same one, have reasons of their own."""
    first, second, _ = segments
    for path in map(index_path, (first, second)):
        path.unlink()
    assert [len(asked(layout, segment)[1]) for segment in (first, first, second, second)] == [1, 0, 1, 0]
    index_path(second).touch()
    assert len(asked(layout, second)[1]) == 1


def test_index_that_redpanda_writes_late_is_used_as_soon_as_it_is_there(layout, segments):
    """A stale answer is not remembered."""
    first = segments[0]
    sound = index_path(first).read_bytes()
    stale(index_path(first))
    assert layout.broker_timestamp_ms(first) is None
    index_path(first).write_bytes(sound)
    assert asked(layout, first) == (FIRST_TIME_MS, [])


def test_index_that_is_cut_or_altered_gives_no_wrong_timestamp(layout, segments):
    """Redpanda empties the file before it writes it: any part of it may be what is found."""
    first = segments[0]
    path = index_path(first)
    whole = path.read_bytes()
    for data in truncations(whole):
        path.write_bytes(data)
        assert layout.broker_timestamp_ms(first) is None
    for data in flipped(whole):
        path.write_bytes(data)
        assert layout.broker_timestamp_ms(first) in {None, FIRST_TIME_MS}


def test_segment_that_was_deleted_has_no_timestamp(layout, log, segments, tmp_path):
    """Retention may take the directory away while an upload asks."""
    first, second, _ = segments
    for segment in log.segments[2:]:
        (tmp_path / "0_27" / segment.name).unlink()
    found, reasons = asked(layout, second)
    assert (found, len(reasons)) == (None, 1)
    assert reasons[0] == f"{second.path} was closed, but no segment follows it"
    for path in (tmp_path / "0_27").iterdir():
        path.unlink()
    (tmp_path / "0_27").rmdir()
    found, reasons = asked(layout, first)
    assert (found, len(reasons)) == (None, 1)
    assert reasons[0].startswith(f"{tmp_path}/0_27 cannot be read")


def test_kafka_keeps_no_such_time(segments):
    """Kafka's layout answers None without reading the files."""
    assert KafkaLayout().broker_timestamp_ms(segments[0]) is None


def test_partitions_that_are_gone_are_forgotten(log, layout, segments, tmp_path):
    """The memory of a directory goes with it: faults of indexes, and counted offsets."""
    index_path(segments[0]).unlink()
    assert asked(layout, segments[0])[1]
    layout._untranslated.add("/gone")
    layout.scan([str(tmp_path / "empty")])
    assert (layout._untimed, layout._untranslated, layout._logs._counted) == ({}, set(), {})
