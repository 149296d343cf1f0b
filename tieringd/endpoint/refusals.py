"""
Refusals for clients that want more than to read: final errors, after which clients do not retry.

The endpoint accepts no writes. Where it keeps no consumer groups, it refuses those too. The requests that
clients begin with are offered nevertheless: librdkafka takes a node without them for a very old broker, and
waits where it could have been refused. It looks for its group's coordinator even if it needs none. So the
endpoint names itself the coordinator, and refuses the group's requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

from kio.schema.errors import ErrorCode

from tieringd.endpoint.access import Access
from tieringd.endpoint.cluster_answers import NO_DELAY
from tieringd.endpoint.endpoint_settings import NODE_ID, ApiKey, EndpointSettings
from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.messages import made, response_module
from tieringd.storage.threads import in_steps

READ_ONLY: Final = "This endpoint serves an archive without a broker: it is read-only"
_GROUP: Final = 0
"""The coordinator type of groups. The other type is for transactions."""


class Refusals:
    """Answers that refuse."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings

    async def produce(self, version: int, request: Any, _access: Access) -> Any:
        """
        Refuse every partition.

        Raises:
            ProtocolViolation: The client wants no response, so only closing its connection can tell it.
        """
        if request.acks == 0:
            raise ProtocolViolation(
                "a client wrote without acknowledgement, but an archive without a broker is read-only"
            )
        module: Any = response_module(ApiKey.PRODUCE, version)
        answers: list[list[Any]] = [[] for _ in request.topic_data]
        async for at, partition in _in_steps([one.partition_data for one in request.topic_data]):
            answers[at].append(
                made(
                    module.PartitionProduceResponse,
                    index=partition.index,
                    error_code=ErrorCode.policy_violation,
                    base_offset=-1,
                    record_errors=(),
                    error_message=READ_ONLY,
                )
            )
        topics = tuple(
            [
                made(
                    module.TopicProduceResponse,
                    name=getattr(topic, "name", None),
                    topic_id=getattr(topic, "topic_id", None),
                    partition_responses=tuple(answers[at]),
                )
                async for at, topic in in_steps(enumerate(request.topic_data))
            ]
        )
        return made(module.ProduceResponse, responses=topics, throttle_time=NO_DELAY)

    async def init_producer_id(self, version: int, request: Any, _access: Access) -> Any:
        """
        Return a meaningless producer id, so that the write itself is refused, with the reason.

        An error in this response has no room for a reason, and looks like a missing ACL. Transactions
        are refused here.
        """
        module: Any = response_module(ApiKey.INIT_PRODUCER_ID, version)
        is_given = request.transactional_id is None
        return made(
            module.InitProducerIdResponse,
            throttle_time=NO_DELAY,
            error_code=ErrorCode.none if is_given else ErrorCode.transactional_id_authorization_failed,
            producer_id=0 if is_given else -1,
            producer_epoch=0 if is_given else -1,
            ongoing_txn_producer_id=-1,
            ongoing_txn_producer_epoch=-1,
        )

    async def find_coordinator(self, version: int, request: Any, _access: Access) -> Any:
        """Name this node as the coordinator of groups, whose requests it refuses. Transactions have none."""
        module: Any = response_module(ApiKey.FIND_COORDINATOR, version)
        found: dict[str, Any] = {
            "node_id": NODE_ID,
            "host": self._settings.advertised_host,
            "port": self._settings.advertised_port,
            "error_code": ErrorCode.none,
            "error_message": None,
        }
        if getattr(request, "key_type", _GROUP) != _GROUP:
            found |= {
                "node_id": -1,
                "host": "",
                "port": -1,
                "error_code": ErrorCode.transactional_id_authorization_failed,
                "error_message": READ_ONLY,
            }
        keys = in_steps(dict.fromkeys(getattr(request, "coordinator_keys", ())))
        coordinators = tuple([module.Coordinator(key=key, **found) async for key in keys])
        return made(
            module.FindCoordinatorResponse, throttle_time=NO_DELAY, coordinators=coordinators, **found
        )

    async def join_group(self, version: int, _request: Any, _access: Access) -> Any:
        """Refuse every member."""
        module: Any = response_module(ApiKey.JOIN_GROUP, version)
        return made(
            module.JoinGroupResponse,
            throttle_time=NO_DELAY,
            error_code=ErrorCode.group_authorization_failed,
            generation_id=-1,
            protocol_type=None,
            protocol_name="",
            leader="",
            skip_assignment=False,
            member_id="",
            members=(),
        )

    async def offset_commit(self, version: int, request: Any, _access: Access) -> Any:
        """Refuse every offset."""
        module: Any = response_module(ApiKey.OFFSET_COMMIT, version)
        answers: list[list[Any]] = [[] for _ in request.topics]
        async for at, one in _in_steps([one.partitions for one in request.topics]):
            answers[at].append(
                module.OffsetCommitResponsePartition(
                    partition_index=one.partition_index,
                    error_code=ErrorCode.group_authorization_failed,
                )
            )
        topics = tuple(
            [
                made(
                    module.OffsetCommitResponseTopic,
                    name=getattr(topic, "name", None),
                    topic_id=getattr(topic, "topic_id", None),
                    partitions=tuple(answers[at]),
                )
                async for at, topic in in_steps(enumerate(request.topics))
            ]
        )
        return made(module.OffsetCommitResponse, throttle_time=NO_DELAY, topics=topics)

    async def offset_fetch(self, version: int, request: Any, _access: Access) -> Any:
        """Return no offset, and an error."""
        module: Any = response_module(ApiKey.OFFSET_FETCH, version)
        error = ErrorCode.group_authorization_failed
        if hasattr(request, "groups"):
            named = in_steps(dict.fromkeys([one.group_id for one in request.groups]))
            groups = tuple(
                [
                    module.OffsetFetchResponseGroup(group_id=one, topics=(), error_code=error)
                    async for one in named
                ]
            )
            return made(module.OffsetFetchResponse, throttle_time=NO_DELAY, groups=groups)
        asked = request.topics or ()
        answers: list[list[Any]] = [[] for _ in asked]
        async for at, number in _in_steps([one.partition_indexes for one in asked]):
            answers[at].append(
                made(
                    module.OffsetFetchResponsePartition,
                    partition_index=number,
                    committed_offset=-1,
                    committed_leader_epoch=-1,
                    metadata="",
                    error_code=error,
                )
            )
        topics = tuple(
            [
                module.OffsetFetchResponseTopic(name=topic.name, partitions=tuple(answers[at]))
                async for at, topic in in_steps(enumerate(asked))
            ]
        )
        return made(module.OffsetFetchResponse, throttle_time=NO_DELAY, topics=topics, error_code=error)


def _in_steps(topics: Iterable[Iterable[Any]]) -> AsyncIterator[tuple[int, Any]]:
    """Yield the partitions of all *topics* in steps, each with its topic's place."""
    return in_steps((at, one) for at, partitions in enumerate(topics) for one in partitions)
