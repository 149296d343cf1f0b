"""Compacted re-upload as a job: whose turn it is, how much of it, and what the archiver has to say."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.archive import Clock, archive_in, archived, observed, values_in
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import stored_manifest
from tests.fakes.store import store_unavailable
from tests.unit.housekeeping.test_rewritten_segments import rewrite
from tieringd.archiving.claim import Claim
from tieringd.errors import StorageUnavailable, TieringError
from tieringd.housekeeping.partition_sweep import ArchivedPartition, JobTurn
from tieringd.housekeeping.reupload import CompactedReuploadJob
from tieringd.metrics import Metrics
from tieringd.model.partition import Leadership

FOR_ONE = 3
"""Requests for one segment in the place of one: data, index and manifest."""


class Offered:
    """The archiver's side: commits what is offered in the next step, which is at once, or drops it."""

    def __init__(self, store, writer):
        self.store, self.writer = store, writer
        self.is_gone = False
        self.changes = 0
        self.last = None
        self.is_compacted = True
        self.archive = archive_in(store, writer_id="b2")
        self.leadership = Leadership(writer.identified, 0)
        self.claim = Claim(self.leadership, self.archive.manifests, metrics=Metrics())
        self.manifest = stored_manifest(store, writer)

    def offer(self, change):
        self.changes += 1
        future = asyncio.get_running_loop().create_future()
        if self.is_gone:
            future.cancel()
        else:
            self.last = asyncio.create_task(self._after(self.last, change, future))
        return future

    async def _after(self, before, change, future):
        if before is not None:
            await before
        try:
            known = await self.claim.current(lambda: pytest.fail("there is one"))
            self.manifest = (await change.commit(self.claim, known)).existing
        except TieringError as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def partition(self):
        seen = observed(self.writer, reuploads_compacted=self.is_compacted)
        return ArchivedPartition(self.leadership, self, seen)


async def compacted(store, tmp_path, number, *, segments=3):
    """Archive a partition of *segments* segments, and compact each of them."""
    writer = LogWriter(tmp_path / "logs", partition=number)
    for _ in range(segments):
        writer.append(b"gone")
        writer.append(b"kept")
        writer.roll()
    await archived(writer, archive_in(store))
    for base in writer.bases[:-1]:
        writer.compact(base, without=[base])
    return Offered(store, writer)


def job_of(*offered):
    return CompactedReuploadJob(
        lambda: {one.leadership: one.partition() for one in offered},
        remote_log=offered[0].archive.remote_log,
        metrics=Metrics(),
        now_ms=Clock(),
    )


async def test_one_turn_does_all_there_is_room_for(store, tmp_path):
    """Every compacted segment takes its place, and then there is nothing more to do."""
    offered = [await compacted(store, tmp_path, number) for number in range(2)]
    job = job_of(*offered)
    assert await job.turn(requests_max=1000) == JobTurn(6 * FOR_ONE, has_more=False)
    requests = len(store.requests)
    assert await job.turn(requests_max=1000) == JobTurn(0, has_more=False)
    assert len(store.requests) == requests
    for one in offered:
        assert await values_in(one.archive, one.manifest) == one.writer.values()


async def test_partitions_take_turns(store, tmp_path):
    """Partitions alternate with room for one share, a few segments each, until nothing is left."""
    offered = [await compacted(store, tmp_path, number, segments=6) for number in range(2)]
    job = job_of(*offered)
    counts, turns = [], []
    while not turns or turns[-1].has_more:
        turns.append(await job.turn(requests_max=1))
        counts.append(tuple(one.changes for one in offered))
    assert counts == [(4, 0), (4, 4), (6, 4), (6, 6)]
    assert [turn.requests for turn in turns] == [4 * FOR_ONE, 4 * FOR_ONE, 2 * FOR_ONE, 2 * FOR_ONE]
    assert [turn.has_covered_all for turn in turns] == [False, True, False, True]


async def test_segment_that_is_compacted_later_is_found(store, tmp_path):
    """A partition that was done is compared again when its log has changed."""
    offered = await compacted(store, tmp_path, 0)
    job = job_of(offered)
    await job.turn(requests_max=1000)
    offered.writer.compact(0, without=[1])
    assert (await job.turn(requests_max=1000)).requests == FOR_ONE
    assert await values_in(offered.archive, offered.manifest) == offered.writer.values()


async def test_only_topics_that_ask_for_it_are_compared(store, tmp_path):
    """A topic that is not compacted, or where it is off, stays as it was archived."""
    offered = await compacted(store, tmp_path, 0)
    offered.is_compacted = False
    assert await job_of(offered).turn(requests_max=1000) == JobTurn(0, has_more=False)
    assert offered.changes == 0


async def test_partition_that_is_not_known_waits(store, tmp_path):
    """Nothing is planned while the archiver of a partition does not know the manifest for certain."""
    offered = await compacted(store, tmp_path, 0)
    job, known = job_of(offered), offered.manifest
    offered.manifest = None
    assert (await job.turn(requests_max=1000)).requests == 0
    offered.manifest = known
    assert (await job.turn(requests_max=1000)).requests == 3 * FOR_ONE


async def test_archiver_that_ends_takes_its_changes_along(store, tmp_path):
    """A change that no archiver commits is dropped, and the turn goes on with other partitions."""
    gone, other = [await compacted(store, tmp_path, number) for number in range(2)]
    gone.is_gone = True
    before = gone.manifest
    await job_of(gone, other).turn(requests_max=1000)
    assert stored_manifest(store, gone.writer) == before
    assert await values_in(other.archive, other.manifest) == other.writer.values()


async def test_archiver_that_is_fenced_does_not_hold_up_the_others(store, tmp_path):
    """The commit of one partition fails, and the turn goes on with other partitions."""
    fenced, other = [await compacted(store, tmp_path, number) for number in range(2)]
    known = await fenced.archive.manifests.load(fenced.writer.identified)
    await archive_in(store, writer_id="c3").manifests.commit(known, known.existing, leader_epoch=9)
    before = stored_manifest(store, fenced.writer)
    await job_of(fenced, other).turn(requests_max=1000)
    assert stored_manifest(store, fenced.writer) == before
    assert await values_in(other.archive, other.manifest) == other.writer.values()


async def test_file_that_cannot_be_read_does_not_hold_up_the_others(store, tmp_path):
    """The other segments of its partition have their turn."""
    offered = await compacted(store, tmp_path, 0)
    seen = offered.partition().seen
    offered.writer.log_path(0).rename(tmp_path / "away")
    offered.partition = lambda: ArchivedPartition(offered.leadership, offered, seen)
    assert (await job_of(offered).turn(requests_max=1000)).requests == 2 * FOR_ONE


async def test_store_that_is_away_ends_the_turn(store, tmp_path):
    """The turn is given up, and a later one does the work."""
    offered = await compacted(store, tmp_path, 0)
    job = job_of(offered)
    store.fail_next("put", lambda: store_unavailable("put"))
    with pytest.raises(StorageUnavailable):
        await job.turn(requests_max=1000)
    assert (await job.turn(requests_max=1000)).requests == 3 * FOR_ONE


async def joined_beside_rewritten(store, tmp_path):
    """Archive eight segments, two of them rewritten, each of which the cleaner joins with one before it."""
    writer = LogWriter(tmp_path / "logs")
    for _ in range(8):
        writer.append(b"gone")
        writer.append(b"kept")
        writer.roll()
    await archived(writer, archive_in(store))
    await rewrite(store, writer, 2, 6, without={2, 6}, tmp_path=tmp_path)
    writer.compact(0, 2, without=[0])
    writer.compact(4, 6, without=[4])
    return writer


async def test_files_beside_what_was_rewritten_come_last(store, tmp_path):
    """One at a time, after what needs no check; and each until no part of it is to go."""
    writer = await joined_beside_rewritten(store, tmp_path)
    writer.compact(8, without=[8])
    offered = Offered(store, writer)
    job = job_of(offered)
    found = []
    for _ in range(6):
        before = offered.changes
        turn = await job.turn(requests_max=1000)
        assert turn.requests == (offered.changes - before) * FOR_ONE
        found.append(
            ([one.base_offset for one in offered.manifest.segments if one.writer_id == "b2"], turn.has_more)
        )
    assert found == [
        ([8], True),
        ([0, 8], True),
        ([0, 8], True),
        ([0, 4, 8], False),
        ([0, 4, 8], False),
        ([0, 4, 8], False),
    ]


async def test_file_that_changes_holds_up_no_other(store, tmp_path):
    """The next check shows it as it is then."""
    writer = await joined_beside_rewritten(store, tmp_path)
    offered = Offered(store, writer)
    seen = offered.partition()
    writer.compact(0, without=[1])
    offered.partition = lambda: seen

    await job_of(offered).turn(requests_max=1000)

    assert [one.base_offset for one in offered.manifest.segments if one.writer_id == "b2"] == [4]


async def test_parts_go_too_where_a_cleaner_is_always_busy(store, tmp_path):
    """There is something to be replaced whole at every check."""
    writer = await joined_beside_rewritten(store, tmp_path)
    offered = Offered(store, writer)
    job = job_of(offered)
    for base in (8, 10, 12, 14):
        writer.compact(base, without=[base])
        await job.turn(requests_max=1000)
        await job.turn(requests_max=1000)
    assert {0, 4} <= {one.base_offset for one in offered.manifest.segments if one.writer_id == "b2"}
