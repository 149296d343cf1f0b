"""
Spare Spark's Python workers garbage collections that find nothing.

Spark reuses workers for many tasks, and runs a garbage collection between tasks. A collection visits every
object of the loaded modules, hundreds of thousands, and took as long as decoding half a million records.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_REUSED = "SPARK_REUSE_WORKER"
"""A variable that Spark sets in workers that it reuses."""


def spare_collections() -> None:
    """
    Exclude all objects that exist now from later collections, if this process is a reused worker.

    Call this after all modules that a task needs are loaded. Only the first call in a process has an effect.
    """
    if _REUSED in os.environ:
        _freeze_once()


@contextmanager
def without_collections() -> Iterator[None]:
    """
    Do the work of the context without garbage collections.

    For work that makes many objects which stay, such as a large plan: each collection visits all of them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _freeze_once() -> None:
    gc.collect()
    gc.freeze()
