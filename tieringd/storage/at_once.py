"""
Parts of one whole, a few at a time: all of them, or the first error.

It is for parts that are of no use alone, as those of one object, or of one look at a bucket. What stands
by itself is not given up for another's error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

PARTS_AT_ONCE = 4


async def at_once(
    parts: Sequence[T], send: Callable[[T], Awaitable[R]], *, count: int = PARTS_AT_ONCE
) -> list[R]:
    """Return what *send* gives for each part, in order. *count* are sent at once; one failure ends all."""
    waiting = iter(enumerate(parts))
    results: dict[int, R] = {}

    async def work() -> None:
        for number, part in waiting:
            results[number] = await send(part)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(count, len(parts))):
                group.create_task(work())
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        # Its cause has the server's answer, which tells callers more than the class does.
        raise first from first.__cause__
    return [results[number] for number in range(len(parts))]
