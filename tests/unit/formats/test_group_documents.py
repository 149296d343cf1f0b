"""Consumer groups and leases in the bucket."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.make_own_golden import CLASSIC_GROUP, DELETED_GROUP, ENDPOINT_LEASE, NEWER_GROUP, OWN
from tests.unit.formats.damage import NOT_JSON_OBJECTS, changed_heads, flipped, truncations
from tieringd.errors import CorruptDataError
from tieringd.formats.group_documents import (
    GROUP_NAME_MAX,
    decode_group,
    decode_lease,
    encode_group,
    encode_lease,
    group_key,
    groups_prefix,
    is_storable_group,
    lease_key,
    leases_prefix,
    parse_group_key,
    parse_lease_key,
)

GROUPS = {
    "consumer-group.v1.json": CLASSIC_GROUP,
    "consumer-group-newer.v1.json": NEWER_GROUP,
    "consumer-group-deleted.v1.json": DELETED_GROUP,
}


@pytest.mark.parametrize("name", GROUPS)
def test_stored_groups_are_read_and_written_alike(name):
    """The golden files are what this release writes."""
    data = (OWN / name).read_bytes()
    assert decode_group(data) == GROUPS[name]
    assert encode_group(GROUPS[name]) == data


def test_stored_lease_is_read_and_written_alike():
    """The golden file is what this release writes."""
    data = (OWN / "endpoint-lease.v1.json").read_bytes()
    assert decode_lease(data) == ENDPOINT_LEASE
    assert encode_lease(ENDPOINT_LEASE) == data


@pytest.mark.parametrize("data", [*NOT_JSON_OBJECTS, b'{"version": 2}'])
def test_other_bytes_are_refused(data):
    """Also those of a newer release."""
    with pytest.raises(CorruptDataError, match="consumer group"):
        decode_group(data)
    with pytest.raises(CorruptDataError, match="lease"):
        decode_lease(data)


def test_damaged_group_is_refused():
    """A changed digit of an offset would skip records; what is only space between fields may change."""
    data = encode_group(NEWER_GROUP)
    for changed in [*flipped(data), *truncations(data)]:
        try:
            assert decode_group(changed) == NEWER_GROUP
        except CorruptDataError:
            continue


@given(changed_heads(json.loads(encode_lease(ENDPOINT_LEASE))))
def test_changed_lease_is_read_or_refused(document):
    """A lease with any change of its fields is decoded, or refused by the documented error."""
    try:
        decode_lease(json.dumps(document).encode())
    except CorruptDataError:
        return


@given(st.text(min_size=1, max_size=GROUP_NAME_MAX + 10))
def test_keys_of_groups(group_id):
    """Each name has a key of its own, which any store takes; names that would be too long are refused."""
    try:
        is_storable = is_storable_group(group_id)
    except UnicodeEncodeError:
        return
    if not is_storable:
        return
    key = group_key("c/d", group_id)
    assert parse_group_key("c/d", key) == group_id
    assert set(key) <= set(string.ascii_letters + string.digits + "/%-._~")
    assert len(key.removeprefix(groups_prefix("c/d"))) <= GROUP_NAME_MAX + len(".json")
    assert parse_lease_key("c/d", key) is None


def test_other_keys_are_none_of_ours():
    """Groups and leases of another cluster, and anything else."""
    for key in ("owners/clusters.json", group_key("other", "g"), groups_prefix("c"), lease_key("c", "0a")):
        assert parse_group_key("c", key) is None
    assert parse_lease_key("c", lease_key("c", "0a")) == "0a"
    assert parse_lease_key("c", leases_prefix("c")) is None
    assert not is_storable_group("")
    assert not is_storable_group("é" * 40)
