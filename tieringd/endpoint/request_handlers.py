"""
The requests that an archive endpoint answers, and which part answers them.

The endpoint offers the requests that a reader needs, and a few others that it refuses with an error. Any
other request closes the connection, as a broker does with unknown requests. Those of consumer groups are
answered where the endpoint keeps groups, and refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from tieringd.endpoint.access import Access
from tieringd.endpoint.cluster_answers import ClusterAnswers, DescriptionAnswers
from tieringd.endpoint.endpoint_settings import ApiKey
from tieringd.endpoint.fetch_answers import FetchAnswers
from tieringd.endpoint.group_answers import GroupAnswers
from tieringd.endpoint.newer_group_answers import Client
from tieringd.endpoint.offset_answers import OffsetAnswers
from tieringd.endpoint.refusals import Refusals
from tieringd.endpoint.sasl_login import SaslLogin
from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire import request_header
from tieringd.formats.kafka_wire.messages import decode_request, encode_response
from tieringd.formats.kafka_wire.pieces import Piece
from tieringd.formats.kafka_wire.request_header import RequestHead, client_id_of
from tieringd.gateway.read_rates import HOST
from tieringd.reading.partition_reader import release_nothing
from tieringd.storage.threads import SMALL_BYTES, in_thread, in_thread_if_large

_LARGE_RESPONSES: Final = frozenset(
    {ApiKey.METADATA, ApiKey.DESCRIBE_LOG_DIRS, ApiKey.DESCRIBE_TOPIC_PARTITIONS}
)
"""A small request may have a response with all partitions of the archive."""
_ENTRY_FACTOR: Final = 4
"""
How much heavier a request may be than its bytes are elsewhere.

The entries of any array may be as small as two bytes, where a client's partition takes twenty.
"""


@dataclass(frozen=True, slots=True)
class EndpointResponse:
    """A whole response. *release* is called once, after sending or on failure."""

    pieces: tuple[Piece, ...]
    release: Callable[[], None] = release_nothing
    waited_for: tuple[str, ...] = ()
    """The chunks that a Fetch awaited from the object store."""


class RequestHandlers:
    """The handlers of all requests of an endpoint."""

    def __init__(
        self,
        *,
        cluster: ClusterAnswers,
        offsets: OffsetAnswers,
        fetch: FetchAnswers,
        description: DescriptionAnswers,
        refusals: Refusals,
        groups: GroupAnswers | None = None,
    ) -> None:
        self._fetch = fetch
        self._versions = cluster.versions
        self._group_handlers = {} if groups is None else groups.handlers
        self._handlers: Final[dict[int, Callable[[int, Any, Access], Coroutine[Any, Any, Any]]]] = {
            ApiKey.METADATA: cluster.metadata,
            ApiKey.API_VERSIONS: cluster.api_versions,
            ApiKey.DESCRIBE_CLUSTER: cluster.describe_cluster,
            ApiKey.DESCRIBE_TOPIC_PARTITIONS: cluster.describe_topic_partitions,
            ApiKey.LIST_OFFSETS: offsets.list_offsets,
            ApiKey.OFFSET_FOR_LEADER_EPOCH: offsets.offset_for_leader_epoch,
            ApiKey.DESCRIBE_CONFIGS: description.configs,
            ApiKey.DESCRIBE_LOG_DIRS: description.log_dirs,
            ApiKey.PRODUCE: refusals.produce,
            ApiKey.INIT_PRODUCER_ID: refusals.init_producer_id,
            ApiKey.FIND_COORDINATOR: refusals.find_coordinator,
            ApiKey.JOIN_GROUP: refusals.join_group,
            ApiKey.OFFSET_COMMIT: refusals.offset_commit,
            ApiKey.OFFSET_FETCH: refusals.offset_fetch,
        }

    async def answer(
        self,
        head: RequestHead,
        frame: memoryview,
        access: Access,
        login: SaslLogin,
        *,
        is_connected: Callable[[], bool],
    ) -> EndpointResponse:
        """
        Answer one whole request of a client that may do what *access* allows.

        *is_connected* says whether the client still has its connection.

        Raises:
            ProtocolViolation: The request cannot be read, or the endpoint does not offer its API and version.
        """
        if head.version not in self._versions.get(head.api_key, ()):
            if head.api_key == ApiKey.API_VERSIONS:
                return EndpointResponse((request_header.unsupported(head.correlation_id),))
            raise ProtocolViolation(
                f"a client requested version {head.version} of API {head.api_key}, which an archive without "
                "a broker does not support"
            )
        if head.api_key in {ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE}:
            step = login.handshake if head.api_key == ApiKey.SASL_HANDSHAKE else login.authenticate
            return EndpointResponse((encode_response(head.correlation_id, await step(head, frame)),))
        if head.api_key == ApiKey.FETCH:
            response, release, waited_for = await self._fetch.fetch(head, frame, access)
            return EndpointResponse(response.pieces, release, waited_for)
        weight_bytes = _ENTRY_FACTOR * len(frame)
        request = await in_thread_if_large(weight_bytes, decode_request, frame, head)
        if (of_a_group := self._group_handlers.get(head.api_key)) is not None:
            name = (client_id_of(frame) or b"").decode(errors="replace")
            client = Client(name, HOST.get(), is_connected)
            message = await of_a_group(head.version, request, access, client)
        else:
            message = await self._handlers[head.api_key](head.version, request, access)
        if weight_bytes > SMALL_BYTES or head.api_key in _LARGE_RESPONSES:
            encoded = await in_thread(encode_response, head.correlation_id, message)
        else:
            encoded = encode_response(head.correlation_id, message)
        return EndpointResponse((encoded,))
