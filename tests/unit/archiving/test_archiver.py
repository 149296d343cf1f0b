"""The archiver over a real log directory, a store in memory and a broker that can refuse."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.fakes.archive import archive_in, archiver_of, observed, values_in, written_below
from tests.fakes.broker import FakeBroker
from tests.fakes.manifests import bases, stored_manifest
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import store_unavailable
from tieringd.archiving.archiver import StepResult
from tieringd.archiving.uploader import LeadershipConfirmation
from tieringd.errors import BrokerUnavailable, FencedError, LocalFileError, StorageUnavailable
from tieringd.policies.upload_plan import UploadLimits


@pytest.fixture
def archiver(writer, archive, broker, metrics, clock):
    return archiver_of(writer, archive, broker, metrics=metrics, now_ms=clock)


def value_of(metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


class PickyStore(MemoryStore):
    """A bucket that does not take the data of segments that begin at one of *refused*."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[int] = set()

    async def put(self, key, body, *, crc32c: int, condition=None):
        name = key.rpartition("/")[2]
        if key.endswith(".log") and int(name.partition("-")[0]) in self.refused:
            raise store_unavailable("put")
        return await super().put(key, body, crc32c=crc32c, condition=condition)


async def test_step_without_closed_segments_does_nothing(writer, archiver, store):
    """The active segment is not uploaded; the bucket knows of the partition, and once is enough."""
    writer.append()

    assert await archiver.step(observed(writer)) == StepResult()
    assert await archiver.step(observed(writer)) == StepResult()
    manifest = stored_manifest(store, writer)
    assert (len(manifest.segments), manifest.next_offset, manifest.commit_number) == (0, 0, 1)


async def test_step_uploads_closed_segments_in_one_commit(writer, archiver, archive, store, metrics):
    """All eligible segments of a step are in bucket and manifest, after one commit and the claim."""
    first, second = writer.closed_segment(b"a", b"b"), writer.closed_segment(b"c")

    result = await archiver.step(observed(writer))

    assert result == StepResult(uploaded=2)
    manifest = stored_manifest(store, writer)
    assert [each.base_offset for each in manifest.segments] == [first, second]
    assert manifest.commit_number == 2
    assert manifest.epochs == ((0, 0),)
    assert await values_in(archive, manifest) == written_below(writer, manifest.next_offset)
    assert value_of(metrics, "tieringd_uploads_total", topic="orders") == 2
    assert value_of(metrics, "tieringd_manifest_commits_total", topic="orders") == 2


async def test_step_takes_so_many_segments_at_once(writer, archive, broker, store):
    """A step uploads up to its limit, says what is left, and the next goes on from there."""
    for _ in range(3):
        writer.closed_segment()
    archiver = archiver_of(writer, archive, broker, limits=UploadLimits(segments_per_step=2))

    first = await archiver.step(observed(writer))
    assert (first.uploaded, first.pending_segments, first.made_progress) == (2, 1, True)
    second = await archiver.step(observed(writer))
    assert (second.uploaded, second.pending_segments) == (1, 0)
    third = await archiver.step(observed(writer))
    assert third == StepResult()
    assert not third.made_progress


async def test_step_stops_at_the_last_stable_offset(writer, archiver, store):
    """A segment with undecided records waits, and so does all that follows it."""
    stable = writer.closed_segment()
    writer.append(producer_id=7)
    undecided = writer.roll()
    writer.closed_segment()

    await archiver.step(observed(writer))
    assert bases(store, writer) == [stable]

    writer.abort(7)
    await archiver.step(observed(writer))
    assert stored_manifest(store, writer).next_offset == writer.bases[-1] > undecided


@pytest.mark.parametrize(("behind", "uploaded"), [(0, 1), (1, 0)])
async def test_segment_is_uploaded_once_all_of_it_is_replicated(writer, archiver, behind, uploaded):
    """The last offset counts: one record that is not replicated holds its segment back."""
    writer.closed_segment(b"a", b"b")
    writer.high_watermark = writer.next_offset - behind

    assert (await archiver.step(observed(writer))).uploaded == uploaded


async def test_archive_continues_after_a_restart(writer, archiver, store, broker):
    """Another process under the same epoch goes on where the manifest ends."""
    first = writer.closed_segment()
    await archiver.step(observed(writer))
    second = writer.closed_segment()
    restarted = archiver_of(writer, archive_in(store, writer_id="b2"), broker)

    assert (await restarted.step(observed(writer))).uploaded == 1

    assert bases(store, writer) == [first, second]
    assert [each.writer_id for each in stored_manifest(store, writer).segments] == ["a1", "b2"]


async def test_epochs_of_the_batches_are_in_the_manifest(writer, store):
    """The manifest's leader epoch history grows with the segments."""
    writer.append()
    writer.begin_epoch(4)
    fourth = writer.append()
    writer.roll()
    await archiver_of(writer, archive_in(store), FakeBroker(writer)).step(observed(writer))

    assert stored_manifest(store, writer).epochs == ((0, 0), (4, fourth))


@pytest.mark.parametrize("refused", [0, 1, 2])
async def test_prefix_before_a_failed_upload_is_committed(writer, broker, refused):
    """Segments before the first failed upload are committed, and none after it."""
    store = PickyStore()
    written = [writer.closed_segment(b"%d" % number) for number in range(3)]
    store.refused = {written[refused]}
    archiver = archiver_of(writer, archive_in(store), broker)

    with pytest.raises(StorageUnavailable):
        await archiver.step(observed(writer))
    assert bases(store, writer) == written[:refused]

    store.refused.clear()
    result = await archiver.step(observed(writer))
    assert result.uploaded == 3 - refused
    assert bases(store, writer) == written


async def test_failing_store_does_not_keep_durable_segments_on_disk(writer, broker):
    """Durable segments leave the disk while the store takes no more: the disk needs the room."""
    store = PickyStore()
    writer.closed_segment()
    second = writer.closed_segment()
    store.refused = {second}
    archiver = archiver_of(writer, archive_in(store), broker)

    with pytest.raises(StorageUnavailable):
        await archiver.step(observed(writer, target_bytes=0))

    assert broker.trims == [(writer.name, second)]


async def test_step_that_failed_on_the_local_log_trims_nothing(writer, archiver, broker):
    """A step trims nothing if something is wrong with the local files."""
    writer.closed_segment()
    second = writer.closed_segment()
    seen = observed(writer, target_bytes=0)
    writer.flip_byte(second)

    with pytest.raises(LocalFileError):
        await archiver.step(seen)

    assert broker.trims == []


async def test_unreadable_segment_ends_the_prefix(writer, archiver, store):
    """A file that changed since the observation is not uploaded; what is before it is committed."""
    first, second = writer.closed_segment(), writer.closed_segment()
    seen = observed(writer)
    writer.flip_byte(second)

    with pytest.raises(LocalFileError, match="changed after it was listed"):
        await archiver.step(seen)

    assert bases(store, writer) == [first]


async def test_commit_of_unknown_outcome_is_checked_before_the_next(writer, archiver, store, metrics):
    """The archiver reads the manifest again after a commit of unknown outcome, and goes on from there."""
    await archiver.step(observed(writer))
    writer.closed_segment()
    seen = observed(writer)
    # Data and index go through; the manifest's answer is lost, and so is the read after it.
    fail_commit(store, after_effect=True)
    with pytest.raises(StorageUnavailable):
        await archiver.step(seen)
    assert archiver.manifest is None

    assert archiver.last_manifest is not None
    assert len(archiver.last_manifest.segments) == 0

    result = await archiver.step(seen)

    assert result.uploaded == 0
    assert archiver.manifest == archiver.last_manifest == stored_manifest(store, writer)
    # The segment is durable and counted, although the response to the commit was lost.
    assert value_of(metrics, "tieringd_uploads_total", topic="orders") == 1


async def test_own_commits_whose_answers_are_lost_fence_nothing(writer, archiver, store):
    """
    Lost answers to an archiver's own commits never fence it, however many there are.

    Only commits of other processes fence it, at the second.
    """
    await archiver.step(observed(writer))
    for number in range(3):
        writer.closed_segment()
        put = store.put
        fail_commit(store, after_effect=True)
        with pytest.raises(StorageUnavailable):
            await archiver.step(observed(writer))
        store.put = put
        await archiver.step(observed(writer))
        assert len(stored_manifest(store, writer).segments) == number + 1


def fail_commit(store: MemoryStore, *, after_effect: bool) -> None:
    """Let the next put of a manifest end in doubt, and the read afterwards fail."""
    put = store.put

    async def doubtful(key, body, *, crc32c, condition=None):
        if not key.endswith("/manifest"):
            return await put(key, body, crc32c=crc32c, condition=condition)
        store.put = put
        store.fail_next("put", lambda: store_unavailable("put", True), after_effect=after_effect)
        store.fail_next("get", lambda: store_unavailable("get"))
        return await put(key, body, crc32c=crc32c, condition=condition)

    store.put = doubtful


async def test_commit_without_effect_is_made_again(writer, archiver, store):
    """Segments whose commit did not take effect are copied and committed by the next step."""
    written = writer.closed_segment()
    fail_commit(store, after_effect=False)
    with pytest.raises(StorageUnavailable):
        await archiver.step(observed(writer))
    assert bases(store, writer) == []

    assert (await archiver.step(observed(writer))).uploaded == 1
    assert bases(store, writer) == [written]


async def test_commit_that_lands_after_the_next_upload_names_what_it_was_made_for(
    writer, archiver, archive, store
):
    """An index that changed between two uploads is stored beside the first: the late commit stays true."""
    base = writer.closed_segment()
    held: list[tuple[str, bytes]] = []
    put = store.put

    async def hold_first_commit(key, body, *, crc32c, condition=None):
        if (
            key.endswith("/manifest")
            and store.objects
            and not held
            and any(each.endswith(".index") for each in store.objects)
        ):
            held.append((key, body))
            raise store_unavailable("put", True)
        if key.endswith("/manifest") and held:
            # What was given up for lost arrives now, before this one.
            store.add(*held[0])
        return await put(key, body, crc32c=crc32c, condition=condition)

    store.put = hold_first_commit
    with pytest.raises(StorageUnavailable):
        await archiver.step(observed(writer))
    writer.log_path(base).with_suffix(".timeindex").unlink()
    with pytest.raises(StorageUnavailable, match="took effect late"):
        await archiver.step(observed(writer))

    assert (await archiver.step(observed(writer))).uploaded == 0
    manifest = stored_manifest(store, writer)
    assert [each.base_offset for each in manifest.segments] == [base]
    assert (await archive.verifier.verify(manifest, deep=True)).faults == ()


async def test_newer_leader_in_the_manifest_fences_before_anything_is_copied(writer, archiver, store, broker):
    """A deposed leader finds out at its first read of the manifest, and uploads nothing."""
    writer.closed_segment()
    newer = archiver_of(writer, archive_in(store, writer_id="b2"), broker, leader_epoch=1)
    await newer.step(observed(writer))
    store.requests.clear()

    with pytest.raises(FencedError, match="leader epoch 1 owns"):
        await archiver.step(observed(writer))

    assert {operation for operation, _ in store.requests} == {"get"}


async def test_fenced_archiver_changes_nothing(writer, archiver, store, broker):
    """An archiver that meets another process twice trims nothing, and the winner's manifest stays."""
    writer.closed_segment()
    await archiver.step(observed(writer))
    rival = archiver_of(writer, archive_in(store, writer_id="b2"), broker, leader_epoch=0)
    writer.closed_segment()
    await rival.step(observed(writer))
    writer.closed_segment()
    with pytest.raises(StorageUnavailable, match="this may be the last commit of a process that has ended"):
        await archiver.step(observed(writer, target_bytes=0))
    await rival.step(observed(writer))
    won = stored_manifest(store, writer)
    writer.closed_segment()

    with pytest.raises(FencedError, match="another daemon \\(writer b2\\) archives orders-0"):
        await archiver.step(observed(writer, target_bytes=0))

    assert stored_manifest(store, writer) == won
    assert broker.trims == []
    assert archiver.manifest is None


async def test_deposed_leader_that_does_not_know_it_trims_nothing(writer, archiver, store, broker):
    """The successor may have cut the archive back, so a deposed leader trims nothing."""
    writer.closed_segment()
    await archiver.step(observed(writer))
    before = observed(writer, target_bytes=0)
    newer = archiver_of(writer, archive_in(store, writer_id="b2"), broker, leader_epoch=1)
    writer.begin_epoch(1)
    await newer.step(observed(writer))
    with pytest.raises(FencedError, match="leader epoch 1 owns"):
        await archiver.step(before)
    assert broker.trims == []


async def test_store_that_is_away_does_not_keep_durable_segments_from_being_trimmed(
    writer, archiver, store, broker
):
    """No other writer can replace an unreachable manifest, and the disk fills while nothing is uploaded."""
    writer.closed_segment()
    await archiver.step(observed(writer))
    store.fail_next("head", lambda: store_unavailable("head"))
    assert (await archiver.step(observed(writer, target_bytes=0))).trimmed == 1


async def test_new_leaders_claim_ends_the_old_one(writer, archiver, store, broker):
    """A new leader owns the manifest from its first step on, even if it has nothing to upload."""
    first = writer.closed_segment()
    await archiver.step(observed(writer))
    second = writer.closed_segment()
    before = observed(writer)
    writer.begin_epoch(1)
    new = archiver_of(writer, archive_in(store, writer_id="b2"), broker, leader_epoch=1)
    await new.step(replace(observed(writer), bounds=replace(writer.bounds(), last_stable_offset=second)))
    assert bases(store, writer) == [first]

    with pytest.raises(FencedError, match="leader epoch 1 owns the manifest"):
        await archiver.step(before)
    await new.step(observed(writer))

    assert bases(store, writer) == [first, second]
    assert stored_manifest(store, writer).leader_epoch == 1


async def test_archiver_whose_leadership_is_old_news_stores_nothing(writer, archiver, store):
    """A process that was stopped through a change of leadership stores no object when it goes on."""
    await archiver.step(observed(writer))
    before = set(store.objects)
    writer.closed_segment()
    archiver.confirm_leadership(LeadershipConfirmation(asyncio.get_running_loop().time() - 1))

    with pytest.raises(BrokerUnavailable, match="it is checked again first"):
        await archiver.step(observed(writer))

    assert set(store.objects) == before


@pytest.mark.parametrize("awaits", range(1, 16))
async def test_step_cancelled_anywhere_can_be_done_again(writer, archiver, store, awaits):
    """An archiver that was cut off at an await goes on with the next step as if nothing had been."""
    written = [writer.closed_segment(), writer.closed_segment()]
    step = asyncio.create_task(archiver.step(observed(writer)))
    for _ in range(awaits):
        await asyncio.sleep(0)
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)

    await archiver.step(observed(writer))

    assert bases(store, writer) == written


async def test_pending_metric_counts_the_offsets_that_are_stable_and_not_archived(writer, archiver, metrics):
    """Redpanda's metric is the distance from the archive's end to the last stable offset."""
    labels = {"namespace": "kafka", "topic": "orders", "partition": "0"}
    writer.closed_segment(b"a", b"b")
    writer.append(b"c")
    writer.append(b"d", producer_id=7)

    await archiver.step(observed(writer))

    assert value_of(metrics, "vectorized_ntp_archiver_pending", **labels) == 1
    writer.commit(7)
    await archiver.step(observed(writer))
    assert value_of(metrics, "vectorized_ntp_archiver_pending", **labels) == 3


async def test_lag_is_the_age_of_the_oldest_segment_that_waits(writer, archive, metrics, clock):
    """The lag counts from the last write to the oldest segment that is eligible, and ends with it."""
    for _ in range(2):
        writer.closed_segment()
    broker = FakeBroker(writer)
    slow = archiver_of(
        writer, archive, broker, metrics=metrics, now_ms=clock, limits=UploadLimits(segments_per_step=1)
    )
    seen = observed(writer)
    waiting = seen.log.segments[1]
    clock.now_ms = waiting.modified_ns // 1_000_000 + 5_000
    labels = {"topic": "orders", "partition": "0"}

    await slow.step(seen)
    assert value_of(metrics, "tieringd_upload_lag_seconds", **labels) == pytest.approx(5)
    assert value_of(metrics, "tieringd_upload_pending_segments", **labels) == 1
    assert value_of(metrics, "tieringd_upload_pending_bytes", **labels) == waiting.size_bytes

    await slow.step(seen)
    assert value_of(metrics, "tieringd_upload_lag_seconds", **labels) == 0
    assert value_of(metrics, "tieringd_archive_next_offset", **labels) == writer.bases[-1]


async def test_active_segment_is_uploaded_before_the_broker_can_delete_it(writer, archiver, store, clock):
    """Kafka closes and deletes an expired active segment in one go, so half of its retention is its time."""
    writer.closed_segment()
    writer.append(b"last", b"words")
    base_offset = writer.bases[-1]
    seen = observed(writer)
    expiring = replace(seen, topic=replace(seen.topic, broker_retention_ms=10_000))
    await archiver.step(expiring)
    assert bases(store, writer) == [0]

    clock.now_ms = seen.log.segments[-1].modified_ns // 1_000_000 + 5_000
    assert not archiver.is_at_rest(expiring)
    assert (await archiver.step(expiring)).uploaded == 1
    assert bases(store, writer) == [0, base_offset]

    assert (await archiver.step(expiring)).uploaded == 0
    assert archiver.is_at_rest(expiring)


async def test_active_segment_that_cannot_be_cut_waits_until_it_is_closed(writer, archive, broker, clock):
    """An active segment is not cut if segments are stored in another form than they have on disk."""
    limits = UploadLimits(cuts_segments=False, max_interval_ms=1)
    archiver = archiver_of(writer, archive, broker, now_ms=clock, limits=limits)
    writer.append(b"last", b"words")
    seen = observed(writer)
    expiring = replace(seen, topic=replace(seen.topic, broker_retention_ms=10_000))
    clock.now_ms += 86_400_000
    assert (await archiver.step(expiring)).uploaded == 0


async def test_lag_is_shown_while_the_store_is_away(writer, archive, store, metrics, clock):
    """A step that cannot even read the manifest shows what waits: alerts rest on it."""
    writer.closed_segment()
    archiver = archiver_of(writer, archive, FakeBroker(writer), metrics=metrics, now_ms=clock)
    await archiver.step(observed(writer))
    writer.closed_segment()
    seen = observed(writer)
    clock.now_ms = seen.log.closed_segments[-1].modified_ns // 1_000_000 + 5_000
    fail_commit(store, after_effect=False)
    with pytest.raises(StorageUnavailable):
        await archiver.step(seen)
    for operation in ("get", "head", "put"):
        store.fail_next(operation, lambda: store_unavailable("any"), times=99)
    for age_seconds in (5, 65):
        with pytest.raises(StorageUnavailable):
            await archiver.step(seen)
        labels = {"topic": "orders", "partition": "0"}
        assert value_of(metrics, "tieringd_upload_lag_seconds", **labels) == pytest.approx(age_seconds)
        assert value_of(metrics, "tieringd_upload_pending_segments", **labels) == 1
        clock.now_ms += 60_000


async def test_markers_that_the_cleaner_emptied_are_archived(writer, archive, broker, store):
    """Emptied markers stand in the way neither of their own segment nor of a search for a later marker."""
    writer.append(b"a", producer_id=3)
    writer.roll()
    writer.append(b"b")
    writer.add_emptied_marker(7)
    writer.commit(3)
    writer.closed_segment(b"c")
    writer.append(b"d")
    result = await archiver_of(writer, archive, broker).step(observed(writer))
    assert (result.fault, result.uploaded) == ("", 2)
    assert written_below(writer, stored_manifest(store, writer).next_offset) == await values_in(
        archive, stored_manifest(store, writer)
    )
