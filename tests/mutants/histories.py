"""
The simulated worlds by name, and a way to run their histories without pytest until one fails.

    python -m tests.mutants.histories cluster:17,0-399 broker:0-599

runs the histories in this order and prints one line of JSON: the world and seed of the first history that
failed, with the reason, or how many histories held.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import structlog

from tests.fakes.virtual_loop import run_virtual
from tests.simulation.cluster import Cluster
from tests.simulation.compacted import Compacted
from tests.simulation.groups import Groups
from tests.simulation.gust import Gust
from tests.simulation.newer_groups import NewerGroups
from tests.simulation.pair import Pair
from tests.simulation.squall import Squall
from tests.simulation.storm import Storm
from tests.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

HISTORY_CPU_SECONDS = 60.0
"""A history that takes longer goes round in circles: it counts as one that fails."""


class Hung(SystemExit):
    """The history used up its time. No task handles a SystemExit, so it ends the loop."""


@dataclass(frozen=True)
class Failure:
    """What a history ended with."""

    world: str
    seed: int
    reason: str
    events: int


def _broker_world(seed: int, root: Path) -> World:
    root.mkdir()
    return World(seed, root)


def _pair_world(seed: int, root: Path) -> World:
    root.mkdir()
    return Pair(seed, root)


WORLDS: dict[str, Callable[[int, Path], Any]] = {
    "cluster": Cluster,
    "storm": Storm,
    "squall": Squall,
    "gust": Gust,
    "groups": Groups,
    "newer_groups": NewerGroups,
    "compacted": Compacted,
    "broker": _broker_world,
    "pair": _pair_world,
}
"""How each world is made of a seed and an empty directory."""


def parse_histories(texts: list[str]) -> Iterator[tuple[str, int]]:
    """Yield world and seed of each history that *texts* name, each once: `cluster:17,0-399`."""
    seen: set[tuple[str, int]] = set()
    for text in texts:
        world, _, ranges = text.partition(":")
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            for seed in range(int(first), int(last or first) + 1):
                if (world, seed) not in seen:
                    seen.add((world, seed))
                    yield world, seed


_simulated_seconds: list[float] = []
"""How long each history of this process was on its own clock."""


async def _timed(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    finally:
        _simulated_seconds.append(asyncio.get_running_loop().time())


def run_history(world: str, seed: int, root: Path) -> Failure | None:
    """Run one history under *root*; return how it failed, or None where every promise held."""
    made: Any = None
    logs = structlog.testing.LogCapture()
    structlog.configure(processors=[logs])
    signal.setitimer(signal.ITIMER_PROF, HISTORY_CPU_SECONDS)
    try:
        made = WORLDS[world](seed, root)
        run_virtual(_timed(made.run()), seed=seed)
        for entry in logs.entries:
            assert not entry["event"].startswith("archiver failed"), f"{entry}"
    except (Exception, Hung) as error:  # noqa: BLE001 - whatever it is, the history has failed
        reason = f"{type(error).__name__}: {error}"
        return Failure(world, seed, reason, len(getattr(made, "events", ())))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        structlog.reset_defaults()
        rmtree(root, ignore_errors=True)
    return None


def main(arguments: list[str]) -> int:
    """Run the histories that *arguments* name until one fails; return 1 where one did."""
    logging.disable()
    # At its usual pace the collector is a tenth of what a history costs.
    gc.set_threshold(50_000, *gc.get_threshold()[1:])
    signal.signal(signal.SIGPROF, _hang)
    began, count = time.process_time(), 0
    failure: Failure | None = None
    with TemporaryDirectory(prefix="histories-", dir=_fast_directory()) as directory:
        for count, (world, seed) in enumerate(parse_histories(arguments), 1):  # noqa: B007 - the count is told
            failure = run_history(world, seed, Path(directory) / f"{world}-{seed}")
            if failure is not None:
                break
    found = {
        "histories": count,
        "cpu_seconds": round(time.process_time() - began, 1),
        "simulated_hours": round(sum(_simulated_seconds) / 3600, 2),
        "failure": None if failure is None else failure.__dict__,
    }
    print(json.dumps(found))  # noqa: T201 - it is the answer
    return int(failure is not None)


def _fast_directory() -> str | None:
    """Return a directory in memory, where there is one: histories write many small files."""
    memory = Path("/dev/shm")
    return str(memory) if os.access(memory, os.W_OK) else None


def _hang(*_: object) -> None:
    raise Hung("the history does not end")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
