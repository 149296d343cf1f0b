"""Quarantine: nothing from the corrupt segment on, until its bytes may have changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.unit.model.values import PARTITION, local_log
from tieringd.archiving.uploader import Quarantine
from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import OldMagicError
from tieringd.model.segment import SegmentSlice

LOG = local_log([0, 10, 20, 30])
SLICES = [
    *(SegmentSlice.whole(each) for each in LOG.closed_segments),
    SegmentSlice(LOG.segments[3], 30, 35, is_open=True),
]
FAULT = CorruptDataError("batch CRC is wrong", source="/logs/orders-3/x.log", position=99, offset=12)


@pytest.fixture
def quarantine(metrics):
    return Quarantine(PARTITION, metrics=metrics)


@pytest.fixture
def held(quarantine):
    """Give a quarantine at the second of four segments."""
    quarantine.enter(LOG.segments[1], FAULT, LOG)
    return quarantine


def changed(number: int, **changes):
    """Return the log with one segment changed."""
    segments = list(LOG.segments)
    segments[number] = replace(segments[number], **changes)
    return replace(LOG, segments=tuple(segments))


def test_partition_that_is_not_held_passes_everything(quarantine):
    """A partition without a fault gives no reason and passes every slice."""
    assert quarantine.fault == ""
    assert quarantine.passes(SLICES) == SLICES
    with capture_logs() as lines:
        quarantine.lift(LOG)
    assert lines == []


def test_quarantine_passes_only_what_lies_before_the_corrupt_segment(held):
    """The segment itself, and all that follow, an open slice too, stay."""
    assert held.passes(SLICES) == SLICES[:1]
    assert held.passes(SLICES[1:]) == []
    assert held.passes([]) == []


def test_quarantine_holds_any_part_of_the_corrupt_segment(held):
    """A slice from behind the fault is of the same file, and does not go either."""
    assert held.passes([SegmentSlice(LOG.segments[1], 15, 20)]) == []
    assert held.passes([SegmentSlice(LOG.segments[0], 5, 10)]) == [SegmentSlice(LOG.segments[0], 5, 10)]


@pytest.mark.parametrize("changes", [{"inode": 99}, {"modified_ns": 99}])
def test_quarantine_ends_when_the_file_with_the_damage_is_another_one(quarantine, changes):
    """A transaction's marker may be in a later file: that one is made anew, and the held one is as it was."""
    there = CorruptDataError("the records end inside a number", source=LOG.segments[2].path)
    quarantine.enter(LOG.segments[0], there, LOG)
    assert quarantine.passes(SLICES) == []
    quarantine.lift(LOG)
    assert quarantine.fault
    quarantine.lift(changed(2, **changes))
    assert not quarantine.fault
    assert quarantine.passes(SLICES) == SLICES


def test_quarantine_at_the_first_segment_passes_nothing(quarantine):
    """A partition that is corrupt from its first byte on is held back as a whole."""
    quarantine.enter(LOG.segments[0], FAULT, LOG)
    assert quarantine.passes(SLICES) == []


def test_quarantine_says_why_and_is_counted(quarantine, metrics):
    """The fault with its place is what an operator sees, in the log once and in the status all the time."""
    with capture_logs() as lines:
        quarantine.enter(LOG.segments[1], FAULT, LOG)
    assert quarantine.fault == str(FAULT)
    (line,) = lines
    assert (line["log_level"], line["base_offset"], line["path"]) == ("error", 10, LOG.segments[1].path)
    assert (line["topic"], line["partition"], line["error"]) == ("orders", 3, str(FAULT))
    labels = {"topic": "orders", "error": "CorruptDataError"}
    assert metrics.registry.get_sample_value("tieringd_upload_failures_total", labels) == 1


def test_quarantine_is_counted_under_its_own_kind_of_fault(quarantine, metrics):
    """A subclass of corruption keeps its name in the metric."""
    quarantine.enter(LOG.segments[1], OldMagicError("message format v0"), LOG)
    labels = {"topic": "orders", "error": "OldMagicError"}
    assert metrics.registry.get_sample_value("tieringd_upload_failures_total", labels) == 1


@pytest.mark.parametrize("change", [{"inode": 77}, {"size_bytes": 77}, {"modified_ns": 77}], ids=str)
def test_quarantine_ends_when_the_segment_s_bytes_may_have_changed(held, change):
    """A replica made anew, a truncation or a write: the segment is tried again."""
    with capture_logs() as lines:
        held.lift(changed(1, **change))
    assert held.fault == ""
    assert held.passes(SLICES) == SLICES
    assert [(line["event"], line["base_offset"]) for line in lines] == [
        ("quarantined segment has changed; looking at it again", 10)
    ]


def test_quarantine_ends_when_the_segment_is_gone(held):
    """The broker's own retention took it, and what follows may be archived."""
    held.lift(replace(LOG, segments=LOG.segments[2:]))
    assert held.passes(SLICES[2:]) == SLICES[2:]


@pytest.mark.parametrize(
    "log",
    [
        pytest.param(LOG, id="nothing changed"),
        pytest.param(changed(0, modified_ns=77), id="the segment before it changed"),
        pytest.param(changed(2, inode=77), id="the segment behind it changed"),
        pytest.param(changed(1, path="/pins/orders-3/x.log"), id="only a pin holds it now"),
        pytest.param(changed(1, next_offset=15), id="another segment follows it"),
        pytest.param(replace(LOG, segments=LOG.segments[1:]), id="the head went"),
    ],
)
def test_quarantine_stays_while_the_same_bytes_are_there(held, log):
    """A damaged segment stays damaged, whatever else happens, and under any name."""
    with capture_logs() as lines:
        held.lift(log)
    assert held.fault == str(FAULT)
    assert lines == []


def test_quarantine_needs_the_place_and_the_bytes(held):
    """A file with the same identity under another base is another segment."""
    moved = replace(LOG.segments[1], base_offset=11)
    held.lift(replace(LOG, segments=(LOG.segments[0], moved)))
    assert held.fault == ""


def test_quarantine_is_entered_anew_at_another_segment(held):
    """The last fault met is the one that holds."""
    other = CorruptDataError("zero tail")
    held.enter(LOG.segments[2], other, LOG)
    assert held.fault == str(other)
    assert held.passes(SLICES) == SLICES[:2]
