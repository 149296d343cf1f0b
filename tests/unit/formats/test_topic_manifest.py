"""The topic manifest: JSON that makes a bucket self-describing."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.make_own_golden import (
    OWN,
    PURGED_TOPIC_MANIFEST,
    TOPIC_MANIFEST,
    TOPIC_MANIFEST_V1,
    TOPIC_MANIFEST_V2,
    TOPIC_MANIFEST_V3,
    TOPIC_MANIFEST_V4,
    files,
)
from tests.unit.formats.damage import NOT_JSON_OBJECTS, changed_heads, truncations
from tieringd.errors import CorruptDataError
from tieringd.formats.object_keys import TopicKey
from tieringd.formats.topic_manifest import (
    Archiving,
    OriginalRetention,
    TieringDefaults,
    TopicManifest,
    decode_topic_manifest,
    encode_topic_manifest,
)
from tieringd.model.partition import TopicIdPartition
from tieringd.model.topic_lifecycle import Deletion, Lease, Lifecycle

GOLDEN = (OWN / "topic-manifest.v5.json").read_bytes()
DOCUMENT = json.loads(GOLDEN)


@given(
    st.builds(
        TopicManifest,
        st.builds(TopicKey, st.text(max_size=9), st.text(max_size=9), st.text(max_size=9)),
        partition_count=st.integers(0, 2**31 - 1),
        created_at_ms=st.integers(0, 2**62),
        lifecycle=st.sampled_from(Lifecycle),
        archiving=st.sampled_from(Archiving),
        original_retention=st.none()
        | st.builds(
            OriginalRetention,
            st.none() | st.text(max_size=9),
            st.none() | st.text(max_size=9),
            st.none() | st.integers(),
            st.none() | st.integers(),
        ),
        retention_released=st.booleans(),
        defaults=st.none()
        | st.builds(
            TieringDefaults,
            st.booleans(),
            st.booleans(),
            st.none() | st.integers(),
            st.none() | st.integers(),
        ),
        remote_delete=st.none() | st.booleans(),
        deletion=st.none()
        | st.builds(
            Deletion,
            st.integers(),
            st.text(max_size=9),
            st.text(max_size=9),
            st.none() | st.builds(Lease, st.text(max_size=9), st.integers()),
            st.none() | st.integers(0),
            st.none() | st.integers(0),
            st.none() | st.integers(),
            st.none() | st.integers(),
        ),
        moved_to=st.text(max_size=9),
    )
)
def test_topic_manifest_survives_encoding(manifest):
    """Every field comes back, and the text is ASCII that ends with a line break."""
    data = encode_topic_manifest(manifest)
    assert decode_topic_manifest(data) == manifest
    assert data.isascii()
    assert data.endswith(b"}\n")


def test_golden_topic_manifest_is_read_and_written():
    """The golden manifest of version 5 decodes to its values, and encodes to the same bytes."""
    assert decode_topic_manifest(GOLDEN) == TOPIC_MANIFEST
    assert files()["topic-manifest.v5.json"] == GOLDEN


def test_golden_mark_of_a_purged_topic_is_read_and_written():
    """The mark of a purged topic has the time of the purge, and how much was purged."""
    golden = (OWN / "topic-manifest-purged.v5.json").read_bytes()
    assert decode_topic_manifest(golden) == PURGED_TOPIC_MANIFEST
    assert files()["topic-manifest-purged.v5.json"] == golden


def test_golden_topic_manifest_of_version_4_is_read():
    """Defaults for fields that version 4 lacks: the topic is not deleted, and keeps its archive if it is."""
    found = decode_topic_manifest((OWN / "topic-manifest.v4.json").read_bytes())
    assert found == TOPIC_MANIFEST_V4
    assert (found.lifecycle, found.deletion, found.remote_delete, found.moved_to) == (
        Lifecycle.LIVE,
        None,
        None,
        "",
    )


def test_topic_manifest_with_an_unknown_state_is_corrupt():
    """A state that we do not know is no reason to archive, or to delete."""
    with pytest.raises(CorruptDataError, match="topic manifest cannot be read: 'gone' is not a valid"):
        decode_topic_manifest(json.dumps(DOCUMENT | {"lifecycle": "gone"}).encode())


def test_golden_topic_manifest_of_version_3_is_read():
    """Defaults for fields that version 3 lacks: what held for a managed topic before."""
    found = decode_topic_manifest((OWN / "topic-manifest.v3.json").read_bytes())
    assert found == TOPIC_MANIFEST_V3
    assert found.original_retention == OriginalRetention("604800000", None, None, None)


def test_golden_topic_manifest_of_version_2_is_read():
    """A manifest of version 2 has no record of the values with which the topic was first seen."""
    found = decode_topic_manifest((OWN / "topic-manifest.v2.json").read_bytes())
    assert found == TOPIC_MANIFEST_V2
    assert found.defaults is None


def test_golden_topic_manifest_of_version_1_is_read_and_stored_as_version_5():
    """A manifest of version 1 counts as archived and never managed."""
    found = decode_topic_manifest((OWN / "topic-manifest.v1.json").read_bytes())
    assert found == TOPIC_MANIFEST_V1
    assert (found.archiving, found.original_retention, found.retention_released) == (
        Archiving.ON,
        None,
        False,
    )
    again = encode_topic_manifest(found)
    assert json.loads(again)["version"] == 5
    assert decode_topic_manifest(again) == found


def test_topic_manifest_leads_to_its_partitions():
    """The partitions are numbered from zero, under the topic's cluster and id."""
    manifest = dataclasses.replace(TOPIC_MANIFEST, partition_count=2)
    key = manifest.key
    assert manifest.partitions() == (
        TopicIdPartition(key.cluster, key.topic, key.topic_id, 0),
        TopicIdPartition(key.cluster, key.topic, key.topic_id, 1),
    )
    assert dataclasses.replace(manifest, partition_count=0).partitions() == ()


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(DOCUMENT | {"version": 6}, id="same fields"),
        pytest.param({"version": 6, "name": "fields that we do not know"}, id="other fields"),
    ],
)
def test_topic_manifest_of_a_newer_version_says_what_to_do(document):
    """The version is looked at first, because a newer document may hold other fields."""
    with pytest.raises(CorruptDataError) as caught:
        decode_topic_manifest(json.dumps(document).encode())
    assert str(caught.value) == (
        "topic manifest has version 6; this release reads 1, 2, 3, 4, 5. Upgrade tieringd on this host"
    )


@pytest.mark.parametrize("name", DOCUMENT)
def test_topic_manifest_without_a_field_is_corrupt(name):
    """Every field is needed, and the error names the one that is missing."""
    document = {key: value for key, value in DOCUMENT.items() if key != name}
    with pytest.raises(CorruptDataError, match=f"topic manifest cannot be read: '{name}'"):
        decode_topic_manifest(json.dumps(document).encode())


@pytest.mark.parametrize("data", NOT_JSON_OBJECTS, ids=range(len(NOT_JSON_OBJECTS)))
def test_bytes_that_are_no_json_object_are_corrupt(data):
    """Anything but a JSON object with the right fields is corrupt data."""
    with pytest.raises(CorruptDataError, match="topic manifest cannot be read: "):
        decode_topic_manifest(data)


@pytest.mark.parametrize("name", ["partition_count", "created_at_ms"])
@pytest.mark.parametrize("value", ["many", None, [], float("inf"), float("nan")])
def test_topic_manifest_with_something_else_for_a_number_is_corrupt(name, value):
    """JSON's Infinity and NaN are as little a count as a word is."""
    with pytest.raises(CorruptDataError, match="topic manifest cannot be read: "):
        decode_topic_manifest(json.dumps(DOCUMENT | {name: value}).encode())


def test_any_truncated_topic_manifest_is_corrupt():
    """Only the last byte, the line break, can be missed without a trace."""
    for data in truncations(GOLDEN[:-1]):
        with pytest.raises(CorruptDataError):
            decode_topic_manifest(data)


@given(st.integers(0, len(GOLDEN) - 1), st.integers(1, 255))
def test_topic_manifest_with_any_changed_byte_is_read_or_corrupt(position, mask):
    """The text has no checksum, but nothing except CorruptDataError comes of a changed byte."""
    data = bytearray(GOLDEN)
    data[position] ^= mask
    with contextlib.suppress(CorruptDataError):
        assert isinstance(decode_topic_manifest(bytes(data)), TopicManifest)


@given(changed_heads(DOCUMENT))
def test_topic_manifest_with_any_other_value_is_read_or_corrupt(document):
    """A topic manifest with a field of any other type is read or raises CorruptDataError."""
    with contextlib.suppress(CorruptDataError):
        assert isinstance(decode_topic_manifest(json.dumps(document).encode()), TopicManifest)
