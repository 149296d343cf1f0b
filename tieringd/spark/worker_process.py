"""
What a Python worker of Spark's is spared: looking for garbage among all that it has imported.

Spark keeps workers for task after task, and has each collect its garbage in between. That walks over every
module that is loaded, hundreds of thousands of objects, and took as long as decoding half a million records.
"""

from __future__ import annotations

import gc
import os
from functools import cache

_REUSED = "SPARK_REUSE_WORKER"
"""Set by Spark in workers that go on to a next task."""


def spare_collections() -> None:
    """
    Leave what is loaded by now out of later collections, if this is a worker that goes on to a next task.

    Call it when all is loaded that tasks of this kind need; the first call in a process is the one that
    counts.
    """
    if _REUSED in os.environ:
        _freeze_once()


@cache
def _freeze_once() -> None:
    gc.collect()
    gc.freeze()
