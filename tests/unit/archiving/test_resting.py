"""An archiver that rests is not stepped, and everything that may give it something to do wakes it."""

from __future__ import annotations

import asyncio
import math
import tracemalloc
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import archive_in
from tests.fakes.counted_calls import CountedCalls
from tests.fakes.daemons import INTERVAL_SECONDS, stepped
from tests.fakes.manifests import stored_manifest
from tests.fakes.store import store_unavailable
from tests.fakes.virtual_loop import virtually
from tieringd.archiving.remote_log import RemoteLog
from tieringd.archiving.resting import ChangeFeed, Resting, WakeUp
from tieringd.archiving.trimmer import DENIED_PAUSE_MS, DIFFERS_MS, PUT_OFF_MS
from tieringd.errors import BrokerDenied, BrokerUnavailable
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.policies.upload_plan import UploadLimits


async def settled(daemon):
    """Let all be archived, retention have checked twice, and every archiver rest."""
    for _ in range(4):
        daemon.clock.now_ms += 20_000
        await daemon.round()
    with stepped() as partitions:
        await daemon.round()
    assert partitions == []


class Nothing:
    """A change that does not fit any more."""

    async def commit(self, claim, stored):
        del claim
        return stored


class Slow:
    """A change that takes several rounds."""

    async def commit(self, claim, stored):
        del claim
        await asyncio.sleep(3 * INTERVAL_SECONDS)
        return stored


@virtually
async def test_archivers_at_rest_are_not_stepped(daemon):
    """An archiver at rest is not stepped, however many rounds there are."""
    async with daemon.running():
        await settled(daemon)
        with stepped() as partitions:
            for _ in range(20):
                await daemon.round()
        assert partitions == []


@virtually
async def test_closed_segment_wakes_its_archiver_in_the_next_round(daemon):
    """The files have changed, so there is another observation."""
    async with daemon.running():
        await settled(daemon)
        base_offset = daemon.writers[1].closed_segment()
        with stepped() as partitions:
            await daemon.round()
        assert set(partitions) == {1}
        assert daemon.archived()["orders-1"] == [0, base_offset]


@virtually
async def test_closed_segment_that_the_watch_told_wakes_its_archiver_at_once(daemon):
    """A segment that the watch reports is uploaded between two rounds. The next round finds nothing new."""
    async with daemon.running():
        await settled(daemon)
        base_offset = daemon.writers[1].closed_segment()
        assert await daemon.reconciler.rescan_partitions([str(daemon.writers[1].path)])
        await asyncio.sleep(1)
        assert daemon.archived()["orders-1"] == [0, base_offset]
        with stepped() as partitions:
            await daemon.round()
            await daemon.round()
            await daemon.round()
        assert set(partitions) <= {1}
        with stepped() as partitions:
            await daemon.round()
        assert partitions == []


@virtually
async def test_setting_of_a_topic_wakes_its_archivers(daemon):
    """The configuration is part of an observation."""
    async with daemon.running():
        await settled(daemon)
        daemon.broker.configs["orders"] = {"local.retention.ms": "1"}
        with stepped() as partitions:
            await daemon.round()
        assert set(partitions) == {0, 1, 2}
        assert [writer.log_start_offset for writer in daemon.writers] == [3, 3, 3]


@virtually
async def test_time_that_has_come_wakes_the_archivers(daemon, store):
    """An archiver polls for edits of its manifest, and meets what a job has put there."""
    async with daemon.running():
        await settled(daemon)
        before = daemon.reconciler.archiver(Leadership(daemon.writers[0].identified, 0)).manifest
        job = archive_in(store, writer_id="job").manifests

        async def edited(manifest):
            return replace(manifest, allowed_local_start_offset=1)

        await job.edit(daemon.writers[0].identified, edited)
        pace = next(daemon.reconciler.archived())[2].topic.retention_pace
        daemon.clock.now_ms += pace.edits_interval_ms
        with stepped() as partitions:
            await daemon.round()
        assert set(partitions) == {0, 1, 2}
        after = daemon.reconciler.archiver(Leadership(daemon.writers[0].identified, 0)).manifest
        assert before != after == stored_manifest(store, daemon.writers[0])


@virtually
async def test_edit_that_comes_before_a_commit_is_no_fault(daemon, store):
    """An archiver that loses its commit to a job's edit commits once more in the same step of its own."""
    async with daemon.running():
        await settled(daemon)
        writer = daemon.writers[0]
        job = archive_in(store, writer_id="job").manifests

        async def edited(manifest):
            return replace(manifest, allowed_local_start_offset=1)

        await job.edit(writer.identified, edited)
        base_offset = writer.closed_segment()
        with capture_logs() as events:
            await daemon.round()
        assert daemon.archived()["orders-0"] == [0, base_offset]
        assert stored_manifest(store, writer).allowed_local_start_offset == 1
        assert [one["event"] for one in events].count("archiver met a job's edit") == 1
        assert [one for one in events if one["log_level"] in {"warning", "error"}] == []


@virtually
@pytest.mark.parametrize(
    ("error", "passed_ms"), [(BrokerUnavailable("away"), PUT_OFF_MS), (BrokerDenied("no"), DENIED_PAUSE_MS)]
)
async def test_trim_that_failed_is_tried_again_though_nothing_changes(daemon, error, passed_ms):
    """The reason may have passed: a replica is in sync again, or an operator has granted a permission."""
    async with daemon.running():
        seldom = daemon.config.model_copy(update={"archive_delete_delay_ms": 3_600_000})
        daemon.reconciler.set_config(seldom, UploadLimits())
        await settled(daemon)
        daemon.broker.fail_next("trim", error)
        daemon.broker.configs["orders"] = {"storage.mode": "cloud"}
        await daemon.round()
        assert [writer.log_start_offset for writer in daemon.writers].count(0) == 1
        pace = next(daemon.reconciler.archived())[2].topic.retention_pace
        assert passed_ms < pace.edits_interval_ms
        daemon.clock.now_ms += passed_ms
        await daemon.round()
        assert [writer.log_start_offset for writer in daemon.writers] == [3, 3, 3]
        await settled(daemon)


@pytest.fixture
def compared(monkeypatch):
    """Count the comparisons of files. The daemon makes its remote log itself."""
    return CountedCalls.of(monkeypatch, RemoteLog, "local_checksums")


@virtually
async def test_file_that_differs_from_the_archive_is_read_once(daemon, compared):
    """A trim is due in each round, and the whole file would be read for it each time."""
    async with daemon.running():
        await settled(daemon)
        daemon.writers[1].flip_byte(0)
        daemon.broker.configs["orders"] = {"local.retention.ms": "1"}
        with capture_logs() as lines:
            for _ in range(5):
                await daemon.round()
        assert [writer.log_start_offset for writer in daemon.writers] == [3, 0, 3]
        assert sum("differs from its stored copy" in one["event"] for one in lines) == 1
        assert len(compared.calls) == 1
        daemon.clock.now_ms += DIFFERS_MS
        await daemon.round()
        assert len(compared.calls) == 2


@virtually
async def test_changed_limits_wake_every_archiver(daemon):
    """The stable part of an open segment may be due under the new limits."""
    async with daemon.running():
        await settled(daemon)
        daemon.reconciler.set_config(daemon.config, UploadLimits(segments_per_step=1))
        with stepped() as partitions:
            await daemon.round()
        assert set(partitions) == {0, 1, 2}
        await settled(daemon)


@virtually
async def test_request_for_space_wakes_the_archiver_at_once(daemon):
    """No round comes in between."""
    async with daemon.running():
        await settled(daemon)
        writer = daemon.writers[2]
        with stepped() as partitions:
            daemon.reconciler.request_space(Leadership(writer.identified, 0), 3)
            await asyncio.sleep(1)
        assert set(partitions) == {2}
        assert writer.log_start_offset == 3


@virtually
async def test_offer_wakes_the_archiver_at_once(daemon):
    """No round comes in between, and afterwards it rests again."""
    async with daemon.running():
        await settled(daemon)
        archiver = daemon.reconciler.archiver(Leadership(daemon.writers[1].identified, 0))
        with stepped() as partitions:
            await asyncio.wait_for(archiver.offer(Nothing()), 1)
        assert partitions == [1]
        await settled(daemon)


@virtually
async def test_room_that_is_asked_for_after_the_trim_of_a_step_gets_another_step(daemon):
    """A disk that fills while a step commits a change does not wait until the space manager asks again."""
    writer = daemon.writers[1]
    leadership = Leadership(writer.identified, 0)

    class Filled(Nothing):
        async def commit(self, claim, stored):
            daemon.reconciler.request_space(leadership, writer.bases[-1])
            return await super().commit(claim, stored)

    async with daemon.running():
        writer.closed_segment()
        await settled(daemon)
        await daemon.reconciler.archiver(leadership).offer(Filled())
        await asyncio.sleep(1)
        assert daemon.broker.trims == [(writer.name, writer.bases[-1])]
        await settled(daemon)


@virtually
async def test_rounds_during_a_step_bring_no_other_step(daemon):
    """Rounds that find nothing new leave an archiver at rest that was stepping meanwhile."""
    async with daemon.running():
        await settled(daemon)
        archiver = daemon.reconciler.archiver(Leadership(daemon.writers[1].identified, 0))
        with stepped() as partitions:
            await archiver.offer(Slow())
            await daemon.round()
        assert partitions == [1]
        await settled(daemon)


@virtually
async def test_archiver_does_not_rest_while_the_store_is_away(daemon, store):
    """Each round tries again, and when the store is back what waited is archived."""
    async with daemon.running():
        await settled(daemon)
        base_offset = daemon.writers[0].closed_segment()
        store.fail_next("put", lambda: store_unavailable("put"), times=3)
        for _ in range(3):
            with stepped() as partitions:
                await daemon.round()
            assert set(partitions) == {0}
        await daemon.round()
        assert daemon.archived()["orders-0"] == [0, base_offset]
        await settled(daemon)


@virtually
async def test_archiver_does_not_rest_in_quarantine(daemon):
    """A file that is mended in place is seen, and until then the partition counts as quarantined."""
    async with daemon.running():
        await settled(daemon)
        base_offset = daemon.writers[0].closed_segment()
        daemon.writers[0].flip_byte(base_offset)
        for _ in range(3):
            with stepped() as partitions:
                await daemon.round()
            assert set(partitions) == {0}
        assert daemon.value("tieringd_quarantined_partitions") == 1
        daemon.writers[0].flip_byte(base_offset)
        await daemon.round()
        assert daemon.archived()["orders-0"] == [0, base_offset]
        await daemon.round()
        assert daemon.value("tieringd_quarantined_partitions") == 0


@virtually
async def test_new_leadership_begins_awake(daemon):
    """A new archiver takes over, and the one that rested is gone."""
    async with daemon.running():
        await settled(daemon)
        daemon.broker.epochs[daemon.writers[1].name] = 1
        daemon.writers[1].begin_epoch(1)
        with stepped() as partitions:
            await daemon.round()
        assert set(partitions) == {1}
        await settled(daemon)
        assert Leadership(daemon.writers[1].identified, 0) not in daemon.reconciler.statuses()


@virtually
async def test_lost_leadership_of_a_resting_partition_ends_its_archiver(daemon):
    """Nothing of what the others show has changed, and it is stopped all the same, and comes back."""
    async with daemon.running():
        await settled(daemon)
        del daemon.broker.epochs[daemon.writers[1].name]
        await daemon.round()
        assert len(daemon.reconciler.statuses()) == 2
        daemon.broker.epochs[daemon.writers[1].name] = 0
        await daemon.round()
        assert len(daemon.reconciler.statuses()) == 3


@pytest.fixture
def leaderships():
    return [Leadership(TopicIdPartition("cluster", "orders", "id", number), 0) for number in range(3)]


def test_leadership_that_is_due_is_woken_and_stays_awake(leaderships):
    """A leadership that is due stays awake until it rests again. The time of an earlier rest is forgotten."""
    resting, (one, other, third) = Resting(), leaderships
    resting.rest(one, until_ms=10)
    resting.rest(other, until_ms=20)
    resting.rest(third, until_ms=math.inf)
    assert set(resting.due(9)) == set()
    assert set(resting.due(10)) == {one}
    assert set(resting.due(10)) == {one}
    resting.rest(one, until_ms=30)
    resting.wake(other)
    resting.rest(other, until_ms=40)
    assert set(resting.due(29)) == set()
    resting.forget(one)
    assert set(resting.due(50)) == {other}


def test_due_times_that_are_outdated_are_not_kept(leaderships):
    """An archiver that each round wakes rests again long before it is due."""
    resting, (one, other, third) = Resting(), leaderships
    resting.rest(other, until_ms=100_000)
    resting.rest(third, until_ms=math.inf)
    for _ in range(1_000):
        resting.wake(one)
        resting.rest(one, until_ms=50_000)
    assert resting.due_times < 100
    assert set(resting.due(49_999)) == set()
    assert set(resting.due(50_000)) == {one}
    assert set(resting.due(100_000)) == {one, other}


def test_each_reader_of_a_feed_hears_of_each_change_once(leaderships):
    """Each reader hears of each change once, however often it was noted, and whenever others read."""
    feed, (one, other, _) = ChangeFeed(), leaderships
    first, second = feed.reader(), feed.reader()
    feed.note(one)
    feed.note(one)
    assert list(first()) == [one]
    feed.note(other)
    assert list(first()) == [other]
    assert set(second()) == {one, other}
    assert list(first()) == list(second()) == []


async def test_wake_up_before_the_wait_is_not_lost_and_counts_once():
    """An archiver is woken during its step as well: the next wait ends at once, the one after does not."""
    wake_up = WakeUp()
    wake_up.set()
    wake_up.set()
    await wake_up.wait()
    waiting = asyncio.create_task(wake_up.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    wake_up.set()
    wake_up.set()
    await waiting


async def test_wake_up_survives_a_wait_that_was_cancelled():
    """A wait that is cancelled before the wake-up takes nothing from it."""
    wake_up = WakeUp()
    waiting = asyncio.create_task(wake_up.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    wake_up.set()
    await wake_up.wait()


async def test_wake_up_that_comes_with_the_cancellation_is_kept():
    """A wait that is cancelled after the wake-up leaves it to the next wait."""
    wake_up = WakeUp()
    waiting = asyncio.create_task(wake_up.wait())
    await asyncio.sleep(0)
    wake_up.set()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    await wake_up.wait()


def test_wake_up_takes_little_of_each_idle_partition():
    """
    A wake-up takes little memory.

    Each archiver waits with one, and an `asyncio.Event` takes a kilobyte.
    """
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = [WakeUp() for _ in range(1000)]
        assert tracemalloc.get_traced_memory()[0] - before < 100 * len(kept)
    finally:
        tracemalloc.stop()
