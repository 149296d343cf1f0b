"""
Memory that threads do not scatter.

glibc gives threads heaps of their own, up to eight for each processor, and gives little of them back.
Uploads run in many threads, one after the other in each of those heaps: at its worst a daemon
held 20 MiB that nobody used. Two heaps are enough: what is large does not come from them.
"""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8  # From malloc.h.
_ARENAS = 2


def keep_arenas_few() -> bool:
    """Bound the heaps, before threads have made their own; return whether this C library can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, _ARENAS) == 1
