"""Compile functions to machine code with numba, and cache the result on disk where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import structlog
from numba.extending import intrinsic, register_jitable

F = TypeVar("F")
R = TypeVar("R")

log = structlog.get_logger(__name__)


def instruction(generator: Callable[..., Any]) -> Callable[..., Any]:
    """Make the instructions that *generator* generates callable from compiled code."""
    made: Callable[..., Any] = intrinsic(generator)
    return made


def helper(function: F) -> F:
    """Make *function* callable from compiled code."""
    register_jitable(function)
    return function


def compiled(function: Callable[..., R], *example: object) -> Callable[..., R]:
    """
    Return *function* compiled for arguments of the types of *example*. It is called once with *example*.

    Numba caches the code in NUMBA_CACHE_DIR, beside the function's file, or in the user's cache directory.
    The first process compiles; later ones load the code. Without a writable directory every process
    compiles. A cache file that a full disk or a power loss has cut short is replaced.
    """
    try:
        return _cached(function, example)
    except (OSError, RuntimeError):
        # Numba finds no writable directory, or the disk is full. Compiling without a cache costs only time.
        made: Callable[..., R] = numba.njit(nogil=True)(function)
        made(*example)
        return made


def _cached(function: Callable[..., R], example: tuple[object, ...]) -> Callable[..., R]:
    made = numba.njit(cache=True, nogil=True)(function)
    try:
        made(*example)
    except (OSError, RuntimeError):
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises anything
        log.warning("cached machine code cannot be used; it is compiled again", error=repr(error))
        made.recompile()  # Nothing is compiled yet: this empties the cache.
        made(*example)
    return cast("Callable[..., R]", made)
