"""Segments in columns: what goes in comes out, found by bisection, small in memory."""

from __future__ import annotations

import pickle
import pickletools
import tracemalloc
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import TIME_MS, WRITERS, remote, remote_segments
from tieringd.model import segment_table
from tieringd.model.segment_table import COLUMNS, SegmentTable

MANY = 100_000
"""`benchmarks.manifest` measures a million; a row takes as much there."""
FOUR = (
    remote(10, 19, writer_id="a", size_bytes=1),
    remote(20, 29, writer_id="b", size_bytes=20),
    remote(40, 49, writer_id="a", size_bytes=300),
    remote(50, 50, writer_id="c", size_bytes=4000),
)
"""Offsets 30 to 39 are missing, as after a gap."""


@st.composite
def tables(draw: st.DrawFn) -> list:
    segments, base_offset = [], draw(st.integers(0, 50))
    for skipped in draw(st.lists(st.integers(0, 3), max_size=10)):
        segments.append(draw(remote_segments(base_offset + skipped, max_length=5)))
        base_offset = segments[-1].next_offset
    return segments


@given(tables())
def test_table_gives_back_what_it_was_built_of(segments):
    """Every field of every segment survives, by row, in order and in number."""
    table = SegmentTable.of(segments)
    assert list(table) == segments
    assert [table[row] for row in range(len(table))] == segments
    assert len(table) == len(segments)
    assert table.total_bytes == sum(segment.size_bytes for segment in segments)


@given(tables(), st.integers(0, 10))
def test_table_is_the_same_after_its_pickle(segments, begin):
    """Rows, writers, and what searches go by; a part of a table as well."""
    table = SegmentTable.of(segments).between(begin, len(segments))
    copy = pickle.loads(pickle.dumps(table))
    assert list(copy) == list(table)
    assert copy.writers == table.writers
    assert copy.latest_timestamp_ms == table.latest_timestamp_ms
    for offset in range(-1, 100):
        assert copy.row_at_or_after(offset) == table.row_at_or_after(offset)


def test_pickle_of_a_table_has_no_object_of_ours_for_each_column():
    """Spark pickles a table for each task, and asks Python about each object that is not built in."""
    classes = [
        argument
        for _, argument, _ in pickletools.genops(pickle.dumps(SegmentTable.of(FOUR)))
        if isinstance(argument, str) and argument.startswith("tieringd")
    ]
    assert classes == ["tieringd.model.segment_table"]
    assert len(pickle.dumps(SegmentTable.of(FOUR))) < 900


@given(tables(), st.integers(0, 10))
def test_table_is_the_same_when_appended_in_parts(segments, cut):
    """Appending is concatenation, and the shorter table stays as it was."""
    head = SegmentTable.of(segments[:cut])
    assert head.appended(segments[cut:]) == SegmentTable.of(segments)
    assert list(head) == segments[:cut]


@given(tables(), st.integers(-1, 100))
def test_table_search_agrees_with_a_linear_one(segments, offset):
    """Both lookups give what a walk over all rows gives, inside, between and outside segments."""
    table = SegmentTable.of(segments)
    rows = [row for row, segment in enumerate(segments) if segment.last_offset >= offset]
    holders = [one for one in segments if one.base_offset <= offset <= one.last_offset]
    assert table.row_at_or_after(offset) == (rows[0] if rows else len(segments))
    assert table.covering(offset) == (holders[0] if holders else None)


@pytest.mark.parametrize(
    ("offset", "row", "covered"),
    [
        *[(0, 0, None), (9, 0, None), (10, 0, 0), (19, 0, 0), (20, 1, 1), (29, 1, 1)],
        *[(30, 2, None), (39, 2, None), (40, 2, 2), (49, 2, 2), (50, 3, 3), (51, 4, None)],
    ],
)
def test_table_lookup_is_exact_at_the_edges(offset, row, covered):
    """First and last offsets are inside; the one before and the one after are not."""
    table = SegmentTable.of(FOUR)
    assert table.row_at_or_after(offset) == row
    assert table.covering(offset) == (None if covered is None else FOUR[covered])


@given(tables(), st.integers(-1, 100), st.integers(1, 30))
def test_table_overlap_agrees_with_a_walk_over_all_rows(segments, base_offset, length):
    """Every segment with an offset in the range is found, ascending, and no other."""
    next_offset = base_offset + length
    expected = [one for one in segments if one.base_offset < next_offset and one.last_offset >= base_offset]
    found = SegmentTable.of(segments).overlapping(base_offset, next_offset)
    assert list(found) == expected


@pytest.mark.parametrize(
    ("base_offset", "next_offset", "rows"),
    [
        pytest.param(0, 10, [], id="before the first"),
        pytest.param(0, 11, [0], id="the first offset of the first"),
        pytest.param(19, 20, [0], id="the last offset of the first"),
        pytest.param(19, 21, [0, 1], id="over an edge"),
        pytest.param(10, 51, [0, 1, 2, 3], id="all"),
        pytest.param(12, 13, [0], id="inside one"),
        pytest.param(30, 40, [], id="inside the gap"),
        pytest.param(29, 41, [1, 2], id="over the gap"),
        pytest.param(51, 99, [], id="behind the last"),
    ],
)
def test_table_overlap_is_exact_at_the_edges(base_offset, next_offset, rows):
    """The base offset is inclusive and the next one exclusive."""
    found = SegmentTable.of(FOUR).overlapping(base_offset, next_offset)
    assert found == tuple(FOUR[row] for row in rows)


@given(tables(), st.integers(0, 12))
def test_table_head_is_its_first_rows(segments, rows):
    """A head is a table of its own, and the one it was taken of stays as it was."""
    table = SegmentTable.of(segments)
    head = table.head(rows)
    assert list(head) == segments[:rows]
    assert len(head) == min(rows, len(segments))
    assert list(table) == segments
    assert head.appended(segments[rows:]) == table


def test_table_head_keeps_the_numbers_of_writers():
    """Rows go on meaning the same writers, also when a later one is first met again."""
    head = SegmentTable.of(FOUR).head(1)
    assert head[0].writer_id == "a"
    assert [one.writer_id for one in head.appended(FOUR[1:])] == ["a", "b", "a", "c"]


def test_table_keeps_each_writer_once():
    """Rows hold the numbers of writers, given out in order of appearance."""
    table = SegmentTable.of(FOUR[:2]).appended(FOUR[2:])
    assert table.writers == ("a", "b", "c")
    assert list(table.writer_numbers) == [0, 1, 0, 2]


def test_table_columns_hold_one_field_each():
    """A column is one field of all rows, under the name of the field."""
    table = SegmentTable.of(FOUR)
    for name in COLUMNS:
        assert list(table.column(name)) == [getattr(segment, name) for segment in FOUR]


@given(tables())
def test_table_is_built_again_from_its_columns(segments):
    """Columns, writers' numbers and writers are the whole of a table."""
    table = SegmentTable.of(segments)
    columns = {name: list(table.column(name)) for name in COLUMNS}
    assert SegmentTable.from_columns(columns, table.writer_numbers, table.writers) == table


def _columns(**changes: list[int]) -> dict[str, list[int]]:
    return {name: [1, 2] for name in COLUMNS} | changes


@pytest.mark.parametrize("name", COLUMNS)
def test_table_refuses_a_column_of_another_length(name):
    """One column shorter than the others is an error, whichever it is."""
    with pytest.raises(ValueError, match="segment columns differ in length"):
        SegmentTable.from_columns(_columns(**{name: [1]}), [0, 0], ["a"])


def test_table_refuses_writer_numbers_of_another_length():
    """Every row has a writer."""
    with pytest.raises(ValueError, match="segment columns differ in length"):
        SegmentTable.from_columns(_columns(), [0], ["a"])


@pytest.mark.parametrize(
    "changes",
    [
        {"crc32c": [0, 2**32]},
        {"crc32c": [0, -1]},
        {"leader_epoch": [0, 2**31]},
        {"base_offset": [0, 2**63]},
        {"size_bytes": [0, 2**63]},
    ],
    ids=str,
)
def test_table_refuses_a_value_that_does_not_fit(changes):
    """A value outside its column's range is an error, and never another number."""
    with pytest.raises(ValueError, match="a segment column holds a value out of range"):
        SegmentTable.from_columns(_columns(**changes), [0, 0], ["a"])


def test_table_refuses_a_writer_number_that_does_not_fit():
    """A writer's number has 16 bits."""
    with pytest.raises(ValueError, match="a segment column holds a value out of range"):
        SegmentTable.from_columns(_columns(), [0, 2**16], ["a"])


def test_table_refuses_a_writer_that_is_not_listed():
    """The number after the last writer's names no writer."""
    assert len(SegmentTable.from_columns(_columns(), [0, 1], ["a", "b"])) == 2
    with pytest.raises(ValueError, match="names a writer that the manifest does not list"):
        SegmentTable.from_columns(_columns(), [0, 2], ["a", "b"])


def test_tables_are_equal_by_what_they_hold():
    """Writers may be numbered differently in equal tables; a list is not a table."""
    forwards = SegmentTable.of(FOUR[:2])
    columns = {name: forwards.column(name) for name in COLUMNS}
    assert SegmentTable.from_columns(columns, [1, 0], ["b", "a"]) == forwards
    assert SegmentTable.from_columns(columns, [0, 0], ["a"]) != forwards
    assert forwards != list(FOUR[:2])


def test_table_is_not_hashable_and_says_its_size():
    """A table compares by its rows, which is no work for a hash; its text does not print them."""
    with pytest.raises(TypeError):
        hash(SegmentTable.of(FOUR))
    assert repr(SegmentTable.of(FOUR)) == "SegmentTable(4 segments)"


@given(tables(), st.data())
def test_table_agrees_with_a_list_however_it_is_cut_and_joined(segments, data):
    """Blocks of any lengths, shared and cut, hold the same rows as a plain list."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_table, "BLOCK_ROWS", data.draw(st.integers(1, 4)))
        table, expected = SegmentTable.of(segments), list(segments)
        for _ in range(data.draw(st.integers(0, 6))):
            rows = data.draw(st.integers(0, len(expected) + 1))
            if data.draw(st.booleans()):
                head, tail = table.head(rows), table.without_head(rows)
                assert (list(head), list(tail)) == (expected[:rows], expected[rows:])
                table = SegmentTable.joined([head, tail])
            elif data.draw(st.booleans()):
                table, expected = table.without_head(rows), expected[rows:]
            else:
                table = table.head(rows).appended(expected[rows:])
        assert list(table) == expected
        assert [table[row] for row in range(len(expected))] == expected
        assert table == SegmentTable.of(expected)
        for name in COLUMNS:
            assert list(table.column(name)) == [getattr(one, name) for one in expected]
        begin, end = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12))
        assert list(table.between(begin, end)) == expected[begin:end]
        offset = data.draw(st.integers(-1, 100))
        later = [row for row, one in enumerate(expected) if one.last_offset >= offset]
        assert table.row_at_or_after(offset) == (later[0] if later else len(expected))


@given(
    st.lists(st.integers(-1, 9), max_size=30),
    st.integers(-2, 10),
    st.integers(1, 5),
)
def test_table_finds_times_that_do_not_ascend(times, wanted, block_rows):
    """Every row with a record as late as that is found, ascending, wherever the newest one lies."""
    rows = [remote(row, row, base_timestamp_ms=-1, max_timestamp_ms=time) for row, time in enumerate(times)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_table, "BLOCK_ROWS", block_rows)
        table = SegmentTable.of(rows)
    assert list(table.rows_reaching(wanted)) == [row for row, time in enumerate(times) if time >= wanted]
    assert table.latest_timestamp_ms == max(times, default=None)


def test_table_numbers_the_writers_of_a_joined_one_anew():
    """Rows go on meaning their writers, although the other table counted them otherwise."""
    joined = SegmentTable.joined([SegmentTable.of(FOUR[1:3]), SegmentTable.of(FOUR[3:])])
    assert joined.writers == ("b", "a", "c")
    assert list(joined) == list(FOUR[1:])
    assert SegmentTable.joined([]) == SegmentTable.of()


def test_table_shares_its_full_blocks_with_what_is_made_of_it():
    """One more row packs the last block anew, and no other."""
    rows = [remote(number, number) for number in range(2 * segment_table.BLOCK_ROWS + 1)]
    table = SegmentTable.of(rows)
    longer = table.appended([remote(len(rows), len(rows))])
    assert [one is other for one, other in zip(table.blocks, longer.blocks, strict=True)] == [
        True,
        True,
        False,
    ]


def test_table_has_no_row_outside():
    """Rows count from either end, and nothing lies past the ends."""
    table = SegmentTable.of(FOUR)
    assert table[-1] == FOUR[-1]
    for row in (4, -5):
        with pytest.raises(IndexError, match="there is no row"):
            table[row]


def test_many_segments_take_less_than_64_bytes_each():
    """Ordinary rows take less than 64 bytes each, and both ends are found."""
    scattered = [number * 2_654_435_761 % 2**32 for number in range(MANY)]
    lasts = array("q", range(99, 100 * MANY, 100))
    times = array("q", (TIME_MS + 60_000 * row + one % 50_000 for row, one in enumerate(scattered)))
    columns = {
        "base_offset": array("q", range(0, 100 * MANY, 100)),
        "last_offset": lasts,
        "size_bytes": array("q", (10**8 + one % 10**6 for one in scattered)),
        "crc32c": array("I", scattered),
        "base_timestamp_ms": array("q", (time - 70_000 for time in times)),
        "max_timestamp_ms": times,
        "leader_epoch": array("i", (row // 1000 for row in range(MANY))),
        "uploaded_at_ms": array("q", (time + one % 5000 for time, one in zip(times, scattered, strict=True))),
        "index_size_bytes": array("I", (4000 + one % 500 for one in scattered)),
        "broker_timestamp_ms": array("q", [-1]) * MANY,
        "index_crc32c": array("q", reversed(scattered)),
    }
    numbers = array("H", [0, 1] * (MANY // 2))
    tracemalloc.start()
    try:
        table = SegmentTable.from_columns(columns, numbers, WRITERS[:2])
        held_bytes, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(table) == MANY
    assert 20 * MANY < held_bytes < 64 * MANY
    assert table.covering(0) == table[0]
    assert table.covering(lasts[-1]).writer_id == WRITERS[1]
    assert table.covering(lasts[-1] + 1) is None
    assert next(table.rows_reaching(times[-1])) == MANY - 1
