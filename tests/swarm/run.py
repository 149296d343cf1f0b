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
import math
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

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
from tests.swarm.faults import FULL_NODE, KINDS, LOCAL_BYTES, Parts, topics
from tests.swarm.report import Report
from tests.swarm.schedule import schedule
from tests.swarm.workload import PARTITIONS, TOPIC, Reader
from tieringd.errors import TieringError
from tieringd.formats.manifest_codec import decode_manifest

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence

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
_PLACES = ([1, 2, 3], [2, 3, 1], [3, 1, 2])


@dataclass
class Swarm:
    """The running parts, and what is known of them."""

    parts: Parts
    objects: S3Bucket
    writers: Writers
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
        try:
            proof = await self._happen(fault, step.seconds)
        except Exception:
            await fault.heal()
            raise
        # A cancellation heals nothing: all parts end, and some may only have begun to be healed.
        await fault.heal()
        healed = time.monotonic()
        self.note(f"{step.number}: healed; {proof or 'no effect'}")
        await self.until_archived_on()
        seconds = time.monotonic() - healed
        self.note(f"{step.number}: archived on after {seconds:.1f} s")
        self.report.add(step, proof, seconds)

    async def _happen(self, fault: Fault, seconds: float) -> str:
        await fault.inject()
        await asyncio.sleep(seconds)
        deadline = time.monotonic() + _PROOF_SECONDS
        proof = await fault.proof()
        while not proof and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            proof = await fault.proof()
        return proof

    async def until_archived_on(self) -> None:
        """Return when the archive of each partition has grown, and all replicas are in sync."""
        before = await in_thread(self._ends)
        deadline = time.monotonic() + _RECOVERY_SECONDS
        while True:
            now = await in_thread(self._ends)
            stuck = [number for number in range(PARTITIONS) if now.get(number, 0) <= before.get(number, 0)]
            if not stuck:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {_RECOVERY_SECONDS} s the archives of {stuck} are still at {now}")
            await asyncio.sleep(0.3)
        async with cluster_admin(self.parts.cluster) as admin:
            for number in range(PARTITIONS):
                await admin.until_in_sync(TOPIC, number=number)

    def _ends(self) -> dict[int, int]:
        if len(self.manifest_keys) < PARTITIONS:
            # The bucket is listed only in the beginning: a listing takes longer with each object.
            found = [key for key in self.objects.keys() if key.endswith("/manifest")]  # noqa: SIM118 a method
            for number in range(PARTITIONS):
                for key in found:
                    if f"/meta/{TOPIC}/{number}_" in key:
                        self.manifest_keys[number] = key
        return {
            number: decode_manifest(self.objects.read(key)).next_offset
            for number, key in self.manifest_keys.items()
        }


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
        store = stack.enter_context(running_seaweedfs(directory / "store"))
        store.create_bucket(_BUCKET)
        proxy = await stack.enter_async_context(fault_proxy(store.endpoint_url))
        ports = tuple(free_ports(3))
        cluster = await KafkaCluster.start(
            directory / "brokers",
            brokers=3,
            heap_mib=384,
            properties=CLUSTER_PROPERTIES,
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
        await in_thread(daemons.launch)
        objects = stack.enter_context(S3Bucket(store.endpoint_url, bucket=_BUCKET, prefix=_PREFIX))
        writers = stack.enter_context(Writers(cluster, {TOPIC: PARTITIONS}))
        gateways = ",".join(f"127.0.0.1:{port}" for port in ports)
        readers = [
            Reader("the reader through the gateways", gateways, writers, reads_archive=True),
            Reader("the reader past the gateways", cluster.bootstrap, writers, reads_archive=False),
        ]
        reading = [asyncio.create_task(reader.run()) for reader in readers]
        parts = Parts(cluster, daemons, store, proxy, lambda node_id: directory / f"state-{node_id}")
        running = Swarm(parts, objects, writers, report, time.monotonic())
        await running.until_archived_on()
        before = await in_thread(checker.resources, daemons)
        try:
            for step in itertools.islice(schedule(report.seed, kinds), faults):
                if time.monotonic() - running.begun > seconds:
                    break
                await running.endure(step)
        except (AssertionError, OSError, RuntimeError, subprocess.TimeoutExpired, TieringError) as error:
            traceback.print_exc()
            report.broken.append(f"a fault was not recovered from: {error}")
        report.hours = (time.monotonic() - running.begun) / 3600
        await in_thread(writers.stop)
        report.records = sum(len(one.acknowledged) for one in writers.writers)
        running.note(f"the producers have stopped: {report.records} records are acknowledged")
        if not report.broken:
            config = daemons.config()
            report.broken += await checker.all_broken(writers, readers, gateways, cluster.bootstrap, config)
            report.broken += checker.grown(before, await in_thread(checker.resources, daemons))
        for task in reading:
            task.cancel()
        for outcome in await asyncio.gather(*reading, return_exceptions=True):
            if isinstance(outcome, Exception):
                report.broken.append(f"a reader ended: {outcome!r}")
        for event in daemons.events("archiver failed; starting it anew"):
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
    directory = Path(tempfile.mkdtemp(prefix="tieringd-swarm-"))
    report = Report(options.seed)
    try:
        ended_by = asyncio.run(_until_signal(options, directory, report))
    except BaseException:
        print("\n".join(["", *report.history, f"logs: {directory}"]))  # noqa: T201 the result
        raise
    print(report.markdown())  # noqa: T201 the result
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
