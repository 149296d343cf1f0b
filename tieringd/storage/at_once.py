"""
Process the parts of one whole, a few at a time: return all results, or raise the first error.

Use this for parts that are useless alone, such as the parts of one object or of one listing. Independent
work should not be cancelled because another item failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

PARTS_AT_ONCE = 4


async def at_once(
    parts: Sequence[T], send: Callable[[T], Awaitable[R]], *, count: int = PARTS_AT_ONCE
) -> list[R]:
    """
    Return what *send* returns for each part, in order; one failure cancels all.

    At most *count* parts are sent at once.
    """
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
        # Its cause holds the server's response, which tells callers more than the class does.
        raise first from first.__cause__
    return [results[number] for number in range(len(parts))]


async def cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel *tasks*, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
