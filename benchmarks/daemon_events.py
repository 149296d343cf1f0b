"""A daemon's log as it grows, for benchmarks that wait for what it says of ten thousand partitions."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.daemon import Daemon

_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 600


class DaemonEvents:
    """What the daemon has logged. Each line is read once, however often one asks."""

    def __init__(self, daemon: Daemon) -> None:
        self._path = daemon.server.output
        self._position = 0
        self._by_name: dict[str, list[dict[str, Any]]] = {}

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the events with this text so far."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._position += end
        for line in data[:end].splitlines():
            if line.startswith(b"{"):
                event = json.loads(line)
                self._by_name.setdefault(event["event"], []).append(event)
        return self._by_name.get(name, [])

    def durable_segments(self) -> list[tuple[int, int]]:
        """Return the partition and base offset of each segment that has become durable."""
        return [(event["partition"], event["base_offset"]) for event in self.named("segment durable")]


def until(is_so: Callable[[], bool], daemon: Daemon, what: str) -> None:
    """Return when *is_so* says so; fail when the daemon ends first, or it takes too long."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not is_so():
        assert daemon.server.is_running, f"the daemon ended before {what}:\n{daemon.tail()}"
        assert time.monotonic() < deadline, f"in {_PATIENCE_SECONDS} s it did not come that {what}"
        time.sleep(_POLL_SECONDS)
