"""
Run a swarm: `make swarm MINUTES=10 SEED=1`.

    python -m tests.swarm.run [--minutes 10] [--seed 1] [--kind NAME ...] [--write]

Three real brokers with a daemon and a gateway beside each, and SeaweedFS behind a proxy. Producers and
readers run throughout. One fault after the other comes, and each partition has to be archived on within a
bounded time. In the end the checker looks at everything. A run with a broken promise prints its history,
keeps its directory, and ends with 1. SIGTERM and SIGINT end a run in order: no process and no mount stays,
and the history is printed. The schedule of a seed is always the same; the moments within it are not, as the
parts are real.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import math
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from aiokafka.errors import KafkaError

from tests.support.cluster import CLUSTER_PROPERTIES, DaemonsBeside, cluster_admin
from tests.support.daemon import endpoint_properties
from tests.support.fault_proxy import fault_proxy
from tests.support.gateways import LISTENER
from tests.support.kafka import KafkaCluster, Listener
from tests.support.ports import free_ports
from tests.support.s3_bucket import S3Bucket
from tests.support.seaweedfs import running_seaweedfs
from tests.support.small_disks import small_disk_at
from tests.support.writers import Writers
from tests.swarm import checker
from tests.swarm.ending import cancelled_by_signals, in_thread
from tests.swarm.faults import FULL_NODE, LOCAL_BYTES, Parts, topics
from tests.swarm.operators import KINDS
from tests.swarm.report import Report
from tests.swarm.schedule import schedule
from tests.swarm.transactions import (
    GROUP,
    TRANSACTION_PARTITIONS,
    TRANSACTIONS,
    CommittedReader,
    TransactionalWriter,
    all_broken_transactions,
    broken_group,
)
from tests.swarm.workload import PARTITIONS, TOPIC, Reader
from tieringd.errors import TieringError
from tieringd.formats.manifest_codec import decode_manifest

if TYPE_CHECKING:
    import signal
    from collections.abc import AsyncIterator, Sequence
    from types import TracebackType

    from tests.swarm.faults import Fault
    from tests.swarm.schedule import Step

_BUCKET = _PREFIX = "swarm"
_PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
_RECOVERY_SECONDS = 120
_PROOF_SECONDS = 15
_STATE_BYTES = 256 << 20
_TOPIC = {
    "segment.bytes": str(1 << 20),
    "retention.ms": "-1",
    "file.delete.delay.ms": "100",
    "min.insync.replicas": "2",
}
_CLUSTER = CLUSTER_PROPERTIES | {
    # Groups and transactions survive the death of one broker.
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
}
_PLACES = ([1, 2, 3], [2, 3, 1], [3, 1, 2])


@dataclass
class Swarm:
    """The running parts, and what is known of them."""

    parts: Parts
    report: Report
    begun: float
    manifest_keys: dict[int, str] = field(default_factory=dict)
    """Where the manifest of each partition is, once it is known."""

    def note(self, what: str) -> None:
        """Add a line to the history, and print it."""
        line = f"{time.monotonic() - self.begun:8.1f} s  {what}"
        self.report.history.append(line)
        print(line, flush=True)  # noqa: T201 the history is for a reader

    async def endure(self, step: Step) -> None:
        """Let one fault come and go, and wait until each partition is archived on."""
        fault: Fault = KINDS[step.kind](self.parts, step)
        self.note(f"{step.number}: {step.kind} (node {step.node_id}, partition {step.partition})")
        meanwhile = None
        try:
            proof = await self._happen(fault, step.seconds)
            if proof and fault.archives_meanwhile:
                meanwhile = await self.until_archived_on(fault)
                self.note(f"{step.number}: archived on meanwhile, after {meanwhile:.1f} s")
        except Exception:
            await fault.heal()
            raise
        # A cancellation heals nothing: all parts end, and some may only have begun to be healed.
        await fault.heal()
        self.note(f"{step.number}: healed; {proof or 'no effect'}")
        seconds = await self.until_archived_on()
        await self.until_in_sync()
        self.note(f"{step.number}: archived on after {seconds:.1f} s")
        self.report.add(step, proof, seconds, meanwhile)

    async def _happen(self, fault: Fault, seconds: float) -> str:
        await fault.inject()
        await asyncio.sleep(seconds)
        deadline = time.monotonic() + _PROOF_SECONDS
        proof = await fault.proof()
        while not proof and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            proof = await fault.proof()
        return proof

    async def until_archived_on(self, fault: Fault | None = None) -> float:
        """
        Return how long it takes until the archive of each partition has grown.

        While *fault* lasts, a partition whose leader has no daemon is left out.
        """
        begun = time.monotonic()
        before = await in_thread(self._ends)
        while True:
            now = await in_thread(self._ends)
            stuck = {number for number in range(PARTITIONS) if now.get(number, 0) <= before.get(number, 0)}
            if stuck and fault is not None:
                stuck -= await self._without_daemon(fault)
            if not stuck:
                return time.monotonic() - begun
            if time.monotonic() - begun > _RECOVERY_SECONDS:
                raise TimeoutError(f"after {_RECOVERY_SECONDS} s the archives of {stuck} are still at {now}")
            await asyncio.sleep(0.3)

    async def _without_daemon(self, fault: Fault) -> set[int]:
        """Return the partitions that nothing can archive while a fault lasts."""
        idle = fault.idle_daemons()
        if not idle:
            return set()
        async with cluster_admin(self.parts.cluster) as admin:
            leaders = await admin.partitions(TOPIC)
        return {number for number, one in leaders.items() if one.leader in idle}

    async def until_in_sync(self) -> None:
        """Return when all replicas are in sync."""
        async with cluster_admin(self.parts.cluster) as admin:
            for number in range(PARTITIONS):
                await admin.until_in_sync(TOPIC, number=number)

    def _ends(self) -> dict[int, int]:
        if len(self.manifest_keys) < PARTITIONS:
            # The bucket is listed only in the beginning: a listing takes longer with each object.
            found = [key for key in self.parts.objects.keys() if key.endswith("/manifest")]  # noqa: SIM118 a method
            for number in range(PARTITIONS):
                for key in found:
                    if f"/meta/{TOPIC}/{number}_" in key:
                        self.manifest_keys[number] = key
        return {
            number: decode_manifest(self.parts.objects.read(key)).next_offset
            for number, key in self.manifest_keys.items()
        }


class Clients:
    """All clients of a swarm. They begin in a `with` block, and the block's end cancels what still runs."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._writers = Writers(parts.cluster, {TOPIC: PARTITIONS})
        self._transactions = TransactionalWriter(parts.cluster)
        self._readers = [
            Reader("the reader through the gateways", parts.gateways, self._writers, reads_archive=True),
            Reader(
                "the reader past the gateways", parts.cluster.bootstrap, self._writers, reads_archive=False
            ),
        ]
        self._group = CommittedReader("the group", parts.gateways, parts.cluster.bootstrap, GROUP)

    def __enter__(self) -> Self:
        self._writers.__enter__()
        self._transacting = asyncio.create_task(self._transactions.run())
        self._reading = [asyncio.create_task(one.run()) for one in (*self._readers, self._group)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in (self._transacting, *self._reading):
            task.cancel()
        self._writers.stop()

    async def stop_writing(self) -> None:
        """Stop the producers, and wait for their last answers."""
        self._transactions.is_stopping = True
        await in_thread(self._writers.stop)
        await self._transacting

    async def broken(self) -> list[str]:
        """Return each broken promise, after the producers have stopped."""
        cluster, config = self._parts.cluster, self._parts.daemons.config()
        gateways = self._parts.gateways
        return [
            *await all_broken_transactions(self._transactions, self._group),
            *await checker.all_broken(self._writers, self._readers, gateways, cluster.bootstrap, config),
        ]

    async def stop_reading(self) -> list[str]:
        """Stop the readers, and return what was wrong with how they ended or where their group is."""
        for task in self._reading:
            task.cancel()
        outcomes = await asyncio.gather(*self._reading, return_exceptions=True)
        ended = [f"a reader ended: {one!r}" for one in outcomes if isinstance(one, Exception)]
        try:
            return [*ended, *await broken_group(self._group)]
        except KafkaError as error:
            return [*ended, f"the group cannot be asked where it is: {error!r}"]

    def tell(self, report: Report) -> None:
        """Add up what was done."""
        report.records = sum(len(one.acknowledged) for one in self._writers.writers)
        report.transactions = Counter(one.value for one in self._transactions.outcomes)
        report.commits, report.members = self._group.commits, self._group.members
        report.stalls = Counter(self._group.stalls)
        report.told, report.untold = self._group.told, self._group.untold


@asynccontextmanager
async def _running_parts(directory: Path, broken: list[str]) -> AsyncIterator[Parts]:
    """Run store, proxy, brokers and daemons under *directory* in the context."""
    async with AsyncExitStack() as stack:
        store = stack.enter_context(running_seaweedfs(directory / "store"))
        store.create_bucket(_BUCKET)
        proxy = await stack.enter_async_context(fault_proxy(store.endpoint_url))
        ports = tuple(free_ports(3))
        cluster = await KafkaCluster.start(
            directory / "brokers",
            brokers=3,
            heap_mib=384,
            properties=_CLUSTER,
            listeners=[Listener(LISTENER, advertised_ports=ports)],
        )
        stack.push_async_callback(cluster.kill)
        stack.enter_context(small_disk_at(directory / f"state-{FULL_NODE}", _STATE_BYTES))
        changes = {**endpoint_properties(proxy.url), "topics": topics(LOCAL_BYTES[0])}
        daemons = DaemonsBeside(cluster, store, directory, bucket=_BUCKET, prefix=_PREFIX, changes=changes)
        for node, port in zip(cluster.brokers, ports, strict=True):
            behind = f"127.0.0.1:{node.listener_ports[LISTENER]}"
            gateway = {"enabled": True, "host": "127.0.0.1", "port": port, "broker": behind}
            daemons.change(node.node_id, gateway=gateway)
        stack.enter_context(daemons)
        await cluster.create_topic(TOPIC, replicas=_PLACES, configs=_TOPIC)
        await cluster.create_topic(TRANSACTIONS, replicas=_PLACES[:TRANSACTION_PARTITIONS], configs=_TOPIC)
        await in_thread(daemons.launch)
        gateways = ",".join(f"127.0.0.1:{port}" for port in ports)
        yield Parts(
            cluster,
            daemons,
            store,
            proxy,
            state=lambda node_id: directory / f"state-{node_id}",
            gateways=gateways,
            objects=stack.enter_context(S3Bucket(store.endpoint_url, bucket=_BUCKET, prefix=_PREFIX)),
            broken=broken,
        )


async def swarm(
    directory: Path,
    report: Report,
    *,
    kinds: Sequence[str],
    seconds: float = math.inf,
    faults: int | None = None,
) -> None:
    """
    Run a swarm under *directory*: for some seconds, or for a number of faults.

    *report* is filled while it runs, and has what was broken. A cancelled swarm ends all of its parts.
    """
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(_running_parts(directory, report.broken))
        clients = stack.enter_context(Clients(parts))
        running = Swarm(parts, report, time.monotonic())
        await running.until_archived_on()
        before = await in_thread(checker.resources, parts.daemons)
        has_recovered = True
        try:
            for step in itertools.islice(schedule(report.seed, kinds), faults):
                if time.monotonic() - running.begun > seconds:
                    break
                await running.endure(step)
        except (AssertionError, OSError, RuntimeError, subprocess.TimeoutExpired, TieringError) as error:
            traceback.print_exc()
            has_recovered = False
            report.broken.append(f"a fault was not recovered from: {error}")
        report.hours = (time.monotonic() - running.begun) / 3600
        await clients.stop_writing()
        clients.tell(report)
        running.note(f"the producers have stopped: {report.records} records are acknowledged")
        if has_recovered:
            report.broken += await clients.broken()
        report.broken += await clients.stop_reading()
        if has_recovered:
            after = await checker.until_settled(parts.daemons, before)
            for node_id, found in after.items():
                running.note(f"the daemon of node {node_id} had {before[node_id]}, and has {found}")
            report.broken += checker.grown(before, after)
        clients.tell(report)
        for event in parts.daemons.events("archiver failed; starting it anew"):
            report.broken.append(f"an archiver failed: {event}")


async def _until_signal(
    options: argparse.Namespace, directory: Path, report: Report
) -> signal.Signals | None:
    """Run a swarm, and return the signal that has ended it early."""
    kinds = options.kind or list(KINDS)
    with cancelled_by_signals() as received:
        try:
            await swarm(directory, report, kinds=kinds, seconds=options.minutes * 60, faults=options.faults)
        except asyncio.CancelledError:
            if not received:
                raise
    return received[0] if received else None


def main() -> int:
    """Run a swarm, print its report, and return the exit code: 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.swarm.run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument(
        "--faults", type=int, help="end after this many faults, if the time has not come before"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind; may be repeated")
    parser.add_argument("--write", action="store_true", help="write the report into docs/reliability.md")
    options = parser.parse_args()
    # The clients tell each broker that is away, many times a second.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    directory = Path(tempfile.mkdtemp(prefix="tieringd-swarm-"))
    report = Report(options.seed)
    try:
        ended_by = asyncio.run(_until_signal(options, directory, report))
    except BaseException:
        print("\n".join(["", *report.history, f"logs: {directory}"]))  # noqa: T201 the result
        raise
    print(report.markdown())  # noqa: T201 the result
    if report.told:
        print("\n".join(["", "Clients that did not go on:", *report.told]))  # noqa: T201 the result
    if ended_by is not None:
        print("\n".join(["", *report.history, f"ended by {ended_by.name} before all was checked"]))  # noqa: T201
    elif options.write:
        report.write_into(_PAGE)
    if report.broken:
        print("\n".join(["", *report.history, "", "BROKEN:", *report.broken, f"logs: {directory}"]))  # noqa: T201
        return 1
    shutil.rmtree(directory)
    return 0 if ended_by is None else 128 + ended_by


if __name__ == "__main__":
    sys.exit(main())
