"""The space manager over real log directories, on a disk that is as large as a test says."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from tests.fakes.log_writer import LogWriter
from tests.fakes.virtual_loop import virtually
from tests.unit.services.daemons import Daemon
from tieringd.policies.disk_areas import DirectoryUse
from tieringd.policies.space_plan import Phase
from tieringd.services.space_facts import FOLLOWED, NOT_TIERED
from tieringd.services.space_manager import SpaceManager

SEGMENTS = 6


class Disk:
    """One filesystem for all log directories: the logs take what their files say."""

    def __init__(self, writers: list[LogWriter]) -> None:
        self.writers = writers
        self.total_bytes = 10**9

    def used_bytes(self) -> int:
        return sum(writer.local_log().size_bytes for writer in self.writers)

    def shrink_by(self, size_bytes: int) -> None:
        """Leave so much less for the logs than they take now; a fifth of a disk is reserved."""
        self.total_bytes = int((self.used_bytes() - size_bytes) / 0.8) + 1

    def __call__(self, log_dirs) -> list[DirectoryUse]:
        used = self.used_bytes()
        return [
            DirectoryUse(path, 1, self.total_bytes, used if index == 0 else 0)
            for index, path in enumerate(log_dirs)
        ]


@pytest.fixture
def daemon(tmp_path, store, writers):
    for writer in writers:
        for _ in range(SEGMENTS - 1):
            writer.closed_segment()
    return Daemon(tmp_path, store, writers)


@pytest.fixture
def disk(writers):
    return Disk(writers)


@pytest.fixture
def manager(daemon, disk):
    return SpaceManager(
        daemon.config,
        reconciler=daemon.reconciler,
        metrics=daemon.metrics,
        now_ms=daemon.clock,
        measure=disk,
    )


def segment_bytes(writer: LogWriter) -> int:
    return len(writer.data_of(writer.bases[0]))


def on_disk(writers: list[LogWriter]) -> list[int]:
    return [len(writer.bases_on_disk) for writer in writers]


async def settle() -> None:
    """Let the archivers that were asked do their step."""
    await asyncio.sleep(1)


@virtually
async def test_logs_within_their_area_are_left_alone(daemon, manager, writers):
    """Without pressure nothing is planned, and nothing goes."""
    async with daemon.running():
        (report,) = await manager.step()
        await settle()
        assert report.plan is None
        assert on_disk(writers) == [SEGMENTS + 1] * 3
        assert daemon.value("tieringd_space_short_bytes", log_dir=str(manager._log_dirs[0])) == 0


@virtually
async def test_logs_over_their_area_give_one_segment_each_in_turn(daemon, manager, writers, disk):
    """As much goes as is needed, from the oldest on, and the next round begins where this one ended."""
    async with daemon.running():
        disk.shrink_by(segment_bytes(writers[0]) * 2)
        (report,) = await manager.step()
        await settle()
        assert sum(on_disk(writers)) == 3 * (SEGMENTS + 1) - 2
        assert max(on_disk(writers)) - min(on_disk(writers)) == 1
        assert report.plan.phases[Phase.DEFAULT_TARGETS - 1].size_bytes > 0

        disk.shrink_by(segment_bytes(writers[0]))
        await manager.step()
        await settle()
        assert on_disk(writers) == [SEGMENTS] * 3


@virtually
async def test_active_segments_stay_however_full_the_disk_is(daemon, manager, writers, disk):
    """The last phase ends before them."""
    async with daemon.running():
        disk.total_bytes = 100
        await manager.step()
        await settle()
        assert on_disk(writers) == [1, 1, 1]


@virtually
async def test_what_is_not_durable_stays(daemon, manager, writers, disk):
    """The archive ends before the last closed segments. That is said, and the shortfall is a metric."""
    async with daemon.running():
        kept = [writer.closed_segment() for writer in writers]
        disk.total_bytes = 100
        with capture_logs() as lines:
            await manager.step()
        assert daemon.value("tieringd_space_short_bytes", log_dir=str(manager._log_dirs[0])) > 0
        await settle()
        assert [writer.bases_on_disk[0] for writer in writers] == kept
        assert [line["log_level"] for line in lines if "over their area" in line["event"]] == ["warning"]


@virtually
async def test_partitions_that_are_not_ours_are_named_with_the_reason(
    daemon, manager, writers, disk, tmp_path
):
    """A follower's replica and a topic that is not tiered give nothing."""
    follower = writers[1].name
    daemon.broker.followed[follower] = daemon.broker.epochs.pop(follower)
    other = LogWriter(tmp_path, "scratch", 0)
    other.closed_segment()
    daemon.broker.add(other)
    daemon.broker.configs["scratch"] = {"remote.storage.enable": "false"}
    async with daemon.running():
        disk.total_bytes = 100
        (report,) = await manager.step()
        await settle()
        reasons = {str(kept.topic_partition): kept.because for kept in report.plan.kept}
        assert (reasons["orders-1"], reasons["scratch-0"]) == (FOLLOWED, NOT_TIERED)
        assert on_disk(writers) == [1, SEGMENTS + 1, 1]
        assert other.bases_on_disk == other.bases


@virtually
async def test_management_can_be_switched_off(daemon, manager, writers, disk):
    """Then the logs may grow over their area."""
    manager.set_config(daemon.config.model_copy(update={"space_management_enable": False}))
    async with daemon.running():
        disk.total_bytes = 100
        running = asyncio.create_task(manager.run())
        await asyncio.sleep(120)
        assert on_disk(writers) == [SEGMENTS + 1] * 3
        manager.set_config(daemon.config)
        await asyncio.sleep(40)
        assert on_disk(writers) == [1, 1, 1]
        running.cancel()


@virtually
async def test_log_directory_that_cannot_be_measured_is_said_and_skipped(daemon, manager, writers):
    """The next round tries again."""

    def fails(log_dirs):
        raise FileNotFoundError(2, "No such file or directory", log_dirs[0])

    manager._measure = fails
    async with daemon.running():
        with capture_logs() as lines:
            assert await manager.step() == ()
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == [
        "log directories cannot be measured"
    ]
