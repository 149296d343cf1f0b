"""The partition manifest as bytes."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
import zlib
from array import array
from itertools import accumulate

import pytest
from hypothesis import given

from tests.golden.make_own_golden import (
    MANIFEST,
    MANIFEST_V1,
    MANIFEST_V2,
    MANIFEST_V3,
    MANIFEST_V4,
    MANIFEST_V5,
    NEW_MANIFEST,
    NEW_MANIFEST_V1,
    NEW_MANIFEST_V2,
    NEW_MANIFEST_V3,
    NEW_MANIFEST_V4,
    NEW_MANIFEST_V5,
    NEWEST_SEGMENTS,
    OWN,
    RETIRED_SEGMENTS,
    SEGMENTS,
    files,
)
from tests.unit.formats.damage import NOT_JSON_OBJECTS, changed_heads, flipped, truncations
from tests.unit.model.values import manifests, remote
from tieringd.errors import CorruptDataError
from tieringd.formats.envelope import seal, unseal
from tieringd.formats.manifest_codec import MAGIC, decode_manifest, encode_manifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.segment import NO_CRC, NO_TIMESTAMP
from tieringd.model.segment_table import COLUMNS, SegmentTable

GOLDEN = (OWN / "partition-manifest.v6").read_bytes()
NEW_GOLDEN = (OWN / "partition-manifest-new.v6").read_bytes()
WRITTEN = {"partition-manifest.v6": MANIFEST, "partition-manifest-new.v6": NEW_MANIFEST}
READ = {
    "partition-manifest.v1": MANIFEST_V1,
    "partition-manifest-new.v1": NEW_MANIFEST_V1,
    "partition-manifest.v2": MANIFEST_V2,
    "partition-manifest-new.v2": NEW_MANIFEST_V2,
    "partition-manifest.v3": MANIFEST_V3,
    "partition-manifest-new.v3": NEW_MANIFEST_V3,
    "partition-manifest.v4": MANIFEST_V4,
    "partition-manifest-new.v4": NEW_MANIFEST_V4,
    "partition-manifest.v5": MANIFEST_V5,
    "partition-manifest-new.v5": NEW_MANIFEST_V5,
}
"""What earlier versions wrote."""
EXPECTED = WRITTEN | READ
DELETION = {"deletion"}
WINNERS = {"unsettled"} | DELETION
SPILLOVER = {"spillover", "trimmed_offset"} | WINNERS
RETENTION = {"allowed_local_start_offset", "expired_at_ms", "retired", "crossing"} | SPILLOVER
NEW_FIELDS = {
    1: {"began_at_ms", "replacements", "translation"} | RETENTION,
    2: RETENTION,
    3: SPILLOVER,
    4: WINNERS,
    5: DELETION,
}
"""What came after each version."""


def body_of(data: bytes) -> bytes:
    return zlib.decompress(unseal(data, MAGIC, newest_version=6, kind="manifest")[1])


def parts_of(data: bytes) -> tuple[dict, bytes]:
    """Return the head and the columns of an encoded manifest."""
    body = body_of(data)
    (length,) = struct.unpack_from(">I", body)
    return json.loads(body[4 : 4 + length]), body[4 + length :]


def sealed(head: object, columns: bytes, version: int = 6) -> bytes:
    """Return a manifest with a right checksum around any head (JSON, or bytes as they are)."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return seal(MAGIC, version, zlib.compress(struct.pack(">I", len(text)) + text + columns))


HEAD, COLUMN_BYTES = parts_of(GOLDEN)
SPILLED = HEAD["spillover"]


@given(manifests())
def test_manifest_survives_encoding(manifest):
    """Every field of every sound manifest comes back, and encodes to the same bytes."""
    data = encode_manifest(manifest)
    found = decode_manifest(data)
    assert found == manifest
    assert list(found.segments) == list(manifest.segments)
    assert encode_manifest(found) == data


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_manifest_decodes_to_its_values(name):
    """The golden manifest of each version decodes to its values, field by field."""
    found = decode_manifest((OWN / name).read_bytes())
    for field in dataclasses.fields(found):
        assert getattr(found, field.name) == getattr(EXPECTED[name], field.name), field.name


def test_golden_manifest_holds_its_segments():
    """Rows, with both writers, are those of the recipe."""
    found = decode_manifest(GOLDEN)
    assert tuple(found.segments) == NEWEST_SEGMENTS
    assert [tuple(one.segments) for one in found.retired] == [RETIRED_SEGMENTS[:2], RETIRED_SEGMENTS[2:]]


@pytest.mark.parametrize("version", NEW_FIELDS)
def test_golden_manifest_of_an_earlier_version_says_nothing_of_what_came_later(version):
    """The head of an older manifest lacks later fields, and reads as if there was nothing of them."""
    old = (OWN / f"partition-manifest.v{version}").read_bytes()
    head, columns = parts_of(old)
    assert old[4:6] == bytes([0, version])
    assert not NEW_FIELDS[version] & head.keys()
    assert NEW_FIELDS[version] | head.keys() == HEAD.keys()
    found = decode_manifest(old)
    assert found.deletions == ()
    if version == 5:
        return
    assert found.unsettled is None
    assert not any(one.is_held for one in found.retired)
    if version == 4:
        return
    assert found.spillover is None
    assert found.trimmed_offset == found.next_offset, "version 4 and older do not record how far trims went"
    if version == 3:
        return
    assert len(columns) == 8 * 3 * 10
    assert (found.allowed_local_start_offset, found.expired_at_ms, found.retired) == (None, None, ())
    assert found.crossing == ()
    assert [one.broker_timestamp_ms for one in found.segments] == [NO_TIMESTAMP] * 3
    assert [one.index_crc32c for one in found.segments] == [NO_CRC] * 3
    if version == 1:
        assert (found.began_at_ms, found.replacements, found.translation) == (0, (), None)


@pytest.mark.parametrize("name", READ)
def test_manifest_of_an_earlier_version_is_stored_again_as_version_6(name):
    """The next commit writes the newest version, and loses nothing on the way."""
    found = decode_manifest((OWN / name).read_bytes())
    again = encode_manifest(found)
    assert again[4:6] == b"\x00\x06"
    assert decode_manifest(again) == found == EXPECTED[name]


@pytest.mark.parametrize(
    ("version", "expected"),
    [(1, MANIFEST_V1), (2, MANIFEST_V2), (3, MANIFEST_V3), (4, MANIFEST_V4), (5, MANIFEST_V5)],
)
def test_fields_of_a_later_version_mean_nothing_in_an_earlier_one(version, expected):
    """A version says what its fields are; others in the head are not taken for them."""
    head, columns = parts_of((OWN / f"partition-manifest.v{version}").read_bytes())
    assert decode_manifest(sealed({**HEAD, **head}, columns, version=version)) == expected


@pytest.mark.parametrize("name", WRITTEN)
def test_golden_manifest_encodes_to_the_same_bytes(name):
    """This release writes version 6. Deflate may differ between zlibs, so its input is compared."""
    data = (OWN / name).read_bytes()
    assert body_of(files()[name]) == body_of(data)
    assert files()[name][:8] == data[:8]


def test_golden_manifest_is_laid_out_as_documented():
    """A reader that knows only the page of the format finds each value."""
    assert (GOLDEN[:4], GOLDEN[4:8]) == (b"TRDM", b"\x00\x06\x00\x00")
    assert HEAD["gaps"] == [
        [2001, 2499, "the broker deleted them first, after 7 Tage (é)", 1_700_000_850_000]
    ]
    assert (HEAD["rows"], HEAD["retired"]) == (3, [[2, 1_700_000_820_000, 0], [1, 1_700_000_830_000, 2**62]])
    assert HEAD["writers"] == [SEGMENTS[0].writer_id, SEGMENTS[1].writer_id, "5" * 32]
    assert HEAD["expired_at_ms"] == 1_700_000_830_000
    assert HEAD["epochs"] == [[0, 0], [4, 1000], [7, 2000], [2**31 - 1, 2500]]
    assert HEAD["began_at_ms"] == 1_699_999_000_000
    assert HEAD["replacements"] == [
        [2001, 3000, 7, 1_700_000_840_000],
        [2500, 2**62, 2**31 - 1, 2**60],
    ]
    assert HEAD["translation"] == [2**62 + 5, 2**40]
    assert HEAD["crossing"] == [
        [9_000_000_000, 1010, 2**62 + 1, 2**31 - 1],
        [5, 2600, 2**62 + 9, 2**31 - 1],
    ]
    assert HEAD["spillover"] == {
        "begin_offset": 550,
        "newest": [700, 999, 1_700_000_000_000, 1_700_000_600_000, 0x12345678],
        "segments": 3,
        "size_bytes": 2**41,
        "gap_offsets": 17,
        "retired": [[570, 1_700_000_820_000], [600, 1_700_000_830_000]],
    }
    assert (HEAD["start_offset"], HEAD["trimmed_offset"]) == (603, 2500)
    assert HEAD["unsettled"] == [2500, 2**62 + 1]
    assert parts_of(NEW_GOLDEN)[0]["translation"] is None
    assert parts_of(NEW_GOLDEN)[0]["spillover"] is None
    values = struct.unpack(f"<{6 * 12}q", COLUMN_BYTES)
    columns = [list(accumulate(values[at : at + 6])) for at in range(0, 72, 6)]
    for name, column in zip(COLUMNS, columns[:-1], strict=True):
        assert column == [getattr(segment, name) for segment in (*NEWEST_SEGMENTS, *RETIRED_SEGMENTS)], name
    assert columns[-1] == [0, 1, 0, 0, 2, 0]


def test_columns_are_swapped_on_a_host_of_the_other_byte_order(monkeypatch):
    """A host of the other byte order swaps the integers of the columns when it writes and when it reads."""
    other = "big" if sys.byteorder == "little" else "little"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "byteorder", other)
        data = encode_manifest(MANIFEST)
        assert decode_manifest(data) == MANIFEST
    found, expected = array("q", parts_of(data)[1]), array("q", COLUMN_BYTES)
    expected.byteswap()
    assert found == expected


def test_column_order_is_that_of_all_versions():
    """The order of columns is part of the stored format: another one needs another version."""
    assert COLUMNS == (
        "base_offset",
        "last_offset",
        "size_bytes",
        "crc32c",
        "base_timestamp_ms",
        "max_timestamp_ms",
        "leader_epoch",
        "uploaded_at_ms",
        "index_size_bytes",
        "broker_timestamp_ms",
        "index_crc32c",
    )


def test_manifest_of_regular_segments_is_small():
    """A thousand segments of one writer take a few bytes each, because differences are alike."""
    rows = [remote(100 * row, 100 * row + 99, uploaded_at_ms=10**12 + 60_000 * row) for row in range(1000)]
    manifest = dataclasses.replace(NEW_MANIFEST, segments=SegmentTable.of(rows), next_offset=100_000)
    assert len(encode_manifest(manifest)) < 4000


@pytest.mark.parametrize("name", EXPECTED)
def test_any_changed_byte_of_a_manifest_is_corrupt(name):
    """One byte changed anywhere is noticed, and as nothing but corrupt data."""
    for data in flipped((OWN / name).read_bytes()):
        with pytest.raises(CorruptDataError):
            decode_manifest(data)


def test_any_truncated_manifest_is_corrupt():
    """A manifest that ends early is noticed at every length."""
    for data in truncations(GOLDEN):
        with pytest.raises(CorruptDataError):
            decode_manifest(data)


def test_manifest_of_a_newer_version_says_what_to_do():
    """A host that was not upgraded names the version and the way out."""
    data = seal(MAGIC, 7, b"whatever version 7 will hold")
    with pytest.raises(CorruptDataError) as caught:
        decode_manifest(data)
    assert str(caught.value) == (
        "partition manifest has format version 7; this release reads 1 to 6. Upgrade tieringd on this host"
    )


def test_segment_index_is_not_a_manifest():
    """The first bytes of a document give its kind."""
    with pytest.raises(CorruptDataError, match="this is not a partition manifest: it begins with b'TRDI'"):
        decode_manifest((OWN / "segment-index.v1").read_bytes())


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"not deflate", id="other bytes"),
        pytest.param(zlib.compress(body_of(GOLDEN))[:-1], id="cut"),
        pytest.param(zlib.compress(body_of(GOLDEN)) + b"x", id="followed by a byte"),
        pytest.param(zlib.compress(b""), id="nothing inside"),
        pytest.param(zlib.compress(b"\xff\xff\xff\xff{}"), id="head longer than the body"),
        pytest.param(zlib.compress(body_of(GOLDEN) + b"x"), id="columns longer than the rows"),
        pytest.param(zlib.compress(body_of(GOLDEN)[:-8]), id="columns shorter than the rows"),
        pytest.param(zlib.compress(body_of(NEW_GOLDEN) + b"x"), id="columns without a row"),
    ],
)
def test_whole_envelope_around_a_wrong_body_is_corrupt(packed):
    """A right checksum does not make a body right."""
    with pytest.raises(CorruptDataError, match="partition manifest cannot be read: "):
        decode_manifest(seal(MAGIC, 4, packed))


@pytest.mark.parametrize("head", NOT_JSON_OBJECTS, ids=range(len(NOT_JSON_OBJECTS)))
def test_manifest_whose_head_is_no_object_is_corrupt(head):
    """Anything but a JSON object with the right fields is corrupt data."""
    with pytest.raises(CorruptDataError, match="partition manifest cannot be read: "):
        decode_manifest(sealed(head, COLUMN_BYTES))


@pytest.mark.parametrize("name", HEAD)
def test_manifest_without_a_field_is_corrupt(name):
    """Every field of the head is needed."""
    assert decode_manifest(sealed(HEAD, COLUMN_BYTES)) == MANIFEST
    with pytest.raises(CorruptDataError, match="partition manifest cannot be read: "):
        decode_manifest(sealed({key: value for key, value in HEAD.items() if key != name}, COLUMN_BYTES))


@given(changed_heads(HEAD))
def test_manifest_with_any_other_head_is_read_or_corrupt(head):
    """A manifest with a field of any other type is read or raises CorruptDataError."""
    try:
        found = decode_manifest(sealed(head, COLUMN_BYTES))
    except CorruptDataError:
        return
    assert found.faults() == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"next_offset": 5}, "next_offset is 5, but the last entry ends before", id="end"),
        pytest.param({"gaps": []}, "offsets 2001 to 2499 are neither stored nor a recorded gap", id="hole"),
        pytest.param(
            {"start_offset": 0, "spillover": None}, "offsets 0 to 999 are neither stored nor", id="start"
        ),
        pytest.param(
            {"start_offset": 549}, "begins at 549, which is not in its spilled part", id="before spilled"
        ),
        pytest.param(
            {"start_offset": 1000}, "begins at 1000, which is not in its spilled part", id="after spilled"
        ),
        pytest.param({"start_offset": 599}, "spilled part has already expired up to 600", id="expired"),
        pytest.param(
            {"spillover": SPILLED | {"segments": -1}}, "bytes or offsets is negative", id="segments"
        ),
        pytest.param({"spillover": SPILLED | {"size_bytes": -1}}, "bytes or offsets is negative", id="size"),
        pytest.param({"spillover": SPILLED | {"gap_offsets": -1}}, "bytes or offsets is negative", id="gaps"),
        pytest.param(
            {"start_offset": 1000, "spillover": SPILLED | {"segments": 0, "retired": []}},
            "the manifest has a spilled part with neither live nor expired segments",
            id="nothing spilled",
        ),
        pytest.param(
            {"spillover": SPILLED | {"retired": [[600, 1], [600, 1]]}}, "are out of order", id="marks twice"
        ),
        pytest.param(
            {"spillover": SPILLED | {"retired": [[550, 1], [600, 1]]}},
            "are out of order",
            id="mark at the begin",
        ),
        pytest.param({"epochs": [[5, 0], [4, 9]]}, "leader epoch 4 at 9 follows 5 at 0", id="epochs"),
        pytest.param(
            {"crossing": [[9, 1010, 1010, 7]]},
            "the transaction from 1010 to 1010 crosses no segment's end",
            id="transaction",
        ),
    ],
)
def test_manifest_that_breaks_a_rule_is_not_read(changes, words):
    """A document that is whole and says something impossible is corrupt, and the error says what."""
    with pytest.raises(CorruptDataError, match=f"partition manifest breaks its rules: .*{words}"):
        decode_manifest(sealed(HEAD | changes, COLUMN_BYTES))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"replacements": [[1, 2, 3]]}, id="replacement too short"),
        pytest.param({"replacements": 7}, id="replacements no list"),
        pytest.param({"replacements": None}, id="no replacements"),
        pytest.param({"translation": [1]}, id="translation too short"),
        pytest.param({"translation": [1, 2]}, id="translation impossible"),
        pytest.param({"translation": ["a", 2]}, id="translation of words"),
        pytest.param({"translation": 7}, id="translation no pair"),
        pytest.param({"allowed_local_start_offset": "7"}, id="hint in words"),
        pytest.param({"expired_at_ms": "7"}, id="time in words"),
        pytest.param({"retired": [[3]]}, id="retired without a time"),
        pytest.param({"retired": [[4, 0], [-1, 0]]}, id="a negative number of rows"),
        pytest.param({"rows": -1, "retired": [[7, 0]]}, id="a negative number of live rows"),
        pytest.param({"retired": [[4, 0]]}, id="more retired than there are rows"),
        pytest.param({"retired": [[2, "x"], [1, 0]]}, id="retired at no time"),
        pytest.param({"crossing": [[1, 2, 3]]}, id="transaction too short"),
        pytest.param({"crossing": [[1, "a", 3, 4]]}, id="transaction of words"),
        pytest.param({"crossing": None}, id="no transactions"),
        pytest.param({"spillover": []}, id="spillover no object"),
        pytest.param({"spillover": SPILLED | {"newest": [1, 2, 3, 4]}}, id="name too short"),
        pytest.param({"spillover": SPILLED | {"newest": [700, 999, 0, 0, "x"]}}, id="name of words"),
        pytest.param({"spillover": SPILLED | {"segments": None}}, id="no number of segments"),
        pytest.param({"spillover": SPILLED | {"retired": [[600]]}}, id="expired at no time"),
        pytest.param({"deletion": [5]}, id="deletion without an epoch"),
        pytest.param({"deletion": ["x", 5]}, id="deletion of words"),
    ],
)
def test_manifest_with_a_wrong_new_field_is_corrupt(changes):
    """The fields of later versions are read as strictly as the rest."""
    with pytest.raises(CorruptDataError, match="partition manifest cannot be read: "):
        decode_manifest(sealed(HEAD | changes, COLUMN_BYTES))


def test_manifest_that_breaks_a_rule_is_not_written():
    """A fault of this program stops before anything reaches the bucket."""
    broken = dataclasses.replace(MANIFEST, gaps=(Gap(2001, 2498, "too short", 0),))
    with pytest.raises(ValueError, match=r"refusing to write .*: offsets 2499 to 2499 are neither"):
        encode_manifest(broken)
