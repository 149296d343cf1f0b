"""
Restart the tasks of a process that end by a defect of the program.

An error of our own tree (`errors`) that leaves a task is meant to end it: an operator must act. Any other
exception is a defect, which may concern one message or one partition only. It must not end the process, nor
leave the process without one of its parts. So the task is logged, counted, and started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from tieringd.errors import TieringError

log = structlog.get_logger(__name__)

RESTART_SECONDS: Final = 1.0
"""The pause before a task is started again. A defect that stays must not take the whole processor."""


async def restarted(
    task: str,
    run: Callable[[], Awaitable[None]],
    *,
    on_failure: Callable[[str], None],
    pause_seconds: float = RESTART_SECONDS,
) -> None:
    """
    Run *run* until it returns, is cancelled or raises an error of ours; start it again after any other error.

    *on_failure* gets the task's name after each such error, for a metric.

    Raises:
        TieringError: The task itself raised it.
    """
    while True:
        try:
            await run()
        except TieringError:
            raise
        except Exception:
            # The boundary between tasks: the other tasks go on.
            on_failure(task)
            log.exception("a task failed by a defect; it is started again", task=task)
            await asyncio.sleep(pause_seconds)
        else:
            return
