"""The faults of the store: a server's requests that are spoiled, and a directory's disk."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from tests.support.fault_proxy import (
    Answer,
    DamageRequest,
    NoAnswer,
    ResetRequest,
    SlowAnswer,
    StallRequest,
    TruncateAnswer,
)
from tests.swarm.ending import in_thread
from tests.swarm.faults import NODES, SERVERS, Fault, Parts, fill, process_exists

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.fault_proxy import Fault as ProxyFault
    from tests.support.fault_proxy import FaultProxy, ProxiedExchange

_SLOW_SECONDS = 1.5
_THROTTLES = Answer("503 Slow Down", headers={"Retry-After": "1"})


def failed_uploads(parts: Parts) -> float:
    """Return how many steps of archivers have failed, over all daemons that run."""
    running = [parts.daemons[one] for one in NODES if parts.daemons[one].server.is_running]
    return sum(one.metric("tieringd_daemon_upload_failures_total") or 0 for one in running)


def _failed_since(before: float, now: float) -> str:
    return f"{now - before:.0f} steps of archivers failed" if now > before else ""


def proxy_of(fault: Fault) -> FaultProxy:
    """Return what spoils requests. A directory has no such fault."""
    assert fault.parts.proxy is not None
    return fault.parts.proxy


def _is_large(one: ProxiedExchange) -> bool:
    return one.method in {"PUT", "POST"} and int(one.headers.get("content-length", "0")) > 1 << 10


class StoreWeather(Fault):
    """Requests to the store that fit are spoiled."""

    stores = SERVERS
    spoils: ProxyFault
    fits: Callable[[ProxiedExchange], bool] = staticmethod(lambda _: True)

    async def inject(self) -> None:
        """Begin to spoil each request that fits."""
        self._proxy = proxy_of(self)
        self._begun = len(self._proxy.exchanges)
        spoils = self.spoiling()
        self._proxy.weather = lambda one: spoils if self.fits(one) else None

    def spoiling(self) -> ProxyFault:
        """Return what happens to a request."""
        return self.spoils

    async def proof(self) -> str:
        """Count what was spoiled."""
        spoils = self.spoiling()
        spoiled = sum(one.fault == spoils for one in self._proxy.exchanges[self._begun :])
        return f"{spoiled} requests spoiled" if spoiled else ""

    async def heal(self) -> None:
        """End the spoiling."""
        proxy = proxy_of(self)
        proxy.weather = lambda _: None
        # The proxy records each request: an hour of them is not needed.
        proxy.exchanges.clear()


class UploadsAnsweredWithAnError(StoreWeather):
    """An upload is answered with 200 and the document of an error, and was not stored."""

    fits = staticmethod(_is_large)

    def spoiling(self) -> ProxyFault:
        """Return the answer in the words of the store."""
        document, media_type = self.parts.store.error_answer
        return Answer("200 OK", body=document, headers={"Content-Type": media_type})


class UploadsAreDamaged(StoreWeather):
    """A bit of an upload is turned on the way."""

    # Azure's clients leave it to TLS to notice that.
    stores = frozenset({"s3", "gcs"})
    spoils = DamageRequest()
    fits = staticmethod(_is_large)


class UploadsStall(StoreWeather):
    """The store takes a part of an upload, reads no more, and does not answer."""

    # The deadline of an upload ends it after half a minute.
    is_slow = True
    spoils = StallRequest(100)
    fits = staticmethod(_is_large)


def _weather(spoils: ProxyFault, fits: Callable[[ProxiedExchange], bool] = lambda _: True) -> type[Fault]:
    return type("StoreWeatherOfAKind", (StoreWeather,), {"spoils": spoils, "fits": staticmethod(fits)})


class ThrottledStart(StoreWeather):
    """The store throttles while a daemon starts."""

    spoils = _THROTTLES

    async def inject(self) -> None:
        """Kill a daemon, and start it while the store throttles."""
        self.parts.daemons.kill(self.step.node_id)
        await super().inject()
        await in_thread(self.parts.daemons.launch, self.step.node_id)


class StoreHangs(Fault):
    """The store's process is stopped: connections open, and nothing answers."""

    stores = SERVERS

    async def inject(self) -> None:
        """Stop the server."""
        self._begun = len(proxy_of(self).exchanges)
        self.parts.store.process.pause()

    async def proof(self) -> str:
        """Count requests without an answer."""
        waiting = sum(one.status is None for one in proxy_of(self).exchanges[self._begun :])
        return f"{waiting} requests without an answer" if waiting else ""

    async def heal(self) -> None:
        """Continue the store's process."""
        self.parts.store.process.resume()


class StoreRestarts(Fault):
    """The store ends, and comes back with its data."""

    # The other servers keep their data in memory.
    stores = frozenset({"s3"})
    is_slow = True

    async def inject(self) -> None:
        """End the server."""
        self._pid = self.parts.store.process.pid
        await in_thread(lambda: self.parts.store.process.stop(grace_seconds=1))

    async def proof(self) -> str:
        """Say that the process has ended."""
        return "" if process_exists(self._pid) else f"process {self._pid} has ended"

    async def heal(self) -> None:
        """Start it again."""
        assert self.parts.store.relaunch is not None
        await in_thread(self.parts.store.relaunch)


class DirectoryRefusesChanges(Fault):
    """No file of the store can be written, replaced or deleted for a while, not by root either."""

    stores = frozenset({"file"})

    async def inject(self) -> None:
        """Make each directory immutable."""
        self._before = await in_thread(failed_uploads, self.parts)
        await in_thread(self._attribute, "+i")

    def _attribute(self, change: str) -> None:
        # A mount cannot be made read-only while a daemon has a file open for writing.
        root = self.parts.store.root / "archive"
        subprocess.run(["find", root, "-type", "d", "-exec", "chattr", change, "{}", "+"], check=True)

    async def proof(self) -> str:
        """Count what could not be stored."""
        return _failed_since(self._before, await in_thread(failed_uploads, self.parts))

    async def heal(self) -> None:
        """Let it be written again."""
        await in_thread(self._attribute, "-i")


class DirectoryIsFull(Fault):
    """The file system of the store is full for a while."""

    stores = frozenset({"file"})

    async def inject(self) -> None:
        """Fill it; that takes no time."""
        self._before = await in_thread(failed_uploads, self.parts)
        self._filler = self.parts.store.root / "filler"
        await in_thread(fill, self._filler)

    async def proof(self) -> str:
        """Count what could not be stored."""
        return _failed_since(self._before, await in_thread(failed_uploads, self.parts))

    async def heal(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)


STORE_FAULTS: dict[str, type[Fault]] = {
    "store refuses connections": _weather(ResetRequest()),
    "store answers 500": _weather(Answer("500 Internal Server Error")),
    "store throttles": _weather(_THROTTLES),
    "store throttles at a daemon's start": ThrottledStart,
    "store's answers are lost": _weather(NoAnswer()),
    "store is slow": _weather(SlowAnswer(_SLOW_SECONDS)),
    "store resets uploads": _weather(ResetRequest(100), _is_large),
    "store takes half a PUT and is silent": UploadsStall,
    "uploads are damaged on the way": UploadsAreDamaged,
    "store answers uploads 200 with an error": UploadsAnsweredWithAnError,
    "downloads end early": _weather(TruncateAnswer(1), lambda one: one.method == "GET"),
    "store hangs": StoreHangs,
    "store restarts": StoreRestarts,
    "store's directory refuses changes": DirectoryRefusesChanges,
    "store's disk is full": DirectoryIsFull,
}
