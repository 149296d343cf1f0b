"""Sound segments of every kind pass the check of their batches' offsets: no false alarm stops a reader."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import batch
from tieringd.formats.batch_check import check_batches
from tieringd.formats.batch_offsets import ExpectedBatches, OffsetCheck, places_in
from tieringd.formats.index_merge import IndexedSegment, merged_index
from tieringd.formats.segment_scan import SegmentScanner
from tieringd.model.segment import RemoteSegment, SegmentIndex


@st.composite
def segments(draw, base_offset):
    """Return a segment's bytes and index; compaction may leave holes anywhere."""
    is_compacted = draw(st.booleans())
    offset, data = base_offset, b""
    for _ in range(draw(st.integers(0 if is_compacted else 1, 8))):
        offset += draw(st.integers(0, 5)) if is_compacted else 0
        count = draw(st.integers(1, 3))
        data += batch(offset, [b"v"] * count)
        offset += count
    next_offset = offset + (draw(st.integers(0, 5)) if is_compacted else 0)
    next_offset = max(next_offset, base_offset + 1)
    scanner = SegmentScanner(
        base_offset, next_offset, index_interval_bytes=draw(st.sampled_from([1, 150, 400]))
    )
    assert scanner.feed(memoryview(data)) == len(data)
    scan = scanner.finish()
    return data, SegmentIndex(
        base_offset=base_offset,
        last_offset=next_offset - 1,
        size_bytes=scan.size_bytes,
        crc32c=scan.crc32c,
        record_count=scan.record_count,
        batch_count=scan.batch_count,
        epochs=scan.epochs,
        aborted=(),
        entries=scan.entries,
    )


@st.composite
def objects(draw):
    """Return the bytes and the index of one segment, or of several that were merged."""
    parts, offset = [], draw(st.sampled_from([0, 7, 2**40]))
    for _ in range(draw(st.integers(1, 3))):
        data, index = draw(segments(offset))
        parts.append((data, index))
        offset = index.last_offset + 1
    if len(parts) == 1:
        return parts[0]
    rows = [IndexedSegment(row_of(index), index) for _, index in parts]
    return b"".join(data for data, _ in parts), merged_index(rows)


def row_of(index):
    """Return a manifest's row for a segment with this index."""
    return RemoteSegment(
        base_offset=index.base_offset,
        last_offset=index.last_offset,
        size_bytes=index.size_bytes,
        crc32c=index.crc32c,
        base_timestamp_ms=-1,
        max_timestamp_ms=-1,
        leader_epoch=0,
        writer_id="00ff",
        index_size_bytes=0,
        index_crc32c=0,
        uploaded_at_ms=0,
    )


@settings(max_examples=150, deadline=None)
@given(objects(), st.data())
def test_sound_segment_passes_from_every_index_entry(found, data):
    """
    A sound segment passes as a whole, from any index entry on, and as the chunk between two entries.

    It is checked batch by batch, or all at once.
    """
    stored, index = found
    view = memoryview(stored)
    check_batches(view, ExpectedBatches.of_index(index))
    ends = sorted({0, index.size_bytes, *(entry.position for entry in index.entries)})
    begin, end = sorted([data.draw(st.sampled_from(ends)), data.draw(st.sampled_from(ends))])
    check_batches(view[begin:end], ExpectedBatches.of_index(index, begin, end))

    places = list(places_in(view[begin:], begin))
    assert OffsetCheck(ExpectedBatches.of_index(index)).faults_of(places) == {}
    check = OffsetCheck(ExpectedBatches.of_index(index))
    for place in places:
        check.require(place)
