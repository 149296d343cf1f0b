"""What counts of an older archive: up to its end, and across what it does not hold any more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import manifests, remote, stored
from tieringd.model.manifest_parts import Gap
from tieringd.policies.chunk_layout import GONE, history_part

THREE = stored(remote(base, base + 9) for base in (0, 10, 20))


def spans(part):
    return [(one.base_offset, one.next_offset) for one in part.segments]


def test_whole_archive_counts_and_its_epochs_do_not():
    """The part ends where the new log begins."""
    part = history_part(replace(THREE, epochs=((3, 0),)), end_offset=30, next_start=30)
    assert spans(part) == [(0, 10), (10, 20), (20, 30)]
    assert (part.next_offset, part.gaps, part.epochs) == (30, (), ())


def test_what_the_old_cluster_archived_since_does_not_count():
    """The new log has other records at these offsets."""
    part = history_part(THREE.with_gap(Gap(30, 39, "lost", 0)), end_offset=20, next_start=20)
    assert (spans(part), part.next_offset, part.gaps) == ([(0, 10), (10, 20)], 20, ())


def test_gap_over_the_end_is_cut_there():
    """The rest of it is the new log's."""
    part = history_part(THREE.with_gap(Gap(30, 39, "lost", 5)), end_offset=35, next_start=35)
    assert (part.next_offset, part.gaps) == (35, (Gap(30, 34, "lost", 5),))


@pytest.mark.parametrize(("end_offset", "next_start"), [(40, 40), (30, 40), (35, 40)])
def test_offsets_without_a_copy_are_a_gap(end_offset, next_start):
    """A reader goes on over the gap, which is reported."""
    part = history_part(THREE, end_offset=end_offset, next_start=next_start)
    assert (part.next_offset, part.gaps) == (40, (Gap(30, 39, GONE, 0),))


@pytest.mark.parametrize(("next_start", "gaps"), [(15, ()), (17, (Gap(15, 16, GONE, 0),))])
def test_segment_that_lies_over_the_end_counts_up_to_there(next_start, gaps):
    """The segment's records past the end would come twice. Those before it stay readable."""
    part = history_part(THREE, end_offset=15, next_start=next_start)
    assert (spans(part), part.next_offset, part.gaps) == ([(0, 10), (10, 20)], next_start, gaps)
    assert part.records_end == part.seen_from(12).records_end == 15


def test_segment_over_the_end_goes_with_the_records_before_the_end():
    """A segment of which a deletion left only records past the end has none for this log."""
    assert spans(history_part(THREE.seen_from(16), end_offset=15, next_start=15)) == []


@given(manifests(), st.integers(0, 10**6), st.data())
def test_part_is_sound_whatever_the_archive_is(manifest, behind, data):
    """The part keeps the rules of a manifest, and reaches from its start to the start of the next."""
    ends = [one.next_offset for one in manifest.segments] + [manifest.next_offset]
    end_offset = data.draw(st.sampled_from(ends) | st.integers(manifest.start_offset, manifest.next_offset))
    next_start = min(end_offset + behind, 2**63 - 1)
    part = history_part(manifest, end_offset=end_offset, next_start=next_start)
    if part.segments and part.segments[-1].next_offset > part.records_end:
        # The last segment crosses the end. The part is sound if the segment is taken to end there.
        assert part.records_end == end_offset
        ending = replace(part.segments[-1], last_offset=end_offset - 1)
        before = part.segments.head(len(part.segments) - 1)
        part = replace(part, segments=before.appended([ending]))
    assert part.faults() == ()
    assert part.next_offset == next_start
