"""Redpanda's `base_index`: its bounds and the broker's own time, whole and right, or corrupt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.redpanda_builders import base_index, index_envelope
from tests.unit.formats.damage import flipped, truncations
from tieringd.errors import CorruptDataError
from tieringd.formats.redpanda_index import BaseIndex, parse_base_index

BROKER_TIME_MS = 1_750_000_000_000
ENTRIES = ((0, 1 << 31, 0), (40, (1 << 31) + 5, 33_000), (90, (1 << 31) - 5, 70_000))
VERSIONS = range(4, 10)

int64 = st.integers(-(2**63), 2**63 - 1)
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)


def index_of(version: int = 9, **fields: object) -> bytes:
    fields = {
        "base_offset": 7,
        "max_offset": 106,
        "times_ms": (1000, 2000),
        "broker_time_ms": BROKER_TIME_MS,
        "entries": ENTRIES,
        "compactible": 12,
    } | fields
    return base_index(version=version, **fields)


def expected(broker_time_ms: int | None = BROKER_TIME_MS) -> BaseIndex:
    return BaseIndex(7, 106, 1000, 2000, broker_time_ms)


def test_index_is_laid_out_as_documented():
    """Every byte of a file of version 9 is where the documentation says, its checksum too."""
    data = bytes.fromhex(
        """
        09 04 6f000000
        67000000
          00000000
          0100000000000000 6400000000000000
          e803000000000000 d007000000000000
          02000000 00000000 05000000
          02000000 00000080 64000080
          02000000 0000000000000000 0080000000000000
          01 01 00
          01 0100000000010000
          01 0700000000000000
          00
          01
        255baaf8
        """
    )
    assert parse_base_index(data) == BaseIndex(
        base_offset=1,
        max_offset=100,
        base_timestamp_ms=1000,
        max_timestamp_ms=2000,
        broker_timestamp_ms=(1 << 40) + 1,
    )


@pytest.mark.parametrize(
    ("version", "broker_time_ms"),
    [(4, None), (5, None), *((version, BROKER_TIME_MS) for version in range(6, 10))],
)
def test_broker_time_is_in_an_index_since_version_6(version, broker_time_ms):
    """Older versions have all else, and no such time."""
    assert parse_base_index(index_of(version)) == expected(broker_time_ms)


@pytest.mark.parametrize("version", range(6, 12))
@pytest.mark.parametrize("absent", [None, -1])
def test_broker_time_may_be_absent(version, absent):
    """An empty optional is no time, and Redpanda's "no timestamp" is none."""
    assert parse_base_index(index_of(version, broker_time_ms=absent)) == expected(None)


def test_segment_without_batches_has_an_index():
    """No column has an entry then."""
    data = base_index(base_offset=7, entries=(), times_ms=(0, 0))
    assert parse_base_index(data) == BaseIndex(7, 0, 0, 0, None)


@pytest.mark.parametrize("needed", [4, 9])
def test_newer_version_for_known_readers_is_read(needed):
    """A newer index may have more fields behind the known ones, and more behind the checksum."""
    data = index_of(200, needed=needed, more_fields=b"new", more=b"newer")
    assert parse_base_index(data) == expected()


@pytest.mark.parametrize(
    ("data", "words", "position"),
    [
        pytest.param(b"", "cut short: 0 bytes", 0, id="nothing"),
        pytest.param(index_of()[:9], "cut short: 9 bytes", 9, id="inside the envelope"),
        pytest.param(index_of()[:-1], "should have 133 bytes and has 132", 2, id="one byte short"),
        pytest.param(index_of() + b"x", "should have 133 bytes and has 134", 2, id="one byte more"),
        pytest.param(b"\x03" + index_of()[1:], "versions before 4 are not read", 0, id="no envelope yet"),
        pytest.param(b"\x03", "versions before 4 are not read", 0, id="no envelope yet, cut"),
        pytest.param(index_of(11, needed=10), "needs a reader of version 10", 1, id="newer readers"),
        pytest.param(index_of(8, needed=9), "version 8 and needs a reader of 9", 1, id="older than itself"),
        pytest.param(index_of(more=b"x"), "cannot have 119 of its 134 bytes", 6, id="more than the checksum"),
        pytest.param(
            index_of(more_fields=b"x"), "more fields than its version 9, bytes left: 1", 129, id="more fields"
        ),
        pytest.param(index_of()[:-1] + b"\x00", "index CRC is", 129, id="other checksum"),
        pytest.param(index_envelope(b""), "end early, bytes missing: 36", 10, id="no fields"),
        pytest.param(
            index_envelope(bytes(36) + b"\xff" * 4), "bytes missing: 17179869180", 50, id="huge column"
        ),
        pytest.param(
            index_envelope(bytes(36) + b"\x01" + bytes(7) + b"\x02" + bytes(11)),
            "a column of the index has 2 entries, and the first has 1",
            54,
            id="columns of different lengths",
        ),
        pytest.param(index_of(flags=(2, 0, 0)), "a flag of the index is 2", 106, id="a flag that is none"),
        pytest.param(
            index_envelope(index_of(8)[10:-4], version=9), "bytes missing: 1", 128, id="fields of an older"
        ),
    ],
)
def test_damaged_index_is_explained(data, words, position):
    """The error says what is wrong, and where in the file."""
    with pytest.raises(CorruptDataError, match=words) as caught:
        parse_base_index(data)
    assert caught.value.position == position


def test_index_for_newer_readers_says_what_to_do():
    """The index is not damaged: the daemon is too old."""
    with pytest.raises(CorruptDataError, match=r"newer Redpanda") as caught:
        parse_base_index(index_of(12, needed=12))
    assert "Update tieringd" in caught.value.hint


@pytest.mark.parametrize("version", [*VERSIONS, 10])
def test_cut_index_is_corrupt_wherever_it_is_cut(version):
    """Every proper beginning of a file is noticed."""
    for data in truncations(index_of(version)):
        with pytest.raises(CorruptDataError):
            parse_base_index(data)


@pytest.mark.parametrize("version", VERSIONS)
def test_fields_that_end_early_are_corrupt(version):
    """Lengths and a checksum that are right do not help fields of which the end is missing."""
    for fields in truncations(index_of(version)[10:-4]):
        with pytest.raises(CorruptDataError):
            parse_base_index(index_envelope(fields, version=version))


@pytest.mark.parametrize("version", VERSIONS)
def test_changed_byte_is_noticed_or_changes_nothing(version):
    """The two version bytes are under no checksum: another version is read only if it says the same."""
    whole = index_of(version)
    for data in flipped(whole):
        try:
            found = parse_base_index(data)
        except CorruptDataError:
            continue
        assert data[2:] == whole[2:]
        assert found == parse_base_index(whole)


@given(
    version=st.integers(4, 30),
    base_offset=int64,
    max_offset=int64,
    times_ms=st.tuples(int64, int64),
    broker_time_ms=st.none() | st.integers(0, 2**63 - 1),
    entries=st.lists(st.tuples(uint32, uint32, uint64), max_size=20),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    compactible=st.none() | uint64,
    compacted_ms=st.none() | int64,
    tombstones=st.booleans(),
)
def test_any_index_is_read_as_it_was_written(version, base_offset, max_offset, times_ms, **fields):
    """Bounds and times are read as they were written, whatever the columns and the other fields hold."""
    data = base_index(
        version=version, base_offset=base_offset, max_offset=max_offset, times_ms=times_ms, **fields
    )
    broker_time_ms = fields["broker_time_ms"] if version >= 6 else None
    assert parse_base_index(data) == BaseIndex(
        base_offset, max_offset, *times_ms, broker_timestamp_ms=broker_time_ms
    )


@given(version=st.integers(0, 255), needed=st.integers(0, 255), fields=st.binary(max_size=120))
def test_any_fields_are_read_or_corrupt(version, needed, fields):
    """Fields of any bytes, with a right checksum, raise no other error."""
    try:
        found = parse_base_index(index_envelope(fields, version=version, needed=needed))
    except CorruptDataError:
        return
    assert isinstance(found, BaseIndex)
    assert needed <= min(version, 9)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_corrupt(data):
    """A file of any bytes raises no other error; none passes the checksum by chance."""
    with pytest.raises(CorruptDataError):
        parse_base_index(data)
