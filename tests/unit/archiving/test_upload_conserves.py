"""
Shares conserve work: gate, controller and policy together, on a machine whose load the test decides.

The clock is virtual. What is counted is the bytes that were uploaded.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from tests.fakes.host import FakeHost
from tests.fakes.uploads import gate_at, partition
from tieringd.archiving.upload_controller import UploadController
from tieringd.archiving.upload_queue import Urgency
from tieringd.policies.upload_control import ControllerLimits, PaceLimits

pytestmark = pytest.mark.looptime

MIB = 2**20
SEGMENT = 64 * MIB
SLOTS = 4
UPLOAD_SECONDS = 0.25
"""Of a segment; four at once are a GiB/s."""
FULL_SPEED = SLOTS * SEGMENT / UPLOAD_SECONDS
SECONDS = 120.0


class Backlog:
    """Segments without end, each of which asks the gate; counts what was uploaded."""

    def __init__(self, gate, host, *, upload_seconds: float = UPLOAD_SECONDS) -> None:
        self._gate, self._host = gate, host
        self.upload_seconds = upload_seconds
        self.uploaded = 0

    async def until_listening(self) -> None:
        """Wait until uploads are kept from beginning, so that the load of others can be heard."""
        is_listening = asyncio.Event()
        set_pace = self._gate.set_pace

        def noting(pace) -> None:
            set_pace(pace)
            if pace.is_listening:
                is_listening.set()

        self._gate.set_pace = noting
        await is_listening.wait()
        self._gate.set_pace = set_pace

    async def upload(self, number: int, urgency: Urgency) -> None:
        async with self._gate.upload(partition(number), SEGMENT, urgency):
            with self._host.uploading():
                await asyncio.sleep(self.upload_seconds)
        self.uploaded += SEGMENT

    async def _drain(self, number: int) -> None:
        while True:
            await self.upload(number, Urgency())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(3 * SLOTS):
                group.create_task(self._drain(number))


@asynccontextmanager
async def draining(
    host,
    metrics,
    *,
    limit: int | None = None,
    upload_seconds: float = UPLOAD_SECONDS,
    drains: bool = True,
    slots: int = SLOTS,
):
    """Drain a backlog at the fewest shares, by a controller beside it."""
    gate = gate_at(slots)
    controller = UploadController(
        gate,
        control=ControllerLimits(),
        pace=PaceLimits(max_uploads=slots, bytes_per_second=limit),
        free_bytes_at_start=10**15,
        backlog_bytes=lambda: 10**9,
        counters=host.counters,
        metrics=metrics,
    )
    backlog = Backlog(gate, host, upload_seconds=upload_seconds)
    tasks = [asyncio.create_task(controller.run(interval_seconds=60))]
    if drains:
        tasks.append(asyncio.create_task(backlog.run()))
    try:
        yield backlog
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def held_seconds(metrics, by: str) -> float:
    return metrics.registry.get_sample_value("tieringd_upload_held_seconds_total", {"by": by}) or 0.0


@pytest.mark.parametrize(
    ("uploads", "upload_seconds", "seconds"),
    [
        pytest.param(0.5, UPLOAD_SECONDS, 60.0, id="uploads leave room"),
        pytest.param(1.5, UPLOAD_SECONDS, 60.0, id="uploads keep every processor busy"),
        pytest.param(1.5, 8.0, 600.0, id="and each takes long to end"),
    ],
)
async def test_an_idle_machine_carries_uploads_at_full_speed_at_the_fewest_shares(
    metrics, uploads, upload_seconds, seconds
):
    """No less than nine tenths of what no controller would carry, though uploads fill the machine."""
    async with draining(FakeHost(uploads=uploads), metrics, upload_seconds=upload_seconds) as backlog:
        await asyncio.sleep(seconds)
        assert backlog.uploaded >= 0.9 * SLOTS * SEGMENT / upload_seconds * seconds
    assert held_seconds(metrics, "cpu") == 0


async def test_uploads_one_at_a_time_do_not_brake_themselves(metrics):
    """The load of an upload is not heard as that of others, though no moment lies between two uploads."""
    async with draining(FakeHost(uploads=1.0), metrics, slots=1) as backlog:
        await asyncio.sleep(60)
        assert backlog.uploaded >= 0.9 * SEGMENT / UPLOAD_SECONDS * 60
    assert held_seconds(metrics, "cpu") == 0


async def test_uploads_beside_others_get_their_shares(metrics):
    """A backlog gets a tenth of the machine if others want all of it, and its waiting is counted."""
    async with draining(FakeHost(others=1.0, uploads=1.0), metrics) as backlog:
        await asyncio.sleep(5)
        before = backlog.uploaded
        await asyncio.sleep(SECONDS)
        uploaded = backlog.uploaded - before
    assert 0.05 * FULL_SPEED * SECONDS < uploaded < 0.15 * FULL_SPEED * SECONDS
    assert held_seconds(metrics, "cpu") > 0.9 * SECONDS


async def test_uploads_follow_others_that_come_and_go(metrics):
    """A brake comes seconds after the others, and goes seconds after them."""
    host = FakeHost(uploads=1.0)
    async with draining(host, metrics) as backlog:
        rates = []
        for others in (0.0, 1.0, 0.0):
            host.set_others(others)
            await asyncio.sleep(30)
            before = backlog.uploaded
            await asyncio.sleep(30)
            rates.append((backlog.uploaded - before) / 30 / FULL_SPEED)
    assert rates[0] >= 0.9
    assert rates[1] <= 0.15
    assert rates[2] >= 0.9


async def test_others_that_come_meet_a_brake_within_seconds(metrics):
    """A producer that starts is heard at once, however long the pause after the last listening is."""
    host, seconds = FakeHost(uploads=1.5), 2.0
    async with draining(host, metrics, upload_seconds=seconds) as backlog:
        await asyncio.sleep(20)
        host.set_others(1.0)
        before = backlog.uploaded
        await asyncio.sleep(30)
        assert backlog.uploaded - before <= SLOTS * SEGMENT / seconds * (3 * seconds + 0.15 * 24)


@pytest.mark.parametrize("after_seconds", [0.02, 0.06, 0.1, 0.14, 0.18])
@pytest.mark.parametrize("others", [1.0, 2.0])
async def test_others_that_come_while_uploads_listen_meet_a_brake_within_seconds(
    metrics, after_seconds, others
):
    """Uploads hear a part of their load, which leaves room by itself, and listen again soon."""
    host = FakeHost(uploads=1.5)
    async with draining(host, metrics) as backlog:
        await asyncio.sleep(20)
        await backlog.until_listening()
        await asyncio.sleep(after_seconds)
        host.set_others(others)
        before = backlog.uploaded
        await asyncio.sleep(10)
        assert backlog.uploaded - before <= FULL_SPEED * (2 + 0.1 * 8)


async def test_a_backlog_after_an_outage_meets_a_brake_within_seconds(metrics):
    """Uploads that hang for a minute leave nothing to hear; once the store is back the brake comes soon."""
    host = FakeHost(others=1.0, uploads=0.5)
    async with draining(host, metrics, upload_seconds=60.0) as backlog:
        await asyncio.sleep(59.5)
        backlog.upload_seconds = UPLOAD_SECONDS
        await asyncio.sleep(10)
        before = backlog.uploaded
        await asyncio.sleep(30)
        assert backlog.uploaded - before <= 0.2 * FULL_SPEED * 30


async def test_a_new_segment_is_not_held_beside_others(metrics):
    """Keeping up waits for its transfer and for nothing else."""
    async with draining(FakeHost(others=1.0, uploads=1.0), metrics) as backlog:
        await asyncio.sleep(SECONDS)
        for number in range(100, 150):
            began = asyncio.get_running_loop().time()
            await backlog.upload(number, Urgency(is_new=True))
            assert asyncio.get_running_loop().time() - began <= 2 * UPLOAD_SECONDS


@pytest.mark.parametrize("others", [0.0, 1.0])
@pytest.mark.parametrize("seconds", [0.5, 0.98, 1.02, 1.1, 3.0])
async def test_an_upload_after_a_pause_is_not_forgotten(metrics, others, seconds):
    """One upload at a time keeps the machine busy, and ends while it is listened to or just before."""
    host = FakeHost(others=others, uploads=1.5)
    async with draining(host, metrics, upload_seconds=seconds, drains=False) as backlog:
        for number in range(20):
            async with asyncio.timeout(30):
                await backlog.upload(number, Urgency())
            await asyncio.sleep(7.3)


async def test_the_hard_limit_binds_on_an_idle_machine(metrics):
    """The hard limit bounds the bytes that begin on an idle machine, and is the reason for waiting."""
    async with draining(FakeHost(), metrics, limit=16 * MIB) as backlog:
        await asyncio.sleep(SECONDS)
        assert backlog.uploaded <= 16 * MIB * (SECONDS + 1) + SEGMENT
    assert held_seconds(metrics, "limit") > 0.9 * SECONDS
