"""
The settings of an archive endpoint.

`ApiKey` names the APIs that an archive endpoint offers, and `ADVERTISED` their versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from tieringd.formats.kafka_wire.request_header import KNOWN_VERSIONS
from tieringd.formats.kafka_wire.request_header import InspectedApi as GatewayApi

NODE_ID = 0
"""The id of a sole node."""


class ApiKey(IntEnum):
    """The APIs that are answered."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    DESCRIBE_CONFIGS = 32
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36
    DELETE_GROUPS = 42
    OFFSET_DELETE = 47
    DESCRIBE_CLUSTER = 60
    CONSUMER_GROUP_HEARTBEAT = 68
    CONSUMER_GROUP_DESCRIBE = 69
    DESCRIBE_TOPIC_PARTITIONS = 75


ADVERTISED: Final[dict[int, range]] = {
    ApiKey.FETCH: KNOWN_VERSIONS[GatewayApi.FETCH],
    ApiKey.LIST_OFFSETS: KNOWN_VERSIONS[GatewayApi.LIST_OFFSETS],
    ApiKey.METADATA: range(14),
    ApiKey.API_VERSIONS: KNOWN_VERSIONS[GatewayApi.API_VERSIONS],
    ApiKey.OFFSET_FOR_LEADER_EPOCH: KNOWN_VERSIONS[GatewayApi.OFFSET_FOR_LEADER_EPOCH],
    ApiKey.DESCRIBE_CONFIGS: range(1, 5),
    ApiKey.DESCRIBE_LOG_DIRS: KNOWN_VERSIONS[GatewayApi.DESCRIBE_LOG_DIRS],
    ApiKey.DESCRIBE_CLUSTER: range(3),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: range(1),
    # Version 0 of the handshake is refused. Clients look for it nevertheless, to learn that there is SASL.
    ApiKey.SASL_HANDSHAKE: range(2),
    ApiKey.SASL_AUTHENTICATE: range(3),
    # The endpoint answers these with refusals (`refusals`).
    ApiKey.PRODUCE: KNOWN_VERSIONS[GatewayApi.PRODUCE],
    ApiKey.INIT_PRODUCER_ID: range(7),
    ApiKey.FIND_COORDINATOR: range(7),
    ApiKey.JOIN_GROUP: range(10),
    ApiKey.OFFSET_COMMIT: range(2, 11),
    ApiKey.OFFSET_FETCH: range(1, 11),
}
"""Without consumer groups."""
ADVERTISED_WITH_GROUPS: Final[dict[int, range]] = ADVERTISED | {
    ApiKey.SYNC_GROUP: range(6),
    ApiKey.HEARTBEAT: range(5),
    ApiKey.LEAVE_GROUP: range(6),
    ApiKey.OFFSET_DELETE: range(1),
    ApiKey.DESCRIBE_GROUPS: range(7),
    ApiKey.LIST_GROUPS: range(6),
    ApiKey.DELETE_GROUPS: range(3),
    ApiKey.CONSUMER_GROUP_HEARTBEAT: range(2),
    ApiKey.CONSUMER_GROUP_DESCRIBE: range(2),
}


_MIB: Final = 1 << 20
REQUEST_BYTES_MAX: Final[dict[int, int]] = {
    ApiKey.FETCH: 4 * _MIB,
    ApiKey.LIST_OFFSETS: 4 * _MIB,
    ApiKey.OFFSET_FOR_LEADER_EPOCH: 4 * _MIB,
    ApiKey.METADATA: 4 * _MIB,
    # The leader of a large group brings the assignments of all members. Offsets are of many partitions.
    ApiKey.SYNC_GROUP: 4 * _MIB,
    ApiKey.OFFSET_COMMIT: 4 * _MIB,
    # It is refused, and read whole for that. Producers send less by default.
    ApiKey.PRODUCE: 16 * _MIB,
}
"""The largest request of a kind. Requests of all other kinds have at most `OTHER_REQUEST_BYTES_MAX`."""
OTHER_REQUEST_BYTES_MAX: Final = _MIB
BEFORE_LOGIN_BYTES_MAX: Final = 64 << 10
"""The largest request of a client that has not logged in."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """The endpoint's own address, and how long it waits."""

    advertised_host: str
    advertised_port: int
    """Port of this endpoint, to which clients that bootstrapped here connect next."""
    bucket: str
    sync_interval_seconds: float = 30.0
    """How old the known state of the bucket may be."""
    answer_timeout_seconds: float = 25.0
    """Deadline of the object store's part of one request. Clients give up after 30 seconds by default."""
    longest_wait_seconds: float = 30.0
    """Longest wait of a Fetch at the archive's end, whatever a client asks. A lost client goes unnoticed."""
