"""A user's DeleteRecords through the archiver's step: after two observations the archive's start follows."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.archive import SCAN_NUMBERS, archive_in, archiver_of, observed, values_in
from tests.fakes.manifests import bases, stored_manifest
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import store_unavailable
from tieringd.archive.record_deletion import delete_archived
from tieringd.archiving.claim import EXPECTED_EDIT_MS
from tieringd.archiving.uploader import LeadershipConfirmation
from tieringd.errors import BucketNotFound, StorageUnavailable
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.policies.local_hint import StorageMode
from tieringd.policies.total_retention import RetentionPace, TotalRetention

MINUTE_MS = 60_000
PACE = RetentionPace(interval_ms=MINUTE_MS, delete_delay_ms=10 * MINUTE_MS)
FOREVER = TotalRetention(limit_ms=None, limit_bytes=None)


@pytest.fixture
def archiver(writer, archive, broker, metrics, clock):
    return archiver_of(writer, archive, broker, metrics=metrics, now_ms=clock)


def observe(writer, log_start_offset=None, total=FOREVER, **changes):
    seen = observed(writer, total=total, retention_pace=PACE, **changes)
    if log_start_offset is None:
        return seen
    return replace(seen, bounds=replace(seen.bounds, log_start_offset=log_start_offset))


async def filled(writer, archiver, segments=3):
    """Archive segments of four records, from offset 0 on."""
    for number in range(segments):
        writer.closed_segment(*(b"%d-%d" % (number, at) for at in range(4)))
    while (await archiver.step(observe(writer))).uploaded:
        pass


async def filled_singly(writer, archiver, segments=3):
    """Archive segments of four batches of one record each, from offset 0 on."""
    for number in range(segments):
        for at in range(4):
            writer.append(b"%d-%d" % (number, at))
        writer.roll()
    while (await archiver.step(observe(writer))).uploaded:
        pass


@pytest.fixture
def next_leader(writer, store, broker, clock):
    """Give a function that makes the archiver of the next leader, whose log has a batch of its epoch."""

    def begin():
        writer.begin_epoch(1)
        writer.closed_segment(b"later")
        later = archive_in(store, writer_id="b1", now_ms=clock)
        return archiver_of(writer, later, broker, leader_epoch=1, now_ms=clock)

    return begin


@pytest.fixture
def delete(writer, store, clock):
    """Give a function that records a deletion, as a gateway and `tieringd topic delete-records` do."""

    async def record(before_offset):
        manifests = archive_in(store, writer_id="job", now_ms=clock).manifests
        deletion = RecordDeletion(before_offset, leader_epoch=0)
        await delete_archived(manifests, writer.identified, deletion, now_ms=clock)

    return record


@pytest.fixture
def steps(writer, clock):
    """Give a function that steps an archiver on several observations, a minute apart."""

    async def step(acting, log_start_offset, times=3, *, seen=None):
        for _ in range(times):
            clock.now_ms += MINUTE_MS
            await acting.step(
                replace(seen or observe(writer, log_start_offset), scan_number=next(SCAN_NUMBERS))
            )

    return step


async def step_to_end(archiver, seen):
    """Step until a step has uploaded nothing; an edit of the manifest costs one step."""
    for _ in range(9):
        with suppress(StorageUnavailable):
            if not (await archiver.step(seen)).uploaded:
                return


async def test_recorded_deletion_survives_a_change_of_leader(writer, archiver, store, delete, next_leader):
    """A new leader goes on from the recorded start, also at a segment's base. No deleted record is back."""
    await filled(writer, archiver)
    for before_offset in (4, 6, 8, 12):
        await delete(before_offset)
        assert stored_manifest(store, writer).start_offset == before_offset
    successor = next_leader()
    await step_to_end(successor, observe(writer, 12))
    manifest = stored_manifest(store, writer)
    assert (manifest.leader_epoch, manifest.start_offset) == (1, 12)
    assert sorted(await values_in(archive_in(store), manifest)) == [12]


@pytest.mark.parametrize("is_later_leader", [False, True], ids=["same leader", "later leader"])
@pytest.mark.parametrize("before_offset", [12, 13, 14, 16, 18])
async def test_deletion_ahead_of_the_archive_is_followed_by_each_upload(
    request, archiver, delete, before_offset, is_later_leader
):
    """The records are still in files, in pins, or in the active segment; no commit ever shows them."""
    writer, store = request.getfixturevalue("writer"), request.getfixturevalue("store")
    await filled(writer, archiver)
    writer.append(b"x", b"y")
    writer.roll()
    writer.append(b"z", b"z", b"z", b"z")
    await delete(before_offset)
    acting = request.getfixturevalue("next_leader")() if is_later_leader else archiver
    writer.roll()
    await step_to_end(acting, observe(writer))
    manifest = stored_manifest(store, writer)
    assert manifest.next_offset >= 18
    assert manifest.start_offset == before_offset
    found = await values_in(archive_in(store), manifest)
    assert sorted(found) == list(range(before_offset, manifest.next_offset))


async def test_records_of_a_later_leader_are_not_deleted(writer, archiver, store, delete, next_leader):
    """A deletion reached past an offset that an unclean election then gave to other records."""
    await filled(writer, archiver)
    await delete(20)
    successor = next_leader()
    writer.closed_segment(*[b"kept"] * 9)
    await step_to_end(successor, observe(writer))
    manifest = stored_manifest(store, writer)
    assert (manifest.start_offset, manifest.deleted_before) == (12, 12)
    assert sorted(await values_in(archive_in(store), manifest)) == list(range(12, 22))


async def test_start_inside_a_batch_is_a_users_for_every_leader(writer, archiver, store, steps, next_leader):
    """The log itself is the mark: a leader sees it that took over before its predecessor did."""
    await filled(writer, archiver)
    await steps(next_leader(), 6, times=2)
    manifest = stored_manifest(store, writer)
    assert (manifest.trimmed_offset, manifest.start_offset) == (6, 6)
    assert manifest.deletions == (RecordDeletion(6, leader_epoch=1),)


async def test_file_that_cannot_be_read_is_no_evidence(writer, archiver, store, steps, next_leader):
    """An uncertain deletion is not carried out, and the next observation reads the file again."""
    await filled(writer, archiver)
    successor = next_leader()
    seen = observe(writer, 6)
    (path,) = [Path(one.path) for one in seen.log.segments if one.base_offset == 4]
    away = path.rename(f"{path}.away")
    await steps(successor, 6, seen=seen)
    assert stored_manifest(store, writer).start_offset == 0
    away.rename(path)
    await steps(successor, 6, seen=seen)
    assert stored_manifest(store, writer).start_offset == 6


async def test_deletion_that_two_observations_found_is_recorded(writer, archiver, store, steps, next_leader):
    """The next leader knows the part of a deletion that lies past the archive's end."""
    await filled(writer, archiver)
    writer.append(b"x", b"y", b"z")
    await steps(archiver, 14, times=2)
    assert stored_manifest(store, writer).deletions == (RecordDeletion(14, leader_epoch=0),)
    writer.roll()
    await step_to_end(next_leader(), observe(writer, 14))
    manifest = stored_manifest(store, writer)
    assert sorted(await values_in(archive_in(store), manifest)) == [14, 15]


async def test_deletion_by_a_command_is_noticed_soon(writer, archiver, delete, clock):
    """The log's start has moved, and the command edits the manifest after that."""
    await filled(writer, archiver)
    assert archiver.last_manifest.start_offset == 0
    await archiver.step(observe(writer, 4))
    await delete(4)
    clock.now_ms += EXPECTED_EDIT_MS - 1
    await archiver.step(observe(writer, 4))
    assert archiver.last_manifest.start_offset == 0
    clock.now_ms += 1
    await archiver.step(observe(writer, 4))
    assert archiver.last_manifest.start_offset == 4


async def test_archive_follows_after_a_second_observation(writer, archiver, store, clock):
    """
    The archive's start is the user's to the record.

    Whole segments go, and their objects after the delay.
    """
    await filled(writer, archiver)
    clock.now_ms += MINUTE_MS
    await archiver.step(observe(writer, 6))
    assert stored_manifest(store, writer).start_offset == 0
    clock.now_ms += MINUTE_MS
    await archiver.step(observe(writer, 6))
    manifest = stored_manifest(store, writer)
    assert manifest.start_offset == 6
    assert bases(store, writer) == [4, 8]
    assert [len(one.segments) for one in manifest.retired] == [1]

    archive = archive_in(store)
    found = await values_in(archive, manifest)
    assert sorted(found) == [6, 7, 8, 9, 10, 11]
    assert await archive.records.first_offset(manifest) == 6
    assert (await archive.records.first_record_at(manifest, 0)).offset == 6
    assert (await archive.verifier.verify(manifest, deep=True)).faults == ()

    clock.now_ms += PACE.delete_delay_ms
    await archiver.step(observe(writer, 6))
    assert len([key for key in store.objects if key.endswith(".log")]) == 2
    clock.now_ms += MINUTE_MS
    await archiver.step(observe(writer, 6))
    assert stored_manifest(store, writer).start_offset == 6


@pytest.mark.parametrize("second", [None, 5], ids=["none", "less"])
async def test_start_that_comes_back_lower_counts(writer, archiver, store, clock, second):
    """A broker that crashed in between may have forgotten: only what both observations have is deleted."""
    await filled(writer, archiver)
    for log_start_offset in (6, second):
        clock.now_ms += MINUTE_MS
        await archiver.step(observe(writer, log_start_offset))
    assert stored_manifest(store, writer).start_offset == (second or 0)


async def test_first_observation_alone_moves_nothing(writer, archiver, store, clock):
    """The archive's start moves only as far as two observations agree, also inside the first segment."""
    await filled(writer, archiver)
    for log_start_offset, expected in ((2, 0), (3, 2), (3, 3)):
        clock.now_ms += MINUTE_MS
        await archiver.step(observe(writer, log_start_offset))
        assert stored_manifest(store, writer).start_offset == expected


async def test_start_at_the_end_of_a_segment_is_the_brokers_retention(writer, archiver, store, clock):
    """A start at a segment's end may be the broker's retention or a user's, so nothing is deleted."""
    await filled(writer, archiver)
    for _ in range(4):
        clock.now_ms += MINUTE_MS
        await archiver.step(observe(writer, 4))
    assert stored_manifest(store, writer).start_offset == 0


async def test_own_trim_is_no_users_for_the_next_leader(writer, archiver, store, broker, clock):
    """Only the record of a trim tells the next leader that no user deleted: its segments end elsewhere."""
    await filled(writer, archiver)
    archiver.request_space(8)
    await archiver.step(observe(writer))
    assert broker.trims == [(writer.name, 8)]
    manifests = archive_in(store, now_ms=clock).manifests
    stored = await manifests.load(writer.identified)
    rows = list(stored.existing.segments)
    size_bytes = sum(one.size_bytes for one in rows)
    merged = stored.existing.merged(replace(rows[0], last_offset=11, size_bytes=size_bytes), now_ms=clock())
    await manifests.commit(stored, merged, leader_epoch=0)

    async def starts(trimmed_offset: int) -> int:
        again = archive_in(store, writer_id="b2", now_ms=clock)
        known = await again.manifests.load(writer.identified)
        noted = replace(known.existing, trimmed_offset=trimmed_offset)
        await again.manifests.commit(known, noted, leader_epoch=0)
        other = archiver_of(writer, again, broker, now_ms=clock)
        seen = observe(writer, 8)
        first, *rest = seen.log.segments
        log = replace(seen.log, segments=(replace(first, base_offset=6), *rest))
        for _ in range(3):
            clock.now_ms += MINUTE_MS
            await other.step(replace(seen, log=log, scan_number=next(SCAN_NUMBERS)))
        return stored_manifest(store, writer).start_offset

    assert merged.trimmed_offset == 8
    assert await starts(8) == 0
    assert await starts(7) == 8, "without the record it would be taken for a user's"


async def test_trim_is_recorded_before_it_is_asked_for(writer, archiver, store, broker, clock):
    """A trim is recorded before it is asked for, even without a hint, and is recorded once."""
    await filled(writer, archiver)
    seen_by_broker = []
    trim = broker.trim

    async def noting_trim(*arguments, **named):
        seen_by_broker.append(stored_manifest(store, writer).trimmed_offset)
        return await trim(*arguments, **named)

    broker.trim = noting_trim
    await archiver.step(observe(writer, storage_mode=StorageMode.CLOUD, target_bytes=0))
    assert (broker.trims, seen_by_broker) == ([(writer.name, 12)], [12])
    before = stored_manifest(store, writer).commit_number
    await archiver.step(observe(writer, storage_mode=StorageMode.CLOUD, target_bytes=0))
    assert stored_manifest(store, writer).commit_number == before


async def test_what_follows_a_recorded_trim_knows_of_the_record(writer, archiver, store, broker, clock):
    """One step trims and then expires segments: each commit is made on the one before."""
    await filled(writer, archiver)
    total = TotalRetention(limit_ms=0, limit_bytes=None)
    clock.now_ms += MINUTE_MS
    await archiver.step(observe(writer, total=total))
    clock.now_ms += MINUTE_MS
    done = await archiver.step(observe(writer, total=total, storage_mode=StorageMode.CLOUD, target_bytes=0))
    assert done.expired == 3
    assert stored_manifest(store, writer).trimmed_offset == 12


class PutsFail(MemoryStore):
    """A store whose PUTs fail on demand."""

    is_full = False

    async def put(self, key, body, *, crc32c, condition=None):
        if self.is_full:
            raise store_unavailable("put")
        return await super().put(key, body, crc32c=crc32c, condition=condition)


@pytest.mark.parametrize("cut", [None, 10], ids=["a stored segment's end", "another"])
async def test_trim_that_cannot_be_recorded(writer, broker, clock, cut):
    """A full disk is relieved while the store is away, where the trim cannot be taken for a user's."""
    store = PutsFail()
    archiver = archiver_of(writer, archive_in(store, now_ms=clock), broker, now_ms=clock)
    await filled(writer, archiver)
    claim = archiver._claim
    store.is_full = True
    assert await claim.record_trim(12, is_stored_end=cut is None) is (cut is None)
    assert claim.newest(claim._known).existing.trimmed_offset == 0
    store.is_full = False
    await archiver.step(observe(writer))
    assert await claim.record_trim(12, is_stored_end=False)
    assert stored_manifest(store, writer).trimmed_offset == 12
    store.is_full = True
    assert await claim.record_trim(11, is_stored_end=False), "it is recorded already"


class Vanishes(MemoryStore):
    """A store whose bucket vanishes on demand."""

    is_gone = False

    async def put(self, key, body, *, crc32c, condition=None):
        if self.is_gone:
            raise BucketNotFound("there is no bucket")
        return await super().put(key, body, crc32c=crc32c, condition=condition)


async def test_nothing_is_trimmed_when_the_bucket_has_vanished(writer, broker, clock):
    """Segments that count as durable may be gone with the bucket, so a full disk waits for an operator."""
    store = Vanishes()
    archiver = archiver_of(writer, archive_in(store, now_ms=clock), broker, now_ms=clock)
    await filled(writer, archiver)
    store.is_gone = True
    with pytest.raises(BucketNotFound):
        await archiver._claim.record_trim(12, is_stored_end=True)


async def test_compact_only_topic_keeps_its_archive(writer, archiver, store, clock):
    """Kafka refuses to delete records there, so a start that looks like it is none."""
    await filled(writer, archiver)
    for _ in range(4):
        clock.now_ms += MINUTE_MS
        await archiver.step(observe(writer, 6, total=TotalRetention(0, 0, deletes=False)))
    assert stored_manifest(store, writer).start_offset == 0


async def test_everything_deleted_leaves_an_archive_that_goes_on(writer, archiver, store, clock):
    """DeleteRecords up to the end of the log, past what is archived."""
    await filled(writer, archiver)
    writer.append(b"x", b"y")
    for _ in range(3):
        clock.now_ms += MINUTE_MS
        await archiver.step(observe(writer, 14))
    manifest = stored_manifest(store, writer)
    assert (manifest.start_offset, manifest.next_offset, len(manifest.segments)) == (12, 12, 0)
    writer.roll()
    await archiver.step(observe(writer, 14))
    assert stored_manifest(store, writer).next_offset == 14


async def test_log_that_an_earlier_leader_cut_is_no_users(writer, archiver, store, broker, clock):
    """The earlier leader's segments ended elsewhere, so its retention may have cut inside one of ours."""
    await filled_singly(writer, archiver)
    writer.begin_epoch(1)
    writer.closed_segment()
    later = archive_in(store, writer_id="b2", now_ms=clock)
    successor = archiver_of(writer, later, broker, leader_epoch=1, now_ms=clock)
    for log_start_offset, start_offset in ((6, 0), (6, 0), (6, 0), (9, 0), (9, 9)):
        clock.now_ms += MINUTE_MS
        await successor.step(observe(writer, log_start_offset))
        assert stored_manifest(store, writer).start_offset == start_offset


async def test_hint_that_only_follows_the_logs_start_hides_no_users_deletion(writer, archiver, store, clock):
    """Nothing is trimmed by it: a record of a trim would say that the cut was ours."""
    await filled(writer, archiver)
    keeps_all = {"storage_mode": StorageMode.TIERED_CLOUD, "target_bytes": 1 << 30}
    stored = await archiver._claim.current(lambda: pytest.fail("there is one"))
    await archiver._claim.commit(stored, stored.existing.with_hint(1))
    for _ in range(2):
        clock.now_ms += MINUTE_MS
        await archiver.step(observe(writer, 6, **keeps_all))
    manifest = stored_manifest(store, writer)
    assert (manifest.allowed_local_start_offset, manifest.trimmed_offset, manifest.start_offset) == (6, 0, 6)


async def test_trim_waits_until_the_archive_has_followed_a_user(writer, archiver, broker, clock):
    """A trim would move the log's start past the user's. A disk that needs room comes first."""
    await filled(writer, archiver)
    lets_go = {"storage_mode": StorageMode.CLOUD, "target_bytes": 0}
    clock.now_ms += MINUTE_MS
    await archiver.step(observe(writer, 6, **lets_go))
    assert broker.trims == []
    archiver.request_space(8)
    await archiver.step(observe(writer, 6, **lets_go))
    assert broker.trims


async def test_observation_that_no_round_has_confirmed_deletes_nothing(writer, archiver, store, clock):
    """An offer makes the archiver step on an old observation, which would confirm itself."""
    await filled(writer, archiver)
    archiver.confirm_leadership(LeadershipConfirmation(-1))
    for _ in range(3):
        clock.now_ms += MINUTE_MS
        await archiver.step(observe(writer, 6))
    assert stored_manifest(store, writer).start_offset == 0
    archiver.confirm_leadership(LeadershipConfirmation(math.inf))
    for _ in range(2):
        clock.now_ms += MINUTE_MS
        await archiver.step(observe(writer, 6))
    assert stored_manifest(store, writer).start_offset == 6


async def test_one_observation_does_not_confirm_itself(writer, archiver, store, clock):
    """Rounds may fail for a long time, and an archiver acts on what it has meanwhile."""
    await filled(writer, archiver)
    seen = observe(writer, 6)
    for _ in range(4):
        clock.now_ms += MINUTE_MS
        await archiver.step(seen)
    assert stored_manifest(store, writer).start_offset == 0
    await archiver.step(observe(writer, 6))
    assert stored_manifest(store, writer).start_offset == 6
