"""
Exclude the imported modules from the garbage collections of Spark's Python workers.

Spark reuses workers for many tasks, and runs a garbage collection between tasks. A collection visits every
object of the loaded modules, hundreds of thousands, and took as long as decoding half a million records.
"""

from __future__ import annotations

import gc
import os
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


@cache
def _freeze_once() -> None:
    gc.collect()
    gc.freeze()
