"""The loop of the simulations does what asyncio's own loop does, in the same order and at the same times."""

from __future__ import annotations

import asyncio
import selectors
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.virtual_loop import VirtualLoop, run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable

_STEPS = 400


class _JumpingSelector(selectors.DefaultSelector):
    """Passes the time of each wait to the clock of asyncio's own loop."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout:
            self.now += timeout
        return found


def _own_loop() -> asyncio.AbstractEventLoop:
    """Return asyncio's own loop on a clock that jumps."""
    selector = _JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    return loop


class _History:
    """Callbacks, timers and tasks, made and cancelled at random. `called` tells what was called, and when."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._handles: list[asyncio.Handle] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.called: list[tuple[Any, ...]] = []

    async def run(self) -> list[tuple[Any, ...]]:
        """Return what was called."""
        asyncio.get_running_loop().set_exception_handler(
            lambda _, told: self.called.append(("error", str(told)))
        )
        steps = [self._soon, self._later, self._later, self._at, self._cancel, self._cancel, self._task]
        for number in range(_STEPS):
            self._random.choice(steps)(number)
            if self._random.random() < 0.05:
                await asyncio.sleep(self._random.choice([0, 0.5, 1]))
        await asyncio.gather(*self._tasks)
        await asyncio.sleep(30)
        self._note("end")
        return self.called

    def _note(self, *what: object) -> None:
        loop = asyncio.get_running_loop()
        self.called.append((loop.time(), *what))
        if self._random.random() < 0.3:
            self._handles.append(loop.call_soon(self._note, *what, "again"))

    def _delay(self) -> float:
        """Return one of few, so that many timers are due at the same time."""
        return self._random.choice([-1, 0, 0.5, 0.5, 0.5, 1, 7])

    def _soon(self, number: int) -> None:
        self._handles.append(asyncio.get_running_loop().call_soon(self._note, number))

    def _later(self, number: int) -> None:
        self._handles.append(asyncio.get_running_loop().call_later(self._delay(), self._note, number))

    def _at(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_at(loop.time() + self._delay(), self._note, number)
        self._handles.append(timer)
        self.called.append(("at", timer.when()))

    def _cancel(self, _: int) -> None:
        if self._handles:
            handle = self._handles.pop(self._random.randrange(len(self._handles)))
            handle.cancel()
            handle.cancel()
            self.called.append(("cancelled", handle.cancelled()))

    def _task(self, number: int) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._work(number)))

    async def _work(self, number: int) -> None:
        try:
            async with asyncio.timeout(self._random.choice([0, 0.5, 3])):
                await asyncio.sleep(self._random.choice([0, 0.5, 0.5, 1]))
        except TimeoutError:
            self._note(number, "late")
        self._note(number, "done")


@pytest.mark.parametrize("seed", range(20))
def test_order_is_that_of_asyncio(seed: int) -> None:
    """Timers that are due together, and timers that were cancelled, come and go as in asyncio's own loop."""
    with asyncio.Runner(loop_factory=_own_loop) as runner:
        wanted = runner.run(_History(seed).run())
    assert run_virtual(_History(seed).run(), seed=seed) == wanted
    assert sum("again" in one for one in wanted) > 20


def test_cancelled_timers_are_dropped_as_in_asyncio() -> None:
    """A heap of which most timers are cancelled is built anew, which changes the order of equal times."""

    async def history() -> list[int]:
        loop, called = asyncio.get_running_loop(), []
        timers = [loop.call_later(1 + number % 3, called.append, number) for number in range(300)]
        for timer in Random(1).sample(timers, 200):
            timer.cancel()
        await asyncio.sleep(0.5)
        assert len(loop._scheduled) <= 101
        await asyncio.sleep(10)
        return called

    with asyncio.Runner(loop_factory=_own_loop) as runner:
        wanted = runner.run(history())
    assert run_virtual(history(), seed=0) == wanted
    assert len(wanted) == 100


def test_error_of_a_callback_goes_to_the_handler() -> None:
    """The loop goes on after an error, and tells its handler of it."""

    async def history() -> list[str]:
        loop, told = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: told.append(repr(context["exception"])))
        loop.call_soon(_fail("soon"))
        loop.call_later(1, _fail("later"))
        await asyncio.sleep(2)
        return told

    assert run_virtual(history(), seed=0) == ["ValueError('soon')", "ValueError('later')"]


def _fail(why: str) -> Callable[[], None]:
    def fail() -> None:
        raise ValueError(why)

    return fail


def test_waiting_for_nothing_is_an_error() -> None:
    """A simulation that can never go on says so, and does not stand still."""

    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="something that never comes"):
        run_virtual(wait(), seed=0)


def test_closed_loop_takes_no_callbacks() -> None:
    """A callback that would never be called is an error."""
    loop = VirtualLoop(0)
    loop.close()
    for call in (loop.call_soon, lambda callback: loop.call_later(1, callback)):
        with pytest.raises(RuntimeError, match="closed"):
            call(print)
