"""Uploads through a gate on virtual time, which a test starts, observes and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import looptime
import pytest

from tieringd.archiving.upload_gate import UploadGate
from tieringd.archiving.upload_queue import Urgency
from tieringd.model.partition import NO_TOPIC_ID, TopicIdPartition
from tieringd.policies.upload_control import (
    OrderLimits,
    UploadPace,
    WaitingPartition,
    is_fair_turn,
    is_near_loss,
)

KIB = 1024
ORDER = OrderLimits(near_loss_seconds=100, last_moment_seconds=10, fair_turn_every=4)


def partition(number: int) -> TopicIdPartition:
    return TopicIdPartition("cluster", "orders", NO_TOPIC_ID, number)


def now() -> float:
    return asyncio.get_running_loop().time()


def gate_at(uploads: int | UploadPace, bytes_per_second: int | None = None, **options) -> UploadGate:
    options = {"timers": asyncio.get_running_loop(), "order": ORDER, "segments_per_turn": 1, **options}
    pace = uploads if isinstance(uploads, UploadPace) else UploadPace(uploads, bytes_per_second)
    return UploadGate(pace, **options)


async def settle() -> None:
    """Let every task run as far as it can without the clock moving."""
    for _ in range(6):
        await asyncio.sleep(0)


class Uploader:
    """Runs uploads through a gate, and records when each began and how many ran at once."""

    def __init__(self, gate: UploadGate) -> None:
        self.gate = gate
        self.begun: list[tuple[float, int, int]] = []
        self.running = 0
        self.most_running = 0
        self.tasks: list[asyncio.Task[None]] = []
        self._ends: list[tuple[int, asyncio.Event]] = []

    @property
    def order(self) -> list[int]:
        """Return the partitions in the order in which their uploads began."""
        return [number for _, number, _ in self.begun]

    @property
    def times(self) -> list[float]:
        """Return the times at which the uploads began, in seconds."""
        return [pytest.approx(at) for at, _, _ in self.begun]

    def start(
        self, number: int, size_bytes: int = KIB, *, seconds: float | None = None, **urgency
    ) -> asyncio.Task[None]:
        """Request an upload that takes *seconds*; None is until the test ends it."""
        upload = self._upload(number, size_bytes, seconds, Urgency(**urgency))
        task = asyncio.get_running_loop().create_task(upload)
        self.tasks.append(task)
        return task

    async def start_all(self, *numbers: int, **details) -> None:
        for number in numbers:
            self.start(number, **details)
        await settle()

    async def end_first(self) -> int:
        """End the upload that has been running longest."""
        number, end = self._ends.pop(0)
        end.set()
        await settle()
        return number

    async def let_next_in(self) -> None:
        """End the upload that has been running longest, and stop before the next one runs."""
        self._ends.pop(0)[1].set()
        await asyncio.sleep(0)

    async def end_all(self) -> None:
        while self._ends:
            await self.end_first()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _upload(self, number: int, size_bytes: int, seconds: float | None, urgency: Urgency) -> None:
        async with self.gate.upload(partition(number), size_bytes, urgency):
            self.begun.append((now(), number, size_bytes))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                if seconds is None:
                    end = asyncio.Event()
                    self._ends.append((number, end))
                    await end.wait()
                else:
                    await asyncio.sleep(seconds)
            finally:
                self.running -= 1


class CountingTimers:
    """Counts the loop's timers, and calls them *early_seconds* before their time."""

    def __init__(self, early_seconds: float = 0.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._early_seconds = early_seconds
        self.pending: set[float] = set()
        self.made = 0

    def time(self) -> float:
        return self._loop.time()

    def call_at(self, when: float, callback, argument: float, /) -> CountedTimer:
        def call() -> None:
            self.pending.discard(when)
            callback(argument)

        self.made += 1
        self.pending.add(when)
        return CountedTimer(self, when, self._loop.call_at(when - self._early_seconds, call))


class CountedTimer:
    """One timer of `CountingTimers`."""

    def __init__(self, timers: CountingTimers, when: float, handle: asyncio.TimerHandle) -> None:
        self._timers, self._when, self._handle = timers, when, handle

    def cancel(self) -> None:
        self._timers.pending.discard(self._when)
        self._handle.cancel()


def on_virtual_time(coroutine) -> None:
    """Run a coroutine on a new loop. A property test runs its coroutine many times in one test."""
    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        runner.run(coroutine)


def upload_order(
    waiting: Iterable[WaitingPartition], limits: OrderLimits, *, turn: int, now: float
) -> tuple[WaitingPartition, ...]:
    """
    Return *waiting* in the order in which to serve them; *turn* is the first one's number.

    It is the order that a `UploadQueue` keeps, made anew from all facts; `upload_control` describes it.
    """
    by_turn = sorted(waiting, key=lambda one: one.turn_key)
    by_loss = sorted(
        (one for one in by_turn if is_near_loss(one, limits, now=now)), key=lambda one: one.loss_key
    )
    ordered: dict[TopicIdPartition, WaitingPartition] = {}
    lines = {True: iter(by_turn), False: iter((*by_loss, *by_turn))}
    for at in range(turn, turn + len(by_turn)):
        chosen = next(one for one in lines[is_fair_turn(at, limits)] if one.partition not in ordered)
        ordered[chosen.partition] = chosen
    return tuple(ordered.values())
