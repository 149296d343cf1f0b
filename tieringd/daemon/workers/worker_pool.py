"""
The workers of one port, as the daemon sees them: started, watched, replaced when they end, and ended.

A worker that ends unasked is replaced at once. If its successors end soon as well, the next one waits, twice
as long each time: a fault that stays must not take the whole processor. A worker that does not answer for
half a minute is killed, which cuts its connections: a process that is stuck would otherwise keep them.

The first workers must all serve before the daemon calls itself ready. A fault of the configuration that a
worker finds at its start ends the daemon, as it would without workers. Later it is logged, and tried again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import structlog

from tieringd.daemon.workers.link import PULSE, Handlers, Link, error_of
from tieringd.daemon.workers.worker_status import WorkerStatus
from tieringd.errors import TieringError
from tieringd.gateway.shared_port import ConnectionCounts
from tieringd.gateway.unanswered_hosts import answer_all
from tieringd.metrics.gateway import WorkerMetrics
from tieringd.metrics.merged import NOTHING, Figures, added
from tieringd.metrics.restarts import restarted
from tieringd.pauses import BEAT_SECONDS, AwakeClock
from tieringd.storage.at_once import cancelled

log = structlog.get_logger(__name__)

SILENT_SECONDS: Final = 30.0
"""How long a worker may not answer until it is killed."""
_START_PATIENCE_MAX: Final = 16
"""How many times as long as that a worker may take to answer at its start, at most."""
_WATCHES: Final = 6
"""How many times a worker is asked in that time."""
_FIGURES_SECONDS: Final = 2.0
"""How long a scrape waits for the figures of a worker; those of the last scrape stand in."""
_STEADY_SECONDS: Final = 60.0
"""A worker that served for this long did not end at its start: its successor does not wait."""
_PAUSE_SECONDS: Final = 0.5
_PAUSE_SECONDS_MAX: Final = 30.0
_END_SECONDS: Final = 5.0
"""How long a worker may take to end after its connections did."""


class Worker:
    """One worker process, and the link to it."""

    def __init__(self, number: int, process: Process) -> None:
        self.number = number
        self.process = process
        self.link: Link | None = None
        self.is_greeted = False
        """Whether it has been told what it begins with. Notes come after that."""
        self.is_serving = False
        self.has_served = False
        """Whether it came to serve. Before that it starts."""
        self.failure: TieringError | None = None
        """The error that it reported before it ended."""
        self.figures: Figures = NOTHING
        self.end = ""
        """Why this side killed it."""

    def kill(self, why: str) -> None:
        """End it now. Its connections are cut."""
        self.end = self.end or why
        with suppress(ProcessLookupError):
            self.process.kill()


class _Slot:
    """A place for one worker at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.worker: Worker | None = None
        self.since = time.monotonic()
        self.restarts = 0
        self.last_end = ""
        self.ended_at = 0.0
        """When the last worker ended, on the clock of `time.monotonic`."""
        self.start_patience = 1
        """How many times `silent_seconds` the next worker may take to answer at its start."""


class WorkerPool:
    """The workers of one port. Started and closed once; belongs to one event loop."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        count: int,
        listen: Callable[[], socket.socket],
        greeting: Callable[[int], object],
        handlers: Callable[[Worker], Handlers],
        metrics: WorkerMetrics,
        on_end: Callable[[Worker], None] = lambda _: None,
        on_failure: Callable[[str], None] = lambda _: None,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        """
        Keep the arguments.

        Args:
            command: Starts a worker; the descriptors of link, port and counts are added to it.
            count: How many workers there are.
            listen: Opens the listening socket, which the pool closes. Raises `ConfigError`.
            greeting: Returns what the worker of a number is told first.
            handlers: Returns what a worker may ask.
            metrics: Figures of the workers themselves.
            on_end: Gets each worker that has ended.
            on_failure: Gets the name of a part that failed, for a metric.
            silent_seconds: How long a worker may not answer until it is killed. At its start it may take
                twice as long as the one before it that was killed there, up to sixteen times as long.
        """
        self._command = list(command)
        self._listen = listen
        self._listener: socket.socket | None = None
        self._greeting = greeting
        self._handlers = handlers
        self._metrics = metrics
        self._on_end = on_end
        self._on_failure = on_failure
        self._silent_seconds = silent_seconds
        self._counts_fd, self._counts = ConnectionCounts.create(count)
        self._slots = [_Slot(number) for number in range(count)]
        self._ended: Figures = NOTHING
        """Counts at the last scrape of workers that have ended since."""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_started = False
        self._is_closing = False
        metrics.wanted.set(count)

    @property
    def port(self) -> int:
        """Return the port that clients connect to. The pool must be started."""
        assert self._listener is not None, "the pool is not started"
        return int(self._listener.getsockname()[1])

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Return the workers that run now, serving or not."""
        return tuple(slot.worker for slot in self._slots if slot.worker is not None)

    @property
    def fault(self) -> str:
        """Return why no client is served; empty while at least one worker serves."""
        if any(worker.is_serving for worker in self.workers):
            return ""
        ended = max(
            (slot for slot in self._slots if slot.last_end), key=lambda slot: slot.ended_at, default=None
        )
        how = "" if ended is None else f"; worker {ended.number} was the last to end, {ended.last_end}"
        return f"none of the {len(self._slots)} workers of the gateway serves clients{how}"

    def tell(self, name: str, *arguments: Any) -> None:
        """Send a note to every worker that knows what it begins with."""
        for worker in self.workers:
            if worker.link is not None and worker.is_greeted:
                worker.link.tell(name, *arguments)

    async def start(self) -> None:
        """
        Start the workers, and return when all of them serve.

        Raises:
            TieringError: A worker cannot serve, and another try would not help.
            ConfigError: The address cannot be listened on.
        """
        self._listener = self._listen()
        for slot in self._slots:
            keeping = restarted("gateway_worker", partial(self._keep, slot), on_failure=self._on_failure)
            task = asyncio.get_running_loop().create_task(keeping)
            self._tasks.add(task)
        while not all(worker.is_serving for worker in self.workers) or len(self.workers) < len(self._slots):
            self._changed.clear()
            for task in self._tasks:
                if task.done():
                    task.result()
            await self._changed.wait()
        self._is_started = True
        log.info("workers of the gateway serve", workers=len(self._slots), port=self.port)

    async def run(self) -> None:
        """Replace workers that end, until cancelled. Raises an error that ended this."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def close(self, *, grace_seconds: float = 5.0) -> None:
        """Let the workers finish the answers that are due, and end them."""
        self._is_closing = True
        self.tell("drain", grace_seconds)
        for worker in self.workers:
            if not worker.is_serving:
                worker.kill("the daemon ends")
        waits = [worker.process.wait() for worker in self.workers]
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds + _END_SECONDS):
                await asyncio.gather(*waits)
        for worker in self.workers:
            worker.kill("it did not end in time")
        await asyncio.gather(*(worker.process.wait() for worker in self.workers))
        await cancelled(tuple(self._tasks))
        if self._listener is not None:
            self._listener.close()
        os.close(self._counts_fd)

    async def gather_figures(self) -> None:
        """Ask all workers for their figures, for a page. `figures` returns the sums."""

        async def one(worker: Worker) -> None:
            if worker.link is None or not worker.is_serving:
                return
            with suppress(TieringError, TimeoutError):
                async with asyncio.timeout(_FIGURES_SECONDS):
                    worker.figures = await worker.link.ask("figures")

        await asyncio.gather(*(one(worker) for worker in self.workers))

    def figures(self) -> Figures:
        """Return the sums of what all workers have counted, as of the last `gather_figures`."""
        found = self._ended
        for worker in self.workers:
            found = added(found, worker.figures)
        return found

    def status(self) -> tuple[WorkerStatus, ...]:
        """Return what a person wants to know of each worker."""
        now = time.monotonic()
        return tuple(
            WorkerStatus(
                slot.number,
                None if slot.worker is None else slot.worker.process.pid,
                slot.worker is not None and slot.worker.is_serving,
                self._counts.of(slot.number),
                now - slot.since,
                slot.restarts,
                slot.last_end,
            )
            for slot in self._slots
        )

    async def _keep(self, slot: _Slot) -> None:
        """Run one worker after another."""
        pause_seconds = 0.0
        while True:
            began = slot.since = time.monotonic()
            try:
                worker = await self._run_one(slot)
            except OSError as error:
                pause_seconds = min(max(_PAUSE_SECONDS, 2 * pause_seconds), _PAUSE_SECONDS_MAX)
                log.error(  # noqa: TRY400 its text is enough
                    "a worker of the gateway cannot be started; it is tried again",
                    worker=slot.number,
                    error=str(error),
                    pause_seconds=pause_seconds,
                    hint="The host lacks memory, processes or descriptors; set fewer gateway.workers",
                )
                await asyncio.sleep(pause_seconds)
                continue
            lived_seconds = time.monotonic() - began
            if self._is_closing:
                return
            if worker.failure is not None and not self._is_started:
                self._changed.set()
                raise worker.failure
            # A worker may need longer to start, on a host with much load: each would be killed in turn.
            is_too_slow = bool(worker.end) and not worker.has_served
            if lived_seconds >= _STEADY_SECONDS and not is_too_slow:
                pause_seconds = 0.0
            slot.start_patience = min(2 * slot.start_patience, _START_PATIENCE_MAX) if is_too_slow else 1
            slot.restarts += 1
            slot.last_end, slot.ended_at = _end_of(worker), time.monotonic()
            self._metrics.ends.labels(_kind_of(worker)).inc()
            self._on_failure("gateway_worker")
            log.error(
                "a worker of the gateway has ended; another one takes its place",
                worker=slot.number,
                pid=worker.process.pid,
                how=slot.last_end,
                lived_seconds=round(lived_seconds, 1),
                pause_seconds=pause_seconds,
                hint="Its clients connect again by themselves. If it goes on, the log has the worker's own "
                "last events; gateway.workers: 0 serves the clients in the daemon",
            )
            slot.since = time.monotonic()
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(max(_PAUSE_SECONDS, 2 * pause_seconds), _PAUSE_SECONDS_MAX)

    async def _run_one(self, slot: _Slot) -> Worker:
        """Start a worker, and return it when it has ended."""
        assert self._listener is not None, "the pool is started"
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                given = (theirs.fileno(), self._listener.fileno(), self._counts_fd)
                process = await asyncio.create_subprocess_exec(
                    *self._command, *map(str, given), stdin=DEVNULL, pass_fds=given
                )
        except BaseException:
            ours.close()
            raise
        worker = slot.worker = Worker(slot.number, process)
        try:
            worker.link = await Link.over(
                ours, self._handlers_for(worker), other_side=f"worker {slot.number} of the gateway"
            )
            worker.link.tell("start", self._greeting(slot.number))
            worker.is_greeted = True
            await self._attend(worker, start_seconds=self._silent_seconds * slot.start_patience)
        finally:
            # Cancelled or not, no worker outlives its place here.
            if process.returncode is None:
                worker.kill("the daemon ends")
                await process.wait()
            slot.worker, worker.is_serving = None, False
            self._counts.clear(slot.number)
            # The port is the same socket for all workers, and one that was killed has left its filter there.
            answer_all(self._listener)
            self._ended = added(self._ended, Figures(worker.figures.counts, {}))
            self._note_change()
            self._on_end(worker)
        return worker

    async def _attend(self, worker: Worker, *, start_seconds: float) -> None:
        """Serve a worker's questions until it has ended."""
        assert worker.link is not None
        messages = asyncio.create_task(worker.link.run())
        watch = asyncio.create_task(self._watch(worker, worker.link, start_seconds=start_seconds))
        try:
            await worker.process.wait()
            # What it sent last is still to be read.
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await asyncio.shield(messages)
        finally:
            await cancelled((messages, watch))

    async def _watch(self, worker: Worker, link: Link, *, start_seconds: float) -> None:
        """Kill a worker that does not answer, after *start_seconds* until it serves."""
        while True:
            await asyncio.sleep(self._silent_seconds / _WATCHES)
            if worker.has_served:
                if not await answers(link, self._silent_seconds):
                    worker.kill("it did not answer")
            elif not await answers(link, start_seconds):
                worker.kill(f"it did not answer at its start for {start_seconds:g} s")

    def _handlers_for(self, worker: Worker) -> Handlers:
        def serving() -> None:
            worker.is_serving = worker.has_served = True
            self._note_change()

        def failed(*parts: Any) -> None:
            worker.failure = error_of(*parts)

        return {"serving": serving, "failed": failed, **self._handlers(worker)}

    def _note_change(self) -> None:
        self._metrics.serving.set(sum(worker.is_serving for worker in self.workers))
        self._changed.set()


async def done_before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do *work*, unless *stop* is set before it has ended. Return whether it has."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        await cancelled((working, stopping))


async def answers(link: Link, seconds: float) -> bool:
    """
    Say whether a worker answers within *seconds*. A link that is over counts as an answer.

    Time in which this process stood still does not count: the answer lies in the socket, or the whole machine
    stood still, and the worker as well.
    """
    awake = AwakeClock(is_telling=False)
    asking, began = asyncio.ensure_future(link.ask(PULSE)), awake.now()
    try:
        while not asking.done() and awake.now() - began < seconds:
            await asyncio.wait({asking}, timeout=min(BEAT_SECONDS, seconds / _WATCHES))
        if not asking.done():
            return False
        with suppress(TieringError):
            # The link is over: the process ends, or has ended.
            asking.result()
        return True
    finally:
        await cancelled((asking,))


def _kind_of(worker: Worker) -> str:
    if worker.end:
        return "killed"
    code = worker.process.returncode or 0
    return "signal" if code < 0 else "error"


def _end_of(worker: Worker) -> str:
    """Return in words how a worker ended."""
    code = worker.process.returncode or 0
    if worker.end:
        return f"killed: {worker.end}"
    if code < 0:
        # Not every signal has a name.
        name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
        return f"by {name}"
    text = f"with exit code {code}"
    return f"{text}: {worker.failure}" if worker.failure is not None else text
