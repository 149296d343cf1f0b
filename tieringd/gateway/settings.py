"""What a gateway is told: where it listens, where its broker is, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of one gateway; the defaults are Kafka's where Kafka has the same limit."""

    host: str
    port: int
    """0 lets the system pick one."""
    broker_host: str = ""
    broker_port: int = 0
    """Of the broker's listener whose advertised address is this gateway's; none with an archive alone."""
    client_tls: ssl.SSLContext | None = None
    """What clients meet; None is plain."""
    broker_tls: ssl.SSLContext | None = None
    """How the broker is met; None is plain."""
    broker_server_name: str | None = None
    """The name in the broker's certificate; None is *broker_host*."""
    max_connections: int = 10_000
    max_request_bytes: int = 100 << 20
    max_held_bytes: int = 4 << 20
    """
    The largest message that is held until it is whole. A larger answer to Fetch passes as it comes; what else
    would have to be looked at ends its connection.
    """
    buffered_bytes: int = 256 << 20
    """What all connections together may hold; beyond it they read in small steps."""
    archive_bytes_per_second: int | None = None
    """Of archived records, to all clients together; None is without limit."""
    client_archive_bytes_per_second: int | None = None
    """The same, to one host."""
    connect_timeout_seconds: float = 10.0
    """For a connection to the broker, and for every TLS handshake."""
    answer_timeout_seconds: float = 25.0
    """For the archive; clients give up after 30 seconds by default."""
    idle_timeout_seconds: float = 660.0
    """For a connection on which nothing moves; brokers close theirs after 600 seconds by default."""
    reuse_port: bool = False
    """True lets several processes listen on the port, and the kernel spread clients over them."""
