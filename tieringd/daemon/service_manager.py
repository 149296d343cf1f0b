"""
What systemd is told: ready, reloading, stopping, and that the event loop turns.

The service manager names a socket in `NOTIFY_SOCKET`, and each message is one datagram of lines `NAME=value`
(sd_notify(3)). Without that variable nothing is sent. A message that cannot be sent is dropped: the daemon
does not depend on the manager that started it.

The watchdog is fed by the event loop's turns, and so also while the daemon is idle, waits for the store or
fails at each step. It catches a loop that no longer turns, and nothing else: whether the work gets on is
for the alerts to tell.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

_FEEDS_PER_LIMIT = 4
"""How often the watchdog is fed within its limit, so that one slow turn ends nothing."""


class ServiceManager:
    """The service manager that has started this process, or none."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        found = os.environ if environ is None else environ
        address = found.get("NOTIFY_SOCKET", "")
        # A name that begins with @ is an abstract socket, whose address begins with a zero byte.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        is_ours = found.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        limit = found.get("WATCHDOG_USEC", "")
        self.watchdog_seconds = int(limit) / 1e6 if is_ours and limit.isdecimal() else 0.0
        """How long the loop may stand still; 0 without a watchdog."""

    def ready(self, status: str) -> None:
        """Tell that the gateway listens, or that a reload has ended; *status* is one line for people."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Tell that a reload begins; `ready` tells its end."""
        # Type=notify-reload compares this time with that of its request.
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        """Tell that the daemon was asked to stop, and finishes the uploads under way."""
        self._send("STOPPING=1", "STATUS=finishing the uploads in hand")

    async def feed_watchdog(self) -> None:
        """Feed the watchdog until cancelled; without one, wait."""
        if not self.watchdog_seconds:
            await asyncio.Event().wait()
        while True:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_seconds / _FEEDS_PER_LIMIT)

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        message = "\n".join(line.replace("\n", " ") for line in lines)
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(message.encode(), self._address)
