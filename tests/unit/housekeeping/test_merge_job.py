"""Merging as a kind of housekeeping: which partitions have their share, and what is left alone."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.archive import archive_in, values_in
from tests.fakes.daemons import Daemon
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import bases, stored_manifest
from tests.fakes.store import store_unavailable
from tests.fakes.virtual_loop import virtually
from tieringd.archive.object_joiner import ObjectJoiner
from tieringd.archiving.claim import ChangeQueue
from tieringd.errors import StorageDenied, StorageUnavailable
from tieringd.formats.object_keys import index_key
from tieringd.housekeeping.merging import DENIED_MS, MergeJob, SegmentMerger
from tieringd.housekeeping.partition_sweep import ArchivedPartition

SEGMENTS = 8


class RefusesOnce:
    """A claim whose next commit the store refuses; after that the queue has its own claim again."""

    def __init__(self, queue):
        self.queue, self.claim = queue, queue._claim

    async def commit(self, *_):
        self.queue._claim = self.claim
        raise store_unavailable("put")

    def __getattr__(self, name):
        return getattr(self.claim, name)


class Merging(Daemon):
    """A daemon whose brokers keep next to nothing, and its job that merges three segments into one."""

    def __init__(self, tmp_path, store, writers, **config):
        super().__init__(tmp_path, store, writers, **({"target_bytes": 1} | config))
        self.tmp_path = tmp_path
        size_bytes = writers[0].local_log().segments[0].size_bytes
        self.broker.configs["orders"] = {"segment.bytes": str(3 * size_bytes)}
        self.job = MergeJob(self.partitions, make_worker=self.merger)
        self.mergers = []
        self.hidden = set()

    def partitions(self):
        return {
            leadership: ArchivedPartition(leadership, archiver, seen)
            for leadership, archiver, seen in self.reconciler.archived()
            if leadership.partition.partition not in self.hidden
        }

    def merger(self, leadership):
        self.mergers.append(leadership)
        return SegmentMerger(
            leadership,
            self.store,
            joiner=ObjectJoiner(self.store, work_directory=self.tmp_path),
            writer_id="a1",
            metrics=self.metrics,
            now_ms=self.clock,
        )

    async def turns(self, *, requests_max=10_000, at_most=50):
        """Give turns until there is nothing more to do; return them."""
        done = []
        for _ in range(at_most):
            done.append(await self.job.turn(requests_max=requests_max))
            if not done[-1].has_more:
                return done
        pytest.fail("it never comes to an end")


@pytest.fixture
def writers(tmp_path):
    writers = [LogWriter(tmp_path, "orders", number) for number in range(3)]
    for writer in writers:
        for number in range(SEGMENTS):
            writer.append(b"%d" % number)
            writer.roll()
    return writers


@pytest.fixture
def daemon(tmp_path, store, writers):
    return Merging(tmp_path, store, writers)


async def settled(daemon):
    """Let all be uploaded, and trimmed but for the newest closed segment."""
    for _ in range(10):
        daemon.clock.now_ms += 60_000
        await daemon.round()


@virtually
async def test_small_segments_of_each_partition_become_few(daemon, store):
    """The same records are read, and a pass without work has covered all at no cost."""
    async with daemon.running():
        await settled(daemon)
        before = [await values_in(archive_in(store), stored_manifest(store, one)) for one in daemon.writers]
        turns = await daemon.turns()
        assert daemon.archived() == {f"orders-{number}": [0, 3, 6, 7] for number in range(3)}
        after = [await values_in(archive_in(store), stored_manifest(store, one)) for one in daemon.writers]
        assert after == before
        assert (turns[-1].requests, turns[-1].has_covered_all) == (0, True)
        requests = len(store.requests)
        assert (await daemon.job.turn(requests_max=100)).requests == 0
        assert len(store.requests) == requests


@virtually
async def test_what_the_broker_holds_is_left_as_it_is(tmp_path, store, writers):
    """Segments that the broker still has are not merged: a trim compares them one by one first."""
    daemon = Merging(tmp_path, store, writers, target_bytes=-1)
    async with daemon.running():
        await settled(daemon)
        await daemon.turns()
        assert all(len(named) == SEGMENTS for named in daemon.archived().values())
        writers[1].drop_head()
        writers[1].drop_head()
        await settled(daemon)
        await daemon.turns()
        assert [len(named) for named in daemon.archived().values()] == [SEGMENTS, SEGMENTS - 1, SEGMENTS]
        for _ in range(2):
            writers[1].drop_head()
        await settled(daemon)
        await daemon.turns()
        assert daemon.archived()["orders-1"] == [0, 3, 4, 5, 6, 7]


@virtually
async def test_turn_ends_when_its_requests_are_spent(daemon):
    """A turn makes at least one plan of one partition, and the next turn goes on with the next partition."""
    async with daemon.running():
        await settled(daemon)
        first = await daemon.job.turn(requests_max=1)
        assert (first.has_more, first.has_covered_all) == (True, False)
        assert first.requests >= 6
        assert [len(named) for named in daemon.archived().values()] == [4, SEGMENTS, SEGMENTS]
        second = await daemon.job.turn(requests_max=1)
        third = await daemon.job.turn(requests_max=1)
        assert [second.has_covered_all, third.has_covered_all] == [False, True]
        assert [len(named) for named in daemon.archived().values()] == [4, 4, 4]


@virtually
async def test_partitions_that_come_and_go_do_not_disturb_the_pass(daemon):
    """One that has moved away is passed over, and forgotten with the next pass."""
    async with daemon.running():
        await settled(daemon)
        await daemon.job.turn(requests_max=1)
        daemon.hidden = {1}
        await daemon.turns()
        assert [len(named) for named in daemon.archived().values()] == [4, SEGMENTS, 4]
        daemon.hidden = {0}
        await daemon.turns()
        assert [len(named) for named in daemon.archived().values()] == [4, 4, 4]
        assert {one.partition.partition for one in daemon.job._known} == {1, 2}


@pytest.mark.parametrize(
    "config", [{"cleanup.policy": "compact,delete"}, {"redpanda.remote.write": "false"}], ids=str
)
@virtually
async def test_topics_that_are_not_merged_are_left_alone(daemon, config):
    """Compacted ones are, and those that are not archived any more."""
    async with daemon.running():
        await settled(daemon)
        before = daemon.archived()
        daemon.broker.configs["orders"] |= config
        await settled(daemon)
        assert (await daemon.turns())[-1].requests == 0
        assert daemon.archived() == before


@virtually
async def test_archiver_that_cannot_commit_does_not_hold_up_the_others(daemon, store, writers):
    """The partition is left alone for some passes, and merged when its archiver's steps succeed again."""
    async with daemon.running():
        await settled(daemon)
        (first, archiver, _), *_ = daemon.reconciler.archived()
        archiver._changes._claim = RefusesOnce(archiver._changes)
        await daemon.turns()
        assert [len(named) for named in daemon.archived().values()] == [SEGMENTS, 4, 4]
        joins = [key for operation, key in store.requests if operation == "join"]
        await daemon.turns()
        assert [key for operation, key in store.requests if operation == "join"] == joins
        await daemon.turns()
        await daemon.turns()
        assert [len(named) for named in daemon.archived().values()] == [4, 4, 4]
        assert first not in daemon.job._sweep._failing


@virtually
async def test_runs_that_cannot_be_merged_are_passed_over(daemon, store, writers):
    """A partition of which all are damaged stays as it is, and is not asked for again."""
    async with daemon.running():
        await settled(daemon)
        for segment in stored_manifest(store, writers[0]).segments:
            store.add(index_key(writers[0].identified, segment), b"not an index")
        await daemon.turns()
        assert [len(named) for named in daemon.archived().values()] == [SEGMENTS, 4, 4]
        requests = len(store.requests)
        assert not (await daemon.job.turn(requests_max=10_000)).has_more
        assert len(store.requests) == requests


@virtually
async def test_denied_object_holds_up_no_other_merge(daemon, store, writers):
    """A run with an object that the store denies is told of once an hour; those beside it are merged."""
    async with daemon.running():
        await settled(daemon)
        store.denied.add(index_key(writers[0].identified, stored_manifest(store, writers[0]).segments[1]))
        with pytest.raises(StorageDenied, match="access denied"):
            await daemon.job.turn(requests_max=10_000)
        await daemon.turns()
        assert [len(named) for named in daemon.archived().values()] == [6, 4, 4]
        requests = len(store.requests)
        await daemon.turns()
        assert len(store.requests) == requests

        daemon.clock.now_ms += DENIED_MS
        with pytest.raises(StorageDenied, match="access denied"):
            await daemon.turns()
        store.denied.clear()
        await daemon.turns()
        assert [len(named) for named in daemon.archived().values()] == [6, 4, 4]
        daemon.clock.now_ms += DENIED_MS
        await daemon.turns()
        assert [len(named) for named in daemon.archived().values()] == [4, 4, 4]


@virtually
async def test_store_that_is_away_fails_the_turn(daemon, store):
    """The service hears of it; the next turn goes on with the next partition, and a later pass merges all."""
    async with daemon.running():
        await settled(daemon)
        store.fail_next("join", lambda: store_unavailable("join"))
        with pytest.raises(StorageUnavailable):
            await daemon.job.turn(requests_max=10_000)
        await daemon.turns()
        assert [len(named) for named in daemon.archived().values()] == [4, 4, 4]


@virtually
async def test_end_of_the_archiver_is_not_the_end_of_the_job(daemon, store):
    """A change that it took along is not done: the others go on, and its successor's offsets are merged."""
    async with daemon.running():
        await settled(daemon)
        (_, archiver, _), *_ = daemon.reconciler.archived()
        archiver.close()
        for _ in range(3):
            await daemon.job.turn(requests_max=1)
        assert [len(named) for named in daemon.archived().values()] == [SEGMENTS, 4, 4]
        # The reconciler starts one that failed anew, under the same leadership.
        archiver._changes = ChangeQueue(archiver._claim)
        await daemon.turns()
        assert [len(named) for named in daemon.archived().values()] == [4, 4, 4]


@virtually
async def test_uploads_go_on_while_merges_are_prepared(daemon, store, writers):
    """Both commit to one manifest, by the one archiver, and neither loses what the other did."""
    async with daemon.running():
        await settled(daemon)
        store.latency_seconds = 1.0
        merging = asyncio.create_task(daemon.turns())
        for number in range(40):
            for writer in writers:
                writer.append(b"later %d" % number)
                writer.roll()
            daemon.reconciler.hint()
            await asyncio.sleep(2)
        await merging
        store.latency_seconds = 0.0
        await settled(daemon)
        await daemon.turns()
        for writer in writers:
            manifest = stored_manifest(store, writer)
            assert manifest.faults() == ()
            assert manifest.next_offset == SEGMENTS + 40
            found = await values_in(archive_in(store), manifest)
            assert list(found) == list(range(SEGMENTS + 40))
            assert found == writer.values()
            assert len(bases(store, writer)) < 30
        assert daemon.reconciler.fault == ""


@virtually
async def test_readers_go_on_through_merges_and_deletions(daemon, store, writers):
    """One with a manifest from before has the objects it names for the delay; one that asks again has all."""
    async with daemon.running():
        await settled(daemon)
        old = stored_manifest(store, writers[0])
        readers = archive_in(store)
        wanted = await values_in(readers, old)
        failed = []

        async def read_on():
            while True:
                manifest = stored_manifest(store, writers[0])
                if await values_in(readers, manifest) != wanted:
                    failed.append(manifest)

        store.latency_seconds = 0.01
        reading = asyncio.create_task(read_on())
        await daemon.turns()
        assert await values_in(archive_in(store), old) == wanted
        daemon.clock.now_ms += 2_000
        await settled(daemon)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert failed == []
        assert stored_manifest(store, writers[0]).retired == ()
        assert await values_in(archive_in(store), stored_manifest(store, writers[0])) == wanted
        logs = [key for key in store.objects if key.endswith(".log") and "/orders/0_" in key]
        assert len(logs) == 4
