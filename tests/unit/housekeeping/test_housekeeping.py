"""The housekeeping service on a virtual clock: idle stores, traffic, forced turns, fairness, failures."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from tests.fakes.log_lines import listening
from tests.fakes.virtual_loop import virtually
from tieringd.errors import StorageUnavailable
from tieringd.housekeeping.partition_sweep import JobTurn
from tieringd.housekeeping.service import TURN_REQUESTS_MAX, Housekeeping, TrafficWatch
from tieringd.metrics import Metrics
from tieringd.policies.housekeeping_turns import HousekeepingLimits
from tieringd.storage.background import is_background

LIMITS = HousekeepingLimits(window_seconds=10.0, threshold_rps=1, interval_seconds=300.0)


class Job:
    """Work in equal pieces; each turn takes one second and tells when it was."""

    def __init__(self, name, pieces=0, *, partitions=1):
        self.name = name
        self.pieces = pieces
        self.partitions = partitions
        self.turns = []
        self.quotas = []
        self.errors = []

    async def turn(self, *, requests_max):
        self.turns.append(asyncio.get_running_loop().time())
        self.quotas.append(requests_max)
        assert is_background()
        await asyncio.sleep(1)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        done = min(1, self.pieces)
        self.pieces -= done
        return JobTurn(
            requests=done,
            has_more=self.pieces > 0,
            has_covered_all=len(self.turns) % self.partitions == 0,
        )


class Daemon:
    """A housekeeping service, and the traffic of other requests."""

    def __init__(self, *jobs, limits=LIMITS):
        now = asyncio.get_running_loop().time
        self.metrics = Metrics()
        self.watch = TrafficWatch(window_seconds=limits.window_seconds, now=now)
        self.service = Housekeeping(
            jobs, traffic=self.watch, limits=limits, metrics=self.metrics.housekeeping, now=now
        )

    def value(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"tieringd_housekeeping_{name}", labels) or 0

    @property
    def state(self):
        return [one for one in ("active", "paused", "idle") if self.value("state", state=one)]

    async def busy(self, seconds, *, rps=5, is_throttled=False):
        """Make requests for so long."""
        for _ in range(int(seconds * rps)):
            self.watch.note(is_throttled=is_throttled)
            await asyncio.sleep(1 / rps)


@asynccontextmanager
async def running(daemon):
    task = asyncio.create_task(daemon.service.run())
    try:
        yield daemon
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@virtually
async def test_idle_store_is_used_once_it_was_watched_for_a_window():
    """The first turn comes then, and turns follow each other until all is done."""
    job = Job("merge", pieces=3)
    async with running(Daemon(job)) as daemon:
        await asyncio.sleep(20)
        assert [round(at, 1) for at in job.turns[:3]] == [10.0, 11.0, 12.0]
        assert job.pieces == 0
        assert daemon.value("turns_total", task="merge", reason="idle") == 3
        assert daemon.value("requests_total", task="merge") == 3
        assert daemon.state == ["idle"]


@virtually
async def test_finished_job_is_asked_again_a_window_after_the_round():
    """A round ends when every job is done."""
    one, other = Job("a"), Job("b", pieces=2)
    async with running(Daemon(one, other)) as daemon:
        await asyncio.sleep(40)
        assert [round(at) for at in one.turns] == [10, 23, 35]
        assert [round(at) for at in other.turns] == [11, 12, 24, 36]
        assert daemon.value("rounds_total") == 3


@virtually
async def test_traffic_pauses_and_its_end_resumes():
    """No job gets a turn during traffic. Housekeeping goes on after a window without requests."""
    job = Job("merge", pieces=1000)
    async with running(Daemon(job)) as daemon:
        await asyncio.sleep(15)
        assert daemon.state == ["active"]
        await daemon.busy(60)
        during = [at for at in job.turns if 20 < at < 75]
        assert during == []
        assert daemon.state == ["paused"]
        await asyncio.sleep(13)
        # The count is at the threshold again when all but ten of the last requests have left the window.
        assert [at for at in job.turns if 75 < at < 88]
        assert daemon.state == ["active"]
        assert daemon.value("pauses_total") == 2


@virtually
async def test_traffic_at_the_threshold_is_idle():
    """One request a second for ten seconds is what the documents call idle."""
    job = Job("merge", pieces=1000)
    async with running(Daemon(job)) as daemon:
        await daemon.busy(60, rps=0.9)
        assert len(job.turns) > 40


@virtually
async def test_throttled_store_is_left_alone_for_a_window():
    """One answer that asks to slow down is enough."""
    job = Job("merge", pieces=1000)
    async with running(Daemon(job)) as daemon:
        await asyncio.sleep(30)
        daemon.watch.note(is_throttled=True)
        await asyncio.sleep(12)
        assert [at for at in job.turns if 31.5 < at < 40] == []
        assert [at for at in job.turns if at > 40]


@virtually
async def test_forced_turn_comes_once_per_interval_beside_traffic():
    """A job that never finds an idle store has one turn in each interval."""
    job = Job("merge", pieces=1000)
    async with running(Daemon(job)) as daemon:
        await daemon.busy(1510, rps=20)
        assert [round(at) for at in job.turns] == [300, 601, 902, 1203, 1504]
        assert daemon.value("turns_total", task="merge", reason="forced") == 5
        assert daemon.value("turns_total", task="merge", reason="idle") == 0


@virtually
async def test_forced_turns_go_on_until_each_partition_had_its_share():
    """The job says when; another job that is overdue has its turns in between."""
    merge, scrub = Job("merge", pieces=1000, partitions=4), Job("scrub", pieces=1000, partitions=2)
    async with running(Daemon(merge, scrub)) as daemon:
        await daemon.busy(320, rps=20)
        assert [round(at) for at in merge.turns] == [300, 302, 304, 305]
        assert [round(at) for at in scrub.turns] == [301, 303]


@virtually
async def test_turns_alternate_between_jobs():
    """A job with much to do does not keep the others from theirs; each turn has the same quota."""
    jobs = [Job(name, pieces=50) for name in "abc"]
    async with running(Daemon(*jobs)):
        await asyncio.sleep(100)
    order = sorted((at, job.name) for job in jobs for at in job.turns)
    names = [name for _, name in order]
    assert names[:9] == list("abcabcabc")
    assert {quota for job in jobs for quota in job.quotas} == {TURN_REQUESTS_MAX}


@virtually
async def test_failed_turn_is_counted_said_and_comes_again_later():
    """Other jobs go on meanwhile; a success ends the pauses."""
    job, other = Job("merge", pieces=5), Job("scrub", pieces=5)
    job.errors = [StorageUnavailable("away"), StorageUnavailable("away")]
    with listening() as lines:
        async with running(Daemon(job, other)) as daemon:
            await asyncio.sleep(60)
            assert daemon.value("failures_total", task="merge", error="StorageUnavailable") == 2
    # The pauses are a window and two; the first ends within the pause between two rounds.
    assert [round(at) for at in job.turns[:4]] == [10, 26, 47, 48]
    assert [round(at) for at in other.turns[:5]] == [11, 12, 13, 14, 15]
    assert job.pieces == 0
    assert lines.events.count("housekeeping failed; it comes again later") == 2


@virtually
async def test_success_ends_the_growth_of_pauses():
    """The next failure is a first one again."""
    job = Job("merge", pieces=5)
    job.errors = [StorageUnavailable("away"), StorageUnavailable("away"), None, StorageUnavailable("away")]
    async with running(Daemon(job)):
        await asyncio.sleep(100)
    failed_at, again_at = job.turns[3:5]
    assert 11 <= again_at - failed_at < 22


@virtually
async def test_failed_job_does_not_wait_for_the_end_of_a_long_round():
    """Another job with much to do keeps the round open, and the failed one has its turns in it."""
    job, other = Job("merge", pieces=1), Job("scrub", pieces=1_000)
    job.errors = [StorageUnavailable("away")]
    async with running(Daemon(job, other)):
        await asyncio.sleep(40)
    assert job.pieces == 0
    assert other.pieces > 900


@virtually
async def test_fault_of_ours_does_not_end_the_service():
    """The failure is counted by its name, and the job comes again later."""
    job, other = Job("merge", pieces=1), Job("scrub", pieces=5)
    job.errors = [ValueError("a bug")]
    async with running(Daemon(job, other)) as daemon:
        await asyncio.sleep(60)
        assert daemon.value("failures_total", task="merge", error="ValueError") == 1
    assert job.pieces == 0


@virtually
async def test_failing_job_beside_traffic_is_forced_again_after_its_pause():
    """A failing job is not asked again at once, although it is still overdue."""
    job = Job("merge", pieces=5)
    job.errors = [StorageUnavailable("away")] * 3
    async with running(Daemon(job)) as daemon:
        await daemon.busy(400, rps=20)
    assert [round(at) for at in job.turns] == [300, 311, 332, 373]


@virtually
async def test_other_limits_work_at_once():
    """A reload wakes a service that sleeps, and counts over the new window."""
    job = Job("merge", pieces=1)
    async with running(Daemon(job)) as daemon:
        await asyncio.sleep(20)
        served = len(job.turns)
        daemon.service.set_limits(HousekeepingLimits(2.0, 1, 5.0))
        assert daemon.watch.traffic.watched_seconds == 0
        await asyncio.sleep(1)
        daemon.service.set_limits(HousekeepingLimits(2.0, 1, 5.0))
        assert daemon.watch.traffic.watched_seconds == pytest.approx(1)
        await daemon.busy(20, rps=20)
        assert len(job.turns) - served >= 3
        assert daemon.value("turns_total", task="merge", reason="forced") >= 3


@virtually
async def test_reload_wakes_a_service_that_sleeps_long():
    """A long window is not slept through when it becomes a short one."""
    job = Job("merge", pieces=1)
    async with running(Daemon(job, limits=HousekeepingLimits(3_600.0, 1, 7_200.0))) as daemon:
        await asyncio.sleep(10)
        daemon.service.set_limits(HousekeepingLimits(2.0, 1, 60.0))
        await asyncio.sleep(4)
    assert len(job.turns) == 1


@virtually
async def test_job_without_work_and_without_an_await_stops_no_other_job():
    """Other tasks run between the turns, however short the interval is."""

    class Hasty(Job):
        async def turn(self, *, requests_max):
            self.turns.append(requests_max)
            return JobTurn(requests=0, has_more=True)

    job = Hasty("merge")
    async with running(Daemon(job, limits=HousekeepingLimits(0.1, 0, 0.001))):
        await asyncio.sleep(1)
        assert 50 <= len(job.turns) <= 110


@virtually
async def test_cancelled_service_cancels_the_turn():
    """A daemon that stops does not wait for a job."""
    began, ended = asyncio.Event(), []

    class Endless(Job):
        async def turn(self, *, requests_max):
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(requests_max)

    async with running(Daemon(Endless("merge"))):
        await began.wait()
    assert ended == [TURN_REQUESTS_MAX]


@virtually
async def test_last_success_is_known_from_the_start():
    """A job that never succeeds is seen by its age."""
    daemon = Daemon(Job("merge"))
    assert daemon.value("last_success_timestamp_seconds", task="merge") > 0


@virtually
async def test_two_jobs_of_one_name_are_a_fault_of_ours():
    """The metrics and turns of two such jobs would be one."""
    with pytest.raises(AssertionError):
        Daemon(Job("merge"), Job("merge"))
