"""
The number of heaps of a process with threads.

glibc gives threads heaps of their own, up to eight for each processor, and returns little of them. Uploads
run in many threads, one after the other in each of those heaps: at its worst a daemon held 20 MiB without
use. Two heaps are enough: large blocks do not come from them.
"""

from __future__ import annotations

import ctypes
from typing import Final

_M_ARENA_MAX: Final = -8  # From malloc.h.
_ARENAS: Final = 2


def keep_arenas_few() -> bool:
    """Limit the number of heaps, before threads have made their own; return whether the C library can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, _ARENAS) == 1
