"""The seeds that a run tries, and the run of one seed."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

from tests.fakes.virtual_loop import run_virtual

CHUNKS = 10


def replay(seed: int) -> str:
    """Return the environment in which a seed has the same history again: sets have an order of their own."""
    return f"PYTHONHASHSEED={os.environ.get('PYTHONHASHSEED', '<as it was>')} TIERINGD_SEED={seed}"


def seeds_of(chunk: int, *, usual: int, share: float) -> range:
    """
    Return the seeds of one of the chunks of a world that has *usual* seeds.

    `TIERINGD_SEEDS` is the number of all worlds together, of which this one gets its *share*;
    `TIERINGD_SEED` names a single one.
    """
    one = os.environ.get("TIERINGD_SEED")
    if one is not None:
        return range(int(one), int(one) + 1) if chunk == 0 else range(0)
    count = os.environ.get("TIERINGD_SEEDS")
    total = usual if count is None else max(1, round(int(count) * share))
    return range(chunk * total // CHUNKS, (chunk + 1) * total // CHUNKS)


class History(Protocol):
    """A simulated history."""

    @property
    def events(self) -> Sequence[Any]:
        """Return what has happened so far."""

    def run(self) -> Coroutine[Any, Any, None]:
        """Run the history; fail at the first promise that is broken."""


def run_history(history: History, seed: int, quiet: Sequence[Mapping[str, Any]], *, name: str) -> None:
    """
    Run a history on a virtual clock. A failure prints how to run it again.

    *quiet* has the log lines of the run: no archiver may have failed by a defect.
    """
    try:
        run_virtual(history.run(), seed=seed)
    except BaseException:
        print(f"{name} fails after {len(history.events)} events; {replay(seed)} runs it alone")  # noqa: T201 - pytest shows it with the failure
        raise
    assert not [each for each in quiet if each["event"].startswith("archiver failed")], seed
