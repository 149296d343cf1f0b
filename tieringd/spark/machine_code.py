"""Functions as machine code, from numba's cache where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

R = TypeVar("R")


def compiled(function: Callable[..., R], *example: object) -> Callable[..., R]:
    """
    Return *function* as machine code for arguments of the types of *example*, with which it is called once.

    It comes from numba's cache: where NUMBA_CACHE_DIR says, or beside the function's file, or in the user's
    cache directory. The first process compiles it; so does every one where there is nowhere to keep it.
    """
    try:
        return _compiled(function, example, is_cached=True)
    except (OSError, RuntimeError):
        # Numba knows no directory that can be written, or its disk is full: only time is lost.
        return _compiled(function, example, is_cached=False)


def _compiled(
    function: Callable[..., R], example: tuple[object, ...], *, is_cached: bool
) -> Callable[..., R]:
    made: Callable[..., R] = numba.njit(cache=is_cached, nogil=True)(function)
    made(*example)
    return made
