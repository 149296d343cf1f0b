"""Compile functions to machine code with numba, and cache the result on disk where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

R = TypeVar("R")


def compiled(function: Callable[..., R], *example: object) -> Callable[..., R]:
    """
    Return *function* compiled for arguments of the types of *example*. It is called once with *example*.

    Numba caches the code in NUMBA_CACHE_DIR, beside the function's file, or in the user's cache directory.
    The first process compiles; later ones load the code. Without a writable directory every process
    compiles.
    """
    try:
        return _compiled(function, example, is_cached=True)
    except (OSError, RuntimeError):
        # Numba finds no writable directory, or the disk is full. Compiling without a cache costs only time.
        return _compiled(function, example, is_cached=False)


def _compiled(
    function: Callable[..., R], example: tuple[object, ...], *, is_cached: bool
) -> Callable[..., R]:
    made: Callable[..., R] = numba.njit(cache=is_cached, nogil=True)(function)
    made(*example)
    return made
