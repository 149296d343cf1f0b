"""Offsets that no segment holds: each of them is a loss, whether a gap is recorded for it or not."""

from __future__ import annotations

import pytest

from tests.unit.model.values import PARTITION, remote
from tieringd.model.manifest_parts import Gap
from tieringd.model.segment_table import SegmentTable
from tieringd.spark.source.planning import Stretch
from tieringd.spark.source.segment_spans import UNTOLD, holes_between, losses_in


@pytest.mark.parametrize(
    ("spans", "holes"),
    [
        ([], [(0, 30)]),
        ([(0, 30)], []),
        ([(0, 10), (10, 30)], []),
        ([(5, 10), (15, 20)], [(0, 5), (10, 15), (20, 30)]),
    ],
)
def test_holes_are_what_no_span_holds(spans, holes):
    """Holes are the offsets that no span holds: before the first span, between spans, and after the last."""
    segments = [remote(begin, end - 1) for begin, end in spans]
    found = [Stretch(PARTITION, SegmentTable.of(segments[at : at + 2]), 0, 30) for at in range(0, 3, 2)]
    assert holes_between(found, 0, 30) == holes


@pytest.mark.parametrize(
    ("gaps", "losses"),
    [
        ([], [(10, 19, UNTOLD)]),
        ([(0, 9), (20, 29)], [(10, 19, UNTOLD)]),
        ([(10, 19)], [(10, 19, "disk full")]),
        ([(5, 12), (15, 25)], [(10, 12, "disk full"), (13, 14, UNTOLD), (15, 19, "disk full")]),
    ],
)
def test_hole_is_filled_with_losses(gaps, losses):
    """Recorded gaps say why; a manifest that breaks its rules loses nothing in silence."""
    found = losses_in(
        PARTITION.topic_partition, [(10, 20)], [Gap(first, last, "disk full", 0) for first, last in gaps]
    )
    assert [(one.base_offset, one.last_offset) for one in found] == [one[:2] for one in losses]
    assert all(reason in one.reason for one, (*_, reason) in zip(found, losses, strict=True))
