"""The upload controller: the gate's pace follows the backlog, and what others want of the machine."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from tests.fakes.host import FakeHost
from tests.fakes.uploads import gate_at, partition
from tieringd.archiving.upload_controller import UploadController
from tieringd.policies.upload_control import CPU, IO, ControllerLimits, PaceLimits, UploadPace

if TYPE_CHECKING:
    from tieringd.archiving.upload_gate import UploadGate

MIB = 2**20
FREE = 1000 * MIB


pytestmark = pytest.mark.looptime


class Backlog:
    """A backlog that is what a test says, and counts how often it was asked for."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.asked = 0

    def __call__(self) -> int:
        self.asked += 1
        return self.size_bytes


@pytest.fixture
def backlog():
    return Backlog()


@pytest.fixture
async def host():
    """Give a machine that others want all of."""
    return FakeHost(others=1.0)


@pytest.fixture
def make_controller(backlog, metrics, host):
    """Give a function that returns a controller and its gate, on the running loop."""

    def make(
        *, pace: PaceLimits | None = None, free_bytes_at_start: int = FREE, **limits
    ) -> tuple[UploadController, UploadGate]:
        gate = gate_at(1, 1)
        controller = UploadController(
            gate,
            control=ControllerLimits(**limits),
            pace=pace or PaceLimits(max_uploads=20),
            free_bytes_at_start=free_bytes_at_start,
            backlog_bytes=backlog,
            counters=host.counters,
            metrics=metrics,
        )
        return controller, gate

    return make


def values(metrics) -> tuple[float | None, ...]:
    """Return the shares, the error and the backlog that were published."""
    names = ("upload_shares", "upload_controller_error", "upload_backlog_bytes")
    return tuple(metrics.registry.get_sample_value(f"tieringd_{name}") for name in names)


def braked(uploads: int, bytes_per_second: int) -> UploadPace:
    return UploadPace(uploads, bytes_per_second, held_by=CPU, new_uploads=20)


async def heard(controller: UploadController) -> None:
    """Let the controller hear the machine for a second without uploads."""
    await asyncio.sleep(1)
    controller.probe()


async def test_controller_without_a_backlog_is_polite(make_controller, metrics):
    """The controller allows the fewest shares if there is no backlog: two uploads at a modest rate."""
    controller, gate = make_controller()
    await heard(controller)
    controller.step()
    assert gate.pace == braked(2, 16 * MIB)
    assert values(metrics) == (100, 0, 0)


async def test_controller_brakes_nothing_on_an_idle_machine(make_controller, host):
    """The fewest shares as well leave no processor idle while something waits."""
    host.set_others(0.5)
    controller, gate = make_controller()
    await heard(controller)
    controller.step()
    assert gate.pace == UploadPace(20, None)


async def test_controller_names_what_others_want(make_controller, host):
    """Disks count as processors do, and what has passed leaves no brake."""
    controller, gate = make_controller()
    seen = []
    for others, io in ((1.0, 0.0), (0.1, 0.9), (0.1, 0.0)):
        host.set_others(others, io=io)
        await heard(controller)
        seen.append(gate.pace.held_by)
    assert seen == [CPU, IO, ""]


async def test_controller_gives_everything_to_a_backlog_of_half_the_free_disk(
    make_controller, backlog, metrics
):
    """A backlog of half the free disk gives 1000 shares at the default coefficient, and no limit."""
    backlog.size_bytes = FREE // 2
    controller, gate = make_controller()
    controller.step()
    assert gate.pace == UploadPace(20, None)
    assert values(metrics) == (1000, -500, FREE // 2)


async def test_controller_moves_with_the_backlog_in_both_directions(make_controller, backlog, metrics):
    """More waits, more shares; what has drained is uploaded politely again."""
    controller, gate = make_controller()
    await heard(controller)
    seen = []
    for thousandths in (0, 100, 250, 400, 600, 250, 0):
        backlog.size_bytes = FREE * thousandths // 1000
        controller.step()
        seen.append((values(metrics)[0], gate.pace.concurrent_uploads))
    assert seen == [(100, 2), (200, 4), (500, 10), (800, 16), (1000, 20), (500, 10), (100, 2)]


async def test_controller_remembers_the_last_error_for_its_derivative(make_controller, backlog, metrics):
    """A growing backlog counts on top of its size, and one that stands still does not."""
    controller, _ = make_controller(d_coeff=1.0)
    backlog.size_bytes = FREE // 10
    controller.step()
    assert values(metrics)[0] == 400
    controller.step()
    assert values(metrics)[0] == 200
    backlog.size_bytes = FREE // 20
    controller.step()
    assert values(metrics)[0] == 100


async def test_controller_passes_on_what_the_machine_carries(make_controller, backlog):
    """The rate below the most shares is a part of what uploads were measured at."""
    controller, gate = make_controller()
    gate.set_pace(UploadPace(1, None))
    async with gate.upload(partition(0), 4000 * MIB):
        await asyncio.sleep(4)
    assert gate.measured_bytes_per_second == pytest.approx(1000 * MIB)
    await heard(controller)
    backlog.size_bytes = FREE // 4
    controller.step()
    assert gate.pace.bytes_per_second == pytest.approx(500 * MIB, rel=1e-6)


async def test_controller_keeps_the_interval_however_few_the_shares(make_controller, backlog):
    """The rate carries the backlog within the upload interval at the least, however few the shares are."""
    backlog.size_bytes = 10_000 * MIB
    pace = PaceLimits(max_uploads=20, upload_interval_seconds=10)
    controller, gate = make_controller(pace=pace, free_bytes_at_start=1000 * FREE)
    await heard(controller)
    controller.step()
    assert gate.pace == braked(2, 1000 * MIB)


async def test_controller_of_a_full_disk_has_no_division_by_zero(make_controller, backlog):
    """A disk that had nothing free makes any backlog urgent, and none polite."""
    controller, gate = make_controller(free_bytes_at_start=0)
    await heard(controller)
    controller.step()
    assert gate.pace.bytes_per_second == 16 * MIB
    backlog.size_bytes = 1
    controller.step()
    assert gate.pace.bytes_per_second is None


async def test_controller_says_when_its_shares_change_and_is_silent_else(make_controller, backlog):
    """A line for each change, none for the minutes between."""
    controller, _ = make_controller()
    with capture_logs() as lines:
        for size_bytes in (0, 0, 1, FREE // 2, FREE, 0):
            backlog.size_bytes = size_bytes
            controller.step()
    assert [(line["event"], line["shares"]) for line in lines] == [
        ("upload shares", 100),
        ("upload shares", 1000),
        ("upload shares", 100),
    ]
    assert lines[1]["backlog_bytes"] == FREE // 2
    assert (lines[1]["concurrent_uploads"], lines[1]["bytes_per_second"]) == (20, None)


@asynccontextmanager
async def running(controller: UploadController, interval_seconds: float):
    task = asyncio.create_task(controller.run(interval_seconds=interval_seconds))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_controller_sets_the_pace_at_once_and_every_interval(make_controller, backlog):
    """The first step waits for nothing, and the next ones come in time, until it is cancelled."""
    controller, _ = make_controller()
    async with running(controller, 60):
        await asyncio.sleep(0)
        assert backlog.asked == 1
        await asyncio.sleep(59.5)
        assert backlog.asked == 1
        await asyncio.sleep(1)
        assert backlog.asked == 2
        await asyncio.sleep(600)
        assert backlog.asked == 12
    await asyncio.sleep(600)
    assert backlog.asked == 12


async def test_controller_leaves_an_idle_machine_alone(make_controller, host):
    """The machine is not measured while no upload runs or waits: an hour costs no reading."""
    controller, gate = make_controller()
    async with running(controller, 60):
        await asyncio.sleep(3600)
        assert host.readings == 1
        async with gate.upload(partition(0), MIB):
            await asyncio.sleep(10)
        await asyncio.sleep(5)
        readings = host.readings
        assert readings > 10
        await asyncio.sleep(3600)
        assert host.readings == readings


async def test_a_limit_that_is_set_while_it_runs_holds_at_once(make_controller, host):
    """A reload does not wait for the next update of the shares."""
    host.set_others(0)
    controller, gate = make_controller()
    controller.set_pace(PaceLimits(max_uploads=20, bytes_per_second=5 * MIB))
    assert gate.pace.limit_bytes_per_second == 5 * MIB
