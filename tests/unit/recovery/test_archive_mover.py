"""Moving an archive: nothing is lost or read otherwise, while daemons upload, and whenever the move dies."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from random import Random

import pytest
from crc32c import crc32c

from tests.fakes.archive import Clock, archive_in, archived, archiver_of, observed, values_in, written_below
from tests.fakes.broker import FakeBroker
from tests.fakes.daemons import INTERVAL_SECONDS, Daemon
from tests.fakes.deleted_topics import NEW, OLD, THIRD, DeletedTopics
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import bases, stored_manifest
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import DistantStore
from tests.fakes.virtual_loop import run_virtual, virtually
from tests.fakes.wire import CrashingWire, UnreliableWire, Wire
from tests.unit.housekeeping.test_rewritten_segments import rewrite
from tieringd.archive.manifest_store import closed
from tieringd.archive.segment_swap import store_rewriting
from tieringd.errors import ConfigError, CorruptDataError, FencedError, ObjectNotFound, StorageError
from tieringd.formats.disk_state import QuotaPhase, QuotaRecord, encode_quota_record
from tieringd.formats.history_link import HistoryLink
from tieringd.formats.object_keys import (
    client_quotas_key,
    data_key,
    index_key,
    owner_of,
    rewriting_prefix,
    spillover_prefix,
    topic_key,
)
from tieringd.model.disk_state import QuotaChange, quota_entity
from tieringd.model.manifest import CLOSED_EPOCH
from tieringd.model.segment import Rewriting, RewritingKind, SegmentIdentity
from tieringd.model.topic_lifecycle import Lifecycle
from tieringd.policies.topic_lifecycle import moved_away
from tieringd.recovery.archive_mover import ArchiveMover, Site
from tieringd.recovery.partition_mover import PIECE_BYTES, CopySource, ObjectCopier, PartitionMover

HERE, THERE = "memory://here", "memory://there"


class Moving:
    """One call of the command, from one bucket to another."""

    def __init__(self, source, target, tmp_path, *, wire: Wire | None = None, name: str = "copy-1"):
        wire = wire or Wire()
        stores = [DistantStore(source, wire), DistantStore(target, wire)]
        self.source, self.target = (archive_in(store, writer_id=name) for store in stores)
        partitions = PartitionMover(
            self.source.manifests,
            self.target.manifests,
            source_store=stores[0],
            copier=ObjectCopier(*stores, work_directory=tmp_path),
        )
        self.steps: list[str] = []
        self.mover = ArchiveMover(
            _site(self.source, HERE),
            _site(self.target, THERE),
            partitions,
            on_progress=lambda step, _: self.steps.append(step),
        )

    @classmethod
    def back(cls, source, target, tmp_path, *, name: str = "copy-2", wire: Wire | None = None):
        """Return a call that moves from *target* back to *source*."""
        moving = cls(target, source, tmp_path, wire=wire, name=name)
        moving.mover._source = _site(moving.source, THERE)
        moving.mover._target = _site(moving.target, HERE)
        return moving

    async def move(self, *names: str):
        return await self.mover.move(await self.mover.topics(names))

    async def copy(self, *names: str):
        return await self.mover.copy(await self.mover.topics(names))


def _site(archive, place):
    return Site(archive.store, archive.manifests, archive.catalog, archive.history, archive.verifier, place)


@pytest.fixture
async def world(tmp_path):
    """Give a filled bucket."""
    made = DeletedTopics(tmp_path)
    await made.fill()
    return made


@pytest.fixture
def target():
    """Give an empty bucket."""
    return MemoryStore()


@pytest.fixture
def moving(world, target, tmp_path):
    """Give a move of all there is."""
    return Moving(world.store, target, tmp_path)


async def there_of(store, topic):
    """Return a topic's manifest in *store*."""
    return await archive_in(store).manifests.load_topic(topic)


async def all_values(store, writer):
    """Return what a bucket holds of a partition, read both ways."""
    archive = archive_in(store)
    manifest = (await archive.manifests.load(writer.identified)).existing
    whole = await archive.manifests.spillovers.with_history(manifest)
    return [await values_in(archive, whole, read_committed=committed) for committed in (False, True)]


async def assert_sound(store, writers):
    """Assert that a deep scrub of a bucket finds no fault."""
    archive = archive_in(store)
    for writer in writers:
        manifest = (await archive.manifests.load(writer.identified)).existing
        report = await archive.verifier.verify(manifest, deep=True)
        assert report.faults == ()


async def test_moved_archive_is_read_as_before(world, target, moving):
    """Spilled parts as well; the source is left as it is, and closed."""
    before = [await all_values(world.store, writer) for writer in world.writers]
    data = {key: one for key, (one, _) in world.store.objects.items() if ".log" in key}

    moved = await moving.move()

    assert [await all_values(target, writer) for writer in world.writers] == before
    await assert_sound(target, world.writers)
    assert all(one.is_switched and not one.fault for one in moved)
    assert moving.steps[-4:] == ["switch"] * 4
    assert {key: one for key, (one, _) in world.store.objects.items() if ".log" in key} == data
    assert await moving.mover.verify(await moving.mover.topics(()), deep=True) == []
    assert any(key.startswith(spillover_prefix(world.writers[0].identified)) for key in target.objects)


async def test_unnamed_and_retired_objects_stay_behind(world, target, moving):
    """The target holds what its manifests name, and nothing else."""
    await moving.move()
    named = set()
    for writer in world.writers:
        archive = archive_in(target)
        manifest = (await archive.manifests.load(writer.identified)).existing
        assert manifest.retired == ()
        whole = await archive.manifests.spillovers.with_history(manifest)
        named |= {name(writer.identified, one) for one in whole.segments for name in (data_key, index_key)}
    assert {key for key in target.objects if ".log" in key} == named


async def test_records_of_rewritings_go_along(world, target, moving):
    """A rebuild in the target knows of them as one in the source would."""
    segment = SegmentIdentity(0, 9, 61, 0, "rewritten-0a")
    rewriting = Rewriting(RewritingKind.REWRITTEN, (), (segment,))
    key = await store_rewriting(world.store, world.writers[0].identified, rewriting)
    await moving.move()
    assert target.objects[key][0] == world.store.objects[key][0]


async def test_record_that_goes_while_it_is_copied_is_not_missed(world, target, moving):
    """A job whose swap was overtaken deletes it."""
    partition = world.writers[0].identified
    segment = SegmentIdentity(0, 9, 61, 0, "rewritten-0a")
    key = await store_rewriting(world.store, partition, Rewriting(RewritingKind.REWRITTEN, (), (segment,)))
    list_page = world.store.list_page

    async def overtaken(prefix, **options):
        page = await list_page(prefix, **options)
        if prefix == rewriting_prefix(partition):
            await world.store.delete_many([key])
        return page

    world.store.list_page = overtaken
    await moving.move()
    assert key not in target.objects
    assert await all_values(target, world.writers[0]) == await all_values(world.store, world.writers[0])


async def test_second_copy_copies_only_what_is_new(world, target, moving, tmp_path):
    """Objects that the target's manifests name are not even asked for."""
    first = await moving.copy()
    assert (
        sum(one.copy.copied_objects for one in first)
        == len([key for key in target.objects if owner_of(key)]) - 4
    )
    again = Moving(world.store, target, tmp_path, name="copy-2")
    assert sum(one.copy.copied_bytes for one in await again.copy()) == 0
    writer = world.writers[2]
    writer.closed_segment(b"new")
    await archiver_of(writer, archive_in(world.store), FakeBroker(writer)).step(observed(writer))
    later = {one.copy.partition: one.copy.copied_objects for one in await again.copy()}
    assert later[writer.identified] == 2
    assert sum(later.values()) == 2
    assert await all_values(target, writer) == await all_values(world.store, writer)


async def test_uploads_go_on_in_the_target_where_the_source_was_closed(world, target, moving):
    """The old daemon is fenced, and all that it had committed is moved; the new one goes on from there."""
    writer = world.writers[2]
    old = archiver_of(writer, archive_in(world.store, writer_id="dae0"), FakeBroker(writer))
    await moving.copy()
    writer.closed_segment(b"between")
    await old.step(observed(writer))
    await moving.move()
    writer.closed_segment(b"after")
    with pytest.raises(FencedError, match="is closed: it was moved"):
        await old.step(observed(writer))
    closed = (await archive_in(world.store).manifests.load(writer.identified)).existing

    new = archiver_of(writer, archive_in(target, writer_id="dae1"), FakeBroker(writer))
    await new.step(observed(writer))

    assert closed.leader_epoch == CLOSED_EPOCH
    assert new.manifest.next_offset > closed.next_offset
    assert new.manifest.gaps == ()
    assert (await all_values(target, writer))[0] == written_below(writer, new.manifest.next_offset)


async def test_move_that_is_called_again_leaves_a_daemon_in_the_target_alone(world, target, moving, tmp_path):
    """A partition that has gone on in the target is reported, and not written over."""
    await moving.move()
    writer = world.writers[2]
    writer.closed_segment(b"after")
    new = archiver_of(writer, archive_in(target, writer_id="dae1"), FakeBroker(writer))
    await new.step(observed(writer))
    again = await Moving(world.store, target, tmp_path, name="copy-2").move()
    states = {one.copy.partition: one.copy.has_gone_on for one in again}
    assert states == {one.identified: one is writer for one in world.writers}
    assert (await archive_in(target).manifests.load(writer.identified)).manifest == new.manifest


async def test_move_that_is_called_again_leaves_what_a_job_has_edited_alone(world, target, moving, tmp_path):
    """
    A second move leaves alone what a job has edited in the target after the first.

    No daemon archives any more, and the closed source still has what was erased in the target.
    """
    await moving.move()
    writer = world.writers[0]
    base_offset = bases(target, writer)[0]
    await rewrite(target, writer, base_offset, without={base_offset}, tmp_path=tmp_path)
    edited = stored_manifest(target, writer)

    again = Moving(world.store, target, tmp_path, name="copy-2")
    moved = await again.move()

    assert stored_manifest(target, writer) == edited
    assert {one.copy.has_gone_on for one in moved if one.copy.partition == writer.identified} == {True}
    assert await again.mover.verify(await again.mover.topics(()), deep=True) == []


async def test_copy_is_not_written_over_what_a_job_has_edited(world, target, moving, tmp_path):
    """
    A copy before the switch is not written over what a job has edited in the target.

    The source goes on, and has what was erased from the copy.
    """
    await moving.copy()
    writer = world.writers[0]
    base_offset = bases(target, writer)[0]
    await rewrite(target, writer, base_offset, without={base_offset}, tmp_path=tmp_path)
    edited = stored_manifest(target, writer)

    moved = await moving.copy()

    (one,) = [one for one in moved if one.copy.partition == writer.identified]
    assert "that a daemon or a job has written" in one.fault
    assert stored_manifest(target, writer) == edited


async def test_target_that_a_daemon_archives_into_is_refused(world, target, moving):
    """Nothing is written over, nothing is closed, and the report says why."""
    writer = world.writers[2]
    await archiver_of(writer, archive_in(target, writer_id="dae1"), FakeBroker(writer)).step(observed(writer))
    before = (await archive_in(target).manifests.load(writer.identified)).existing
    moved = await moving.move("orders")
    faults = {one.copy.partition: one.fault for one in moved if one.fault}
    assert list(faults) == [writer.identified]
    assert (
        "the target has an archive of orders-0 that a daemon or a job has written"
        in faults[writer.identified]
    )
    assert (await archive_in(target).manifests.load(writer.identified)).existing == before
    assert not (await archive_in(world.store).manifests.load(writer.identified)).existing.is_closed
    assert ((await world.manifest(NEW)).moved_to, (await world.manifest(OLD)).moved_to) == ("", THERE)


async def closed_too_early(world, target, moving, *, is_copied: bool):
    """
    Close a partition in the source that the target has in part or not at all, and let a daemon go on there.

    Its log begins after what the target has.
    """
    writer = world.writers[2]
    if is_copied:
        await moving.copy()
    for value in (b"five", b"six"):
        writer.closed_segment(value)
    old = archiver_of(writer, archive_in(world.store, writer_id="dae0"), FakeBroker(writer))
    await old.step(observed(writer))
    source = (await closed(moving.source.manifests, writer.identified)).existing
    while writer.log_start_offset < source.next_offset - 1:
        writer.drop_head()
    later = Clock(world.clock.now_ms + 60_000)
    there = archive_in(target, writer_id="dae1", now_ms=later)
    new = archiver_of(writer, there, FakeBroker(writer), now_ms=later)
    for _ in range(2):
        # The second observation that misses offsets records a gap.
        await new.step(observed(writer))
    assert new.manifest.next_offset >= source.next_offset
    return writer.identified


@pytest.mark.parametrize(
    ("is_copied", "fault"),
    [
        pytest.param(
            True, "the target has a gap from offset 4 to 4, although the source has", id="copied in part"
        ),
        pytest.param(False, "a daemon has begun a new archive in the target", id="not copied"),
    ],
)
async def test_target_that_lacks_what_the_source_holds_is_not_taken_over(
    world, target, moving, is_copied, fault
):
    """A daemon was restarted too early: the move says so, and so does the check at the end."""
    partition = await closed_too_early(world, target, moving, is_copied=is_copied)
    faults = {one.copy.partition: one.fault for one in await moving.move() if one.fault}
    assert list(faults) == [partition]
    assert faults[partition].startswith(f"{partition}: {fault}")
    topics = await moving.mover.topics(())
    assert [one for one in await moving.mover.verify(topics) if one.startswith(f"{partition}: {fault}")]


async def test_gap_that_the_source_has_as_well_is_no_fault(world, target, moving, tmp_path):
    """The gap was copied, and the daemon in the target went on after it."""
    writer = world.writers[2]
    writer.closed_segment(b"lost")
    writer.closed_segment(b"six")
    while writer.log_start_offset < 5:
        writer.drop_head()
    old = archiver_of(writer, archive_in(world.store, writer_id="dae0"), FakeBroker(writer))
    for _ in range(2):
        await old.step(observed(writer))
    assert [(gap.base_offset, gap.last_offset) for gap in old.manifest.gaps] == [(4, 4)]
    await moving.move()
    writer.closed_segment(b"after")
    await archiver_of(writer, archive_in(target, writer_id="dae1"), FakeBroker(writer)).step(observed(writer))
    again = Moving(world.store, target, tmp_path, name="copy-2")
    moved = {one.copy.partition: one for one in await again.move()}
    assert (moved[writer.identified].copy.has_gone_on, moved[writer.identified].fault) == (True, "")
    assert await again.mover.verify(await again.mover.topics(())) == []


@pytest.mark.parametrize("has_run_there", [False, True])
async def test_archive_that_is_moved_back_goes_on(world, target, moving, tmp_path, has_run_there):
    """An archive that is moved away and back is open in the first bucket, and closed in the other."""
    await moving.move()
    writer = world.writers[2]
    if has_run_there:
        writer.closed_segment(b"there")
        there = archiver_of(writer, archive_in(target, writer_id="dae1"), FakeBroker(writer))
        await there.step(observed(writer))

    back = Moving.back(world.store, target, tmp_path)
    moved = await back.move()

    assert [(one.is_switched, one.fault) for one in moved] == [(True, "")] * 4
    assert await back.mover.verify(await back.mover.topics(()), deep=True) == []
    assert all(stored_manifest(target, one).is_closed for one in world.writers)
    assert ((await world.manifest(NEW)).moved_to, (await there_of(target, NEW)).moved_to) == ("", HERE)
    writer.closed_segment(b"here")
    here = archiver_of(writer, archive_in(world.store, writer_id="dae2"), FakeBroker(writer))
    await here.step(observed(writer))
    assert here.manifest.gaps == ()
    assert (await all_values(world.store, writer))[0] == written_below(writer, here.manifest.next_offset)
    assert here.manifest.next_offset == writer.bases[-1]


async def test_partition_without_an_archive_is_open_again_after_a_move_back(world, target, moving, tmp_path):
    """A partition of which neither bucket has anything begins in the bucket that it came back to."""
    await archive_in(world.store).manifests.ensure_topic(THIRD, partition_count=2)
    await moving.move("third")
    await Moving.back(world.store, target, tmp_path).move("third")
    (_, partition) = (await world.manifest(THIRD)).partitions()
    stored = await archive_in(world.store).manifests.load(partition)
    assert not stored.existing.is_closed
    assert (await archive_in(target).manifests.load(partition)).existing.is_closed


async def test_object_that_the_first_bucket_has_lost_is_copied_back(world, target, moving, tmp_path):
    """A closed archive may have been deleted in part: its manifest does not prove that objects exist."""
    await moving.move("third")
    writer = world.writers[3]
    key = data_key(writer.identified, stored_manifest(world.store, writer).segments[1])
    await world.store.delete_many([key])
    await Moving.back(world.store, target, tmp_path).move("third")
    await assert_sound(world.store, [writer])


async def test_spilled_object_that_the_first_bucket_has_lost_is_copied_back(world, target, moving, tmp_path):
    """A spillover manifest in a closed archive does not prove that its objects exist."""
    await moving.move("orders")
    writer, spillovers = world.writers[0], archive_in(world.store).manifests.spillovers
    manifest = stored_manifest(world.store, writer)
    (name, *_) = await spillovers.names(manifest, from_offset=manifest.start_offset)
    held = [
        one
        for one in (await spillovers.load(writer.identified, name)).segments
        if one.next_offset > manifest.start_offset
    ]
    await world.store.delete_many([data_key(writer.identified, held[0])])
    await Moving.back(world.store, target, tmp_path).move("orders")
    await assert_sound(world.store, world.writers[:3])


async def test_archive_that_came_only_half_back_is_not_moved_the_other_way(world, target, moving, tmp_path):
    """
    An archive that is closed in both buckets is opened only where the last move leads.

    That move died after it had closed its source, and its target lacks the newest records.
    """
    await moving.move("third")
    writer = world.writers[3]
    back = Moving.back(world.store, target, tmp_path)
    await back.copy("third")
    assert (await world.manifest(THIRD)).moved_to == THERE
    writer.closed_segment(b"there")
    await archiver_of(writer, archive_in(target, writer_id="dae1"), FakeBroker(writer)).step(observed(writer))
    await back.target.manifests.change_topic(THIRD, lambda found: replace(found, moved_to=""))
    await back.source.manifests.change_topic(THIRD, lambda found: replace(found, moved_to=HERE))
    await closed(back.source.manifests, writer.identified)
    newest = stored_manifest(target, writer)

    (wrong,) = await Moving(world.store, target, tmp_path, name="copy-3").move("third")
    assert "third-0 is closed in the source and in the target" in wrong.fault
    assert stored_manifest(target, writer) == newest

    (right,) = await Moving.back(world.store, target, tmp_path, name="copy-4").move("third")
    assert right.fault == ""
    assert (await all_values(world.store, writer))[0] == written_below(writer, newest.next_offset)
    assert not stored_manifest(world.store, writer).is_closed


async def crash_on_the_way_back(world, target, tmp_path, *, at: int) -> bool:
    """End a move back at its *at*-th point, let daemons of both buckets try to upload, and move again."""
    await world.fill()
    await Moving(world.store, target, tmp_path).move("orders")
    writer = world.writers[2]
    writer.closed_segment(b"there")
    there = archiver_of(writer, archive_in(target, writer_id="dae1"), FakeBroker(writer))
    await there.step(observed(writer))
    before = [await all_values(target, one) for one in world.writers[:2]]
    wire = CrashingWire(at)
    first = asyncio.create_task(Moving.back(world.store, target, tmp_path, wire=wire).move("orders"))
    crash = asyncio.create_task(wire.crashed.wait())
    await asyncio.wait({first, crash}, return_when=asyncio.FIRST_COMPLETED)
    has_crashed = not first.done()
    for task in (first, crash):
        task.cancel()
    await asyncio.gather(first, crash, return_exceptions=True)
    manifests = [stored_manifest(store, writer) for store in (world.store, target)]
    assert any(one.is_closed for one in manifests), "two buckets take records of one partition"
    await assert_sound(world.store, world.writers[:3])
    writer.closed_segment(b"meanwhile")
    # The daemon with the old configuration is too early here, and the other one too late there.
    stale = archiver_of(writer, archive_in(world.store, writer_id="dae0"), FakeBroker(writer))
    for daemon, manifest in ((there, manifests[1]), (stale, manifests[0])):
        if manifest.is_closed:
            with pytest.raises(FencedError):
                await daemon.step(observed(writer))
        else:
            await daemon.step(observed(writer))

    moved = await Moving.back(world.store, target, tmp_path, name="copy-3").move("orders")

    assert [one.fault for one in moved] == ["", "", ""]
    await assert_sound(world.store, world.writers[:3])
    assert [await all_values(world.store, one) for one in world.writers[:2]] == before
    here = archiver_of(writer, archive_in(world.store, writer_id="dae2"), FakeBroker(writer))
    await here.step(observed(writer))
    assert here.manifest.gaps == ()
    assert (await all_values(world.store, writer))[0] == written_below(writer, here.manifest.next_offset)
    assert here.manifest.next_offset == writer.bases[-1]
    assert all(stored_manifest(target, one).is_closed for one in world.writers[:3])
    return has_crashed


def test_crash_at_every_point_of_a_move_back_loses_nothing(tmp_path):
    """One bucket at most takes records at any moment, and the next call ends in the same state."""
    for at in count(1):
        world, target = DeletedTopics(tmp_path / str(at)), MemoryStore()
        if not run_virtual(crash_on_the_way_back(world, target, tmp_path, at=at), seed=at):
            break
    # Two points around each: data and index of a new segment, and two manifests that differ; two topic
    # manifests that are elsewhere no more, two that are there, and two marks of the move; three manifests
    # that are closed, and three that are opened.
    assert at == 2 * (2 + 2 + 2 + 2 + 2 + 3 + 3) + 1


@virtually
async def test_daemon_that_looks_during_a_move_back_goes_on_after_it(tmp_path):
    """A daemon beside the first bucket sees the topic when it is open, and needs no restart."""
    here, there = MemoryStore(), MemoryStore()
    writer = LogWriter(tmp_path)
    writer.closed_segment()
    await archived(writer, archive_in(here))
    await archive_in(here).manifests.ensure_topic(topic_key(writer.identified), partition_count=1)
    await Moving(here, there, tmp_path).move()
    daemon = Daemon(tmp_path, here, [writer])
    async with daemon.running():
        slow = UnreliableWire(Random(1), fault_rate=0, latency_seconds=2 * INTERVAL_SECONDS)
        await Moving.back(here, there, tmp_path, wire=slow).move()
        writer.closed_segment()
        await daemon.round()
        await daemon.round()
        assert daemon.archived() == {"orders-0": [0, 3]}


async def test_topics_that_are_half_purged_are_told_apart(world, moving):
    """Half-purged topics were moved to this target before, and their names are not unknown."""
    await moving.move("third")
    now_ms = world.clock.now_ms
    await moving.source.manifests.change_topic(
        THIRD, lambda found: moved_away(found, now_ms=now_ms, by="copy-1")
    )
    half_purged = await moving.mover.half_purged(["third"])
    assert [one.key for one in half_purged] == [THIRD]
    assert await moving.mover.half_purged(["orders"]) == []
    assert await moving.mover.topics(["third"], half_purged=half_purged) == []
    moving.mover._target = _site(moving.target, "memory://elsewhere")
    assert await moving.mover.half_purged(()) == []


async def test_damaged_object_keeps_its_topic_where_it_is(world, target, moving):
    """The others are moved; what is damaged is named."""
    writer = world.writers[3]
    segment = (await archive_in(world.store).manifests.load(writer.identified)).existing.segments[1]
    key = data_key(writer.identified, segment)
    world.store.add(key, b"x" * segment.size_bytes)
    faults = [one.fault for one in await moving.move() if one.fault]
    assert len(faults) == 1
    assert key in faults[0]
    assert (await world.manifest(THIRD)).moved_to == ""
    assert (await world.manifest(NEW)).moved_to == THERE
    assert key not in target.objects


async def test_partition_of_which_nothing_is_archived_is_closed_too(world, target, moving):
    """An archiver that has not begun begins in the target, not here."""
    manifests = archive_in(world.store).manifests
    await manifests.ensure_topic(THIRD, partition_count=2)
    await moving.move("third")
    (partition,) = [one for one in (await world.manifest(THIRD)).partitions() if one.partition == 1]
    assert (await manifests.load(partition)).existing.is_closed
    assert (await archive_in(target).manifests.load(partition)).manifest is None


async def test_topic_manifest_goes_with_the_topic(world, target, moving):
    """The topic's settings hold in the target. In the source its manifest says where it went."""
    await moving.move("third")
    there, here = await archive_in(target).manifests.load_topic(THIRD), await world.manifest(THIRD)
    assert (there.moved_to, here.moved_to) == ("", THERE)
    assert (there.remote_delete, there.partition_count, there.lifecycle) == (True, 1, Lifecycle.LIVE)
    assert await archive_in(target).manifests.load_topic(NEW) is None


async def test_topics_that_one_goes_on_from_go_with_it(world, target, moving):
    """The link between them goes as well, and so does the record of quotas before they were lowered."""
    await archive_in(world.store).history.link(HistoryLink(THIRD, OLD, ((0, 5),)))
    world.store.add(client_quotas_key(OLD.cluster), b"{}")
    await moving.move("third")
    there = archive_in(target)
    assert (await there.history.link_of(THIRD)).history == OLD
    assert await there.manifests.load_topic(OLD) is not None
    assert client_quotas_key(OLD.cluster) in target.objects


def quota_record(phase, *, changed_at_ms) -> bytes:
    change = QuotaChange(quota_entity(user="alice"), 5e6)
    return encode_quota_record(QuotaRecord(phase, 1000, (change,), node_id=1, changed_at_ms=changed_at_ms))


@pytest.mark.parametrize(("changed_at_ms", "is_newer"), [(3, True), (1, False)])
async def test_quota_record_of_an_earlier_copy_is_replaced_by_a_newer_one(
    world, target, moving, changed_at_ms, is_newer
):
    """A record that says that producers are held back counts, and an older one does not."""
    key = client_quotas_key(OLD.cluster)
    world.store.add(key, quota_record(QuotaPhase.RESTORED, changed_at_ms=2))
    await moving.copy()
    before = target.objects[key][0]
    world.store.add(key, quota_record(QuotaPhase.LOWERED, changed_at_ms=changed_at_ms))
    await moving.move()
    assert target.objects[key][0] == (world.store.objects[key][0] if is_newer else before)


async def test_damaged_quota_record_is_named_with_its_bucket(world, target, moving):
    """A damaged record may say that producers are held back: an operator has to look."""
    key = client_quotas_key(OLD.cluster)
    world.store.add(key, quota_record(QuotaPhase.LOWERED, changed_at_ms=2))
    target.add(key, b"{}")
    with pytest.raises(CorruptDataError, match=f"{key} in {THERE}"):
        await moving.move()
    assert target.objects[key][0] == b"{}"


async def test_topic_that_is_not_there_is_said(moving):
    """Nothing is moved then."""
    with pytest.raises(ObjectNotFound, match="the source holds no topic named nothing"):
        await moving.move("third", "nothing")
    assert moving.steps == []


async def test_topic_is_not_moved_to_two_places(world, moving, tmp_path):
    """A moved topic goes on from where it is."""
    await moving.move("third")
    other = Moving(world.store, MemoryStore(), tmp_path)
    other.mover._target = _site(other.target, "memory://elsewhere")
    with pytest.raises(ConfigError, match=f"was moved to {THERE}"):
        await other.move("third")
    assert {one.copy.partition.topic for one in await other.move()} == {"orders"}


async def crash_and_come_again(world, target, tmp_path, *, at: int) -> bool:
    """End a move at its *at*-th point, let the daemon upload where it may, and move again."""
    await world.fill()
    before = [await all_values(world.store, writer) for writer in world.writers]
    wire = CrashingWire(at)
    first = asyncio.create_task(Moving(world.store, target, tmp_path, wire=wire).move("orders"))
    crash = asyncio.create_task(wire.crashed.wait())
    await asyncio.wait({first, crash}, return_when=asyncio.FIRST_COMPLETED)
    has_crashed = not first.done()
    for task in (first, crash):
        task.cancel()
    await asyncio.gather(first, crash, return_exceptions=True)
    # Whatever the target's manifests name is there, at any moment.
    there = archive_in(target).manifests
    known = [one for one in world.writers if (await there.load(one.identified)).manifest is not None]
    await assert_sound(target, known)
    writer = world.writers[2]
    writer.closed_segment(b"meanwhile")
    old = archiver_of(writer, archive_in(world.store, writer_id="dae0"), FakeBroker(writer))
    is_open = True
    try:
        await old.step(observed(writer))
    except FencedError:
        is_open = False

    moved = await Moving(world.store, target, tmp_path, name="copy-2").move("orders")

    assert [one.fault for one in moved] == ["", "", ""]
    await assert_sound(target, world.writers[:3])
    after = [await all_values(target, one) for one in world.writers[:3]]
    assert after[:2] == before[:2]
    new = archiver_of(writer, archive_in(target, writer_id="dae1"), FakeBroker(writer))
    await new.step(observed(writer))
    assert new.manifest.gaps == ()
    assert (await all_values(target, writer))[0] == written_below(writer, new.manifest.next_offset)
    assert new.manifest.next_offset == writer.bases[-1]
    assert is_open or (await world.manifest(topic_key(writer.identified))).moved_to == THERE
    return has_crashed


def test_crash_at_every_point_of_a_move_loses_nothing(tmp_path):
    """Uploads go on and the next call ends in the same state, whichever effect of a move is the last."""
    for at in count(1):
        world, target = DeletedTopics(tmp_path / str(at)), MemoryStore()
        if not run_virtual(crash_and_come_again(world, target, tmp_path, at=at), seed=at):
            break
    # Two points around each: data and index of 11 segments, a spilled part, three manifests and two topic
    # manifests; two marks of the move, and three manifests that are closed.
    assert at == 2 * (2 * 11 + 1 + 3 + 2 + 2 + 3) + 1


class TestObjectCopier:
    """One object."""

    @pytest.fixture
    def stores(self):
        """Give two buckets."""
        return MemoryStore(), MemoryStore()

    @pytest.mark.parametrize("size_bytes", [0, 1, PIECE_BYTES, 2 * PIECE_BYTES + 7])
    async def test_object_of_any_size_is_copied_once(self, stores, tmp_path, size_bytes):
        """A large one in pieces; the second time it is there."""
        source, target = stores
        data = bytes(range(251)) * (size_bytes // 251 + 1)
        data = data[:size_bytes]
        source.add("k", data)
        copier = ObjectCopier(source, target, work_directory=tmp_path)
        wanted = CopySource("k", size_bytes, crc32c(data))
        assert await copier.copy(wanted) == size_bytes
        assert target.objects["k"][0] == data
        assert await copier.copy(wanted) == 0
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("size_bytes", [9, PIECE_BYTES + 9])
    async def test_other_bytes_than_are_known_are_not_copied(self, stores, tmp_path, size_bytes):
        """Neither a changed nor a cut object gets into the target."""
        source, target = stores
        source.add("k", bytes(size_bytes))
        copier = ObjectCopier(source, target, work_directory=tmp_path)
        for wanted in (CopySource("k", size_bytes, 1), CopySource("k", size_bytes + 1)):
            with pytest.raises(CorruptDataError, match="the object has"):
                await copier.copy(wanted)
        assert target.objects == {}

    async def test_another_object_in_the_target_is_not_written_over(self, stores, tmp_path):
        """Names are unique: an operator has to find out first which process wrote it."""
        source, target = stores
        source.add("k", b"ours")
        target.add("k", b"else")
        copier = ObjectCopier(source, target, work_directory=tmp_path)
        with pytest.raises(StorageError, match="is already in the target, but it is another object"):
            await copier.copy(CopySource("k", 4, crc32c(b"ours")))
        assert target.objects["k"][0] == b"else"


async def test_source_that_goes_on_after_a_copy_is_no_fault(world, target, moving):
    """A source is left open by a copy: what daemons add afterwards is due at the next copy only."""
    await archive_in(world.store).manifests.ensure_topic(THIRD, partition_count=2)
    topics = await moving.mover.topics(())
    await moving.mover.copy(topics)
    later = LogWriter(world.writers[3].path.parent, "third", 1, topic_id=THIRD.topic_id)
    later.closed_segment(b"first")
    for writer in (world.writers[2], later):
        writer.closed_segment(b"new")
        await archiver_of(writer, archive_in(world.store), FakeBroker(writer)).step(observed(writer))
    assert await moving.mover.verify(topics) == []

    # What was copied is due, and gone.
    stored = await moving.target.manifests.load(world.writers[2].identified)
    before = bases(target, world.writers[2])[-1]
    held = stored.existing.segments
    earlier = replace(stored.existing, segments=held.head(len(held) - 1), next_offset=before)
    await moving.target.manifests.commit(stored, earlier, leader_epoch=0)
    (fault,) = await moving.mover.verify(topics)
    assert fault == f"orders-0: the target ends before offset {before}, and the source before {before + 1}"


async def test_verify_says_what_the_target_has_not(world, target, moving, tmp_path):
    """Partitions without a manifest, an end that is too early, and other counts than were closed."""
    topics = await moving.mover.topics(["third"])
    (fault,) = await moving.mover.verify(topics)
    assert fault == "third-0: the target has no manifest of the partition"
    await moving.copy("third")
    assert await moving.mover.verify(topics) == []

    writer = world.writers[3]
    writer.closed_segment(b"new")
    await archiver_of(writer, archive_in(world.store), FakeBroker(writer)).step(observed(writer))
    (fault,) = await Moving(world.store, target, tmp_path).mover.verify(topics)
    assert fault == "third-0: the target ends before offset 4, and the source before 5"

    await moving.move("third")
    stored = await moving.target.manifests.load(writer.identified)
    shorter = stored.existing.expired(1, now_ms=0)
    await moving.target.manifests.commit(stored, shorter, leader_epoch=0)
    (fault,) = await moving.mover.verify(topics)
    assert fault.startswith("third-0: the source has 5 segments of ")
