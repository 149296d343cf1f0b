"""
Garbage collections that do not stop the loop.

What the start leaves behind, the cloud's SDK most of all, is some 170,000 objects. They stay for as
long as the daemon does, and a full collection walks over all of them: the loop stands still for a
fifth of a second, every few minutes. So they are left out.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def startup_objects_spared() -> Iterator[None]:
    """Leave the objects that are there now out of collections, for the time of the context."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
