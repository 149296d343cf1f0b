"""The read gateway: where clients meet it, and the broker's listener behind it."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 pydantic reads the annotations
from typing import Annotated

from pydantic import BaseModel

from tieringd.config.fields import MAX_INT64, AbsolutePath, Flag, Number, Text, size
from tieringd.config.topic_properties import STRICT

_HOST_PORT = r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}"
_MIB = 2**20
_RATE_MIN = 64 * 1024


class GatewayConfig(BaseModel):
    """The read gateway: Kafka's protocol for clients, with the archive behind the broker."""

    model_config = STRICT

    enabled: Annotated[bool, Flag()] = False
    """Serve clients the archived offsets of the topics with remote read, beside those of the broker."""
    host: Annotated[str, Text("host", r"[A-Za-z0-9:._-]{1,253}", "must be a host name or an address")] = (
        "0.0.0.0"  # noqa: S104 clients are on other hosts
    )
    """Address to listen on; an archive without a broker listens on 127.0.0.1 unless this is set."""
    port: Annotated[int, Number(0, 65535)] = 9095
    """Port to listen on: what the broker's second listener advertises. 0 lets the system pick one."""
    broker: Annotated[
        str, Text("host:port", _HOST_PORT, "must be host:port of the broker's second listener")
    ] = "localhost:9094"
    """The broker's second listener, whose advertised address is this gateway's."""
    advertised: (
        Annotated[str, Text("host:port", _HOST_PORT, "must be host:port, as clients reach it")] | None
    ) = None
    """Where clients of `tieringd gateway --archive-only` are sent; null is where it listens."""
    tls_cert_file: Annotated[Path, AbsolutePath()] | None = None
    """PEM file with the certificate that clients meet; null serves them in plain text."""
    tls_key_file: Annotated[Path, AbsolutePath()] | None = None
    """PEM file with its private key."""
    broker_tls: Annotated[bool, Flag()] = False
    """Whether the broker's second listener is encrypted."""
    broker_tls_ca_file: Annotated[Path, AbsolutePath()] | None = None
    """PEM file with the authorities to trust for it; null trusts the system's."""
    max_connections: Annotated[int, Number(1, 1_000_000)] = 10_000
    """How many clients may be connected at once."""
    max_request_bytes: Annotated[int, size(1024, MAX_INT64)] = 100 * _MIB
    """The largest request that is passed on, as the broker's socket.request.max.bytes."""
    buffer_bytes: Annotated[int, size(_MIB, MAX_INT64)] = 256 * _MIB
    """What all connections together may hold in memory."""
    archive_bytes_per_second: Annotated[int, size(_RATE_MIN, MAX_INT64)] | None = None
    """Archived records sent to all clients together in a second; null is without limit."""
    client_archive_bytes_per_second: Annotated[int, size(_RATE_MIN, MAX_INT64)] | None = None
    """The same to one host, so that one reader of old records leaves room for the others."""
