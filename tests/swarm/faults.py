"""
The faults of a swarm. Each has `inject`, `proof` that it had its effect, and `heal`.

A fault whose proof is empty does not count. `proof` is asked while the fault lasts. `heal` leaves everything
running as before; it is called whatever happened.
"""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiokafka import AIOKafkaConsumer, TopicPartition

from tests.support.cluster import cluster_admin, restart_broker, start_broker
from tests.support.fault_proxy import (
    Answer,
    DamageRequest,
    NoAnswer,
    ResetRequest,
    StallRequest,
    TruncateAnswer,
)
from tests.swarm.ending import in_thread
from tests.swarm.transactions import TRANSACTIONS
from tests.swarm.workload import PARTITIONS, TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cluster import DaemonsBeside
    from tests.support.daemon import Daemon
    from tests.support.fault_proxy import Fault as ProxyFault
    from tests.support.fault_proxy import FaultProxy, ProxiedExchange
    from tests.support.kafka import KafkaCluster
    from tests.support.s3_bucket import S3Bucket
    from tests.support.seaweedfs import SeaweedFS
    from tests.swarm.schedule import Step

NODES = (1, 2, 3)
FULL_NODE = 1
"""The node whose daemon has its state on a small file system."""
OPERATED = "swarm-operated-"
"""What the names of topics begin with that one fault creates, changes and deletes."""
LOCAL_BYTES = (2 << 20, 3 << 20)
_SESSION_SECONDS = 12  # More than a broker's session of 9 s: the controller fences a broker that hangs.

_ERROR_DOCUMENT = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"
)


@dataclass
class Parts:
    """The parts of a swarm that faults act on."""

    cluster: KafkaCluster
    daemons: DaemonsBeside
    store: SeaweedFS
    proxy: FaultProxy
    state: Callable[[int], Path]
    """Returns the state directory of a node's daemon."""
    gateways: str
    """The addresses of the gateways, joined by commas."""
    objects: S3Bucket
    broken: list[str]
    """Broken promises that a fault found."""
    local_bytes: int = LOCAL_BYTES[0]


class Fault(ABC):
    """One fault of a schedule."""

    archives_meanwhile = False
    """Whether partitions have to be archived on while the fault lasts: it does not concern the store."""

    def __init__(self, parts: Parts, step: Step) -> None:
        self.parts = parts
        self.step = step

    @abstractmethod
    async def inject(self) -> None:
        """Begin the fault."""

    @abstractmethod
    async def proof(self) -> str:
        """Return what shows its effect; empty as long as nothing does."""

    def idle_daemons(self) -> set[int]:
        """Return the nodes whose daemon is away while the fault lasts: what they lead is not archived."""
        return set()

    async def heal(self) -> None:  # noqa: B027 a fault may heal itself
        """End it. What has healed itself needs nothing."""


def _is_large(one: ProxiedExchange) -> bool:
    return one.method in {"PUT", "POST"} and int(one.headers.get("content-length", "0")) > 1 << 10


class StoreWeather(Fault):
    """Requests to the store that fit are spoiled."""

    spoils: ProxyFault
    fits: Callable[[ProxiedExchange], bool] = staticmethod(lambda _: True)

    async def inject(self) -> None:
        """Begin to spoil each request that fits."""
        self._begun = len(self.parts.proxy.exchanges)
        self.parts.proxy.weather = lambda one: self.spoils if self.fits(one) else None

    async def proof(self) -> str:
        """Count what was spoiled."""
        spoiled = sum(one.fault == self.spoils for one in self.parts.proxy.exchanges[self._begun :])
        return f"{spoiled} requests spoiled" if spoiled else ""

    async def heal(self) -> None:
        """End the spoiling."""
        self.parts.proxy.weather = lambda _: None
        # The proxy records each request: an hour of them is not needed.
        self.parts.proxy.exchanges.clear()


def _weather(spoils: ProxyFault, fits: Callable[[ProxiedExchange], bool] = lambda _: True) -> type[Fault]:
    return type("StoreWeatherOfAKind", (StoreWeather,), {"spoils": spoils, "fits": staticmethod(fits)})


class ThrottledStart(StoreWeather):
    """The store throttles while a daemon starts."""

    spoils = Answer("503 Slow Down", headers={"Retry-After": "1"})

    async def inject(self) -> None:
        """Kill a daemon, and start it while the store throttles."""
        self.parts.daemons.kill(self.step.node_id)
        await super().inject()
        await in_thread(self.parts.daemons.launch, self.step.node_id)


class StoreHangs(Fault):
    """The store's process is stopped: connections open, and nothing answers."""

    async def inject(self) -> None:
        """Stop the server."""
        self._begun = len(self.parts.proxy.exchanges)
        self.parts.store.pause()

    async def proof(self) -> str:
        """Count requests without an answer."""
        waiting = sum(one.status is None for one in self.parts.proxy.exchanges[self._begun :])
        return f"{waiting} requests without an answer" if waiting else ""

    async def heal(self) -> None:
        """Continue the store's process."""
        self.parts.store.resume()


class StoreRestarts(Fault):
    """The store ends, and comes back with its data."""

    async def inject(self) -> None:
        """End the server."""
        self._pid = self.parts.store.server.pid
        await in_thread(self.parts.store.stop)

    async def proof(self) -> str:
        """Say that the process has ended."""
        return "" if _exists(self._pid) else f"process {self._pid} has ended"

    async def heal(self) -> None:
        """Start it again."""
        await in_thread(self.parts.store.launch)


class DaemonDies(Fault):
    """A daemon is killed and started again."""

    archives_meanwhile = True
    nodes: tuple[int, ...] = ()
    number = signal.SIGKILL

    async def inject(self) -> None:
        """Kill the daemon."""
        self._nodes = self.nodes or (self.step.node_id,)
        self._codes: list[int] = []
        for node_id in self._nodes:
            daemon = self.parts.daemons[node_id]
            daemon.send_signal(self.number)
            self._codes.append(await in_thread(daemon.wait, 120))
            if self.number is signal.SIGTERM:
                await in_thread(self.parts.daemons.launch, node_id)

    async def proof(self) -> str:
        """Give the exit codes."""
        return f"exit codes {self._codes}" if len(self._codes) == len(self._nodes) else ""

    def idle_daemons(self) -> set[int]:
        """Return what does not run."""
        return {one for one in self._nodes if not self.parts.daemons[one].server.is_running}

    async def heal(self) -> None:
        """Start what does not run."""
        for node_id in self._nodes:
            if not self.parts.daemons[node_id].server.is_running:
                await in_thread(self.parts.daemons.launch, node_id)


class AllDaemonsDie(DaemonDies):
    """All daemons are killed one after the other, and then started."""

    archives_meanwhile = False
    nodes = NODES


class DaemonEnds(DaemonDies):
    """A daemon ends in order, and starts again."""

    archives_meanwhile = False
    number = signal.SIGTERM


class RollingDaemons(DaemonEnds):
    """Each daemon ends in order and starts again, one after the other."""

    nodes = NODES


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class DaemonHangs(Fault):
    """A daemon is stopped for a while (SIGSTOP), and goes on."""

    archives_meanwhile = True

    async def inject(self) -> None:
        """Stop it."""
        self.parts.daemons[self.step.node_id].server.pause()

    async def proof(self) -> str:
        """Look at the state of the process."""
        pid = self.parts.daemons[self.step.node_id].server.pid
        return f"process {pid} is stopped" if _process_state(pid) == "T" else ""

    def idle_daemons(self) -> set[int]:
        """Return its node."""
        return {self.step.node_id}

    async def heal(self) -> None:
        """Continue the daemon."""
        self.parts.daemons[self.step.node_id].server.resume()


class DeposedDaemonHangs(Fault):
    """The daemon of a leader is stopped, another broker's daemon archives meanwhile, and it goes on."""

    archives_meanwhile = True

    async def inject(self) -> None:
        """Stop the daemon of a partition's leader, move the leader, and let the daemon go on."""
        number = self.step.partition
        async with cluster_admin(self.parts.cluster) as admin:
            self._leader = (await admin.partitions(TOPIC))[number].leader
            self._next = self._leader % len(NODES) + 1
            self._stopped_before = await in_thread(self._stops)
            self.parts.daemons[self._leader].server.pause()
            await admin.move_leader(TOPIC, self._next, number=number)
        after = self.parts.daemons[self._next]
        begun = await in_thread(self._archived_by, after)
        # The deposed daemon has to come back to an archive that has another writer.
        await in_thread(after.until, lambda: self._archived_by(after) > begun, f"node {self._next} archives")
        self.parts.daemons[self._leader].server.resume()

    def _archived_by(self, daemon: Daemon) -> float:
        return daemon.next_offset(TOPIC, self.step.partition) or 0

    def _stops(self) -> int:
        daemon, what = self.parts.daemons[self._leader], "archiver stopped: this broker no longer leads"
        return len(daemon.events(what, topic=TOPIC, partition=self.step.partition))

    async def proof(self) -> str:
        """Look for the log line of the deposed daemon."""
        count = await in_thread(self._stops) - self._stopped_before
        if not count:
            return ""
        return f"node {self._next} archived, and then the daemon of node {self._leader} stopped its archiver"

    async def heal(self) -> None:
        """Continue the daemon, unless it was continued before."""
        self.parts.daemons[self._leader].server.resume()


class Reloads(Fault):
    """Each daemon's configuration changes, and is read again (SIGHUP)."""

    async def inject(self) -> None:
        """Change how much stays in local logs."""
        self.parts.local_bytes = LOCAL_BYTES[self.parts.local_bytes == LOCAL_BYTES[0]]
        self._before = self._reloads()
        for node_id in NODES:
            self.parts.daemons.change(node_id, topics=topics(self.parts.local_bytes))
            self.parts.daemons[node_id].send_signal(signal.SIGHUP)

    def _reloads(self) -> int:
        return sum(len(self.parts.daemons[one].events("configuration reloaded")) for one in NODES)

    async def proof(self) -> str:
        """Say that each daemon has read its configuration."""
        count = await in_thread(self._reloads) - self._before
        return f"{count} daemons reloaded" if count >= len(NODES) else ""


class BrokerDies(Fault):
    """A broker is killed and started again."""

    archives_meanwhile = True

    async def inject(self) -> None:
        """Kill the broker."""
        self._node = self.parts.cluster.brokers[self.step.node_id - 1]
        self._pid = self._node.pid
        await self._end()

    async def _end(self) -> None:
        await self._node.kill()

    async def proof(self) -> str:
        """Say that the process has ended."""
        return "" if _exists(self._pid) else f"process {self._pid} has ended"

    async def heal(self) -> None:
        """Start it."""
        await start_broker(self.parts.cluster, self._node)


class BrokerStops(BrokerDies):
    """A broker stops in order and starts again."""

    async def _end(self) -> None:
        await self._node.stop()


class BrokerHangs(Fault):
    """A broker is stopped (SIGSTOP) until it leads nothing, and goes on."""

    archives_meanwhile = True

    async def inject(self) -> None:
        """Stop it."""
        self.parts.cluster.brokers[self.step.node_id - 1].pause()
        await asyncio.sleep(_SESSION_SECONDS)

    async def proof(self) -> str:
        """Say that other brokers lead."""
        others = [one for one in NODES if one != self.step.node_id]
        async with cluster_admin(self.parts.cluster, *others) as admin:
            leaders = [one.leader for one in (await admin.partitions(TOPIC)).values()]
        return f"leaders {leaders}" if self.step.node_id not in leaders else ""

    async def heal(self) -> None:
        """Continue the broker."""
        self.parts.cluster.brokers[self.step.node_id - 1].resume()


class RollingBrokers(Fault):
    """Each broker stops and starts again, when all replicas are in sync."""

    async def inject(self) -> None:
        """Restart the brokers one after the other."""
        self._pids = [one.pid for one in self.parts.cluster.brokers]
        async with cluster_admin(self.parts.cluster) as admin:
            for node_id in NODES:
                await restart_broker(self.parts.cluster, node_id)
                for number in range(PARTITIONS):
                    await admin.until_in_sync(TOPIC, number=number)

    async def proof(self) -> str:
        """Say that each broker is another process."""
        pids = [one.pid for one in self.parts.cluster.brokers]
        return f"processes {self._pids} became {pids}" if not set(pids) & set(self._pids) else ""


class LeaderMoves(Fault):
    """Partitions get other leaders."""

    times = 1

    async def inject(self) -> None:
        """Move leaders."""
        self._moves: list[str] = []
        async with cluster_admin(self.parts.cluster) as admin:
            for turn in range(self.times):
                number = (self.step.partition + turn) % PARTITIONS
                state = (await admin.partitions(TOPIC))[number]
                following = state.replicas[(state.replicas.index(state.leader) + 1) % len(state.replicas)]
                await admin.move_leader(TOPIC, following, number=number)
                self._moves.append(f"{number}: {state.leader} to {following}")

    async def proof(self) -> str:
        """Give the moves."""
        return ", ".join(self._moves)


class LeaderBurst(LeaderMoves):
    """Leaders move nine times without a pause."""

    times = 9


class Reassigns(Fault):
    """A partition shrinks to two replicas, and grows to three again."""

    archives_meanwhile = True

    async def inject(self) -> None:
        """Take the last replica away."""
        async with cluster_admin(self.parts.cluster) as admin:
            state = (await admin.partitions(TOPIC))[self.step.partition]
            self._replicas = state.replicas
            await admin.reassign(TOPIC, state.replicas[:-1], number=self.step.partition)

    async def proof(self) -> str:
        """Compare the replicas with the ones before."""
        async with cluster_admin(self.parts.cluster) as admin:
            now = (await admin.partitions(TOPIC))[self.step.partition].replicas
        return f"replicas {self._replicas} became {now}" if len(now) < len(self._replicas) else ""

    async def heal(self) -> None:
        """Give the replica back."""
        async with cluster_admin(self.parts.cluster) as admin:
            await admin.reassign(TOPIC, self._replicas, number=self.step.partition)


class StateDiskFull(Fault):
    """The file system of a daemon's state is full while a client reads the archive through its gateway."""

    archives_meanwhile = True

    async def inject(self) -> None:
        """Fill the file system, and let a client read through the daemon's node from the beginning."""
        async with cluster_admin(self.parts.cluster) as admin:
            await admin.move_leader(TOPIC, FULL_NODE, number=self.step.partition)
        self._filler = self.parts.state(FULL_NODE) / "filler"
        self._before = await in_thread(self._refused)
        await in_thread(self._fill)
        self._reading = asyncio.create_task(self._read())

    def _fill(self) -> None:
        with suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))

    def _refused(self) -> float:
        """Return how many files the daemon's cache could not store."""
        daemon = self.parts.daemons[FULL_NODE]
        return daemon.metric("tieringd_cache_put_failures_total", reason="enospc") or 0

    async def _read(self) -> None:
        partition = TopicPartition(TOPIC, self.step.partition)
        consumer = AIOKafkaConsumer(bootstrap_servers=self.parts.gateways, enable_auto_commit=False)
        await consumer.start()
        try:
            consumer.assign([partition])
            while True:
                # Some segments may be cached already. So all are read, over and over.
                end = (await consumer.end_offsets([partition]))[partition]
                consumer.seek(partition, 0)
                while await consumer.position(partition) < end:
                    await consumer.getmany(timeout_ms=500)
        finally:
            await consumer.stop()

    async def proof(self) -> str:
        """Ask the daemon what its cache could not store."""
        count = await in_thread(self._refused) - self._before
        return f"the daemon's cache could not store {count:.0f} files (ENOSPC)" if count > 0 else ""

    async def heal(self) -> None:
        """Give the room back."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._filler.unlink(missing_ok=True)


def topics(local_bytes: int) -> dict[str, dict[str, object]]:
    """Return a daemon's `topics` block."""
    return {
        name: {"redpanda.remote.write": True, "retention.local.target.bytes": local_bytes}
        for name in (TOPIC, TRANSACTIONS, f"{OPERATED}*")
    }


FAULTS: dict[str, type[Fault]] = {
    "store refuses connections": _weather(ResetRequest()),
    "store answers 500": _weather(Answer("500 Internal Server Error")),
    "store throttles": _weather(Answer("503 Slow Down", headers={"Retry-After": "1"})),
    "store throttles at a daemon's start": ThrottledStart,
    "store's answers are lost": _weather(NoAnswer()),
    "store resets uploads": _weather(ResetRequest(100), _is_large),
    "store takes half a PUT and is silent": _weather(StallRequest(100), _is_large),
    "uploads are damaged on the way": _weather(DamageRequest(), _is_large),
    "store answers uploads 200 with an error": _weather(
        Answer("200 OK", body=_ERROR_DOCUMENT, headers={"Content-Type": "application/xml"}), _is_large
    ),
    "downloads end early": _weather(TruncateAnswer(1), lambda one: one.method == "GET"),
    "store hangs": StoreHangs,
    "store restarts": StoreRestarts,
    "daemon is killed": DaemonDies,
    "all daemons are killed": AllDaemonsDie,
    "daemon ends and starts": DaemonEnds,
    "daemons restart in turn": RollingDaemons,
    "daemon hangs": DaemonHangs,
    "daemon hangs and is deposed": DeposedDaemonHangs,
    "configuration is reloaded": Reloads,
    "state's disk is full": StateDiskFull,
    "broker is killed": BrokerDies,
    "broker stops and starts": BrokerStops,
    "broker hangs": BrokerHangs,
    "brokers restart in turn": RollingBrokers,
    "leader moves": LeaderMoves,
    "leaders move in a burst": LeaderBurst,
    "partition is reassigned": Reassigns,
}
