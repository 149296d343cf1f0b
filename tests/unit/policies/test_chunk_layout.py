"""How a segment is cut: at batches, into all of it, about as large as wanted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.model.segment import IndexEntry, SegmentIndex
from tieringd.policies.chunk_layout import Chunk, plan_chunks


def index_of(entries, size_bytes, *, base_offset=100, last_offset=999):
    """Return an index with (offset, position) entries."""
    return SegmentIndex(
        base_offset=base_offset,
        last_offset=last_offset,
        size_bytes=size_bytes,
        crc32c=1,
        record_count=0,
        batch_count=0,
        epochs=(),
        aborted=(),
        entries=tuple(IndexEntry(offset, position, 0) for offset, position in entries),
    )


def cuts(index, chunk_bytes, **options):
    """Return (position, size, first offset) of each chunk."""
    layout = plan_chunks(index, chunk_bytes=chunk_bytes, **options)
    return [(chunk.position, chunk.size_bytes, chunk.base_offset) for chunk in layout.chunks]


EVEN = [(100 + 10 * row, 40 * row) for row in range(10)]
"""Ten entries, 40 bytes apart."""


@pytest.mark.parametrize(
    ("entries", "size_bytes", "chunk_bytes", "expected"),
    [
        pytest.param(EVEN, 400, 400, [(0, 400, 100)], id="fits"),
        pytest.param(EVEN, 400, 399, [(0, 360, 100), (360, 40, 190)], id="one-byte-less"),
        pytest.param(EVEN, 400, 160, [(0, 160, 100), (160, 160, 140), (320, 80, 180)], id="even"),
        pytest.param(EVEN, 400, 199, [(0, 160, 100), (160, 160, 140), (320, 80, 180)], id="never-over"),
        pytest.param(
            [(100, 0), (110, 500), (120, 540)],
            600,
            100,
            [(0, 500, 100), (500, 100, 110)],
            id="batch-larger-than-a-chunk-stays-whole",
        ),
        pytest.param(
            [(100, 0), (110, 40), (120, 540)],
            600,
            100,
            [(0, 40, 100), (40, 500, 110), (540, 60, 120)],
            id="large-batch-inside",
        ),
        pytest.param([(100, 0), (110, 40)], 600, 100, [(0, 40, 100), (40, 560, 110)], id="large-tail"),
        pytest.param([(105, 0), (110, 40)], 80, 40, [(0, 40, 100), (40, 40, 110)], id="begins-with-a-hole"),
        pytest.param([], 600, 100, [(0, 600, 100)], id="no-entries"),
        pytest.param([], 0, 100, [], id="empty"),
        pytest.param(EVEN, 400, 1, [(40 * row, 40, 100 + 10 * row) for row in range(10)], id="tiny-chunks"),
    ],
)
def test_chunks_end_where_index_entries_are(entries, size_bytes, chunk_bytes, expected):
    """A chunk is as long as it can be without passing the size; only one batch may be longer."""
    assert cuts(index_of(entries, size_bytes), chunk_bytes) == expected


def test_whole_segment_mode_has_one_chunk():
    """A segment is one chunk in this mode, however small the chunk size. An empty segment has no chunk."""
    assert cuts(index_of(EVEN, 400), 10, is_whole=True) == [(0, 400, 100)]
    assert cuts(index_of([], 0), 10, is_whole=True) == []


@pytest.mark.parametrize(
    ("offset", "number"),
    [(0, 0), (100, 0), (139, 0), (140, 1), (179, 1), (180, 2), (998, 2), (999, 2), (1000, None)],
)
def test_offset_is_held_by_the_chunk_that_reading_begins_in(offset, number):
    """The first offset of a chunk is in it; past the segment's end nothing holds an offset."""
    found = plan_chunks(index_of(EVEN, 400), chunk_bytes=160).holding(offset)
    assert (found.number if found else None) == number


def test_chunks_follow_each_other_to_the_end():
    """The next chunk of a sequential reader begins where the one before ends."""
    layout = plan_chunks(index_of(EVEN, 400), chunk_bytes=160)
    first, second, third = layout.chunks
    assert (layout.after(first), layout.after(second), layout.after(third)) == (second, third, None)
    assert second == Chunk(1, 160, 160, 140, 180)
    assert third.next_offset == 1000
    assert plan_chunks(index_of([], 0), chunk_bytes=1).holding(100) is None


@st.composite
def indexes(draw):
    steps = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3000)), max_size=60))
    offset, position, entries = 100 + draw(st.integers(0, 5)), 0, []
    for more_offsets, more_bytes in steps:
        entries.append((offset, position))
        offset, position = offset + more_offsets, position + more_bytes
    tail = draw(st.integers(1, 500))
    return index_of(entries, position + tail, last_offset=offset + draw(st.integers(0, 9)))


@given(indexes(), st.integers(1, 4000), st.booleans())
def test_any_layout_is_the_object_and_cuts_no_batch(index, chunk_bytes, is_whole):
    """Chunks are the object byte for byte and offset for offset; only what cannot be cut is larger."""
    layout = plan_chunks(index, chunk_bytes=chunk_bytes, is_whole=is_whole)
    positions = [entry.position for entry in index.entries]
    assert layout.chunks[0].position == 0
    assert layout.chunks[-1].end == index.size_bytes
    assert (layout.chunks[0].base_offset, layout.chunks[-1].next_offset) == (100, index.last_offset + 1)
    for number, chunk in enumerate(layout.chunks):
        assert (chunk.number, chunk.size_bytes > 0) == (number, True)
        following = layout.after(chunk)
        if following is not None:
            assert (following.position, following.base_offset) == (chunk.end, chunk.next_offset)
            entry = index.entries[positions.index(following.position)]
            assert entry.offset == following.base_offset
        inside = [position for position in positions if chunk.position < position < chunk.end]
        assert is_whole or chunk.size_bytes <= chunk_bytes or not inside
        # Not smaller than need be: one entry more would have been too much.
        if following is not None:
            later = [position for position in [*positions, index.size_bytes] if position > chunk.end]
            assert later[0] - chunk.position > chunk_bytes
    for offset in range(100, index.last_offset + 1):
        held = layout.holding(offset)
        assert held is not None
        assert held.base_offset <= offset < held.next_offset
