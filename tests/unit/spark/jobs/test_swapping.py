"""The end of a job that writes: its report of swaps whose answers are lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.fakes.archive import Clock, archive_clock, archive_in, archived
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import bases
from tests.fakes.store import store_unavailable
from tests.unit.archive.test_segment_swap import PLENTY, prepared
from tests.unit.housekeeping.test_merging import filled
from tests.unit.spark.rewriting import Job
from tieringd.archive.retired_objects import GoneSince
from tieringd.archive.segment_swap import held_in
from tieringd.errors import StorageUnavailable
from tieringd.formats.object_keys import manifest_key
from tieringd.spark.jobs.swapping import (
    PARTITIONS_AT_ONCE,
    PartitionSwap,
    SwapKind,
    SwapOutcome,
    delete_replaced,
    end_holding,
    outcome_reported,
    swap,
    swap_all,
)
from tieringd.storage.archive_clock import ArchiveClock


def unanswered():
    return store_unavailable("put", True)


def bucket_in(store, clock=None):
    return SimpleNamespace(
        store=store,
        manifests=archive_in(store, writer_id="0b").manifests,
        config=SimpleNamespace(cloud_storage_target_manifest_size_bytes=PLENTY),
        clock=clock or ArchiveClock(),
    )


async def swapped(store, writer, tmp_path, *failures, clock=None) -> SwapOutcome:
    """Merge what may be merged; each of *failures* says whether a commit that is not answered has effect."""
    manifest, limits = await filled(writer, store)
    successors = await prepared(store, manifest, limits, tmp_path)
    bucket = bucket_in(store, clock)
    for after_effect in failures:
        store.fail_next("put", unanswered, after_effect=after_effect)
    outcome = SwapOutcome()
    await swap(bucket, writer.identified, successors, outcome, kind=SwapKind.MERGED)
    return outcome


@pytest.mark.parametrize("failures", [(), (False,), (True,)], ids=["answered", "not sent", "not answered"])
async def test_swap_is_tried_again(store, writer, tmp_path, failures):
    """An archive that was changed is reported as changed."""
    outcome = await swapped(store, writer, tmp_path, *failures)
    assert outcome.faults == []
    assert (outcome.figures()["segments_before"], outcome.figures()["segments_after"]) == (6, 2)
    assert bases(store, writer) == [0, 6, 10]


async def test_store_that_is_away_is_told(store, writer, tmp_path):
    """A store that does not answer is reported like one whose answer may have been lost."""
    outcome = await swapped(store, writer, tmp_path, False, False)
    (fault,) = outcome.faults
    assert "it is not known whether its segments were replaced: put: the store does not answer" in fault
    assert outcome.swapped == []
    assert len(bases(store, writer)) > 3


def test_job_that_has_replaced_something_reports_what_stopped_it():
    """No other report tells what it has done by then."""
    outcome = SwapOutcome(faults=["another"], has_begun=True)

    with outcome_reported(outcome):
        raise StorageUnavailable("no answer")

    assert outcome.faults == ["another", "the job stopped before its end; run it again: no answer"]


def test_job_that_has_replaced_nothing_fails():
    """There is nothing to report."""
    outcome = SwapOutcome()
    with pytest.raises(StorageUnavailable, match="no answer"), outcome_reported(outcome):
        raise StorageUnavailable("no answer")
    assert outcome.faults == []


async def test_deletion_ends_with_the_store(store, writer, tmp_path):
    """Each of the other partitions would wait for the store as long, so one fault stands for all."""
    await swapped(store, writer, tmp_path)
    outcome, asked = SwapOutcome(), []

    class Away:
        async def edit(self, partition, _change):
            asked.append(partition)
            await asyncio.sleep(0)
            raise StorageUnavailable("no answer")

    bucket = SimpleNamespace(store=store, manifests=Away(), clock=ArchiveClock())
    partitions = [replace(writer.identified, partition=number) for number in range(3 * PARTITIONS_AT_ONCE)]
    await delete_replaced(bucket, partitions, outcome, after_ms=0)

    assert asked == partitions[:PARTITIONS_AT_ONCE], "those that were under way"
    (fault,) = outcome.faults
    assert fault == (
        f"orders-0, and in {len(partitions) - 1} other partitions: objects that no manifest names any "
        "more were not deleted: no answer"
    )


MINUTE_MS = 60_000


@pytest.mark.parametrize("fails", [False, True])
async def test_holding_that_cannot_be_ended_is_a_fault_of_its_partition(store, writer, fails):
    """The partition is returned, so that an erasure does not say that it went over all of it."""
    for _ in range(2):
        writer.append(b"value", keys=[b"key"])
        writer.roll()
    await archived(writer, archive_in(store))
    job, outcome = Job(store, writer.identified), SwapOutcome()
    await job.compact()
    manifest = await job.manifest()
    assert held_in(manifest)
    if fails:
        store.fail_next("put", unanswered, after_effect=False)

    faulty = await end_holding(bucket_in(store), [manifest], outcome)

    assert faulty == ({writer.identified} if fails else set())
    assert ["an election could bring them back" in one for one in outcome.faults] == [True] * fails
    assert bool(held_in(await job.manifest())) == fails


async def test_delay_counts_from_when_the_store_took_the_commit(store, writer, tmp_path):
    """
    The delay counts from the store's time: the commit was dated before it was sent, and readers began then.

    The first sight of the commit at a job's start counts as well.
    """
    now_ms = Clock()
    store.now_ms = now_ms
    clock = archive_clock(now_ms, store)
    await swapped(store, writer, tmp_path, clock=clock)
    before = len(store.objects)
    bucket = SimpleNamespace(store=store, manifests=archive_in(store, now_ms=now_ms).manifests, clock=clock)
    partition, key = writer.identified, manifest_key(writer.identified)

    def taken_at(ms: int) -> None:
        data, info = store.objects[key]
        store.place(key, data, replace(info, modified_ms=ms))

    async def deleted(gone_since=None) -> int:
        outcome = SwapOutcome()
        known = {partition: gone_since} if gone_since else None
        await delete_replaced(bucket, [partition], outcome, after_ms=10 * MINUTE_MS, gone_since=known)
        assert outcome.faults == []
        assert (len(store.objects) < before) is (outcome.deleted_segments > 0)
        return outcome.deleted_segments

    taken_at(now_ms() + 8 * MINUTE_MS)
    now_ms.now_ms += 17 * MINUTE_MS
    assert await deleted() == 0
    at_start = GoneSince()
    at_start.note(await bucket.manifests.load(partition))
    now_ms.now_ms += 2 * MINUTE_MS
    taken_at(now_ms())
    assert await deleted() == 0
    assert await deleted(at_start) == 6


async def test_nothing_is_deleted_by_age_after_a_commit_from_the_future(store, writer, tmp_path):
    """A store without a clock of its own cannot tell whose clock is wrong: this host's, or the writer's."""
    now_ms = Clock()
    await swapped(store, writer, tmp_path, clock=archive_clock(Clock(now_ms() + 60 * MINUTE_MS), store))
    manifests = archive_in(store, now_ms=Clock(now_ms() + 60 * MINUTE_MS)).manifests
    loaded = await manifests.load(writer.identified)
    await manifests.commit(loaded, loaded.existing, leader_epoch=0)
    bucket = SimpleNamespace(store=store, manifests=manifests, clock=ArchiveClock(wall_ms=now_ms))
    outcome = SwapOutcome()
    await delete_replaced(bucket, [writer.identified], outcome, after_ms=1)
    (fault,) = outcome.faults
    assert "in the future by this host's clock" in fault
    assert outcome.deleted_segments == 0


async def test_partitions_are_swapped_some_at_once(store, tmp_path):
    """Ten thousand, one by one, took half an hour; faults and results stay in the order of the partitions."""
    swaps, damaged = [], 4
    for number in range(8):
        writer = LogWriter(tmp_path / "logs", partition=number)
        manifest, limits = await filled(writer, store)
        successors = await prepared(store, manifest, limits, tmp_path)
        swaps.append(PartitionSwap(writer.identified, successors))
        if number == damaged:
            store.remove(manifest_key(writer.identified))
    waiting = AnsweringTogether(store, 3)
    outcome = SwapOutcome()
    bucket = bucket_in(waiting)

    left = await swap_all(bucket, swaps, outcome, kind=SwapKind.MERGED, count=3)

    assert waiting.most_at_once == 3
    done = [one.partition.partition for one in outcome.swapped]
    assert done == [number for number in range(8) if number != damaged]
    assert (left.faulty, left.overtaken) == ({swaps[damaged].partition}, {})
    assert outcome.has_begun


class AnsweringTogether:
    """Answers reads of manifests when *count* are asked for, or nothing more comes."""

    def __init__(self, store, count):
        self._store = store
        self._count = count
        self._waiting = 0
        self.most_at_once = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def get(self, key):
        """Wait for the others that are asked for at once."""
        self._waiting += 1
        self.most_at_once = max(self.most_at_once, self._waiting)
        for _ in range(50):
            await asyncio.sleep(0)
        self._waiting -= 1
        return await self._store.get(key)
