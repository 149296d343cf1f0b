"""The workers of a port, as real processes: started, replaced, and ended with their daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from structlog.testing import capture_logs

from tests.fakes.virtual_loop import virtually
from tests.support.processes import pause, wait_until_ended
from tieringd.cli.gateway_worker import WORKER_COMMAND
from tieringd.daemon.admin import AdminPage
from tieringd.daemon.workers.end_with_daemon import ORPHANED
from tieringd.daemon.workers.link import PULSE
from tieringd.daemon.workers.worker_pool import WorkerPool, answers, done_before
from tieringd.errors import ConfigError
from tieringd.gateway.shared_port import ConnectionCounts, listening_socket
from tieringd.metrics import Metrics


@asynccontextmanager
async def pool_of(kind, *, count=2, **changes):
    """Make a pool of workers that behave as *kind*, and close it at the end."""
    metrics = Metrics()
    pool = WorkerPool(
        [sys.executable, "-m", "tests.fakes.pool_worker", kind],
        count=count,
        listen=lambda: listening_socket("127.0.0.1", 0),
        greeting=lambda number: f"worker {number}",
        handlers=lambda _: {},
        metrics=metrics.workers,
        **changes,
    )
    pool.test_metrics = metrics
    try:
        yield pool
    finally:
        pids = [worker.process.pid for worker in pool.workers]
        await pool.close()
        await asyncio.to_thread(wait_until_ended, pids)


async def until(is_so):
    """Return when *is_so* is true."""
    async with asyncio.timeout(180):
        while not is_so():  # noqa: ASYNC110 processes report no events
            await asyncio.sleep(0.02)


async def test_workers_serve_and_one_that_is_killed_is_replaced():
    """The other one stays; the end is logged, counted and shown."""
    ended = []
    async with pool_of("serving", on_end=ended.append) as pool:
        await pool.start()
        first, second = pool.workers
        assert await first.link.ask("echo", 1, "a") == (1, "a")
        with capture_logs() as logs:
            os.kill(first.process.pid, signal.SIGKILL)
            await until(lambda: len(pool.workers) == 2 and first not in pool.workers)
            await until(lambda: all(worker.is_serving for worker in pool.workers))
        assert second in pool.workers
        assert ended == [first]
        (event,) = [one for one in logs if "another one takes its place" in one["event"]]
        assert (event["worker"], event["how"], event["pause_seconds"]) == (0, "by SIGKILL", 0.0)
        status = pool.status()
        assert [(one.restarts, one.last_end, one.is_serving) for one in status] == [
            (1, "by SIGKILL", True),
            (0, "", True),
        ]
        registry = pool.test_metrics.registry
        assert registry.get_sample_value("tieringd_gateway_worker_ends_total", {"how": "signal"}) == 1
        assert registry.get_sample_value("tieringd_gateway_workers") == 2
        assert registry.get_sample_value("tieringd_gateway_workers_wanted") == 2


async def test_no_worker_that_serves_is_a_reason_not_to_be_ready():
    """The page says so before the first serves and after the last has ended. One that serves is enough."""
    async with pool_of("asked") as pool:
        admin = AdminPage(pool.test_metrics, None, workers=pool)
        async with TestClient(TestServer(admin.application())) as client:

            async def answer():
                async with client.get("/readyz") as response:
                    return response.status, await response.text()

            async def greeted(*without):
                """Return when both places have a worker that waits to be asked, or serves."""
                await until(
                    lambda: sum(one.is_greeted and one not in without for one in pool.workers) == 2,
                )

            starting = asyncio.ensure_future(pool.start())
            await greeted()
            assert await answer() == (503, "none of the 2 workers of the gateway serves clients\n")
            pool.tell("serve")
            await starting
            assert await answer() == (200, "ok\n")

            first, second = pool.workers
            os.kill(first.process.pid, signal.SIGKILL)
            await greeted(first)
            assert await answer() == (200, "ok\n")
            os.kill(second.process.pid, signal.SIGKILL)
            await greeted(first, second)
            status, text = await answer()
            assert status == 503
            assert text.endswith(" serves clients; worker 1 was the last to end, by SIGKILL\n")
            pool.tell("serve")
            await until(lambda: any(one.is_serving for one in pool.workers))
            assert await answer() == (200, "ok\n")


async def test_workers_that_end_again_and_again_wait_longer_each_time():
    """A fault that stays must not take the whole processor; each end is visible."""
    failures = []
    async with pool_of("ending", count=1, on_failure=failures.append) as pool:
        with capture_logs() as logs:
            await pool.start()
            await until(lambda: pool.status()[0].restarts == 3)
        ends = [one for one in logs if "another one takes its place" in one["event"]]
        assert [one["pause_seconds"] for one in ends] == [0.0, 0.5, 1.0]
        assert {one["how"] for one in ends} == {"with exit code 7"}
        assert failures == ["gateway_worker"] * 3


async def test_fault_of_the_configuration_at_the_first_start_is_the_daemons():
    """It is raised with its hint, as without workers. A worker is not started again for it."""
    async with pool_of("faulty") as pool:
        with pytest.raises(ConfigError, match="no such file") as error:
            await pool.start()
        assert error.value.hint == "Name another"


async def test_worker_that_stands_still_is_killed():
    """Its connections are cut; otherwise their clients would wait for ever."""
    async with pool_of("serving", count=1, silent_seconds=8.0) as pool:
        await pool.start()
        stopped = []

        def stop_one():
            # A busy machine may make a worker so slow that it was killed already, and another one comes.
            with suppress(ProcessLookupError, FileNotFoundError):
                for worker in pool.workers:
                    pause(worker.process.pid)
                    stopped.append(worker)
            return stopped

        await until(stop_one)
        await until(lambda: stopped[0] not in pool.workers)
        assert pool.status()[0].last_end == "killed: it did not answer"
        await until(lambda: pool.workers and pool.workers[0].is_serving)


@virtually
async def test_silence_while_the_daemon_stood_still_as_well_does_not_count():
    """The machine was paused: the worker goes on at the same time, and needs a while for its answer."""

    class Link:
        def __init__(self, answer_seconds):
            self.answer_seconds = answer_seconds

        async def ask(self, name):
            assert name == PULSE
            asyncio.get_running_loop().pass_time(300)
            await asyncio.sleep(self.answer_seconds)

    assert await answers(Link(20), 30)
    assert not await answers(Link(40), 30)


def test_worker_of_another_version_ends_with_what_to_do():
    """The package was upgraded under the daemon: a worker that is started now would not understand it."""
    *command, _ = WORKER_COMMAND
    done = subprocess.run([*command, "0.0.0", "0", "0", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "the daemon is 0.0.0. Restart the daemon" in done.stderr


_DAEMON = """
import signal, socket, subprocess, sys
ours, theirs = socket.socketpair()
theirs.set_inheritable(True)
fds = [str(theirs.fileno())] * 3
worker = subprocess.Popen([*sys.argv[1:], *fds], pass_fds=[theirs.fileno()])
print(worker.pid, flush=True)
signal.pause()
"""
"""A daemon that does nothing but start a worker."""


def test_worker_that_is_still_starting_ends_with_its_daemon():
    """
    The kernel ends it: it is stopped in the middle of its imports, so that it cannot end by itself.

    Otherwise it would keep the port for the rest of its imports.
    """
    with subprocess.Popen([sys.executable, "-c", _DAEMON, *WORKER_COMMAND], stdout=subprocess.PIPE) as daemon:
        worker = int(daemon.stdout.readline())
        maps = Path(f"/proc/{worker}/maps")
        try:
            wait_for(lambda: "/uvloop/" in maps.read_text())
            pause(worker)
            daemon.kill()
            daemon.wait()
            wait_until_ended([worker])
        finally:
            daemon.kill()
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def wait_for(is_so):
    """Return when *is_so* is true. Processes report no events."""
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_worker_whose_daemon_had_ended_before_it_asked_the_kernel_ends_at_once():
    """Its parent is not the process that made its link any more."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            # The shell takes the daemon's place as the parent.
            ["/bin/sh", "-c", '"$@"; exit $?', "sh", *WORKER_COMMAND, *[str(theirs.fileno())] * 3],
            pass_fds=[theirs.fileno()],
            timeout=120,
            check=False,
        )
    assert done.returncode == ORPHANED


def test_worker_ends_with_its_link_when_its_log_is_a_pipe_without_a_reader():
    """The last line of its log fails. It must not serve on without its daemon."""
    ours, theirs = socket.socketpair()
    listener = listening_socket("127.0.0.1", 0)
    fd, _ = ConnectionCounts.create(1)
    given = (theirs.fileno(), listener.fileno(), fd)
    with ours, theirs, listener:
        worker = subprocess.Popen(
            [*WORKER_COMMAND, *map(str, given)],
            pass_fds=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        with worker:
            try:
                worker.stdout.close()
                ours.close()
                assert worker.wait(120) == ORPHANED
            finally:
                worker.kill()
    os.close(fd)


async def test_stop_while_workers_start_does_not_wait_for_them():
    """Workers take seconds to start, and one that ends again and again never serves."""
    stop = asyncio.Event()
    async with pool_of("ending", count=2) as pool:
        starting = asyncio.ensure_future(done_before(stop, pool.start()))
        await until(lambda: len(pool.workers) == 2)
        stop.set()
        await starting


async def test_worker_that_starts_slowly_is_not_killed():
    """It lists a large bucket, or waits for its store. It says that it is alive until it serves."""
    silent_seconds = 8.0
    async with pool_of("slow", count=1, silent_seconds=silent_seconds) as pool:
        await pool.start()
        (status,) = pool.status()
        assert status.seconds > silent_seconds
        # A busy machine may make a worker so slow that it was killed already, and another one came.
        killed = "killed: it did not answer at its start for"
        assert status.last_end in {"", f"{killed} 8 s", f"{killed} 16 s"}


async def test_worker_that_is_killed_at_its_start_leaves_its_successor_more_time():
    """Workers that need long to start would be killed for ever, one after the other."""
    stop = asyncio.Event()
    async with pool_of("mute", count=1, silent_seconds=0.05) as pool:
        with capture_logs() as logs:
            starting = asyncio.ensure_future(done_before(stop, pool.start()))
            await until(lambda: pool.status()[0].restarts == 3)
            stop.set()
            await starting
        ends = [one["how"] for one in logs if "another one takes its place" in one["event"]]
        text = "killed: it did not answer at its start for"
        assert ends == [f"{text} 0.05 s", f"{text} 0.1 s", f"{text} 0.2 s"]


async def test_defect_in_the_daemon_does_not_leave_a_place_empty():
    """The worker's end was not noted, by a defect. Another worker takes its place all the same."""
    failures = []

    def on_end(worker):
        if not failures:
            raise ValueError(worker)

    async with pool_of("serving", count=1, on_end=on_end, on_failure=failures.append) as pool:
        await pool.start()
        (first,) = pool.workers
        os.kill(first.process.pid, signal.SIGKILL)
        await until(lambda: pool.workers and first not in pool.workers and pool.workers[0].is_serving)
        assert failures == ["gateway_worker"]


async def test_end_by_a_signal_without_a_name_is_told():
    """Python names only some signals."""
    async with pool_of("serving", count=1) as pool:
        await pool.start()
        (first,) = pool.workers
        os.kill(first.process.pid, signal.SIGRTMIN + 1)
        await until(lambda: pool.workers and first not in pool.workers and pool.workers[0].is_serving)
        assert pool.status()[0].last_end == f"by signal {signal.SIGRTMIN + 1}"
