"""
The faults of a swarm. Each has `inject`, `proof` that it had its effect, and `heal`.

A fault whose proof is empty does not count. `proof` is asked while the fault lasts. `heal` leaves everything
running as before; it is called whatever happened.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tests.support.cluster import cluster_admin, restart_broker, start_broker
from tests.support.previous_release import DaemonOfTree, previous_release
from tests.swarm.ending import in_thread
from tests.swarm.sharing import SHARED
from tests.swarm.transactions import TRANSACTIONS
from tests.swarm.workload import PARTITIONS, TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cluster import DaemonsBeside
    from tests.support.daemon import Daemon
    from tests.support.fault_proxy import FaultProxy
    from tests.support.kafka import KafkaCluster
    from tests.support.network import Network
    from tests.swarm.schedule import Step
    from tests.swarm.sharing import ShareGroup
    from tests.swarm.stores import SwarmStore

NODES = (1, 2, 3)
FULL_NODE = 1
"""The node whose daemon has its state on a small file system."""
CLOCK_NODE = 2
"""The node whose daemon has a clock of its own."""
FULL_LOG_NODE = 3
"""The node whose second log directory is on a small file system."""
OPERATED = "swarm-operated-"
"""What the names of topics begin with that one fault creates, changes and deletes."""
_END_SECONDS = 120
_POLL_SECONDS = 0.3
_BLOCK_BYTES = 1 << 12
LOCAL_BYTES = (2 << 20, 3 << 20)
SERVERS = frozenset({"s3", "gcs", "azure"})
ALL_STORES = SERVERS | {"file"}


@dataclass
class Parts:
    """The parts of a swarm that faults act on."""

    cluster: KafkaCluster
    daemons: DaemonsBeside
    store: SwarmStore
    proxy: FaultProxy | None
    """What spoils requests to the store; None before a store that is a directory."""
    network: Network
    share_group: ShareGroup
    state: Callable[[int], Path]
    """Returns the state directory of a node's daemon."""
    gateways: str
    """The addresses of the gateways, joined by commas."""
    broken: list[str]
    """Broken promises that a fault found."""
    previous_release: Path
    """Where the source tree of the release before this one is, once a fault has needed it."""
    local_bytes: int = LOCAL_BYTES[0]

    def configure(self) -> None:
        """Write the topics into the configuration of each daemon, which reads them at SIGHUP."""
        for node_id in NODES:
            self.daemons.change(node_id, topics=topics(self.local_bytes))

    def reload(self) -> None:
        """Have each daemon read its configuration again."""
        for node_id in NODES:
            self.daemons[node_id].send_signal(signal.SIGHUP)


def others_than(node_id: int) -> tuple[int, ...]:
    """Return the other nodes."""
    return tuple(one for one in NODES if one != node_id)


async def leaders_elsewhere(parts: Parts, node_id: int) -> list[int]:
    """Return the leaders that the other nodes name, once a node leads nothing; empty before."""
    async with cluster_admin(parts.cluster, *others_than(node_id)) as admin:
        leaders = [one.leader for one in (await admin.partitions(TOPIC)).values()]
    return [] if node_id in leaders or -1 in leaders else leaders


class Fault(ABC):
    """One fault of a schedule."""

    archives_meanwhile = False
    """Whether partitions have to be archived on while the fault lasts: it does not concern the store."""
    is_slow = False
    """Whether it takes much longer than others, and so comes less often."""
    stores: ClassVar[frozenset[str]] = ALL_STORES
    """The stores that it can happen to or beside."""

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

    def knowing_nodes(self) -> tuple[int, ...]:
        """Return the nodes that know the leaders while the fault lasts."""
        return NODES

    async def heal(self) -> None:  # noqa: B027 a fault may heal itself
        """End it. What has healed itself needs nothing."""


class DaemonDies(Fault):
    """A daemon is killed and started again."""

    archives_meanwhile = True
    nodes: tuple[int, ...] = ()
    number = signal.SIGKILL

    async def inject(self) -> None:
        """Kill it."""
        self._nodes = self.nodes or (self.step.node_id,)
        self._codes: list[int] = []
        for node_id in self._nodes:
            daemon = self.parts.daemons[node_id]
            daemon.send_signal(self.number)
            self._codes.append(await in_thread(daemon.wait, _END_SECONDS))
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

    is_slow = True
    archives_meanwhile = False
    nodes = NODES


class DaemonEnds(DaemonDies):
    """A daemon ends in order, and starts again."""

    archives_meanwhile = False
    number = signal.SIGTERM


class RollingDaemons(DaemonEnds):
    """Each daemon ends in order and starts again, one after the other."""

    is_slow = True

    nodes = NODES


def fill(path: Path) -> None:
    """Write a file until its file system has no room left."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        # Room is reserved in pieces as large as there is room for: a disk of gigabytes is full at once.
        reserved, piece = 0, 1 << 34
        while piece >= _BLOCK_BYTES:
            try:
                os.posix_fallocate(file.fileno(), reserved, piece)
                reserved += piece
            except OSError:
                piece //= 2
        file.seek(0, os.SEEK_END)
        while True:
            file.write(bytes(_BLOCK_BYTES))


def process_exists(pid: int) -> bool:
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
        """Let it go on."""
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


class DaemonIsThePreviousRelease(Fault):
    """
    A leader's daemon is replaced by that of the previous release, which must not touch what it cannot read.

    The others go on, and so does this release afterwards.
    """

    archives_meanwhile = True
    is_slow = True

    async def inject(self) -> None:
        """End the daemon of a partition's leader, and start the previous release in its place."""
        async with cluster_admin(self.parts.cluster) as admin:
            self._node_id = (await admin.partitions(TOPIC))[self.step.partition].leader
        await _replace_by_previous_release(self.parts, self._node_id)

    async def proof(self) -> str:
        """Ask for a page that the previous release lacks, and for what it says of the partition."""
        daemon = self.parts.daemons[self._node_id]
        partition = await in_thread(daemon.partition, TOPIC, self.step.partition)
        fault = partition.get("fault")
        is_old = await _is_previous_release(daemon)
        return f"the previous release says: {fault.partition(';')[0]}" if is_old and fault else ""

    def idle_daemons(self) -> set[int]:
        """Return its node."""
        return {self._node_id}

    async def heal(self) -> None:
        """Start this release again."""
        await _replace_by_this_release(self.parts, self._node_id)


class DaemonsAreUpgraded(Fault):
    """
    All daemons are those of the previous release, and are upgraded one after the other.

    Each upgraded daemon archives what its broker leads before the next is upgraded.
    """

    is_slow = True

    async def inject(self) -> None:
        """Start the previous release beside each broker, and then this release in turn."""
        self._old: list[int] = []
        self._new: list[int] = []
        for node_id in NODES:
            await _replace_by_previous_release(self.parts, node_id)
        for node_id in NODES:
            if await _is_previous_release(self.parts.daemons[node_id]):
                self._old.append(node_id)
            await _replace_by_this_release(self.parts, node_id)
            await self._until_archives(node_id)

    async def _until_archives(self, node_id: int) -> None:
        """Wait until the archive of each partition that a node goes on leading has grown by its daemon."""
        daemon = self.parts.daemons[node_id]
        begun = {number: await in_thread(daemon.next_offset, TOPIC, number) for number in range(PARTITIONS)}
        deadline = time.monotonic() + _END_SECONDS
        async with cluster_admin(self.parts.cluster) as admin:
            while True:
                leaders = await admin.partitions(TOPIC)
                led = [number for number, one in leaders.items() if one.leader == node_id]
                waiting = [
                    number
                    for number in led
                    if (await in_thread(daemon.next_offset, TOPIC, number) or 0) <= (begun[number] or 0)
                ]
                if not waiting:
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the upgraded daemon of node {node_id} does not archive {waiting}")
                await asyncio.sleep(_POLL_SECONDS)
        self._new.append(node_id)

    async def proof(self) -> str:
        """Say that each daemon was the previous release, and archived after its upgrade."""
        if self._old != list(NODES) or self._new != list(NODES):
            return ""
        return f"the daemons of nodes {self._old} were the previous release, and archived in turn as this one"

    async def heal(self) -> None:
        """Start this release where the previous one is left."""
        for node_id in NODES:
            if await _is_previous_release(self.parts.daemons[node_id]):
                await _replace_by_this_release(self.parts, node_id)


async def _is_previous_release(daemon: Daemon) -> bool:
    """Return whether a running daemon lacks a page that only this release has."""
    if not daemon.server.is_running:
        return False
    status, _ = await in_thread(daemon.get, "/status/overview")
    return status == HTTPStatus.NOT_FOUND


async def _replace_by_previous_release(parts: Parts, node_id: int) -> None:
    """End a node's daemon in order, and start the previous release in its place."""
    daemons = parts.daemons
    if not parts.previous_release.exists():
        await in_thread(previous_release, parts.previous_release)
    await in_thread(_end_in_order, daemons[node_id])
    before = daemons.kinds.get(node_id)
    daemons.kinds[node_id] = partial(DaemonOfTree, source=parts.previous_release)
    try:
        await in_thread(daemons.launch, node_id)
    finally:
        del daemons.kinds[node_id]
        if before is not None:
            daemons.kinds[node_id] = before


async def _replace_by_this_release(parts: Parts, node_id: int) -> None:
    """End a node's daemon in order if it runs, and start this release in its place."""
    daemon = parts.daemons[node_id]
    if daemon.server.is_running:
        await in_thread(_end_in_order, daemon)
    await in_thread(parts.daemons.launch, node_id)


def _end_in_order(daemon: Daemon) -> None:
    daemon.send_signal(signal.SIGTERM)
    daemon.wait(_END_SECONDS)


class Reloads(Fault):
    """Each daemon's configuration changes, and is read again (SIGHUP)."""

    async def inject(self) -> None:
        """Change how much stays in local logs."""
        self.parts.local_bytes = LOCAL_BYTES[self.parts.local_bytes == LOCAL_BYTES[0]]
        self._before = self._reloads()
        self.parts.configure()
        self.parts.reload()

    def _reloads(self) -> int:
        return sum(len(self.parts.daemons[one].events("configuration reloaded")) for one in NODES)

    async def proof(self) -> str:
        """Say that each daemon has read its configuration."""
        count = await in_thread(self._reloads) - self._before
        return f"{count} daemons reloaded" if count >= len(NODES) else ""


class BrokerDies(Fault):
    """A broker is killed and started again."""

    archives_meanwhile = True
    is_slow = True

    async def inject(self) -> None:
        """Kill it."""
        self._node = self.parts.cluster.brokers[self.step.node_id - 1]
        self._pid = self._node.pid
        await self._end()

    async def _end(self) -> None:
        await self._node.kill()

    async def proof(self) -> str:
        """Say that the process has ended."""
        return "" if process_exists(self._pid) else f"process {self._pid} has ended"

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
    is_slow = True

    def knowing_nodes(self) -> tuple[int, ...]:
        """Return the others."""
        return others_than(self.step.node_id)

    async def inject(self) -> None:
        """Stop it."""
        self.parts.cluster.brokers[self.step.node_id - 1].pause()

    async def proof(self) -> str:
        """Say that other brokers lead."""
        leaders = await leaders_elsewhere(self.parts, self.step.node_id)
        return f"leaders {leaders}" if leaders else ""

    async def heal(self) -> None:
        """Let it go on."""
        self.parts.cluster.brokers[self.step.node_id - 1].resume()


class RollingBrokers(Fault):
    """Each broker stops and starts again, when all replicas are in sync."""

    is_slow = True

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

    is_slow = True

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


def topics(local_bytes: int) -> dict[str, dict[str, object]]:
    """Return a daemon's `topics` block."""
    return {
        name: {"redpanda.remote.write": True, "retention.local.target.bytes": local_bytes}
        for name in (TOPIC, TRANSACTIONS, SHARED, f"{OPERATED}*")
    }


PROCESS_FAULTS: dict[str, type[Fault]] = {
    "daemon is killed": DaemonDies,
    "all daemons are killed": AllDaemonsDie,
    "daemon ends and starts": DaemonEnds,
    "daemons restart in turn": RollingDaemons,
    "daemon hangs": DaemonHangs,
    "daemon hangs and is deposed": DeposedDaemonHangs,
    "daemon is the previous release": DaemonIsThePreviousRelease,
    "daemons are upgraded in turn": DaemonsAreUpgraded,
    "configuration is reloaded": Reloads,
    "broker is killed": BrokerDies,
    "broker stops and starts": BrokerStops,
    "broker hangs": BrokerHangs,
    "brokers restart in turn": RollingBrokers,
    "leader moves": LeaderMoves,
    "leaders move in a burst": LeaderBurst,
    "partition is reassigned": Reassigns,
}
