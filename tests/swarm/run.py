"""
Run a swarm: `make swarm MINUTES=10 SEED=1`.

    python -m tests.swarm.run [--minutes 10] [--seed 1] [--store s3] [--kind NAME ...] [--write]

Three real brokers with a daemon and a gateway beside each, and a store. Producers, readers and share
consumers run throughout. One fault after the other comes, and each partition has to be archived on within a
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
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.cluster import cluster_admin
from tests.swarm import checker
from tests.swarm.assembly import running_parts
from tests.swarm.clients import Clients
from tests.swarm.ending import cancelled_by_signals, in_thread
from tests.swarm.kinds import KINDS, kinds_of, slow
from tests.swarm.report import Report
from tests.swarm.schedule import schedule
from tests.swarm.stores import STORES
from tests.swarm.workload import PARTITIONS, TOPIC
from tieringd.errors import TieringError
from tieringd.formats.manifest_codec import decode_manifest

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence

    from tests.swarm.faults import Fault, Parts
    from tests.swarm.schedule import Step

_PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
_RECOVERY_SECONDS = 120
_PROOF_SECONDS = 60


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
        async with cluster_admin(self.parts.cluster, *fault.knowing_nodes()) as admin:
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
            found = [key for key in self.parts.store.objects.keys() if key.endswith("/manifest")]  # noqa: SIM118 a method
            for number in range(PARTITIONS):
                for key in found:
                    if f"/meta/{TOPIC}/{number}_" in key:
                        self.manifest_keys[number] = key
        return {
            number: decode_manifest(self.parts.store.objects.read(key)).next_offset
            for number, key in self.manifest_keys.items()
        }


async def swarm(
    directory: Path,
    report: Report,
    *,
    kinds: Sequence[str],
    store: str = "s3",
    seconds: float = math.inf,
    faults: int | None = None,
) -> None:
    """
    Run a swarm under *directory*: for some seconds, or for a number of faults.

    *report* is filled while it runs, and has what was broken. A cancelled swarm ends all of its parts.
    """
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(running_parts(directory, store, report.broken))
        clients = await stack.enter_async_context(Clients(parts))
        running = Swarm(parts, report, time.monotonic())
        await running.until_archived_on()
        before = await in_thread(checker.resources, parts.daemons)
        has_recovered = True
        try:
            for step in itertools.islice(schedule(report.seed, kinds, slow(kinds)), faults):
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
    kinds = options.kind or kinds_of(options.store)
    with cancelled_by_signals() as received:
        try:
            await swarm(
                directory,
                report,
                kinds=kinds,
                store=options.store,
                seconds=options.minutes * 60,
                faults=options.faults,
            )
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
    parser.add_argument("--store", choices=STORES, default="s3")
    options = parser.parse_args()
    if wrong := set(options.kind or ()) - set(kinds_of(options.store)):
        parser.error(f"a store of the kind {options.store} has no such faults: {', '.join(sorted(wrong))}")
    # The clients tell each broker that is away, many times a second.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    directory = Path(tempfile.mkdtemp(prefix="tieringd-swarm-"))
    report = Report(options.seed, options.store)
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
