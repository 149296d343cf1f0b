"""What an archive endpoint is told about itself."""

from __future__ import annotations

from dataclasses import dataclass

NODE_ID = 0
"""Of the only node there is."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """How the endpoint calls itself, and how long it waits."""

    advertised_host: str
    advertised_port: int
    """Where clients that bootstrapped here are sent: here."""
    bucket: str
    sync_interval_seconds: float = 30.0
    """How old what is known of the bucket may be."""
    answer_timeout_seconds: float = 25.0
    """For the object store, for one request; clients give up after 30 seconds by default."""
    longest_wait_seconds: float = 30.0
    """For a Fetch at the end of the archive, whatever the client asks: a client that has gone is not seen."""
