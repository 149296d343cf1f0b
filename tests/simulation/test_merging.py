"""
The end of the process at every single point of a merge, with uploads and trims of the partition beside it.

After each crash another daemon, with a new writer id, takes over, and brings archive and log to the same
end as if nothing had happened.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING

import pytest

from tests.fakes.archive import Clock, archive_in, archiver_of, observed, values_in, written_below
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import DistantStore
from tests.fakes.virtual_loop import run_virtual
from tests.fakes.wire import CrashingWire, Wire
from tests.simulation.promises import Promises
from tieringd.archive.object_joiner import ObjectJoiner
from tieringd.housekeeping.merging import MergeJob, SegmentMerger
from tieringd.housekeeping.partition_sweep import ArchivedPartition
from tieringd.metrics import Metrics
from tieringd.model.partition import Leadership
from tieringd.policies.segment_merge import MergeSettings
from tieringd.policies.total_retention import RetentionPace

if TYPE_CHECKING:
    from pathlib import Path

PACE = RetentionPace(interval_ms=60_000, delete_delay_ms=120_000)


class StreamingStore(DistantStore):
    """One that cannot join: the bytes pass through a file."""

    join = None


def small_segments(log_dir: Path) -> LogWriter:
    """Write six small segments, with transactions over their ends, and an active one."""
    writer = LogWriter(log_dir)
    writer.append(b"begun", producer_id=7)
    for number in range(6):
        writer.append(b"%d" % number)
        if number == 2:
            writer.abort(7)
            writer.append(b"kept", producer_id=8)
        if number == 4:
            writer.commit(8)
        writer.roll()
    writer.append(b"active")
    return writer


class Life:
    """One process that archives, trims and merges a partition, until there is nothing more to do."""

    def __init__(self, writer, store, writer_id, work_directory):
        self._writer = writer
        self._clock = Clock()
        self._archiver = archiver_of(
            writer, archive_in(store, writer_id=writer_id), FakeBroker(writer), now_ms=self._clock
        )
        self._leadership = Leadership(writer.identified, 0)
        self._settings = MergeSettings(target_bytes=600, min_bytes=250)
        self._job = MergeJob(
            lambda: {self._leadership: ArchivedPartition(self._leadership, self._archiver, self._seen())},
            make_worker=lambda leadership: SegmentMerger(
                leadership,
                store,
                joiner=ObjectJoiner(store, work_directory=work_directory),
                writer_id=writer_id,
                metrics=Metrics(),
                now_ms=self._clock,
            ),
        )

    def _seen(self):
        return observed(self._writer, target_bytes=0, merging=self._settings, retention_pace=PACE)

    async def work(self):
        """Take steps, with turns of the job beside them; a segment is added meanwhile, once."""
        for _ in range(8):
            await self._archiver.step(self._seen())
            self._clock.now_ms += 30_000
        merging = asyncio.create_task(self._merge())
        try:
            if len(self._writer.bases) == 7:
                self._writer.roll()
                self._writer.append(b"later")
            while not merging.done():
                await self._archiver.step(self._seen())
                await asyncio.sleep(0.01)
            await merging
        finally:
            merging.cancel()
        for _ in range(8):
            await self._archiver.step(self._seen())
            self._clock.now_ms += 30_000

    async def _merge(self):
        while (await self._job.turn(requests_max=1_000)).has_more:
            pass


async def crash_and_take_over(writer, store, work_directory, *, at, distant):
    """End a process at its *at*-th point, and let a second finish; say whether it came to that point."""
    promises = Promises(store, [writer])
    wire = CrashingWire(at)
    first = asyncio.create_task(Life(writer, distant(store, wire), "aaaa", work_directory).work())
    crash = asyncio.create_task(wire.crashed.wait())
    await asyncio.wait({first, crash}, return_when=asyncio.FIRST_COMPLETED)
    has_crashed = not first.done()
    for task in (first, crash):
        task.cancel()
    await asyncio.gather(crash, return_exceptions=True)
    ended = await asyncio.gather(first, return_exceptions=True)
    assert has_crashed or ended == [None]
    promises.check()
    await Life(writer, distant(store, Wire()), "bbbb", work_directory).work()
    promises.check()
    return has_crashed, wire.points, promises.manifest_of(writer)


async def expect_same_records(writer, store, manifest):
    archive = archive_in(store)
    for read_committed in (False, True):
        found = await values_in(archive, manifest, read_committed=read_committed)
        assert found == written_below(writer, manifest.next_offset, read_committed=read_committed)
    assert (await archive.verifier.verify(manifest, deep=True)).faults == ()


@pytest.mark.parametrize("distant", [DistantStore, StreamingStore])
def test_crash_at_every_point_of_a_merge_loses_nothing(tmp_path, distant):
    """The next process ends with the same records in as few segments, whichever effect is the last."""
    ends = set()
    for at in count(1):
        log_dir = tmp_path / str(at)
        log_dir.mkdir()
        writer, store = small_segments(log_dir), MemoryStore()
        has_crashed, points, manifest = run_virtual(
            crash_and_take_over(writer, store, tmp_path, at=at, distant=distant), seed=at
        )
        assert manifest.next_offset == writer.bases[-1]
        assert manifest.retired == ()
        run_virtual(expect_same_records(writer, store, manifest), seed=at)
        ends.add(len(manifest.segments))
        if not has_crashed:
            break
    assert max(ends) <= 4, ends
    # Two points around each request: seven segments' objects, what merging reads and stores, and the commits.
    assert points >= 2 * (7 * 2 + 6 + 3)
