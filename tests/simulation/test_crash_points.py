"""
The end of the process at every single point: before and after each effect of a step.

After each crash another daemon, with a new writer id, takes over what the first left in the
bucket and on disk, and brings it to the same end as if nothing had happened.
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
from tieringd.formats.object_keys import manifest_key
from tieringd.policies.total_retention import RetentionPace, TotalRetention
from tieringd.policies.upload_plan import UploadLimits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def three_segments(log_dir: Path) -> LogWriter:
    """Write three closed segments, the middle one with an aborted transaction, and an active one."""
    writer = LogWriter(log_dir)
    writer.closed_segment(b"one", b"two")
    writer.append(b"never", producer_id=7)
    writer.append(b"three")
    writer.abort(7)
    writer.roll()
    writer.closed_segment(b"four")
    writer.append(b"active")
    return writer


def one_segment(log_dir: Path) -> LogWriter:
    """Write one closed segment and an active one."""
    writer = LogWriter(log_dir)
    writer.closed_segment(b"one")
    return writer


class Life:
    """One process that archives *writer*'s partition, over the *store* and disk that outlive it."""

    def __init__(self, writer: LogWriter, store: MemoryStore, writer_id: str, wire: Wire) -> None:
        self._writer = writer
        self._clock = Clock()
        archive = archive_in(DistantStore(store, wire), writer_id=writer_id)
        broker = FakeBroker(writer, wire=wire)
        self._archiver = archiver_of(
            writer, archive, broker, now_ms=self._clock, limits=UploadLimits(segments_per_step=2)
        )

    async def work(self) -> None:
        """Step until two steps in a row find nothing to do."""
        idle = 0
        while idle < 2:
            result = await self._archiver.step(observed(self._writer, target_bytes=0))
            idle = 0 if result.uploaded or result.trimmed or result.gaps else idle + 1


class RetainingLife(Life):
    """One that keeps nothing that was uploaded, and works for ten minutes."""

    async def work(self) -> None:
        """Take a step a minute: retention checks every minute, and objects go two minutes later."""
        pace = RetentionPace(interval_ms=60_000, delete_delay_ms=120_000)
        for _ in range(10):
            seen = observed(
                self._writer, total=TotalRetention(limit_ms=0, limit_bytes=0), retention_pace=pace
            )
            await self._archiver.step(seen)
            self._clock.now_ms += 60_000


async def crash_and_take_over(
    writer: LogWriter, store: MemoryStore, promises: Promises, *, at: int, life: type[Life] = Life
) -> tuple[bool, int]:
    """End a process at its *at*-th point, and let a second finish; say whether it came to that point."""
    wire = CrashingWire(at)
    first = asyncio.create_task(life(writer, store, "aaaa", wire).work())
    crash = asyncio.create_task(wire.crashed.wait())
    await asyncio.wait({first, crash}, return_when=asyncio.FIRST_COMPLETED)
    has_crashed = not first.done()
    for task in (first, crash):
        task.cancel()
    await asyncio.gather(crash, return_exceptions=True)
    ended = await asyncio.gather(first, return_exceptions=True)
    assert has_crashed or ended == [None]
    promises.check()
    await life(writer, store, "bbbb", Wire()).work()
    promises.check()
    return has_crashed, wire.points


def in_new_world(
    tmp_path: Path, at: int, write: Callable[[Path], LogWriter]
) -> tuple[LogWriter, MemoryStore]:
    log_dir = tmp_path / str(at)
    log_dir.mkdir()
    return write(log_dir), MemoryStore()


def test_crash_at_every_point_of_a_step_loses_nothing(tmp_path):
    """The next process ends with the same archive and the same log, whichever effect is the last."""
    for at in count(1):
        writer, store = in_new_world(tmp_path, at, three_segments)
        has_crashed, points = run_virtual(
            crash_and_take_over(writer, store, Promises(store, [writer]), at=at), seed=at
        )
        run_virtual(expect_whole_archive(writer, store), seed=at)
        if not has_crashed:
            break
    # Two points around each: three data objects, three indexes, the claim and two commits, two trims.
    assert points == 2 * (3 + 3 + 3 + 2)


async def expect_whole_archive(writer: LogWriter, store: MemoryStore) -> None:
    archive = archive_in(store)
    manifest = (await archive.manifests.load(writer.identified)).manifest
    assert manifest.next_offset == writer.bases[-1]
    assert not manifest.gaps
    assert writer.bases_on_disk == writer.bases[-1:]
    for read_committed in (False, True):
        found = await values_in(archive, manifest, read_committed=read_committed)
        assert found == written_below(writer, manifest.next_offset, read_committed=read_committed)


def test_crash_at_every_point_of_retention_leaves_nothing_behind(tmp_path):
    """The next process empties archive, bucket and disk all the same, whichever effect is the last."""
    for at in count(1):
        writer, store = in_new_world(tmp_path, at, three_segments)
        promises = Promises(store, [writer], may_expire=lambda *_: True)
        has_crashed, points = run_virtual(
            crash_and_take_over(writer, store, promises, at=at, life=RetainingLife), seed=at
        )
        manifest = promises.manifest_of(writer)
        assert (manifest.start_offset, manifest.next_offset) == (writer.bases[-1],) * 2
        assert manifest.retired == ()
        assert writer.bases_on_disk == writer.bases[-1:]
        referenced = {manifest_key(writer.identified)}
        orphans = len(store.objects.keys() - referenced)
        assert orphans == 0 if not has_crashed else orphans <= 2 * 2, "only what was never in a manifest"
        if not has_crashed:
            break
    # Two points around each: the uploads as above, then two checks' worth of commits, deletions and trims.
    assert points >= 2 * (3 + 3 + 3 + 4)


def test_crash_at_every_point_around_a_gap_records_it_once(tmp_path):
    """A gap that one process saw, or even recorded, is in the archive once, with its exact bounds."""
    for at in count(1):
        writer, store = in_new_world(tmp_path, at, one_segment)
        has_crashed = run_virtual(lose_and_crash(writer, store, at=at), seed=at)
        if not has_crashed:
            break
    assert at > 2 * 3


async def lose_and_crash(writer: LogWriter, store: MemoryStore, *, at: int) -> bool:
    """Archive the first segment, lose the second, and crash while the third is archived."""
    promises = Promises(store, [writer])
    await Life(writer, store, "0000", Wire()).work()
    lost = writer.closed_segment(b"lost", b"too")
    last = writer.closed_segment(b"kept")
    writer.drop_head()
    has_crashed, _ = await crash_and_take_over(writer, store, promises, at=at)
    manifest = promises.manifest_of(writer)
    assert [(gap.base_offset, gap.next_offset) for gap in manifest.gaps] == [(lost, last)]
    assert manifest.next_offset == writer.bases[-1]
    return has_crashed


@pytest.mark.parametrize("epoch", [0, 1])
def test_life_after_a_crash_never_writes_over_what_it_finds(tmp_path, epoch):
    """Every object that a crashed process left has a name of its own, and stays as it was."""
    writer, store = in_new_world(tmp_path, epoch, three_segments)
    left: dict[str, bytes] = {}

    async def crash_then_compare() -> None:
        wire = CrashingWire(4)
        first = asyncio.create_task(Life(writer, store, "aaaa", wire).work())
        await wire.crashed.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        left.update({key: data for key, (data, _) in store.objects.items() if not key.endswith("/manifest")})
        await Life(writer, store, "bbbb", Wire()).work()

    run_virtual(crash_then_compare(), seed=epoch)

    assert left
    assert {key: store.objects[key][0] for key in left} == left
