"""
Full garbage collections that leave long-lived objects out, so that they do not stop the event loop.

A full collection walks over every object while all threads wait. The start leaves some 170,000 objects, most
of them of the cloud's SDK, and ten thousand partitions leave a million: a third of a second each time. Nearly
all of them stay as long as the daemon does.

An object that survives a full collection is reachable. `long_lived_objects_spared` excludes the survivors
of a long collection from the next ones ("freezes" them). An excluded object is still freed by its reference
count. An excluded object that becomes part of an unreachable cycle stays until a full collection looks at
everything again: the first one after `EVERYTHING_EVERY_SECONDS`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

LONG_COLLECTION_SECONDS = 0.02
EVERYTHING_EVERY_SECONDS = 600.0
_FULL = 2


@contextmanager
def long_lived_objects_spared(clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """
    Exclude long-lived objects from full collections, for the time of the context.

    All objects take part again afterwards, except where the caller had excluded some already: the interpreter
    does not tell these apart, so they all stay excluded.

    Args:
        clock: Returns seconds from any fixed point.
    """
    are_others_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    spared = _Spared(clock)
    gc.callbacks.append(spared)
    try:
        yield
    finally:
        gc.callbacks.remove(spared)
        if not are_others_frozen:
            gc.unfreeze()


class _Spared:
    """The interpreter calls it before and after each collection, in the thread that collects."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._everything_at = clock()

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        if info["generation"] != _FULL:
            return
        if phase == "start":
            self._began = self._clock()
            if self._began - self._everything_at >= EVERYTHING_EVERY_SECONDS:
                self._everything_at = self._began
                gc.unfreeze()
        elif self._clock() - self._began >= LONG_COLLECTION_SECONDS:
            gc.freeze()
