"""The space manager over real log directories, on a disk that is as large as a test says."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archived, observed
from tests.fakes.daemons import Daemon
from tests.fakes.log_writer import LogWriter
from tests.fakes.virtual_loop import virtually
from tieringd.broker.disk_use import DiskUseMeter, directory_uses
from tieringd.policies.disk_areas import DirectoryUse
from tieringd.policies.local_retention import ClusterLocalTarget, LocalSettings, resolve_local_target
from tieringd.policies.space_plan import Phase
from tieringd.policies.trim_target import TrimObstacle
from tieringd.space.space_manager import (
    FOLLOWED,
    HIDDEN,
    NOT_TIERED,
    SpaceManager,
    scanned_logs,
    space_partition,
)

SEGMENTS = 6


class Disk:
    """One filesystem for all log directories: the logs take what their files say."""

    def __init__(self, writers: list[LogWriter]) -> None:
        self.writers = writers
        self.total_bytes = 10**9
        self.cache_bytes = 0
        self.measure = self.measured
        """What the manager's next measurements do."""

    def used_bytes(self) -> int:
        return sum(writer.local_log().size_bytes for writer in self.writers)

    def shrink_by(self, size_bytes: int) -> None:
        """Leave so much less for the logs than they take now; a fifth each is reserved and the cache's."""
        self.total_bytes = int((self.used_bytes() - size_bytes) / 0.6) + 1

    def __call__(self, paths) -> list[DirectoryUse]:
        return self.measure(paths)

    def measured(self, paths) -> list[DirectoryUse]:
        """Return what each directory takes."""
        if paths == ["/nowhere/state/cloud_storage_cache"]:
            return [DirectoryUse(paths[0], 1, self.total_bytes, self.cache_bytes)]
        used = self.used_bytes()
        return [
            DirectoryUse(path, 1, self.total_bytes, used if index == 0 else 0)
            for index, path in enumerate(paths)
        ]


@pytest.fixture
def daemon(tmp_path, store, writers):
    for writer in writers:
        for _ in range(SEGMENTS - 1):
            writer.closed_segment()
    return Daemon(tmp_path, store, writers)


@virtually
async def test_file_that_is_no_segment_counts_after_the_next_scan(daemon, writers):
    """A cleaner's file changes the directory's time and no segment: it is measured all the same."""
    path, reconciler = writers[0].path, daemon.reconciler
    for each in (*path.iterdir(), path):
        os.utime(each, ns=(DEFAULT_TIME_MS * 10**6, DEFAULT_TIME_MS * 10**6))
    meter, log_dirs = DiskUseMeter(lambda: scanned_logs(reconciler.snapshot)), [str(path.parent)]
    async with daemon.running():
        await daemon.round()
        await daemon.round()
        before = reconciler.snapshot
        assert meter(log_dirs) == directory_uses(log_dirs)
        (path / f"{0:020d}.log.cleaned").write_bytes(bytes(100_000))
        os.utime(path, ns=(DEFAULT_TIME_MS * 10**6 + 1, DEFAULT_TIME_MS * 10**6 + 1))
        await daemon.round()
        after = reconciler.snapshot
        assert after.scan_number > before.scan_number
        assert [one.log for one in after.wanted.values()] == [one.log for one in before.wanted.values()] != []
        assert meter(log_dirs) == directory_uses(log_dirs)


@pytest.fixture
def disk(writers):
    return Disk(writers)


@pytest.fixture
def told():
    """Give what the cache was told, in order."""
    return []


@pytest.fixture
def manager(daemon, disk, told):
    return SpaceManager(
        daemon.config,
        reconciler=daemon.reconciler,
        metrics=daemon.metrics,
        ages_ms=daemon.clock,
        measure=disk,
        tell_cache=told.append,
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
    """Nothing is planned without pressure, and nothing goes."""
    async with daemon.running():
        (report,) = await manager.step()
        await settle()
        assert report.plan is None
        assert on_disk(writers) == [SEGMENTS + 1] * 3
        assert daemon.value("tieringd_space_short_bytes", log_dir=str(daemon.config.broker.log_dirs[0])) == 0


@virtually
async def test_logs_over_their_area_give_one_segment_each_in_turn(daemon, manager, writers, disk):
    """The oldest segments go, as many as needed. The next round begins where this one ended."""
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
async def test_disk_that_was_measured_long_ago_needs_no_room_now(daemon, manager, writers, disk):
    """A process that stood still since then asks for nothing: the disk may have room again."""

    def slowly(paths):
        asyncio.get_running_loop().pass_time(3600)
        return disk.measured(paths)

    async with daemon.running():
        disk.shrink_by(segment_bytes(writers[0]) * 2)
        disk.measure = slowly
        await manager.step()
        await settle()
        assert on_disk(writers) == [SEGMENTS + 1] * 3
        disk.measure = disk.measured
        await manager.step()
        await settle()
        assert sum(on_disk(writers)) == 3 * (SEGMENTS + 1) - 2


async def test_hint_bounds_the_first_phase_and_the_target_the_second(writer, archive):
    """The published hint may lag behind an enforced target, so it bounds the first phase only."""
    ends = [writer.closed_segment() for _ in range(SEGMENTS)][1:]
    manifest = await archived(writer, archive)
    seen = observed(writer, target_bytes=2 * segment_bytes(writer))
    for hint in (ends[0], ends[1], None):
        stored = replace(manifest, allowed_local_start_offset=hint)
        facts = space_partition(seen, stored, obstacle=None, now_ms=DEFAULT_TIME_MS)
        assert facts.retention_next_offset == (hint or 0)
        assert facts.local_retention_next_offset == ends[3]


async def test_advice_is_the_first_phase_and_total_retention_goes_further(writer, archive):
    """Segments past a target that is only advice go first, and the hint does not lag behind it there."""
    ends = [writer.closed_segment() for _ in range(SEGMENTS)][1:]
    manifest = await archived(writer, archive)
    size_bytes = segment_bytes(writer)
    for advised, total, expected in ((2, None, ends[3]), (4, 3, ends[2]), (None, 4, ends[1])):
        target = resolve_local_target(
            [LocalSettings("the test", redpanda_bytes=advised and advised * size_bytes)],
            cluster=ClusterLocalTarget(None, None, is_strict=False),
            total_ms=None,
            total_bytes=total and total * size_bytes,
        )
        seen = observed(writer)
        seen = replace(seen, topic=replace(seen.topic, local_target=target))
        stored = replace(manifest, allowed_local_start_offset=expected)
        facts = space_partition(seen, stored, obstacle=None, now_ms=DEFAULT_TIME_MS)
        assert facts.retention_next_offset == expected
        assert facts.local_retention_next_offset == expected


@virtually
async def test_what_is_past_an_advised_target_goes_before_anything_recent(tmp_path, store, writers):
    """A topic past its own target gives what is asked for; a topic within its target gives nothing."""
    other = LogWriter(tmp_path, "bounded", 0)
    writers.append(other)
    for writer in writers:
        for _ in range(SEGMENTS):
            writer.closed_segment()
    daemon = Daemon(tmp_path, store, writers, is_strict=False)
    daemon.broker.configs["bounded"] = {"retention.local.target.bytes": str(segment_bytes(other))}
    disk = Disk(writers)
    manager = SpaceManager(
        daemon.config,
        reconciler=daemon.reconciler,
        metrics=daemon.metrics,
        ages_ms=daemon.clock,
        measure=disk,
    )
    async with daemon.running():
        before = on_disk(writers)
        disk.shrink_by(segment_bytes(other) * 4)
        (report,) = await manager.step()
        await settle()
    assert [len(one.removals) for one in report.plan.phases] == [1, 0, 0, 0, 0]
    assert on_disk(writers) == [*before[:-1], before[-1] - 4]


async def test_obstacle_inside_the_log_keeps_what_follows_it(writer, archive):
    """A partition is reclaimable up to the offset that its archiver's trims do not get past."""
    ends = [writer.closed_segment() for _ in range(SEGMENTS)][1:]
    manifest = await archived(writer, archive)
    obstacle = TrimObstacle("a segment differs", from_offset=ends[1], retry_offset=ends[2])
    facts = space_partition(observed(writer), manifest, obstacle=obstacle, now_ms=DEFAULT_TIME_MS)
    assert (facts.reclaimable_next_offset, facts.not_reclaimable) == (ends[1], "a segment differs")


class Beside:
    """A topic past its advised target that cannot be trimmed, and a smaller one that can."""

    def __init__(self, log_dir, store, why: str) -> None:
        self.log_dir = str(log_dir)
        self.stuck, self.other = LogWriter(log_dir, "stuck", 0), LogWriter(log_dir, "bounded", 0)
        for _ in range(SEGMENTS):
            for writer in (self.stuck, self.stuck, self.other):
                writer.closed_segment()
        self.writers = [self.stuck, self.other]
        self.daemon = Daemon(log_dir, store, self.writers, is_strict=False)
        for writer in self.writers:
            target = {"retention.local.target.bytes": str(segment_bytes(writer))}
            self.daemon.broker.configs[writer.name.topic] = target
        self.why = why
        self.disk = Disk(self.writers)
        self.manager = SpaceManager(
            self.daemon.config,
            reconciler=self.daemon.reconciler,
            metrics=self.daemon.metrics,
            ages_ms=self.daemon.clock,
            measure=self.disk,
        )

    async def turn(self) -> None:
        """Begin or end what keeps the trims away."""
        if self.why == "denied":
            self.daemon.broker.denied ^= {"stuck"}
        else:
            self.stuck.flip_byte(0)
        await self.daemon.round()

    async def spend(self, minutes: int) -> list[float]:
        """Do the manager's rounds; return by how much the plans fell short."""
        short_bytes = []
        for _ in range(2 * minutes):
            await self.manager.step()
            short_bytes.append(self.daemon.value("tieringd_space_short_bytes", log_dir=self.log_dir))
            await asyncio.sleep(30)
            self.daemon.clock.now_ms += 30_000
        return short_bytes


@pytest.mark.parametrize("why", ["denied", "differs"])
@virtually
async def test_partition_that_cannot_be_trimmed_is_not_counted_on(tmp_path, store, why):
    """A trim that does not happen frees nothing, so another partition gives what is needed."""
    beside = Beside(tmp_path, store, why)
    async with beside.daemon.running():
        await beside.turn()
        beside.disk.shrink_by(segment_bytes(beside.other) * 4)
        assert await beside.spend(2) == [0] * 4
        assert on_disk(beside.writers) == [2 * SEGMENTS + 1, SEGMENTS + 1 - 4]


@pytest.mark.parametrize("why", ["denied", "differs"])
@virtually
async def test_shortage_behind_a_trim_that_does_not_happen_is_told(tmp_path, store, why):
    """A shortage is told in every round, once in the log, until the trim is tried again and happens."""
    beside = Beside(tmp_path, store, why)
    async with beside.daemon.running():
        await beside.turn()
        beside.disk.shrink_by(segment_bytes(beside.other) * (SEGMENTS + 3))
        with capture_logs() as lines:
            first, *short_bytes = await beside.spend(20)
        assert first == 0
        assert min(short_bytes) > 0
        assert on_disk(beside.writers) == [2 * SEGMENTS + 1, 1]
        assert len([line for line in lines if "over their area" in line["event"]]) == 1

        await beside.turn()
        await beside.spend(6)
        assert (await beside.spend(1))[-1] == 0
        assert on_disk(beside.writers) == [2 * SEGMENTS + 1 - 3, 1]


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
    """The archive ends before the last closed segments. The plan says so, and the shortfall is a metric."""
    async with daemon.running():
        kept = [writer.closed_segment() for writer in writers]
        disk.total_bytes = 100
        with capture_logs() as lines:
            await manager.step()
        assert daemon.value("tieringd_space_short_bytes", log_dir=str(daemon.config.broker.log_dirs[0])) > 0
        await settle()
        assert [writer.bases_on_disk[0] for writer in writers] == kept
        assert [line["log_level"] for line in lines if "over their area" in line["event"]] == ["warning"]


@virtually
async def test_partitions_that_are_not_ours_are_named_with_the_reason(
    daemon, manager, writers, disk, tmp_path
):
    """A follower's replica, a topic that is not tiered and one whose settings are hidden give nothing."""
    follower = writers[1].name
    daemon.broker.followed[follower] = daemon.broker.epochs.pop(follower)
    other, hidden = (LogWriter(tmp_path, topic, 0) for topic in ("scratch", "secret"))
    for writer in (other, hidden):
        writer.closed_segment()
        daemon.broker.add(writer)
    daemon.broker.configs["scratch"] = {"remote.storage.enable": "false"}
    daemon.broker.hidden = {"secret"}
    async with daemon.running():
        disk.total_bytes = 100
        (report,) = await manager.step()
        await settle()
        reasons = {str(kept.topic_partition): kept.because for kept in report.plan.kept}
        assert (reasons["orders-1"], reasons["scratch-0"]) == (FOLLOWED, NOT_TIERED)
        assert reasons["secret-0"] == HIDDEN
        assert on_disk(writers) == [1, SEGMENTS + 1, 1]
        assert other.bases_on_disk == other.bases


@virtually
async def test_management_can_be_switched_off(daemon, manager, writers, disk):
    """The logs may grow over their area then."""
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
async def test_figures_of_the_areas_end_with_the_management(daemon, manager, writers, disk, told):
    """A shortage that is not measured any more is no alert, also where a round was under way."""
    log_dir, cache_dir = str(daemon.config.broker.log_dirs[0]), str(daemon.config.cache_directory)
    off = daemon.config.model_copy(update={"space_management_enable": False})
    loop = asyncio.get_running_loop()

    def switched_off(paths):
        loop.call_soon_threadsafe(manager.set_config, off)
        return disk.measured(paths)

    async with daemon.running():
        for writer in writers:
            writer.closed_segment()
        disk.total_bytes = 100
        await manager.step()
        assert daemon.value("tieringd_space_short_bytes", log_dir=log_dir) > 0
        disk.measure = switched_off
        running = asyncio.create_task(manager.run())
        await asyncio.sleep(90)
        running.cancel()
    for name in ("log_bytes", "log_area_bytes", "short_bytes"):
        assert daemon.value(f"tieringd_space_{name}", log_dir=log_dir) is None
    for name in ("cache_bytes", "cache_area_bytes"):
        assert daemon.value(f"tieringd_space_{name}", directory=cache_dir) is None
    assert (manager.reports, told[-1]) == ((), None)


@virtually
async def test_log_directory_that_cannot_be_measured_is_said_and_skipped(daemon, manager, disk):
    """The next round tries again."""

    def fails(log_dirs):
        raise FileNotFoundError(2, "No such file or directory", log_dirs[0])

    disk.measure = fails
    async with daemon.running():
        with capture_logs() as lines:
            assert [await manager.step() for _ in range(2)] == [(), ()]
        assert daemon.value("tieringd_loop_last_success_timestamp_seconds", loop="space") is None
        disk.measure = disk.measured
        await manager.step()
        assert daemon.value("tieringd_loop_last_success_timestamp_seconds", loop="space") > 0
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == [
        "log directory cannot be measured"
    ]


class SecondDisk:
    """A log directory on a disk of its own, which fails; the cache is on the first disk."""

    def __init__(self, disk: Disk, log_dir: str) -> None:
        self._first, self._log_dir = disk, log_dir
        self.has_failed = False

    def __call__(self, paths) -> list[DirectoryUse]:
        if paths != [self._log_dir]:
            return self._first.measured(paths)
        if self.has_failed:
            raise OSError(5, "Input/output error", self._log_dir)
        return [DirectoryUse(self._log_dir, 2, 1000, 900)]


@pytest.mark.parametrize("log_dirs", ["{first}, {second}", "{second}, {first}"])
@virtually
async def test_disk_that_fails_leaves_the_others_managed(tmp_path, store, log_dirs):
    """Kafka goes on with its other log directories, and the space manager says what it misses."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    (tmp_path / "second").mkdir()
    writer = LogWriter(tmp_path / "first")
    for _ in range(SEGMENTS):
        writer.closed_segment()
    daemon = Daemon(log_dirs.format(first=first, second=second), store, [writer])
    disk, told = Disk([writer]), []
    disk.measure = both = SecondDisk(disk, second)
    manager = SpaceManager(
        daemon.config,
        reconciler=daemon.reconciler,
        metrics=daemon.metrics,
        ages_ms=daemon.clock,
        measure=disk,
        tell_cache=told.append,
    )

    def figures() -> list[float | None]:
        names = ("log_bytes", "log_area_bytes", "short_bytes")
        return [daemon.value(f"tieringd_space_{name}", log_dir=second) for name in names]

    async with daemon.running():
        await manager.step()
        assert figures() == [900, 800, 100]
        succeeded_at = daemon.value("tieringd_loop_last_success_timestamp_seconds", loop="space")
        both.has_failed = True
        disk.shrink_by(segment_bytes(writer) * 2)
        with capture_logs() as lines:
            reports = [await manager.step() for _ in range(2)]
        await settle()
        assert [report.space.log_dirs for (report,) in reports] == [(first,)] * 2
        assert on_disk([writer]) == [SEGMENTS + 1 - 2]
        assert figures() == [None] * 3
        warned = [(line["path"], line["error"]) for line in lines if "cannot be measured" in line["event"]]
        assert warned == [(second, f"[Errno 5] Input/output error: '{second}'")]
        # The logs of the failed directory may be where the cache is: it may only become smaller.
        smaller = told[-1]
        assert told == [200_000_000, smaller, smaller]
        disk.total_bytes = 10**9
        await manager.step()
        assert told[-1] == smaller
        assert daemon.value("tieringd_loop_last_success_timestamp_seconds", loop="space") == succeeded_at
        both.has_failed = False
        await manager.step()
        assert told[-1] == 200_000_000
        assert figures() == [900, 800, 100]
        assert daemon.value("tieringd_loop_last_success_timestamp_seconds", loop="space") > succeeded_at


CACHE = "/nowhere/state/cloud_storage_cache"


@virtually
async def test_cache_is_told_its_area_and_gives_way_before_the_log(daemon, manager, disk, writers, told):
    """A fifth of the disk is the cache's, until the logs have taken of it; they are not trimmed for that."""
    async with daemon.running():
        disk.total_bytes, disk.cache_bytes = 10_000_000, 1_900_000
        (report,) = await manager.step()
        assert (report.space.cache_dir, report.space.areas.log_bytes) == (CACHE, 6_000_000)
        assert told == [2_000_000]
        assert daemon.value("tieringd_space_cache_bytes", directory=CACHE) == 1_900_000
        assert daemon.value("tieringd_space_cache_area_bytes", directory=CACHE) == 2_000_000

        used = disk.used_bytes()
        disk.total_bytes = int(used / 0.6) + 10
        disk.total_bytes = int((used + 0.1 * disk.total_bytes) / 0.8)
        (report,) = await manager.step()
        assert report.space.cache_limit_bytes == disk.total_bytes - int(disk.total_bytes * 0.2) - used
        assert told[-1] == report.space.cache_limit_bytes < report.space.areas.cache_bytes
        assert report.space.cache_excess_bytes > 0


@virtually
async def test_cache_on_a_disk_of_its_own_takes_nothing_from_the_log(daemon, manager, disk, told):
    """The cache has its size from its own disk, and the logs' disk has no cache."""

    def two_disks(paths):
        found = disk.measured(paths)
        return [DirectoryUse(CACHE, 2, 1000, 0)] if paths == [CACHE] else found

    disk.measure = two_disks
    async with daemon.running():
        (report,) = await manager.step()
    assert (report.space.cache_dir, report.space.areas.log_bytes) == (None, 800_000_000)
    assert told == [200]


@virtually
async def test_cache_that_cannot_be_measured_is_said_and_left_out(daemon, manager, disk, told):
    """The logs are managed all the same."""

    def fails(paths):
        if paths == [CACHE]:
            raise PermissionError(13, "Permission denied", CACHE)
        return disk.measured(paths)

    disk.measure = fails
    async with daemon.running():
        with capture_logs() as lines:
            (report,) = await manager.step()
    assert (report.space.cache_dir, told) == (None, [])
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == [
        "the cache directory cannot be measured"
    ]


@virtually
async def test_cache_that_is_not_there_yet_takes_nothing_where_it_will_be(daemon, manager, disk, told):
    """The cache's filesystem is that of the nearest directory above it."""

    def not_there(paths):
        if paths == [CACHE]:
            raise FileNotFoundError(2, "No such file or directory", CACHE)
        return disk.measured(paths)

    disk.measure = not_there
    async with daemon.running():
        await manager.step()
    assert len(told) == 1
    assert told[0] > 0


@virtually
async def test_without_tiering_there_is_no_cache(daemon, manager, told):
    """The whole of what the reservation leaves is the logs'."""
    manager.set_config(daemon.config.model_copy(update={"cloud_storage_enabled": False}))
    async with daemon.running():
        (report,) = await manager.step()
    assert (report.space.areas.log_bytes, told) == (800_000_000, [])


@virtually
async def test_cache_hears_when_the_areas_are_no_longer_managed(daemon, manager, told):
    """The bytes that the logs took last from the cache's area are not held against it for ever."""
    manager.set_config(daemon.config)
    assert told == []
    manager.set_config(daemon.config.model_copy(update={"space_management_enable": False}))
    assert told == [None]
