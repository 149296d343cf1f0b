"""
Committed offsets of consumer groups, as the group's coordinator knows them.

aiokafka's admin client asks in a version that cannot wait for open transactions, and it ignores the error
of the whole response: a coordinator that still loads looks like a group without offsets.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from kio.schema.errors import ErrorCode

from tieringd.broker.kafka_protocol import ApiVersionRange, KafkaConnections, KafkaRequest
from tieringd.errors import BrokerDenied, BrokerUnavailable, TieringError

FIND_COORDINATOR: Final = ApiVersionRange("FindCoordinator", 10, min_version=1, max_version=3)
# Version 7 is the first one with require_stable (Kafka 2.5), and the last one for a single group.
OFFSET_FETCH: Final = ApiVersionRange("OffsetFetch", 9, min_version=7, max_version=7)
_GROUP: Final = 0
_NOT_YET: Final = frozenset(
    {
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.unstable_offset_commit,
    }
)
_DENIED: Final = frozenset({ErrorCode.group_authorization_failed, ErrorCode.topic_authorization_failed})


class OffsetsNotKnownYet(BrokerUnavailable):
    """The coordinator is not ready, or a transaction over an offset has not ended. Ask again."""


@dataclass(frozen=True, slots=True)
class GroupOffset:
    """The commit of a group for one partition."""

    offset: int
    metadata: str


async def group_offsets(
    connections: KafkaConnections,
    address: tuple[str, int],
    group: str,
    topic: str,
    partitions: Collection[int],
    *,
    settled: bool,
) -> dict[int, GroupOffset]:
    """
    Return the offsets that *group* has committed, by partition; a partition without one is left out.

    The broker at *address* names the coordinator. With *settled*, an offset of a transaction that has not
    ended is an error. Without it, the response has the offset of before that transaction, or none.

    Raises:
        OffsetsNotKnownYet: The coordinator is not ready, or with *settled* a transaction has not ended.
        BrokerDenied: This user may not ask.
        BrokerUnavailable: A broker does not answer.
    """

    def find(module: ModuleType) -> Any:
        return module.FindCoordinatorRequest(key=group, key_type=_GROUP)

    def fetch(module: ModuleType) -> Any:
        wanted = module.OffsetFetchRequestTopic(name=topic, partition_indexes=tuple(sorted(partitions)))
        return module.OffsetFetchRequest(group_id=group, topics=(wanted,), require_stable=settled)

    found = await connections.send(address, KafkaRequest(FIND_COORDINATOR, find))
    _check(group, found.error_code)
    coordinator = (found.host, int(found.port))
    response = await connections.send(coordinator, KafkaRequest(OFFSET_FETCH, fetch))
    _check(group, response.error_code)
    offsets: dict[int, GroupOffset] = {}
    for each in (one for named in response.topics for one in named.partitions):
        _check(group, each.error_code)
        if each.committed_offset >= 0:
            offsets[int(each.partition_index)] = GroupOffset(each.committed_offset, each.metadata or "")
    return offsets


def _check(group: str, error: ErrorCode) -> None:
    if error is not ErrorCode.none:
        raise _error(group, error)


def _error(group: str, error: ErrorCode) -> TieringError:
    told = f"the coordinator of group {group} does not tell its offsets: {error.name.upper()}"
    if error in _DENIED:
        return BrokerDenied(told, hint="Grant this user the ACLs Read on the group and Describe on the topic")
    if error in _NOT_YET:
        return OffsetsNotKnownYet(told)
    return BrokerUnavailable(told)
