"""
How many connections a second each client host may open, like Kafka's `max.connection.creation.rate`.

Each connection of a client costs one to the broker, so a host that connects in a loop costs the broker more
than itself. Every host has a bucket of tokens, which fills at the rate. A connection takes one, and a host
whose bucket is empty is refused. A full bucket holds `BURST_SECONDS` of the rate, because the clients of a
host connect again together when a gateway or its network comes back.

A host is an address: clients on this machine are one host, and so are clients behind one NAT.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

BURST_SECONDS: Final = 10
"""How many seconds' worth of connections a host may open at once."""
HOSTS_KEPT: Final = 4096
"""
Hosts beyond this number displace the one that was seen longest ago, whose bucket is full then.

A host takes about 250 bytes.
"""
_TOLD_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Bucket:
    """The tokens of one host, as the time at which all are back."""

    full_at: float
    told_at: float = -math.inf


class ConnectionRates:
    """The buckets of all hosts. Not bound to a loop: the caller passes the time in seconds."""

    def __init__(self, per_second: float | None, *, burst: int) -> None:
        """
        Keep the arguments.

        Args:
            per_second: Tokens that each host gets in a second; None is without limit.
            burst: How many tokens a full bucket has, 1 at least.
        """
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._per_second = per_second
        self._burst = burst

    def __len__(self) -> int:
        """Return the number of hosts that are remembered."""
        return len(self._buckets)

    def set_limit(self, per_second: float | None, *, burst: int) -> None:
        """Use another rate from now on. All buckets are full then, so a larger rate is felt at once."""
        if (per_second, burst) != (self._per_second, self._burst):
            self._buckets.clear()
            self._per_second, self._burst = per_second, burst

    def admits(self, host: str, *, now: float) -> bool:
        """Take a token of *host* for a connection, and return whether it had one."""
        if self._per_second is None:
            return True
        bucket = self._bucket(host, now)
        tokens = self._burst - max(0.0, bucket.full_at - now) * self._per_second
        # A host that keeps to the rate exactly is not refused because of a rounded time.
        if tokens < 1 - 1e-6:
            return False
        bucket.full_at = max(bucket.full_at, now) + 1 / self._per_second
        return True

    def is_to_be_told(self, host: str, *, now: float) -> bool:
        """Say whether a refusal of *host* may be logged: the last one that was is a second ago."""
        bucket = self._bucket(host, now)
        if now - bucket.told_at < _TOLD_SECONDS:
            return False
        bucket.told_at = now
        return True

    def _bucket(self, host: str, now: float) -> _Bucket:
        """Return a host's bucket, and forget full ones of hosts that were seen longest ago."""
        bucket = self._buckets.get(host)
        if bucket is None:
            bucket = self._buckets[host] = _Bucket(now)
        self._buckets.move_to_end(host)
        # Two at most for each one that comes, so that no connection pays for a thousand of them.
        for _ in range(2):
            oldest = next(iter(self._buckets))
            if oldest == host:
                break
            if len(self._buckets) <= HOSTS_KEPT and self._buckets[oldest].full_at > now:
                break
            del self._buckets[oldest]
        return bucket
