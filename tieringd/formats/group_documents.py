"""
Consumer groups in the bucket, and the leases of the endpoints that serve them: JSON for people to read.

    groups/{cluster}/consumer/{group}.json
    groups/{cluster}/endpoints/{endpoint_id}.json

Cluster and group are percent-encoded. A group's object is written by compare-and-swap only, and stays when
the group is deleted: no store's plain delete has a condition, so it could take a commit along that has just
been acknowledged. What stays is small, and the next use of the name goes on from its generation.

A group's document has a checksum. A lease has no time in it. Others see that it was renewed by its version,
and measure with their own clocks.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final
from urllib.parse import quote, unquote

from crc32c import crc32c

from tieringd.formats.json_document import decode_document, encode_document
from tieringd.model.consumer_group import (
    CommittedOffset,
    ConsumerGroup,
    ConsumerMember,
    GroupMember,
    GroupPartition,
    GroupState,
    GroupTopic,
    Offsets,
    StoredGroup,
    SubscribedTopic,
)

GROUPS_PREFIX: Final = "groups/"
"""The prefix of the keys of all groups and leases. An archive-only endpoint writes nowhere else."""
GROUP_VERSION: Final = 1
LEASE_VERSION: Final = 1
GROUP_NAME_MAX: Final = 200
"""Characters of a group's encoded name. Names of files have at most 255."""
_SUFFIX: Final = ".json"


def is_storable_group(group_id: str) -> bool:
    """Say whether a group of this name can be stored."""
    return 0 < len(group_id) <= GROUP_NAME_MAX and len(quote(group_id, safe="")) <= GROUP_NAME_MAX


def groups_prefix(cluster: str) -> str:
    """Return the common prefix of the keys of a cluster's groups, and of no others."""
    return f"{GROUPS_PREFIX}{quote(cluster, safe='')}/consumer/"


def group_key(cluster: str, group_id: str) -> str:
    """Return the key of a group."""
    return f"{groups_prefix(cluster)}{quote(group_id, safe='')}{_SUFFIX}"


def parse_group_key(cluster: str, key: str) -> str | None:
    """Return the group whose object has this key; None for any other key."""
    prefix = groups_prefix(cluster)
    if not key.startswith(prefix) or not key.endswith(_SUFFIX):
        return None
    return unquote(key.removeprefix(prefix).removesuffix(_SUFFIX))


def leases_prefix(cluster: str) -> str:
    """Return the common prefix of the keys of a cluster's leases, and of no others."""
    return f"{GROUPS_PREFIX}{quote(cluster, safe='')}/endpoints/"


def lease_key(cluster: str, endpoint_id: str) -> str:
    """Return the key of an endpoint's lease."""
    return f"{leases_prefix(cluster)}{endpoint_id}{_SUFFIX}"


def parse_lease_key(cluster: str, key: str) -> str | None:
    """Return the endpoint whose lease has this key; None for any other key."""
    prefix = leases_prefix(cluster)
    if not key.startswith(prefix) or not key.endswith(_SUFFIX):
        return None
    return key.removeprefix(prefix).removesuffix(_SUFFIX)


@dataclass(frozen=True, slots=True)
class EndpointLease:
    """What an endpoint says about itself, for as long as it renews this."""

    endpoint_id: str
    """Of this process: another start has another."""
    node_id: int
    """As clients know it; the same for all endpoints behind one address."""
    host: str
    port: int
    renewals: int
    """So that each renewal has other bytes, and so another version in every store."""


def encode_lease(lease: EndpointLease) -> bytes:
    """Return a lease as indented JSON."""
    return encode_document({"version": LEASE_VERSION, **asdict(lease)})


def decode_lease(data: bytes) -> EndpointLease:
    """
    Return the lease in *data*.

    Raises:
        CorruptDataError: The bytes are no lease, or one of another version.
    """
    return decode_document(data, _lease, kind="the lease of an endpoint", versions={LEASE_VERSION})


def _lease(document: dict[str, Any]) -> EndpointLease:
    return EndpointLease(
        str(document["endpoint_id"]),
        int(document["node_id"]),
        str(document["host"]),
        int(document["port"]),
        int(document["renewals"]),
    )


def encode_group(stored: StoredGroup) -> bytes:
    """Return a group as indented JSON. What clients have sent as bytes is in base64."""
    group = stored.group
    return _checked(
        {
            "version": GROUP_VERSION,
            "writer_id": stored.writer_id,
            "commit_number": stored.commit_number,
            "group": group.group_id,
            "state": group.state.value,
            "generation": group.generation,
            "protocol_type": group.protocol_type,
            "protocol": group.protocol,
            "leader": group.leader,
            "is_first_round": group.is_first_round,
            "emptied_at_ms": group.emptied_at_ms,
            "topics": {name: [one.topic_id, one.partition_count] for name, one in group.topics.items()},
            "members": [_member_document(one) for one in group.members.values()],
            "offsets": [
                {
                    "topic": topic.name,
                    "topic_id": topic.topic_id,
                    "partitions": {
                        str(number): [one.offset, one.leader_epoch, one.committed_at_ms, one.metadata]
                        for number, one in partitions.items()
                    },
                }
                for topic, partitions in group.offsets.items()
            ],
        }
    )


def decode_group(data: bytes) -> StoredGroup:
    """
    Return the group in *data*.

    Raises:
        CorruptDataError: The bytes are no group, or one of another version.
    """
    return decode_document(data, _group, kind="a consumer group", versions={GROUP_VERSION})


def _checked(document: dict[str, Any]) -> bytes:
    """Return a document with a checksum of all its other fields: a wrong digit would skip records."""
    return encode_document({**document, "crc32c": _checksum(document)})


def _checksum(document: dict[str, Any]) -> int:
    # Without indentation, which takes several times as long.
    return crc32c(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


def _member_document(member: GroupMember) -> dict[str, Any]:
    return {
        "member_id": member.member_id,
        "instance_id": member.instance_id,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "endpoint_id": member.endpoint_id,
        "session_timeout_ms": member.session_timeout_ms,
        "rebalance_timeout_ms": member.rebalance_timeout_ms,
        "protocols": [[name, _text(metadata)] for name, metadata in member.protocols],
        "assignment": _text(member.assignment),
        "has_joined": member.has_joined,
        "consumer": None if member.consumer is None else _consumer_document(member.consumer),
    }


def _consumer_document(consumer: ConsumerMember) -> dict[str, Any]:
    return {
        "epoch": consumer.epoch,
        "previous_epoch": consumer.previous_epoch,
        "subscribed": list(consumer.subscribed),
        "assignor": consumer.assignor,
        "target": _partition_lists(consumer.target),
        "assigned": _partition_lists(consumer.assigned),
        "revoking": _partition_lists(consumer.revoking),
    }


def _partition_lists(partitions: frozenset[GroupPartition]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for topic_id, number in sorted(partitions):
        found.setdefault(topic_id, []).append(number)
    return found


def _partition_set(document: Mapping[str, list[int]]) -> frozenset[GroupPartition]:
    return frozenset((str(one), int(number)) for one, numbers in document.items() for number in numbers)


def _consumer(document: Mapping[str, Any]) -> ConsumerMember:
    return ConsumerMember(
        int(document["epoch"]),
        int(document["previous_epoch"]),
        tuple(str(one) for one in document["subscribed"]),
        _optional(document["assignor"]),
        _partition_set(document["target"]),
        _partition_set(document["assigned"]),
        _partition_set(document["revoking"]),
    )


def _group(document: dict[str, Any]) -> StoredGroup:
    told = document.pop("crc32c")
    if told != _checksum(document):
        raise ValueError("its checksum is wrong")
    members = [_member(one) for one in document["members"]]
    emptied = document["emptied_at_ms"]
    group = ConsumerGroup(
        str(document["group"]),
        GroupState(document["state"]),
        int(document["generation"]),
        _optional(document["protocol_type"]),
        _optional(document["protocol"]),
        _optional(document["leader"]),
        bool(document["is_first_round"]),
        {one.member_id: one for one in members},
        _offsets(document["offsets"]),
        None if emptied is None else int(emptied),
        {name: SubscribedTopic(str(one), int(count)) for name, (one, count) in document["topics"].items()},
    )
    if (group.state is GroupState.EMPTY) != (not members):
        raise ValueError(f"a group with {len(members)} members is {group.state.value}")
    return StoredGroup(group, str(document["writer_id"]), int(document["commit_number"]))


def _member(document: Mapping[str, Any]) -> GroupMember:
    return GroupMember(
        str(document["member_id"]),
        _optional(document["instance_id"]),
        str(document["client_id"]),
        str(document["client_host"]),
        str(document["endpoint_id"]),
        int(document["session_timeout_ms"]),
        int(document["rebalance_timeout_ms"]),
        tuple((str(name), _bytes(metadata)) for name, metadata in document["protocols"]),
        _bytes(document["assignment"]),
        bool(document["has_joined"]),
        None if document["consumer"] is None else _consumer(document["consumer"]),
    )


def _offsets(documents: list[dict[str, Any]]) -> Offsets:
    return {
        GroupTopic(str(one["topic"]), str(one["topic_id"])): {
            int(number): CommittedOffset(int(offset), int(epoch), str(metadata), int(committed_at_ms))
            for number, (offset, epoch, committed_at_ms, metadata) in one["partitions"].items()
        }
        for one in documents
    }


def _optional(value: Any) -> str | None:
    return None if value is None else str(value)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
