"""
A deterministic event loop on a virtual clock.

When nothing is ready, the clock jumps to the next timer. Work for a thread runs on the loop instead, at a
time that the seed decides. With real threads, as in looptime, no two runs of a simulation would be equal.
As with a thread, such work continues if the task that waits for it is cancelled.
"""

from __future__ import annotations

import asyncio
import selectors
from functools import wraps
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor

_THREAD_SECONDS_MAX = 0.05


class _JumpingSelector(selectors.DefaultSelector):
    """Passes the time of every wait to the loop's clock."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # One file is the loop's own pipe, through which only other threads wake it: there are none. Asking
        # the system for nothing would be a request per turn of the loop.
        events = super().select(0) if len(self.get_map()) > 1 else []
        if not events:
            if timeout is None:
                raise RuntimeError("the simulation waits for something that never comes")
            self.loop.pass_time(timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """One simulation's loop."""

    def __init__(self, seed: int) -> None:
        selector = _JumpingSelector()
        selector.loop = self
        self._now = 0.0
        self._random = Random(seed)
        super().__init__(selector)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def pass_time(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now += max(0.0, seconds)

    def run_in_executor(
        self, executor: Executor | None, function: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        """Run *function* a little later, even if its caller is cancelled."""
        future = self.create_future()

        def work() -> None:
            try:
                result = function(*arguments)
            except Exception as error:  # noqa: BLE001 - like a thread, it passes on any error
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        self.call_later(self._random.uniform(0, _THREAD_SECONDS_MAX), work)
        return future


def run_virtual(main: Coroutine[Any, Any, Any], *, seed: int) -> Any:
    """Run *main* to its end on a loop of its own."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed)) as runner:
        return runner.run(main)


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make an asynchronous test run on a virtual clock, so that sleeps and threads take no real time."""

    @wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        run_virtual(test(*arguments, **options), seed=0)

    return run
