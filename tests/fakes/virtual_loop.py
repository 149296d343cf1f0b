"""
A deterministic event loop on a virtual clock.

When nothing is ready, the clock jumps to the next timer. Work for a thread runs on the loop instead, at a
time that the seed decides. With real threads, as in looptime, no two runs of a simulation would be equal.
As with a thread, such work continues if the task that waits for it is cancelled.

A simulated history takes hundreds of thousands of turns of the loop, most of them for one timer. asyncio's
own timers are compared by a Python method, and each of its turns asks the selector. This loop has turns,
handles and timers of its own, and a sleep takes half the CPU. They do the same things in the same order, so a
seed has the history that it has with asyncio's.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from contextvars import copy_context
from functools import wraps
from random import Random
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor
    from contextvars import Context

_THREAD_SECONDS_MAX = 0.05
_LONGEST_JUMP_SECONDS = 24 * 3600.0
"""asyncio waits no longer than this in one turn."""
_KEEPS_CANCELLED_UP_TO = 100
"""With more timers than this, asyncio takes the cancelled ones out as soon as they are more than half."""


class _Call(asyncio.Handle):
    """A callback that is due. It keeps nothing for asyncio's debugging."""

    __slots__ = ()

    _args: Any
    _callback: Any
    _context: Context

    def __init__(
        self,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._source_traceback = None
        self._repr = None


class _Timer(float):
    """
    A callback that is due at this time, with the methods of `asyncio.TimerHandle`.

    It is a number, so that a heap compares two timers without a call.
    """

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_loop", "_scheduled")

    _args: Any
    _callback: Any
    _cancelled: bool
    _context: Context
    _loop: VirtualLoop
    _scheduled: bool

    def when(self) -> float:
        """Return the time when it is due, in seconds of the loop's clock."""
        return float(self)

    def cancelled(self) -> bool:
        """Say whether it was cancelled."""
        return self._cancelled

    def cancel(self) -> None:
        """Keep the callback from being called."""
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None
            if self._scheduled:
                self._loop.note_cancelled()


class VirtualLoop(asyncio.SelectorEventLoop):
    """One simulation's loop."""

    # asyncio's own, which its other methods use as well.
    _closed: bool
    _stopping: bool
    _clock_resolution: float
    _ready: deque[_Call | _Timer]
    _scheduled: list[_Timer]
    _timer_cancelled_count: int
    _process_events: Callable[[Any], None]

    def __init__(self, seed: int) -> None:
        self._now = 0.0
        self._random = Random(seed)
        selector = selectors.DefaultSelector()
        self._files = selector.get_map()
        self._select = selector.select
        super().__init__(selector)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def pass_time(self, seconds: float) -> None:
        """Move the clock forward, as it goes on while a host is suspended."""
        self._now += max(0.0, seconds)

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call *callback* in the next turn."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        call = _Call(callback, args, self, context)
        self._ready.append(call)
        return call

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call *callback* after *delay* seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call *callback* at a time of this loop's clock."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        # A constructor in Python would take as long as all of this.
        timer = _Timer(when)
        timer._callback = callback
        timer._args = args
        timer._loop = self
        timer._context = copy_context() if context is None else context
        timer._cancelled = False
        timer._scheduled = True
        heapq.heappush(self._scheduled, timer)
        return cast("asyncio.TimerHandle", timer)

    def note_cancelled(self) -> None:
        """Count a timer that was cancelled before it was due."""
        self._timer_cancelled_count += 1

    def _run_once(self) -> None:
        """Jump to the next timer if nothing is ready, and call what is due: one turn of the loop."""
        ready = self._ready
        self._drop_cancelled()
        scheduled = self._scheduled
        # One file is the loop's own pipe, through which only other threads wake it: there are none.
        if len(self._files) > 1:
            self._process_events(self._select(0))
        if not ready and not self._stopping:
            if not scheduled:
                raise RuntimeError("the simulation waits for something that never comes")
            self._now += min(max(0.0, scheduled[0] - self._now), _LONGEST_JUMP_SECONDS)
        due = self._now + self._clock_resolution
        while scheduled and scheduled[0] < due:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            ready.append(timer)
        # What these callbacks add comes in the next turn.
        for _ in range(len(ready)):
            call = ready.popleft()
            if call._cancelled:
                continue
            try:
                call._context.run(call._callback, *call._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - asyncio's own turn tells its handler of any error
                self.call_exception_handler(
                    {"message": f"Exception in callback {call._callback}", "exception": error}
                )

    def _drop_cancelled(self) -> None:
        """Take cancelled timers out when asyncio does: the order of equal times depends on it."""
        scheduled, cancelled = self._scheduled, self._timer_cancelled_count
        if len(scheduled) > _KEEPS_CANCELLED_UP_TO and cancelled / len(scheduled) > 0.5:
            for timer in scheduled:
                timer._scheduled = not timer._cancelled
            self._scheduled = [timer for timer in scheduled if timer._scheduled]
            heapq.heapify(self._scheduled)
            self._timer_cancelled_count = 0
            return
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)._scheduled = False

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
