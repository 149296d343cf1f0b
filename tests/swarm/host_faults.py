"""What happens to a host of a swarm: its disks are full, its clock is stepped, its log directories change."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokafka import AIOKafkaConsumer, TopicPartition

from tests.support.cluster import cluster_admin, start_broker
from tests.support.stepped_clock import SteppedDaemon
from tests.swarm.ending import in_thread
from tests.swarm.faults import CLOCK_NODE, FULL_LOG_NODE, FULL_NODE, SERVERS, Fault, fill
from tests.swarm.workload import TOPIC

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.kafka import KafkaBrokerProcess

_PATIENCE_SECONDS = 180
_STEPS_SECONDS = (600, -600, 3600, -3600, 30 * 3600, -30 * 3600)
_LEAST_SHARE = 0.9
_DISK_FAILED = b"Stopping serving logs in dir"


class StateDiskFull(Fault):
    """The file system of a daemon's state is full while a client reads the archive through its gateway."""

    is_slow = True
    archives_meanwhile = True

    async def inject(self) -> None:
        """Fill the file system, and let a client read through the daemon's node from the beginning."""
        async with cluster_admin(self.parts.cluster) as admin:
            await admin.move_leader(TOPIC, FULL_NODE, number=self.step.partition)
        self._filler = self.parts.state(FULL_NODE) / "filler"
        self._before = await in_thread(self._refused)
        await in_thread(fill, self._filler)
        self._reading = asyncio.create_task(self._read())

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


class ClockIsStepped(Fault):
    """A daemon's clock is wrong by minutes or hours, and then right again. Its store's clock is right."""

    # A directory's times are those of the host.
    stores = SERVERS
    archives_meanwhile = True

    async def inject(self) -> None:
        """Step it."""
        self._daemon = self.parts.daemons[CLOCK_NODE]
        assert isinstance(self._daemon, SteppedDaemon)
        self._seconds = _STEPS_SECONDS[self.step.number % len(_STEPS_SECONDS)]
        self._daemon.step(self._seconds)

    def _error_seconds(self) -> float:
        return self._daemon.metric("tieringd_host_clock_error_seconds") or 0

    async def proof(self) -> str:
        """Ask the daemon how far its clock is from the store's."""
        error = await in_thread(self._error_seconds)
        return f"the daemon's clock was {error:+.0f} s off" if abs(error) > self._least() else ""

    def _least(self) -> float:
        return abs(self._seconds) * _LEAST_SHARE

    def idle_daemons(self) -> set[int]:
        """Return its node where the store refuses requests whose time is that far from its own."""
        return {CLOCK_NODE} if abs(self._seconds) >= self.parts.store.refused_from_seconds else set()

    async def heal(self) -> None:
        """Set it right. The daemon may be another one by now: a new one begins with the right time."""
        assert isinstance(self._daemon, SteppedDaemon)
        self._daemon.step(0)


def _directory(node: KafkaBrokerProcess, number: int) -> Path | None:
    """Return the log directory in which a broker has a partition; None while it moves or is not there."""
    found = [one for one in node.log_dirs if (one / f"{TOPIC}-{number}").exists()]
    return found[0] if len(found) == 1 else None


async def _until_in(node: KafkaBrokerProcess, number: int, directory: Path) -> None:
    deadline = asyncio.get_running_loop().time() + _PATIENCE_SECONDS
    while _directory(node, number) != directory:
        assert asyncio.get_running_loop().time() < deadline, f"{TOPIC}-{number} did not come to {directory}"
        await asyncio.sleep(0.1)


class MovesLogDirectory(Fault):
    """A broker moves a partition to another one of its log directories, while records come."""

    archives_meanwhile = True

    async def inject(self) -> None:
        """Begin the move."""
        self._node = self.parts.cluster.brokers[self.step.node_id - 1]
        before = _directory(self._node, self.step.partition)
        assert before is not None, f"{TOPIC}-{self.step.partition} is in no directory, or in two"
        self._before = before
        self._after = next(one for one in self._node.log_dirs if one != before)
        async with cluster_admin(self.parts.cluster, self.step.node_id) as admin:
            await admin.move_log_dir(TOPIC, self._after, number=self.step.partition)

    async def proof(self) -> str:
        """Look where it is."""
        if _directory(self._node, self.step.partition) != self._after:
            return ""
        return f"{self._before.name} to {self._after.name} of node {self._node.node_id}"

    async def heal(self) -> None:
        """Wait for the end of the move."""
        await _until_in(self._node, self.step.partition, self._after)


class LogDiskIsFull(Fault):
    """The disk of one of a broker's log directories is full: the broker gives the directory up, or ends."""

    archives_meanwhile = True
    is_slow = True

    async def inject(self) -> None:
        """Move a partition there, if it is elsewhere, and fill the disk."""
        self._node = self.parts.cluster.brokers[FULL_LOG_NODE - 1]
        small = self._node.log_dirs[1]
        if _directory(self._node, self.step.partition) != small:
            async with cluster_admin(self.parts.cluster, FULL_LOG_NODE) as admin:
                await admin.move_log_dir(TOPIC, small, number=self.step.partition)
            await _until_in(self._node, self.step.partition, small)
        self._told_before = self._node.output.stat().st_size
        self._filler = small / "filler"
        await in_thread(fill, self._filler)

    async def proof(self) -> str:
        """Look for what the broker says, or whether it has ended."""
        process = self._node.process
        if process is not None and process.poll() is not None:
            return f"the broker has ended with {process.returncode}"
        with self._node.output.open("rb") as told:
            told.seek(self._told_before)
            is_told = _DISK_FAILED in told.read()
        return f"node {FULL_LOG_NODE} has stopped serving {self._filler.parent.name}" if is_told else ""

    async def heal(self) -> None:
        """Give the room back, and start the broker anew: it serves a directory again only then."""
        self._filler.unlink(missing_ok=True)
        await self._node.stop()
        await start_broker(self.parts.cluster, self._node)


HOST_FAULTS: dict[str, type[Fault]] = {
    "state's disk is full": StateDiskFull,
    "a daemon's clock is stepped": ClockIsStepped,
    "a partition moves to another log directory": MovesLogDirectory,
    "a log directory's disk is full": LogDiskIsFull,
}
