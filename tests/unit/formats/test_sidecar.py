"""The index sidecar of a stored segment."""

from __future__ import annotations

import dataclasses
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.make_own_golden import EMPTY_INDEX, INDEX, OWN, files
from tests.unit.formats.damage import NOT_JSON_OBJECTS, changed_heads, flipped, sealed_head, truncations
from tieringd.errors import CorruptDataError
from tieringd.formats.envelope import seal, unseal
from tieringd.formats.sidecar import MAGIC, decode_sidecar, encode_sidecar
from tieringd.model.segment import AbortedTransaction, BrokerIndexes, IndexEntry, SegmentIndex

GOLDEN = (OWN / "segment-index.v1").read_bytes()
EXPECTED = {"segment-index.v1": INDEX, "segment-index-empty.v1": EMPTY_INDEX}
INT64 = st.integers(-(2**63), 2**63 - 1)


def parts_of(data: bytes) -> tuple[dict, bytes]:
    """Return the head of an encoded index and what follows it."""
    _version, body = unseal(data, MAGIC, newest_version=1, kind="index")
    (length,) = struct.unpack_from(">I", body)
    return json.loads(body[4 : 4 + length]), body[4 + length :]


HEAD, REST = parts_of(GOLDEN)

sections = st.none() | st.binary(max_size=40)
indexes = st.builds(
    SegmentIndex,
    base_offset=INT64,
    last_offset=INT64,
    size_bytes=INT64,
    crc32c=st.integers(0, 2**32 - 1),
    record_count=INT64,
    batch_count=INT64,
    epochs=st.lists(st.tuples(INT64, INT64), max_size=3).map(tuple),
    aborted=st.lists(st.builds(AbortedTransaction, INT64, INT64, INT64), max_size=3).map(tuple),
    entries=st.lists(st.builds(IndexEntry, INT64, INT64, INT64), max_size=4).map(tuple),
    broker=st.builds(BrokerIndexes, sections, sections, sections, sections),
)


@given(indexes)
def test_sidecar_survives_encoding(index):
    """Every field comes back, and the broker's files byte for byte, absent or empty ones included."""
    data = encode_sidecar(index)
    assert decode_sidecar(data) == index
    assert encode_sidecar(decode_sidecar(data)) == data


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_sidecar_decodes_to_its_values(name):
    """The golden sidecar of version 1 decodes to its values, field by field."""
    found = decode_sidecar((OWN / name).read_bytes())
    for field in dataclasses.fields(found):
        assert getattr(found, field.name) == getattr(EXPECTED[name], field.name), field.name


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_sidecar_encodes_to_the_same_bytes(name):
    """This release still writes version 1, with the same bytes."""
    assert files()[name] == (OWN / name).read_bytes()


def test_golden_sidecar_is_laid_out_as_documented():
    """A reader that knows only the page of the format finds each value."""
    assert (GOLDEN[:4], GOLDEN[4:8]) == (b"TRDI", b"\x00\x01\x00\x00")
    assert HEAD["entries"] == 3
    assert HEAD["sections"] == {
        "offset_index": 16,
        "time_index": 12,
        "transaction_index": 3,
        "producer_snapshot": 10,
    }
    assert HEAD["aborted"] == [[9_000_000_000, 1010, 1100], [5, 1050, 2**40]]
    entries = list(struct.iter_unpack(">qqq", REST[:72]))
    assert entries == [(1000, 0, 1_700_000_000_000), (1400, 65_536, -1), (1900, 2**33, 1_700_000_600_000)]
    assert REST[72:] == bytes(range(16)) + bytes(range(100, 112)) + b"txn" + b"snapshot\x00\xff"


@pytest.mark.parametrize("name", EXPECTED)
def test_any_changed_byte_of_a_sidecar_is_corrupt(name):
    """One byte changed anywhere is noticed, and as nothing but corrupt data."""
    for data in flipped((OWN / name).read_bytes()):
        with pytest.raises(CorruptDataError):
            decode_sidecar(data)


def test_any_truncated_sidecar_is_corrupt():
    """An index that ends early is noticed at every length."""
    for data in truncations(GOLDEN):
        with pytest.raises(CorruptDataError):
            decode_sidecar(data)


def test_sidecar_of_a_newer_version_says_what_to_do():
    """A host that was not upgraded names the version and the way out."""
    with pytest.raises(CorruptDataError) as caught:
        decode_sidecar(seal(MAGIC, 2, b"whatever version 2 will hold"))
    assert str(caught.value) == (
        "segment index has format version 2; this release reads 1 to 1. Upgrade tieringd on this host"
    )


def test_manifest_is_not_a_sidecar():
    """The first bytes of a document give its kind."""
    with pytest.raises(CorruptDataError, match="this is not a segment index: it begins with b'TRDM'"):
        decode_sidecar((OWN / "partition-manifest.v1").read_bytes())


@pytest.mark.parametrize("head", NOT_JSON_OBJECTS, ids=range(len(NOT_JSON_OBJECTS)))
def test_sidecar_whose_head_is_no_object_is_corrupt(head):
    """Anything but a JSON object with the right fields is corrupt data."""
    with pytest.raises(CorruptDataError, match="segment index cannot be read: "):
        decode_sidecar(sealed_head(MAGIC, 1, head, REST))


@pytest.mark.parametrize("name", HEAD)
def test_sidecar_without_a_field_is_corrupt(name):
    """Every field of the head is needed."""
    assert decode_sidecar(sealed_head(MAGIC, 1, HEAD, REST)) == INDEX
    head = {key: value for key, value in HEAD.items() if key != name}
    with pytest.raises(CorruptDataError, match="segment index cannot be read: "):
        decode_sidecar(sealed_head(MAGIC, 1, head, REST))


@pytest.mark.parametrize("rest", [REST + b"x", REST[:-1], b""], ids=["longer", "shorter", "missing"])
def test_sidecar_sections_fill_the_document_exactly(rest):
    """The sections after the head have the length that the head gives."""
    with pytest.raises(CorruptDataError, match=f"sections end at {len(REST)} of {len(rest)} bytes"):
        decode_sidecar(sealed_head(MAGIC, 1, HEAD, rest))


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x00\x00\x00\x05{}", b"\xff\xff\xff\xff{}"])
def test_sidecar_with_a_wrong_length_of_its_head_is_corrupt(body):
    """A right checksum does not make a body right."""
    with pytest.raises(CorruptDataError, match="segment index cannot be read: "):
        decode_sidecar(seal(MAGIC, 1, body))


@given(changed_heads(HEAD))
def test_sidecar_with_any_other_head_is_read_or_corrupt(head):
    """A sidecar with a field of any other type is read or raises CorruptDataError."""
    try:
        found = decode_sidecar(sealed_head(MAGIC, 1, head, REST))
    except CorruptDataError:
        return
    assert isinstance(found, SegmentIndex)
