"""
What Python 3.11.3 mended in asyncio's timeouts, for older ones: Debian 12 has 3.11.2.

Before, a timeout that ran out raised CancelledError in place of TimeoutError in a task that had been asked to
cancel earlier. A task group that failed leaves such a request behind, so a retry after one would end its
caller. Libraries use the same class, so the class itself is mended.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any


def mend_timeouts() -> None:
    """Have a timeout that runs out raise TimeoutError, unless its task was asked to cancel since it began."""
    mended: Any = asyncio.Timeout
    enter, leave = mended.__aenter__, mended.__aexit__

    async def enter_and_count(self: Any) -> Any:
        task = asyncio.current_task()
        self.requests_before = task.cancelling() if task is not None else 0
        return await enter(self)

    async def leave_by_count(
        self: Any,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> Any:
        ran_out = self.expired()
        # It takes back the timeout's own request, and raises TimeoutError if no other is left.
        left = await leave(self, exc_type, exc_val, exc_tb)
        task = asyncio.current_task()
        is_cut_off = ran_out and exc_type is asyncio.CancelledError
        if is_cut_off and task is not None and task.cancelling() <= self.requests_before:
            raise TimeoutError from exc_val
        return left

    mended.__aenter__, mended.__aexit__ = enter_and_count, leave_by_count
