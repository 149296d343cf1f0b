"""Spillover manifests as bytes, and their names."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib

import pytest
from crc32c import crc32c
from hypothesis import given

from tests.golden.make_own_golden import FIRST_SPILLOVER_PART, OWN, PARTITION, SPILLOVER_PART, files
from tests.unit.formats.damage import NOT_JSON_OBJECTS, changed_heads, flipped, truncations
from tests.unit.model.values import remote
from tieringd.errors import CorruptDataError
from tieringd.formats.envelope import seal, unseal
from tieringd.formats.manifest_codec import SPILLOVER_MAGIC, decode_spillover, encode_spillover
from tieringd.formats.object_keys import manifest_key, parse_spillover_key, spillover_key, spillover_prefix
from tieringd.model.manifest_parts import Gap
from tieringd.model.segment_table import SegmentTable
from tieringd.model.spillover import SpilloverName

GOLDEN = {"spillover-manifest.v1": SPILLOVER_PART, "spillover-manifest-first.v1": FIRST_SPILLOVER_PART}
DATA = (OWN / "spillover-manifest.v1").read_bytes()
NAME = SPILLOVER_PART.name(crc32c(DATA))


def body_of(data: bytes) -> bytes:
    return zlib.decompress(unseal(data, SPILLOVER_MAGIC, newest_version=1, kind="spillover manifest")[1])


BODY = body_of(DATA)
HEAD_END = 4 + struct.unpack_from(">I", BODY)[0]
HEAD, COLUMN_BYTES = json.loads(BODY[4:HEAD_END]), BODY[HEAD_END:]


def sealed(head: object) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return seal(SPILLOVER_MAGIC, 1, zlib.compress(struct.pack(">I", len(text)) + text + COLUMN_BYTES))


def decode(data: bytes):
    """Decode under the name that the bytes give, as only their content is looked at."""
    return decode_spillover(data, partition=PARTITION, name=SPILLOVER_PART.name(crc32c(data)))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_spillover_manifest_decodes_to_its_values(name):
    """The golden part of version 1 decodes to its values, field by field, under its name."""
    data, part = (OWN / name).read_bytes(), GOLDEN[name]
    found = decode_spillover(data, partition=PARTITION, name=part.name(crc32c(data)))
    for field in dataclasses.fields(part):
        assert getattr(found, field.name) == getattr(part, field.name), field.name


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_spillover_manifest_encodes_to_the_same_bytes(name):
    """This release writes version 1. Deflate may differ between zlibs, so its input is compared."""
    data = (OWN / name).read_bytes()
    assert body_of(files()[name]) == body_of(data)
    assert files()[name][:8] == data[:8] == b"TRDS\x00\x01\x00\x00"


def test_spillover_manifest_is_the_same_bytes_however_its_table_came_about():
    """Writers that other rows of the table had, and their numbers, leave no trace."""
    expected = encode_spillover(SPILLOVER_PART)
    longer = SegmentTable.of([remote(0, 1, writer_id="f" * 32), *SPILLOVER_PART.segments, remote(2000, 2001)])
    table = longer.without_head(1).head(2)
    assert table.writers != SPILLOVER_PART.segments.writers
    assert encode_spillover(dataclasses.replace(SPILLOVER_PART, segments=table)) == expected


def test_spillover_manifest_is_named_after_what_it_holds():
    """Offsets, the earliest and the latest time, and the checksum of all."""
    data, name = encode_spillover(SPILLOVER_PART)
    assert name == SpilloverName(700, 999, 1_700_000_000_000, 1_700_000_600_000, crc32c(data))
    timeless = SegmentTable.of([remote(900, 999, base_timestamp_ms=-1, max_timestamp_ms=-1)])
    name = encode_spillover(dataclasses.replace(FIRST_SPILLOVER_PART, segments=timeless))[1]
    assert (name.base_timestamp_ms, name.max_timestamp_ms) == (0, 0)


def test_spillover_key_tells_its_name():
    """A key lies under the live manifest's and has each part of the name; other keys are refused."""
    key = spillover_key(PARTITION, NAME)
    assert key == f"{manifest_key(PARTITION)}.700.999.1700000000000.1700000600000.{NAME.crc32c}"
    assert key.startswith(spillover_prefix(PARTITION))
    assert parse_spillover_key(PARTITION, key) == NAME
    other = dataclasses.replace(PARTITION, partition=PARTITION.partition + 1)
    assert parse_spillover_key(other, key) is None
    for wrong in (
        manifest_key(PARTITION),
        key + ".1",
        key[:-1] + "x",
        key.replace(".700.", ".0700."),
        key + "\n",
    ):
        assert parse_spillover_key(PARTITION, wrong) is None, wrong


def test_any_changed_byte_of_a_spillover_manifest_is_corrupt():
    """One byte changed anywhere is noticed."""
    for data in flipped(DATA):
        with pytest.raises(CorruptDataError):
            decode(data)


def test_any_truncated_spillover_manifest_is_corrupt():
    """One that ends early is noticed at every length."""
    for data in truncations(DATA):
        with pytest.raises(CorruptDataError):
            decode(data)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SpilloverName)])
def test_spillover_manifest_under_another_name_is_corrupt(name):
    """Bytes that are whole and lie where others should are not taken for them."""
    other = dataclasses.replace(NAME, **{name: getattr(NAME, name) + 1})
    with pytest.raises(CorruptDataError, match="has a wrong name"):
        decode_spillover(DATA, partition=PARTITION, name=other)


def test_spillover_manifest_of_another_partition_is_corrupt():
    """A part of another partition's history is not taken for this one's."""
    other = dataclasses.replace(PARTITION, topic_id="A" * 22)
    with pytest.raises(CorruptDataError, match="has a wrong name"):
        decode_spillover(DATA, partition=other, name=NAME)


@pytest.mark.parametrize("head", NOT_JSON_OBJECTS, ids=range(len(NOT_JSON_OBJECTS)))
def test_spillover_manifest_whose_head_is_no_object_is_corrupt(head):
    """Anything but a JSON object with the right fields is corrupt data."""
    with pytest.raises(CorruptDataError, match="spillover manifest cannot be read: "):
        decode(sealed(head))


@given(changed_heads(HEAD))
def test_spillover_manifest_with_any_other_head_is_read_or_corrupt(head):
    """A spillover manifest with a field of any other type is read or raises CorruptDataError."""
    try:
        found = decode(sealed(head))
    except CorruptDataError:
        return
    assert found.faults() == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"gaps": []}, "offsets 800 to 899 are neither stored nor", id="hole"),
        pytest.param({"next_offset": 1001}, "next_offset is 1001, but", id="end"),
        pytest.param({"base_offset": 699}, "offsets 699 to 699 are neither", id="begin"),
        pytest.param({"previous": [0, 698, 0, 0, 0]}, "its predecessor ends at 698", id="previous"),
    ],
)
def test_spillover_manifest_that_breaks_a_rule_is_not_read(changes, words):
    """A document that is whole and says something impossible is corrupt, and the error says what."""
    with pytest.raises(CorruptDataError, match=f"spillover manifest breaks its rules: .*{words}"):
        decode(sealed(HEAD | changes))


def test_spillover_manifest_that_breaks_a_rule_is_not_written():
    """A fault of this program stops before anything reaches the bucket."""
    empty = dataclasses.replace(
        FIRST_SPILLOVER_PART, segments=SegmentTable.of(), gaps=(Gap(900, 999, "all of it", 0),)
    )
    with pytest.raises(ValueError, match=r"refusing to write .*: the spillover manifest has no segment"):
        encode_spillover(empty)
