"""
The start offsets of share groups (KIP-932), as the brokers tell them.

A broker lists the groups that it coordinates, and describes their offsets. So every live broker is asked,
with two requests. A broker without the DescribeShareGroupOffsets request has no share groups.

While the coordination of a group moves from one broker to another, none of them may list the group. So a
group that was known before is gone only when its coordinator says so: others answer NOT_COORDINATOR.

The start offset of a share-partition is the first offset that its group still needs: all records before it
are acknowledged or archived by the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from tieringd.broker.kafka_errors import refusal
from tieringd.broker.kafka_protocol import (
    DESCRIBE_SHARE_GROUP_OFFSETS,
    LIST_GROUPS,
    KafkaConnections,
    KafkaRequest,
)
from tieringd.errors import BrokerLacksApi, BrokerUnavailable
from tieringd.model.partition import TopicPartition

if TYPE_CHECKING:
    from kio.schema.describe_share_group_offsets.v0.response import (
        DescribeShareGroupOffsetsResponse,
        DescribeShareGroupOffsetsResponseGroup,
    )
    from kio.schema.list_groups.v5 import ListGroupsResponse

_SHARE: Final = "share"
_GONE: Final = frozenset({ErrorCode.group_id_not_found, ErrorCode.unknown_topic_or_partition})
"""A group or topic may be deleted between the listing and the description."""


async def share_group_starts(
    connections: KafkaConnections,
    own: tuple[str, int],
    others: Iterable[tuple[str, int]],
    *,
    known: Collection[str] = (),
) -> dict[str, dict[TopicPartition, int]]:
    """
    Ask the live brokers for their share groups; return the start offsets by group and partition.

    Args:
        connections: Used for all of them.
        own: The address of the broker beside us. Without the request there, the cluster has no share groups.
        others: The addresses of the other live brokers.
        known: The groups that were there before. One that is not in the result is gone.

    Raises:
        BrokerUnavailable: A broker does not answer, or cannot tell the offsets now. Or no broker coordinates
            a known group now.
        BrokerDenied: This user may not see a group that a broker lists.
    """
    try:
        answers = [await _of_broker(connections, own)]
    except BrokerLacksApi:
        return {}
    addresses = [own, *others]
    answers += await asyncio.gather(*(_of_broker(connections, address) for address in addresses[1:]))
    starts: dict[str, dict[TopicPartition, int]] = {}
    for answer in answers:
        for group, offsets in answer.items():
            starts.setdefault(group, {}).update(offsets)
    if unlisted := sorted(set(known) - starts.keys()):
        starts |= await _of_coordinators(connections, addresses, unlisted)
    return starts


async def _of_coordinators(
    connections: KafkaConnections, addresses: Sequence[tuple[str, int]], groups: Sequence[str]
) -> dict[str, dict[TopicPartition, int]]:
    """Return what the coordinators of *groups* say, without those that are gone."""
    request = _description(groups)
    responses: list[DescribeShareGroupOffsetsResponse] = await asyncio.gather(
        *(
            connections.send(address, KafkaRequest(DESCRIBE_SHARE_GROUP_OFFSETS, request))
            for address in addresses
        )
    )
    told = [
        one
        for response in responses
        for one in response.groups
        if one.error_code is not ErrorCode.not_coordinator
    ]
    if untold := sorted(set(groups) - {one.group_id for one in told}):
        raise BrokerUnavailable(f"no broker coordinates share group {untold[0]} now")
    return _described(told)


async def _of_broker(
    connections: KafkaConnections, address: tuple[str, int]
) -> Mapping[str, dict[TopicPartition, int]]:
    listed: ListGroupsResponse = await connections.send(
        address, KafkaRequest(LIST_GROUPS, _listing, only_with=DESCRIBE_SHARE_GROUP_OFFSETS)
    )
    if listed.error_code is not ErrorCode.none:
        raise refusal("to list share groups", listed.error_code)
    groups = [one.group_id for one in listed.groups if one.group_type == _SHARE]
    if not groups:
        return {}
    response: DescribeShareGroupOffsetsResponse = await connections.send(
        address, KafkaRequest(DESCRIBE_SHARE_GROUP_OFFSETS, _description(groups))
    )
    return _described(response.groups)


def _listing(module: ModuleType) -> Any:
    return module.ListGroupsRequest(states_filter=(), types_filter=(_SHARE,))


def _description(groups: Sequence[str]) -> Any:
    def build(module: ModuleType) -> Any:
        return module.DescribeShareGroupOffsetsRequest(
            groups=tuple(
                module.DescribeShareGroupOffsetsRequestGroup(group_id=group, topics=None) for group in groups
            )
        )

    return build


def _described(
    groups: Iterable[DescribeShareGroupOffsetsResponseGroup],
) -> dict[str, dict[TopicPartition, int]]:
    starts: dict[str, dict[TopicPartition, int]] = {}
    for group in groups:
        if group.error_code in _GONE:
            continue
        _require(group.group_id, group.error_code)
        offsets = starts.setdefault(group.group_id, {})
        for topic in group.topics:
            for partition in topic.partitions:
                if partition.error_code in _GONE:
                    continue
                _require(group.group_id, partition.error_code)
                offsets[TopicPartition(topic.topic_name, partition.partition_index)] = partition.start_offset
    return starts


def _require(group: str, error: ErrorCode) -> None:
    if error is not ErrorCode.none:
        raise refusal(f"the offsets of share group {group}", error)
