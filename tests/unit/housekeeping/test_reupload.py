"""Compacted segments in the place of their originals: the archive gives what the broker gives."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.fakes.archive import Clock, archive_in, archived, archiver_of, observed, values_in
from tests.fakes.broker import FakeBroker
from tests.fakes.dying_store import Dying, Killed
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import bases, stored_manifest
from tests.fakes.memory_store import MemoryStore
from tests.fakes.metric_values import value_of
from tests.fakes.store import store_unavailable
from tieringd.archive.record_deletion import delete_archived
from tieringd.archiving.claim import Claim
from tieringd.archiving.segment_copier import CopyRequest
from tieringd.errors import FencedError, LocalFileError, StorageUnavailable
from tieringd.formats.object_keys import data_key, index_key
from tieringd.housekeeping.reupload import ATTEMPTS_MAX, CompactedReuploader
from tieringd.metrics import Metrics
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.model.partition import Leadership
from tieringd.model.segment import CrossingTransaction, SegmentSlice
from tieringd.policies.compacted_reupload import BEFORE_START
from tieringd.policies.total_retention import RetentionPace

DELAY_MS = 600_000
NEVER_TRIMMED = {"is_compact_only": True, "never_trimmed_because": "Kafka refuses it"}
"""So each replica's log has what was replaced: the objects are not held for an election."""
PACE = RetentionPace(interval_ms=60_000, delete_delay_ms=DELAY_MS)


class Reuploading:
    """One daemon process that uploads what compaction left of one partition."""

    def __init__(self, store, writer, *, writer_id="b2", leader_epoch=None, clock=None):
        self.clock = clock or Clock()
        self.writer = writer
        self.metrics = Metrics()
        self.archive = archive_in(store, writer_id=writer_id, now_ms=self.clock)
        newest = writer.epochs[-1][0]
        leadership = Leadership(writer.identified, newest if leader_epoch is None else leader_epoch)
        self.claim = Claim(leadership, self.archive.manifests, metrics=self.metrics)
        self.reuploader = CompactedReuploader(
            leadership, self.archive.remote_log, metrics=self.metrics, now_ms=self.clock
        )

    async def step(self, **topic) -> int:
        """Replace what one plan names, whole or in parts; return how many runs that were."""
        stored = await self.claim.current(lambda: pytest.fail("there is a manifest"))
        seen, done = observed(self.writer, **topic), 0
        await self.reuploader.compare_head(stored.existing, seen)
        plan = self.reuploader.plan(stored.existing, seen)
        parts = [part for file in plan.beside_rewritten for part in await self.reuploader.parts_to_go(file)]
        for run in (*plan.reuploads, *parts):
            change = await self.reuploader.prepare(seen, run)
            if change is not None:
                stored = await change.commit(self.claim, stored)
                done += 1
        return done

    def counted(self, name: str) -> float:
        """Return a counter of the topic."""
        labels = {"topic": self.writer.name.topic}
        return self.metrics.registry.get_sample_value(f"tieringd_archive_{name}_total", labels) or 0


async def filled(writer, store):
    """
    Archive six segments, with transactions over their ends, under two leader epochs.

    Segment 0 has the beginning of an aborted transaction and of a committed one, 3 their ends. What a
    cleaner may drop are whole batches.
    """
    writer.append(b"zero")  # 0
    writer.append(b"undone", producer_id=7)  # 1
    writer.append(b"kept", producer_id=8)  # 2
    writer.roll()
    writer.abort(7)  # 3
    writer.append(b"four")  # 4
    writer.commit(8)  # 5
    writer.roll()
    writer.begin_epoch(2)
    for number in range(6, 14):
        writer.append(b"%d" % number)
        if number % 2:
            writer.roll()
    return await archived(writer, archive_in(store))


def compact_all(writer):
    """Clean as a broker does: aborted data goes, segments are grouped, holes stay."""
    writer.compact(0, without=[0, 1])
    writer.compact(3, 6, without=[4, 6, 7])
    writer.compact(8, without=[])
    writer.compact(10, without=[10, 11])


async def both_ways(archive, manifest):
    return [await values_in(archive, manifest, read_committed=committed) for committed in (False, True)]


def broker_gives(writer, end=14):
    """Return what clients of the broker read of what is archived, in both isolation levels."""
    found = [writer.values(read_committed=committed) for committed in (False, True)]
    return [{at: value for at, value in one.items() if at < end} for one in found]


async def test_reading_gives_what_the_broker_gives(store, writer):
    """Records, and what is committed of them, are those of the compacted log; a deep scrub finds no fault."""
    original = await filled(writer, store)
    compact_all(writer)
    before = await both_ways(archive_in(store), original)
    reuploading = Reuploading(store, writer)

    assert await reuploading.step() == 3

    found = stored_manifest(store, writer)
    assert bases(store, writer) == [0, 3, 8, 10, 12]
    assert await both_ways(archive_in(store), found) == broker_gives(writer) != before
    assert (found.start_offset, found.next_offset, found.epochs) == (0, 14, original.epochs)
    report = await reuploading.archive.verifier.verify(found, deep=True)
    assert (report.faults, found.faults()) == ((), ())
    assert reuploading.counted("compacted_segments") == 4
    saved = reuploading.counted("compacted_bytes_before") - reuploading.counted("compacted_bytes_after")
    assert saved == original.size_bytes - found.size_bytes > 0


async def test_each_offset_can_be_read_from(store, writer):
    """Reading from a hole begins with the next record that is left."""
    await filled(writer, store)
    compact_all(writer)
    await Reuploading(store, writer).step()
    found = stored_manifest(store, writer)
    for offset in range(found.next_offset):
        left = {at: value for at, value in broker_gives(writer)[0].items() if at >= offset}
        assert await values_in(archive_in(store), found, from_offset=offset) == left


async def test_nothing_is_uploaded_twice(store, writer):
    """A segment whose file is archived as it is stays. It is uploaded again once it is compacted again."""
    await filled(writer, store)
    compact_all(writer)
    reuploading = Reuploading(store, writer)
    await reuploading.step()
    requests = len(store.requests)
    assert await reuploading.step() == 0
    assert await Reuploading(store, writer, writer_id="c3").step() == 0
    assert not [one for one in store.requests[requests:] if one[0] == "put"]
    writer.compact(8, without=[8])
    assert await reuploading.step() == 1
    assert await both_ways(archive_in(store), stored_manifest(store, writer)) == broker_gives(writer)


async def test_brokers_that_cut_their_logs_elsewhere_agree(store, tmp_path):
    """A new leader whose segments begin elsewhere replaces the old one's where both meet."""
    old, new = LogWriter(tmp_path / "old"), LogWriter(tmp_path / "new")
    for number in range(12):
        for one, length in ((old, 3), (new, 4)):
            one.append(b"%d" % number)
            if number % length == length - 1:
                one.roll()
    await archived(old, archive_in(store))
    new.compact(4, without=[5])
    reuploading = Reuploading(store, new, leader_epoch=1)
    assert await reuploading.step() == 1
    assert bases(store, new) == [0, 4, 8]
    assert await values_in(archive_in(store), stored_manifest(store, new)) == new.values()


async def test_transactions_over_new_ends_are_remembered(store, tmp_path):
    """The manifest names a transaction that is open where a new leader's segment ends, from then on."""
    old, new = LogWriter(tmp_path / "old"), LogWriter(tmp_path / "new")
    for one in (old, new):
        one.append(b"zero")
        one.append(b"one", producer_id=7)
        if one is new:
            one.roll()
        one.append(b"two")
        one.commit(7)
        one.roll()
    original = await archived(old, archive_in(store))
    new.compact(0, without=[0])
    assert await Reuploading(store, new, leader_epoch=1).step() == 1
    found = stored_manifest(store, new)
    assert (original.crossing, bases(store, new)) == ((), [0, 2])
    assert found.crossing == (CrossingTransaction(7, 1, 3, 0),)


async def test_reframed_files_are_read_to_find_out(store, writer):
    """A newer reframed file is read once to find its size, and replaces its segment only if it is smaller."""
    await filled(writer, store)
    writer.compact(8, without=[8])
    reuploading = Reuploading(store, writer)
    seen = observed(writer)
    seen = replace(seen, log=replace(seen.log, is_reframed=True))
    manifest = stored_manifest(store, writer)
    runs = reuploading.reuploader.plan(manifest, seen).reuploads
    changes = [await reuploading.reuploader.prepare(seen, run) for run in runs]
    assert [(run.base_offset, change is not None) for run, change in zip(runs, changes, strict=True)] == [
        (base, base == 8) for base in (0, 3, 6, 8, 10, 12)
    ]
    assert [run.base_offset for run in reuploading.reuploader.plan(manifest, seen).reuploads] == [8]


async def test_readers_of_the_old_manifest_have_its_objects_for_a_while(store, writer):
    """The originals' objects go after the delay that retention has for readers, and no others with them."""
    old = await filled(writer, store)
    before = await values_in(archive_in(store), old)
    compact_all(writer)
    clock = store.now_ms = Clock()
    await Reuploading(store, writer, clock=clock).step(**NEVER_TRIMMED)
    found = stored_manifest(store, writer)
    archiver = archiver_of(
        writer, archive_in(store, writer_id="b2", now_ms=clock), FakeBroker(writer), now_ms=clock
    )

    clock.now_ms += DELAY_MS - 1
    await archiver.step(observed(writer, retention_pace=PACE))
    assert await values_in(archive_in(store), old) == before

    # A read manifest counts as in effect a second after the store's time, which has no fractions.
    clock.now_ms += 1001
    while stored_manifest(store, writer).retired:
        await archiver.step(observed(writer, retention_pace=PACE))
    left = stored_manifest(store, writer)
    assert list(left.segments) == list(found.segments)
    assert await both_ways(archive_in(store), left) == broker_gives(writer)
    named = {name(writer.identified, one) for one in left.segments for name in (data_key, index_key)}
    assert {key for key in store.objects if key.endswith((".log", ".index"))} == named


async def test_reader_in_the_middle_reads_on(store, writer):
    """One that began before sees the records of one manifest to its end, without a failed read."""
    old = await filled(writer, store)
    before = await values_in(archive_in(store), old)
    compact_all(writer)
    reading = archive_in(store).records.records(
        old, from_offset=0, read_committed=False, on_gap=lambda _: pytest.fail("there is no gap")
    )
    async with aclosing(reading):
        found = {(first := await anext(reading)).offset: first.value}
        assert await Reuploading(store, writer).step() == 3
        found |= {record.offset: record.value async for record in reading}
    assert found == before


async def test_trimming_goes_on_after_compaction(store, writer):
    """
    A compacted segment is not trimmed while the archive has the original, and is once it has this one.

    Its bytes are compared once more before they go.
    """
    await filled(writer, store)
    compact_all(writer)
    broker = FakeBroker(writer)
    archiver = archiver_of(writer, archive_in(store, writer_id="b2"), broker)
    await archiver.step(observed(writer, target_bytes=0))
    assert writer.bases_on_disk[0] == 0

    expected = broker_gives(writer)
    await Reuploading(store, writer, writer_id="c3").step()
    archiver = archiver_of(writer, archive_in(store, writer_id="c3"), broker, leader_epoch=2)
    for _ in range(3):
        await archiver.step(observed(writer, target_bytes=0))
    assert writer.bases_on_disk == [14]
    assert await both_ways(archive_in(store), stored_manifest(store, writer)) == expected


async def test_head_of_the_same_size_is_compared_before_it_holds_up_a_trim(store, writer):
    """The next file to be trimmed is uploaded if only its checksum differs. The others wait."""
    writer.begin_epoch(1)
    written = [writer.closed_segment() for _ in range(3)]
    await archived(writer, archive_in(store))
    for base in (written[0], written[2]):
        data = bytearray(writer.log_path(base).read_bytes())
        data[15] ^= 1  # A leader epoch, which no checksum of a batch covers.
        writer.log_path(base).write_bytes(bytes(data))
    assert await Reuploading(store, writer).step(never_trimmed_because="compact only") == 0
    reuploading = Reuploading(store, writer)
    assert await reuploading.step() == 1
    assert reuploading.reuploader.plan(stored_manifest(store, writer), observed(writer)).reuploads == ()
    assert await reuploading.step() == 0
    found = stored_manifest(store, writer).segments
    assert found.covering(0).writer_id == "b2"
    assert found.covering(written[2]).writer_id != "b2"
    archiver = archiver_of(writer, archive_in(store, writer_id="c3"), FakeBroker(writer))
    await archiver.step(observed(writer, target_bytes=0))
    assert writer.bases_on_disk[0] == written[2]


async def test_damaged_file_of_the_same_size_is_never_trimmed(store, writer):
    """The next file to be trimmed is neither uploaded nor trimmed if it has a wrong batch."""
    await filled(writer, store)
    writer.flip_byte(0)
    assert await Reuploading(store, writer).step() == 0
    archiver = archiver_of(writer, archive_in(store, writer_id="b2"), FakeBroker(writer))
    await archiver.step(observed(writer, target_bytes=0))
    assert writer.bases_on_disk[0] == 0


async def test_damaged_file_is_never_archived(store, writer):
    """A compacted file with a wrong checksum is counted once, and replaces nothing until it changes."""
    original = await filled(writer, store)
    writer.compact(8, without=[8])
    writer.flip_byte(8)
    reuploading = Reuploading(store, writer)
    assert await reuploading.step() == 0
    assert stored_manifest(store, writer).segments == original.segments
    requests = len(store.requests)
    assert await reuploading.step() == 0
    assert store.requests[requests:] == []
    failures = reuploading.metrics.reuploaded.failures.labels("orders", "CorruptDataError")
    assert value_of(failures) == 1
    writer.flip_byte(8)
    assert await reuploading.step() == 1


async def test_file_that_changes_during_the_scan_is_scanned_again(store, writer):
    """A file that another pass of the cleaner has replaced since the scan is not uploaded."""
    original = await filled(writer, store)
    writer.compact(8, without=[8])
    seen = observed(writer)
    reuploading = Reuploading(store, writer)
    (run,) = reuploading.reuploader.plan(original, seen).reuploads
    writer.compact(8, without=[9])
    for _ in range(ATTEMPTS_MAX - 1):
        with pytest.raises(LocalFileError, match="changed after it was listed"):
            await reuploading.reuploader.prepare(seen, run)
    assert await reuploading.reuploader.prepare(seen, run) is None
    assert await reuploading.step() == 1


async def test_file_that_is_not_smaller_after_all_stores_nothing(store, writer):
    """A copy whose size is only known from reading stores nothing if it saves nothing."""
    original = await filled(writer, store)
    writer.compact(8, without=[8])
    seen = observed(writer)
    (run,) = Reuploading(store, writer).reuploader.plan(original, seen).reuploads
    objects = dict(store.objects)
    log = Reuploading(store, writer).archive.remote_log
    part = SegmentSlice.whole(run.segments[0])
    leadership = Leadership(writer.identified, 2)
    size_bytes = run.segments[0].size_bytes
    request = CopyRequest(leadership, seen.log, part, bytes_below=size_bytes)
    assert await log.copy_segment(request) is None
    assert store.objects == objects
    request = CopyRequest(leadership, seen.log, part, bytes_below=size_bytes + 1)
    assert await log.copy_segment(request) is not None


async def test_store_that_is_away_is_asked_again(store, writer):
    """An outage is not a fault of the file: the next attempt replaces the segment."""
    original = await filled(writer, store)
    writer.compact(8, without=[8])
    reuploading = Reuploading(store, writer)
    store.fail_next("put", lambda: store_unavailable("put"))
    with pytest.raises(StorageUnavailable):
        await reuploading.step()
    assert stored_manifest(store, writer).segments == original.segments
    assert await reuploading.step() == 1


async def prepared(reuploading, manifest):
    seen = observed(reuploading.writer)
    run = reuploading.reuploader.plan(manifest, seen).reuploads[0]
    return await reuploading.reuploader.prepare(seen, run)


async def test_commit_whose_answer_is_lost_is_not_done_twice(store, writer):
    """The commit took effect; committing the same once more finds it done."""
    original = await filled(writer, store)
    compact_all(writer)
    reuploading = Reuploading(store, writer)
    change = await prepared(reuploading, original)
    stored = await reuploading.claim.current(lambda: pytest.fail("there is a manifest"))
    after = await change.commit(reuploading.claim, stored)
    assert await change.commit(reuploading.claim, after) is after
    assert reuploading.counted("compacted_segments") == 1


async def test_change_that_comes_too_late_is_given_up(store, writer):
    """The manifest stays as it is if retention or another leader has changed the archive there."""
    original = await filled(writer, store)
    compact_all(writer)
    reuploading = Reuploading(store, writer)
    change = await prepared(reuploading, original)
    stored = await reuploading.claim.current(lambda: pytest.fail("there is a manifest"))
    stored = await reuploading.claim.commit(stored, stored.existing.expired(1, now_ms=0))
    assert await change.commit(reuploading.claim, stored) is stored
    assert bases(store, writer) == [one.base_offset for one in original.segments][1:]


async def test_change_is_given_up_where_a_user_has_deleted_all_of_its_first_segment(store, tmp_path, clock):
    """The archive begins inside the replaced segment then, and after the first of those that replace it."""
    old, leader = (LogWriter(tmp_path / name) for name in ("old", "leader"))
    for one in (old, leader):
        for at in range(6):
            one.append(b"%d" % at, keys=[b"k%d" % at])
            if at == 5 or (one is leader and at == 1):
                one.roll()
    original = await archived(old, archive_in(store))
    leader.compact(2, without=[2])
    reuploading = Reuploading(store, leader, leader_epoch=1)
    change = await prepared(reuploading, original)
    manifests = archive_in(store, writer_id="job", now_ms=clock).manifests
    await delete_archived(manifests, leader.identified, RecordDeletion(4, leader_epoch=0), now_ms=clock)
    stored = await reuploading.claim.current(lambda: pytest.fail("there is a manifest"))
    assert await change.commit(reuploading.claim, stored) is stored
    assert bases(store, leader) == [0]
    plan = reuploading.reuploader.plan(stored.existing, observed(leader))
    assert (plan.reuploads, plan.passed[0].reason) == ((), BEFORE_START)


async def test_deposed_writer_replaces_nothing(store, writer):
    """A commit under an epoch that is over is refused, and the new leader's manifest holds."""
    original = await filled(writer, store)
    compact_all(writer)
    old, new = Reuploading(store, writer), Reuploading(store, writer, writer_id="c3", leader_epoch=3)
    change = await prepared(old, original)
    stored = await old.claim.current(lambda: pytest.fail("there is a manifest"))
    await new.claim.current(lambda: pytest.fail("there is a manifest"))
    held = stored_manifest(store, writer)
    with pytest.raises(FencedError):
        await change.commit(old.claim, stored)
    assert stored_manifest(store, writer) == held


async def test_copy_can_be_cancelled(store, writer):
    """A preparation that is cancelled leaves the manifest alone, and is done anew."""
    original = await filled(writer, store)
    compact_all(writer)
    reuploading = Reuploading(store, writer)
    task = asyncio.create_task(prepared(reuploading, original))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stored_manifest(store, writer).segments == original.segments
    assert await reuploading.step() == 3


@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("same_process", [False, True], ids=["restarted", "same-writer"])
async def test_crash_at_any_request_loses_nothing(tmp_path, after_effect, same_process):
    """A re-upload that dies at any request leaves segments that read as before or after, and is done anew."""
    died = 0
    for number in range(1, 100):
        store, writer = MemoryStore(), LogWriter(tmp_path / f"logs-{number}")
        original = await filled(writer, store)
        before = await values_in(archive_in(store), original)
        compact_all(writer)
        after = broker_gives(writer)
        try:
            await Reuploading(Dying(store, number, after_effect=after_effect), writer).step()
        except Killed:
            died += 1
        found = await values_in(archive_in(store), stored_manifest(store, writer))
        assert after[0].items() <= found.items() <= before.items()
        again = Reuploading(store, writer, writer_id="b2" if same_process else "c3")
        await again.step()
        left = stored_manifest(store, writer)
        assert bases(store, writer) == [0, 3, 8, 10, 12]
        assert await both_ways(archive_in(store), left) == after
        assert (await again.archive.verifier.verify(left, deep=True)).faults == ()
        assert await values_in(archive_in(store), original) == before
        if died < number:
            break
    else:
        pytest.fail("it never came to an end")
    assert died >= 10
