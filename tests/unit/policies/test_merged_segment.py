"""Manifest rows of merged segments: whose they are, and how old they count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import PARTITION, remote
from tieringd.formats.index_merge import IndexedSegment, merged_index
from tieringd.formats.object_keys import data_key
from tieringd.model.segment import NO_TIMESTAMP, SegmentIndex
from tieringd.policies.retention_time import retention_time_ms
from tieringd.policies.segment_merge import merged_segment


def row(parts, **changes):
    values = {"sidecar_bytes": 400, "sidecar_crc32c": 0xABCDEF01, "leader_epoch": 9, "writer_id": "0f" * 16}
    index = merged_index([IndexedSegment(part, index_of(part)) for part in parts])
    return merged_segment(parts, index, **values | changes)


def index_of(part) -> SegmentIndex:
    return SegmentIndex(part.base_offset, part.last_offset, part.size_bytes, part.crc32c, 0, 0, (), (), ())


def test_row_of_a_merged_segment_is_the_writer_s_own():
    """The merging writer and its epoch are in the name, so it differs from the names of the parts."""
    parts = [remote(0, 4), remote(5, 9)]
    merged = row(parts)
    assert (merged.base_offset, merged.last_offset, merged.size_bytes) == (0, 9, 2048)
    assert (merged.leader_epoch, merged.writer_id) == (9, "0f" * 16)
    assert (merged.index_size_bytes, merged.index_crc32c) == (400, 0xABCDEF01)
    assert data_key(PARTITION, merged).endswith(f"/0-9-2048-9-{'0f' * 16}-abcdef01.log")


times = st.one_of(st.just(NO_TIMESTAMP), st.integers(0, 100))
rows = st.tuples(times, times, times, st.integers(0, 100))


@given(st.lists(rows, min_size=2, max_size=5))
def test_no_record_goes_earlier_by_a_merge(values):
    """Retention counts a merged segment's age from no earlier than any part's."""
    parts = [
        remote(
            10 * number,
            10 * number + 9,
            base_timestamp_ms=base,
            max_timestamp_ms=largest,
            broker_timestamp_ms=noted,
            uploaded_at_ms=uploaded,
        )
        for number, (base, largest, noted, uploaded) in enumerate(values)
    ]
    merged = row(parts)
    assert retention_time_ms(merged) >= max(retention_time_ms(part) for part in parts)
    assert merged.max_timestamp_ms == max(part.max_timestamp_ms for part in parts)
    known = [part.base_timestamp_ms for part in parts if part.base_timestamp_ms != NO_TIMESTAMP]
    assert merged.base_timestamp_ms == min(known, default=NO_TIMESTAMP)
