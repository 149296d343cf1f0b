"""
From client to broker: every request is forwarded unchanged, except a few kinds.

Fetch loses its session, in place, and asks for less where archived partitions starve beside large batches.
DeleteRecords waits for the leader epochs of its partitions. Requests whose responses are inspected are
remembered whole. Produce is refused while the archive says that clients may not write. ApiVersions in an
unknown version is answered by the gateway.

A client whose write is refused gets the error that Redpanda gives on a full disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode
from kio.static.primitive import i32Timedelta

from tieringd.errors import BrokerUnavailable, ProtocolViolation
from tieringd.formats.kafka_wire import request_header
from tieringd.formats.kafka_wire.cursor import SIZE_BYTES, IncompleteMessage
from tieringd.formats.kafka_wire.fetch import asked_of, limit_bytes, remove_session, with_offsets
from tieringd.formats.kafka_wire.messages import encode_response, response_module
from tieringd.formats.kafka_wire.produce import ProduceRequestWalk, acks_of
from tieringd.formats.kafka_wire.request_header import (
    HEAD,
    REQUEST_BYTES_MAX,
    InspectedApi,
    RequestHead,
    client_id_of,
)
from tieringd.gateway.ahead import FetchAhead
from tieringd.gateway.archive_answers import PartitionKey
from tieringd.gateway.deletion_epochs import DeletionEpochs
from tieringd.gateway.frames import Frames, PendingRequest, PendingRequests
from tieringd.gateway.proxy_header import SIGNATURE
from tieringd.gateway.seen_login import SeenLogin
from tieringd.gateway.wire import MemoryBudget

REFUSED: Final = ErrorCode.broker_not_available
_MESSAGE: Final = "The broker's disk has no space for writes; contact the operator of the cluster"
_NO_DELAY: Final = i32Timedelta.parse(timedelta(0))

LIMITED_FETCH_BYTES: Final = 1 << 20
"""The limit that a Fetch gets while its response has to be held to replace archived partitions in it."""
_WITH_REQUEST: Final = frozenset(
    {
        InspectedApi.FETCH,
        InspectedApi.LIST_OFFSETS,
        InspectedApi.DELETE_RECORDS,
        InspectedApi.OFFSET_FOR_LEADER_EPOCH,
        InspectedApi.DESCRIBE_LOG_DIRS,
    }
)
"""The responses of these requests cannot be understood without the request."""
_NO_LOG_OFFSET: Final = 1 << 62
"""An offset that no log has. The broker finds it out of range."""
_AUTHENTICATION: Final = frozenset({InspectedApi.SASL_HANDSHAKE, InspectedApi.SASL_AUTHENTICATE})


def refusal(head: RequestHead, partitions: Mapping[str | UUID, Sequence[int]]) -> bytes:
    """Return the answer to a known Produce request: the same error for each of its partitions."""
    module: Any = response_module(head.api_key, head.version)
    fields = module.PartitionProduceResponse.__dataclass_fields__
    explained = {"error_message": _MESSAGE, "record_errors": ()} if "error_message" in fields else {}
    topics = []
    for topic, indexes in partitions.items():
        named = {"topic_id": topic} if isinstance(topic, UUID) else {"name": topic}
        answers = tuple(
            module.PartitionProduceResponse(index=index, error_code=REFUSED, base_offset=-1, **explained)
            for index in indexes
        )
        topics.append(module.TopicProduceResponse(**named, partition_responses=answers))
    response = module.ProduceResponse(responses=tuple(topics), throttle_time=_NO_DELAY)
    return encode_response(head.correlation_id, response)


class RequestFrames(Frames):
    """The requests of one connection."""

    def __init__(
        self,
        scratch: memoryview,
        budget: MemoryBudget,
        pending: PendingRequests,
        *,
        ahead: FetchAhead,
        deletions: DeletionEpochs,
        forward: Callable[[memoryview], None],
        may_produce: Callable[[], bool],
        max_request_bytes: int,
        held_bytes: int,
        login: SeenLogin,
    ) -> None:
        super().__init__(scratch, budget, forward, held_bytes=held_bytes)
        self._pending = pending
        self._ahead = ahead
        self._deletions = deletions
        self._may_produce = may_produce
        self._max_request_bytes = max_request_bytes
        self._refused: ProduceRequestWalk | None = None
        self._is_authenticating = False
        self._login = login
        self._fetch_at: float | None = None
        """Arrival of the Fetch that is held back, on the clock of `time.monotonic`; None if none is."""
        self._has_begun = False

    @property
    def is_before_login(self) -> bool:
        """Say whether the client has sent no request yet, or has not finished to authenticate."""
        return not self._has_begun or self._is_authenticating

    @property
    def is_authenticating(self) -> bool:
        """
        Say whether the client authenticates now, for the first time or again (KIP-368).

        The broker then closes a connection on which any other request comes. A client sends its next other
        request when it is authenticated.
        """
        return self._is_authenticating

    @property
    def is_between_messages(self) -> bool:
        """Say whether every request that began is complete."""
        return super().is_between_messages and self._refused is None

    @property
    def may_resume(self) -> bool:
        """Say whether reading may resume: the queue has room, and no answer is awaited."""
        is_awaited = self._ahead.is_awaited or self._deletions.is_awaited
        return self._is_stopped and not self._pending.is_full and not is_awaited

    def _step(self, view: memoryview) -> int:
        if self._passing:
            return self._pass(view)
        if self._dropping:
            return self._drop(view)
        if self._refused is not None:
            return self._refuse(self._refused, view)
        if self._pending.is_full:
            self._is_stopped = True
            return 0
        return self._begin(view) if len(view) >= HEAD.size else 0

    def _begin(self, view: memoryview) -> int:
        head = RequestHead.read(view)
        if bytes(view[: len(SIGNATURE)]) == SIGNATURE:
            raise ProtocolViolation(
                "a connection begins with a header of the PROXY protocol, which is not expected",
                hint="Set gateway.proxy_protocol to true if a load balancer sends it for every connection",
            )
        limit = min(self._max_request_bytes, REQUEST_BYTES_MAX.get(head.api_key, self._max_request_bytes))
        head.require_size(limit)
        self._has_begun = True
        self._is_authenticating = head.api_key in _AUTHENTICATION
        if head.api_key == InspectedApi.PRODUCE:
            return self._begin_produce(head, view)
        if head.api_key in _WITH_REQUEST and head.is_known:
            return self._begin_remembered(head, view)
        if head.api_key == InspectedApi.API_VERSIONS:
            return self._begin_api_versions(head, view)
        if head.api_key == InspectedApi.SASL_HANDSHAKE and head.version == 0:
            raise ProtocolViolation(
                "a client tried to authenticate with SaslHandshake version 0, which the gateway does not "
                "support",
                hint="Use a client from 2018 or newer, or the broker's own listener",
            )
        if head.api_key in _AUTHENTICATION:
            return self._begin_login(head, view)
        return self._begin_passing(head, view, PendingRequest(head))

    def _begin_login(self, head: RequestHead, view: memoryview) -> int:
        size = SIZE_BYTES + head.size
        if len(view) < size:
            return len(view) if self._hold(view, size) else self._begin_unheld(view)
        if head.api_key == InspectedApi.SASL_HANDSHAKE:
            self._login.see_handshake(view[:size])
            return self._begin_passing(head, view, PendingRequest(head))
        claimed = self._login.see_token(view[:size], head)
        return self._begin_passing(head, view, PendingRequest(head, b"", claimed=claimed))

    def _begin_passing(self, head: RequestHead, view: memoryview, pending: PendingRequest | None) -> int:
        if pending is not None:
            self._pending.push(pending)
        self._passing = SIZE_BYTES + head.size
        return self._pass(view)

    def _begin_remembered(self, head: RequestHead, view: memoryview) -> int:
        size = SIZE_BYTES + head.size
        if len(view) < size:
            return len(view) if self._hold(view, size) else self._begin_unheld(view)
        frame = view[:size]
        if head.api_key == InspectedApi.FETCH:
            return self._begin_fetch(head, frame)
        if head.api_key == InspectedApi.DELETE_RECORDS:
            return self._begin_deletion(head, frame)
        return self._begin_passing(head, frame, PendingRequest(head, bytes(frame)))

    def _begin_fetch(self, head: RequestHead, frame: memoryview) -> int:
        if not remove_session(frame, head):
            return self._begin_passing(head, frame, PendingRequest(head))
        begun_at, self._fetch_at = self._fetch_at or time.monotonic(), None
        prepared = self._ahead.claim(frame, head)
        if self._ahead.is_awaited:
            self._is_stopped = True
            self._fetch_at = begun_at
            return 0
        reader = self._login.reader(client_id_of(frame))
        pending = PendingRequest(head, bytes(frame), reader=reader, begun_at=begun_at, prepared=prepared)
        if prepared is not None:
            self._pending.push(pending)
            return len(frame)
        if self._pending.may_be_archived:
            limit_bytes(frame, head, LIMITED_FETCH_BYTES)
            hidden = self._hide_all_but_starving(frame, head)
            pending = replace(pending, is_limited=True, hidden=hidden)
        return self._begin_passing(head, frame, pending)

    def _hide_all_but_starving(self, frame: memoryview, head: RequestHead) -> frozenset[PartitionKey]:
        """Let a Fetch ask for no records of partitions beside starving ones. Returns these partitions."""
        starving = self._pending.starving
        if not starving:
            return frozenset()
        asked = asked_of(frame, head).partitions.keys()
        hidden = frozenset(asked - starving) if starving & asked else frozenset()
        starving.clear()
        frame[:] = with_offsets(frame, head, dict.fromkeys(hidden, _NO_LOG_OFFSET))
        return hidden

    def _begin_deletion(self, head: RequestHead, frame: memoryview) -> int:
        leader_epochs = self._deletions.claim(frame, head)
        if leader_epochs is None:
            self._is_stopped = True
            return 0
        pending = PendingRequest(head, bytes(frame), leader_epochs=leader_epochs)
        return self._begin_passing(head, frame, pending)

    def _held_may_pass(self) -> bool:
        return False

    def _begin_unheld(self, view: memoryview) -> int:
        head = RequestHead.read(view)
        if head.api_key in _AUTHENTICATION:
            # The user's name stays unknown.
            return self._begin_passing(head, view, PendingRequest(head))
        if head.api_key == InspectedApi.DESCRIBE_LOG_DIRS:
            # The response then lacks the archive's sizes, on which no client acts.
            return self._begin_passing(head, view, PendingRequest(head))
        raise self._unheld(f"a request {InspectedApi(head.api_key).name}", SIZE_BYTES + head.size)

    def _begin_api_versions(self, head: RequestHead, view: memoryview) -> int:
        if head.is_known:
            return self._begin_passing(head, view, PendingRequest(head, b""))
        answer = request_header.unsupported(head.correlation_id)
        self._pending.push(PendingRequest(head, own_answer=answer))
        self._dropping = SIZE_BYTES + head.size
        return self._drop(view)

    def _begin_produce(self, head: RequestHead, view: memoryview) -> int:
        frame = view[: SIZE_BYTES + head.size]
        try:
            acks = acks_of(frame, head)
        except IncompleteMessage:
            if len(frame) == SIZE_BYTES + head.size:
                raise
            return 0
        if self._may_produce():
            return self._begin_passing(head, view, PendingRequest(head) if acks else None)
        if not acks or not head.is_known:
            raise BrokerUnavailable(
                "clients may not write now, and a request without acknowledgement can only be refused by "
                "closing its connection"
            )
        self._refused = ProduceRequestWalk(head)
        return self._refuse(self._refused, view)

    def _refuse(self, walk: ProduceRequestWalk, view: memoryview) -> int:
        taken = walk.feed(view)
        if walk.is_done:
            self._refused = None
            self._pending.push(PendingRequest(walk.head, own_answer=refusal(walk.head, walk.partitions)))
        return taken
