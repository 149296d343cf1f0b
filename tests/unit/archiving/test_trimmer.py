"""Letting local segments go: only what is durable, past its target, and the same bytes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import SHARE_GROUP_HOLD_MS, archive_in, archived, archiver_of, observed
from tests.fakes.broker import FakeBroker, broker_unavailable
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import bases, stored_manifest
from tests.fakes.store import rot
from tests.fakes.virtual_loop import virtually
from tieringd.archiving.claim import ended
from tieringd.archiving.share_groups import FRESH_SECONDS, ShareGroups
from tieringd.archiving.trimmer import (
    DENIED_PAUSE_MS,
    DIFFERS_MS,
    SPACE_REQUEST_GOOD_MS,
    STALE_SCAN_SECONDS,
    Trimmer,
)
from tieringd.errors import BrokerDenied, LocalFileError
from tieringd.formats.object_keys import data_key, index_key
from tieringd.model.partition import Leadership
from tieringd.policies.local_hint import plan_hint
from tieringd.policies.total_retention import RetentionPace, TotalRetention
from tieringd.policies.trim_target import TrimObstacle


async def always() -> bool:
    return True


async def recorded(before_offset: int, *, is_stored_end: bool) -> bool:
    return True


class HintedTrimmer(Trimmer):
    """A trimmer of a partition whose stored hint is always what local retention says now."""

    async def trim(self, manifest, seen) -> int:
        hint = plan_hint(
            seen.log,
            manifest,
            seen.topic.hint_shape,
            None,
            stored=None,
            segment_bytes=1,
            log_start_offset=seen.bounds.log_start_offset,
            now_ms=self._steady_ms(),
        )
        return await super().trim(replace(manifest, allowed_local_start_offset=hint.offset), seen)


@pytest.fixture
def trimmer_with(writer, broker, archive, metrics, clock):
    """Return a function that makes a trimmer with this remote log, and these answers of its leadership."""

    def make(*, remote_log=archive.remote_log, is_current=always) -> HintedTrimmer:
        return HintedTrimmer(
            Leadership(writer.identified, 0),
            broker=broker,
            remote_log=remote_log,
            metrics=metrics,
            share_groups=ShareGroups(broker, metrics=metrics, steady_ms=clock, hold_ms=SHARE_GROUP_HOLD_MS),
            steady_ms=clock,
            ages_ms=lambda _: clock(),
            is_current=is_current,
            record=recorded,
        )

    return make


@pytest.fixture
def trimmer(trimmer_with):
    return trimmer_with()


async def test_files_that_an_observation_lacks_are_not_trimmed(writer, archive, trimmer, broker):
    """A trim deletes all before its offset: also what this observation lacks, durable or not."""
    writer.closed_segment()
    writer.closed_segment()
    manifest = await archived(writer, archive)
    seen = observed(writer, target_bytes=0)
    torn = replace(seen, log=replace(seen.log, segments=seen.log.segments[1:]))

    assert await trimmer.trim(manifest, torn) == 0
    assert broker.trims == []
    assert await trimmer.trim(manifest, seen) == 2


async def test_durable_segments_past_the_target_are_trimmed(writer, archive, trimmer, broker, metrics):
    """Segments past the target go from the disk in one request, and are counted."""
    bases = [writer.closed_segment() for _ in range(3)]
    size_bytes = sum(len(writer.data_of(base)) for base in bases)
    manifest = await archived(writer, archive)

    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 3

    assert broker.trims == [(writer.name, writer.bases[-1])]
    assert writer.bases_on_disk == writer.bases[-1:]
    value = metrics.registry.get_sample_value
    assert value("tieringd_trimmed_segments_total", {"topic": "orders"}) == 3
    assert value("tieringd_trimmed_bytes_total", {"topic": "orders"}) == size_bytes


@virtually
async def test_observation_from_before_a_trim_trims_nothing_again(writer, archive, trimmer, broker, metrics):
    """An observation from before a trim has segments that are gone, and trims nothing. A later scan may."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    await asyncio.sleep(1)
    seen = replace(observed(writer, target_bytes=0), scan_began_at=asyncio.get_running_loop().time())
    await asyncio.sleep(1)
    assert await trimmer.trim(manifest, seen) == 1
    assert len(broker.trims) == 1

    async def tries_again(seen) -> bool:
        # The file is gone, so a trim that compares it logs an error.
        with capture_logs() as lines:
            await trimmer.trim(manifest, seen)
        return [line["event"] for line in lines] == ["segment cannot be compared before a trim"]

    assert not await tries_again(seen)
    assert await tries_again(replace(seen, scan_began_at=asyncio.get_running_loop().time()))
    # A broker that forgot the trim in a crash looks just as before it.
    await asyncio.sleep(STALE_SCAN_SECONDS)
    assert await tries_again(seen)


async def test_segments_within_the_target_stay(writer, archive, trimmer, broker):
    """Only as much goes as leaves the target in place."""
    for _ in range(3):
        writer.closed_segment()
    manifest = await archived(writer, archive)
    target_bytes = len(writer.data_of(writer.bases[2])) + len(writer.data_of(writer.bases[1]))

    assert await trimmer.trim(manifest, observed(writer, target_bytes=target_bytes)) == 1
    assert await trimmer.trim(manifest, observed(writer)) == 0

    assert writer.bases_on_disk == writer.bases[1:]


async def test_segments_that_a_share_group_needs_stay(writer, archive, trimmer, broker, clock):
    """The group reads from the broker alone. As it goes on, the trim follows."""
    bases = [writer.closed_segment() for _ in range(3)]
    sizes = [len(writer.data_of(base)) for base in bases]
    manifest = await archived(writer, archive)
    broker.share_groups = {"work": {writer.name: bases[1]}, "ahead": {writer.name: bases[2]}}

    with capture_logs() as lines:
        assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 1
        assert trimmer.held_bytes == sizes[1] + sizes[2]
    assert writer.bases_on_disk[0] == bases[1]
    (line,) = [one for one in lines if one["event"] == "trim waits for a share group"]
    assert line["because"] == f"share group work needs offset {bases[1]} and later"

    broker.share_groups["work"][writer.name] = writer.bases[-1]
    clock.now_ms += int(FRESH_SECONDS * 1000)
    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 1
    assert writer.bases_on_disk[0] == bases[2]


async def test_share_group_that_begins_while_segments_are_compared_keeps_them(
    writer, archive, trimmer_with, broker, clock
):
    """The comparison takes a while, or the process stands still in it: the groups are asked again."""
    bases = [writer.closed_segment() for _ in range(3)]
    manifest = await archived(writer, archive)

    async def compared_late():
        clock.now_ms += int(FRESH_SECONDS * 1000)
        broker.share_groups = {"new": {writer.name: bases[1]}}
        return True

    trimmer = trimmer_with(is_current=compared_late)
    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 1
    assert writer.bases_on_disk[0] == bases[1]


async def test_nothing_is_asked_of_share_groups_without_something_to_trim(writer, archive, trimmer, broker):
    """An idle daemon sends no requests for them."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    assert await trimmer.trim(manifest, observed(writer)) == 0
    assert not broker.calls["share_group_starts"]


async def test_full_disk_goes_before_a_share_group(writer, archive, trimmer, broker):
    """The space manager's request is trimmed, and no more than that."""
    bases = [writer.closed_segment() for _ in range(3)]
    manifest = await archived(writer, archive)
    broker.share_groups = {"work": {writer.name: 0}}
    trimmer.request_space(bases[1])
    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 1
    assert writer.bases_on_disk[0] == bases[1]


@virtually
async def test_request_for_space_serves_one_trim(writer, archive, trimmer, broker):
    """A later trim would act on pressure that is gone."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    trimmer.request_space(writer.bases[1])
    assert await trimmer.trim(manifest, observed(writer, target_bytes=10**9)) == 1
    writer.closed_segment()
    manifest = await archived(writer, archive)
    await asyncio.sleep(STALE_SCAN_SECONDS + 1)
    trimmer.request_space(writer.bases[1])
    assert await trimmer.trim(manifest, observed(writer, target_bytes=10**9)) == 0
    trimmer.request_space(writer.bases[2])
    broker.fail_next("trim", broker_unavailable("trim"))
    assert await trimmer.trim(manifest, observed(writer, target_bytes=10**9)) == 0
    assert await trimmer.trim(manifest, observed(writer, target_bytes=10**9)) == 0


async def test_request_for_space_of_long_ago_does_not_count(writer, archive, trimmer, broker, clock):
    """The step that was to serve it waited, as for a store that hangs."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    trimmer.request_space(writer.bases[1])
    clock.now_ms += SPACE_REQUEST_GOOD_MS + 1
    assert trimmer.cloud_gc_offset is None
    assert await trimmer.trim(manifest, observed(writer, target_bytes=10**9)) == 0
    trimmer.request_space(writer.bases[1])
    clock.now_ms += SPACE_REQUEST_GOOD_MS
    assert await trimmer.trim(manifest, observed(writer, target_bytes=10**9)) == 1


class SlowLog:
    """A remote log that takes *read_ms* on *clock* to read a file, and counts what it reads."""

    def __init__(self, remote_log, clock, read_ms) -> None:
        self._remote_log, self._clock, self._read_ms = remote_log, clock, read_ms
        self.reads = 0

    async def local_checksums(self, segment, sizes) -> tuple[int, ...]:
        self.reads += 1
        self._clock.now_ms += self._read_ms
        return await self._remote_log.local_checksums(segment, sizes)


@pytest.mark.parametrize("is_still_full", [False, True])
async def test_request_for_space_counts_no_longer_because_of_a_proof(
    writer, archive, trimmer_with, broker, clock, *, is_still_full
):
    """A trim whose proof outlives the request is planned anew, and nothing is read again for it."""
    for _ in range(3):
        writer.closed_segment()
    manifest = await archived(writer, archive)
    slow = SlowLog(archive.remote_log, clock, SPACE_REQUEST_GOOD_MS)
    trimmer = trimmer_with(remote_log=slow)
    broker.lagging = {writer.name}

    async def trim() -> int:
        return await trimmer.trim(manifest, observed(writer, target_bytes=10**9, may_elect_uncleanly=True))

    trimmer.request_space(writer.bases[2])
    assert await trim() == 0
    assert broker.trims == []
    assert trimmer.is_put_off
    if is_still_full:
        trimmer.request_space(writer.bases[2])
    assert await trim() == (2 if is_still_full else 0)
    assert len(broker.trims) == is_still_full
    assert slow.reads == 2


async def test_segments_that_are_not_durable_stay(writer, archive, trimmer, broker):
    """Segments that the manifest lacks are never trimmed, whatever the target is."""
    durable = writer.closed_segment()
    manifest = await archived(writer, archive)
    kept = writer.closed_segment()

    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 1

    assert writer.bases_on_disk == [kept, writer.bases[-1]]
    assert durable not in writer.bases_on_disk


@pytest.mark.parametrize("differs", [0, 1, 2])
async def test_segment_with_other_bytes_than_its_copy_stays(writer, archive, trimmer, broker, differs):
    """A file whose checksum differs from its stored copy's ends the trim before it."""
    bases = [writer.closed_segment() for _ in range(3)]
    manifest = await archived(writer, archive)
    writer.flip_byte(bases[differs])

    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == differs

    assert writer.bases_on_disk == writer.bases[differs:]


async def test_segment_that_changed_since_the_observation_stays(writer, archive, trimmer, broker):
    """A file that is not the one observed is not compared and not trimmed."""
    base = writer.closed_segment()
    manifest = await archived(writer, archive)
    seen = observed(writer, target_bytes=0)
    writer.flip_byte(base)

    assert await trimmer.trim(manifest, seen) == 0
    assert broker.trims == []


async def test_segment_that_vanished_is_no_reason_to_trim(writer, archive, trimmer, broker):
    """A file that cannot be read ends the trim before it."""
    base = writer.closed_segment()
    manifest = await archived(writer, archive)
    seen = observed(writer, target_bytes=0)
    writer.log_path(base).unlink()

    assert await trimmer.trim(manifest, seen) == 0
    assert broker.trims == []


class CountingLog:
    """A remote log that counts the checksums it was asked for."""

    def __init__(self, remote_log) -> None:
        self._remote_log = remote_log
        self.read: list[int] = []

    async def local_checksums(self, segment, sizes) -> tuple[int, ...]:
        self.read.append(segment.base_offset)
        return await self._remote_log.local_checksums(segment, sizes)


@pytest.fixture
def counted(archive, trimmer_with):
    """Give a remote log that counts, and a trimmer that uses it."""
    counting = CountingLog(archive.remote_log)
    trimmer = trimmer_with(remote_log=counting)
    return counting, trimmer


async def test_file_is_read_once_for_its_checksum(writer, archive, broker, counted):
    """A file that was compared is not read again while it is the same, however often a trim fails."""
    counting, trimmer = counted
    base = writer.closed_segment()
    manifest = await archived(writer, archive)
    broker.fail_next("trim", broker_unavailable("trim"))

    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 0
    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 1

    assert counting.read == [base]


async def test_file_that_was_just_uploaded_is_not_read_again(writer, archive, counted):
    """An upload has read the file for its checksum; only another identity makes a trim read it."""
    counting, trimmer = counted
    base, changed = writer.closed_segment(), writer.closed_segment()
    manifest = await archived(writer, archive)
    for segment in observed(writer).log.closed_segments:
        trimmer.note_proved(segment.base_offset, segment.identity)
    writer.flip_byte(changed)

    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 1

    assert counting.read == [changed]
    assert base not in writer.bases_on_disk


async def test_refused_trim_pauses(writer, archive, trimmer, broker, clock):
    """A trimmer leaves the broker alone for a while after a refusal for good, and then asks again."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    broker.denied.add("orders")

    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 0
    clock.now_ms += DENIED_PAUSE_MS - 1
    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 0
    assert len(broker.trims) == 1

    broker.denied.clear()
    clock.now_ms += 1
    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 1


async def test_refusal_is_an_obstacle_until_a_trim_succeeds(writer, archive, trimmer, broker, clock):
    """The broker's refusal outlasts the pause: only the trim of one segment shows that it has ended."""
    ends = [writer.closed_segment() for _ in range(3)][1:]
    manifest = await archived(writer, archive)
    assert trimmer.obstacle is None
    broker.denied.add("orders")
    trimmer.request_space(ends[1])
    assert await trimmer.trim(manifest, observed(writer)) == 0
    expected = TrimObstacle("orders is never trimmed. Grant DELETE on the topic", retry_offset=ends[0])
    assert trimmer.obstacle == expected
    clock.now_ms += DENIED_PAUSE_MS
    assert trimmer.obstacle == expected

    broker.denied.clear()
    trimmer.request_space(expected.retry_offset)
    assert await trimmer.trim(manifest, observed(writer)) == 1
    assert trimmer.obstacle is None


async def test_refusal_is_no_obstacle_once_the_segments_have_gone(writer, archive, trimmer, broker, clock):
    """The broker's own retention takes what it had refused to delete, so no trial shows anything."""
    first = writer.closed_segment()
    writer.closed_segment()
    manifest = await archived(writer, archive)
    broker.denied.add("orders")
    trimmer.request_space(writer.bases[1])
    assert await trimmer.trim(manifest, observed(writer)) == 0
    writer.trim_file(first)
    writer.log_start_offset = writer.bases[1]
    clock.now_ms += DENIED_PAUSE_MS
    trimmer.request_space(trimmer.obstacle.retry_offset)
    assert await trimmer.trim(manifest, observed(writer)) == 0
    assert trimmer.obstacle is None
    assert len(broker.trims) == 1


@pytest.mark.parametrize("ends_by", ["repair", "compaction", "deletion"])
async def test_segment_that_differs_is_an_obstacle_from_its_offset_on(
    writer, archive, trimmer, broker, ends_by
):
    """A segment that is not the archive's keeps what follows it, and nothing before it."""
    bases = [writer.closed_segment() for _ in range(4)]
    manifest = await archived(writer, archive)
    whole = observed(writer)
    writer.flip_byte(bases[2])
    for _ in range(2):
        # One scan misses the file. The second trim knows the difference, and does not read the file.
        torn = replace(whole, log=replace(whole.log, segments=whole.log.segments[3:]))
        assert await trimmer.trim(manifest, torn) == 0
        assert trimmer.obstacle is None
        trimmer.request_space(writer.bases[-1])
        await trimmer.trim(manifest, observed(writer))
        assert writer.bases_on_disk[0] == bases[2]
        obstacle = trimmer.obstacle
        assert (obstacle.from_offset, obstacle.retry_offset) == (bases[2], bases[3])

    writer.flip_byte(bases[2])
    if ends_by == "repair":
        trimmer.request_space(obstacle.retry_offset)
        assert await trimmer.trim(manifest, observed(writer)) == 1
    elif ends_by == "deletion":
        writer.trim_file(bases[2])
        writer.log_start_offset = bases[3]
        assert await trimmer.trim(manifest, observed(writer)) == 0
    else:
        # The observation's file begins before the segment that differed, and ends behind it.
        grouped = replace(whole.log.segments[1], next_offset=bases[3])
        seen = observed(writer)
        log = replace(seen.log, segments=(grouped, *seen.log.segments[1:]))
        assert await trimmer.trim(manifest, replace(seen, log=log)) == 0
    assert trimmer.obstacle is None


async def test_segment_that_cannot_be_read_is_an_obstacle(writer, archive, trimmer):
    """A bad sector keeps what follows it on the disk as other bytes do."""
    base = writer.closed_segment()
    manifest = await archived(writer, archive)
    seen = observed(writer, target_bytes=0)
    writer.log_path(base).unlink()
    assert await trimmer.trim(manifest, seen) == 0
    assert trimmer.obstacle.from_offset == base
    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 0
    assert trimmer.obstacle is None


@virtually
async def test_what_expired_waits_after_a_refusal_and_for_a_newer_observation(
    writer, archive, trimmer, broker, clock
):
    """The broker is not asked again at once after a refusal, nor for segments that it has already deleted."""
    writer.closed_segment()
    writer.closed_segment()
    manifest = (await archived(writer, archive)).expired(1, now_ms=clock())
    await asyncio.sleep(1)
    before = replace(observed(writer), scan_began_at=0.0)
    broker.denied.add("orders")
    assert [await trimmer.trim_expired(manifest, before) for _ in range(2)] == [0, 0]
    assert len(broker.trims) == 1
    broker.denied.clear()
    broker._keeps_trimmed_files = True
    clock.now_ms += DENIED_PAUSE_MS
    assert [await trimmer.trim_expired(manifest, before) for _ in range(2)] == [1, 0]
    assert len(broker.trims) == 2


async def test_refused_trim_is_counted(writer, archive, trimmer, broker, metrics):
    """A refusal is a failure by the name of its error."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    broker.denied.add("orders")

    await trimmer.trim(manifest, observed(writer, target_bytes=0))

    labels = {"topic": "orders", "error": BrokerDenied.__name__}
    assert metrics.registry.get_sample_value("tieringd_trim_failures_total", labels) == 1


@pytest.mark.parametrize("error", [broker_unavailable("trim"), LocalFileError("busy", path="/x")])
async def test_failed_trim_is_tried_again_at_once(writer, archive, trimmer, broker, error):
    """A failure that may pass costs nothing but this trim."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    broker.fail_next("trim", error)

    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 0
    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 1


async def test_segments_on_their_way_out_are_not_asked_for_again(writer, archive, trimmer, broker):
    """A broker that deletes its files later is asked once."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    broker._keeps_trimmed_files = True

    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 1
    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 0

    assert len(broker.trims) == 1
    broker.delete_trimmed()
    assert writer.bases_on_disk == writer.bases[-1:]


async def test_age_counts_from_the_upload_at_the_latest(writer, archive, trimmer, clock):
    """A segment goes by time once it is as old as the target says, counted from its upload at the latest."""
    writer.closed_segment()
    manifest = await archived(writer, archive)

    clock.now_ms += 999
    assert await trimmer.trim(manifest, observed(writer, target_ms=1000)) == 0
    clock.now_ms += 10
    assert await trimmer.trim(manifest, observed(writer, target_ms=1000)) == 1


async def test_archiver_trims_only_what_its_step_has_committed(writer, store, broker, archive):
    """The trim of a step comes after the commit that makes it safe."""
    writer.closed_segment()
    order: list[str] = []
    put, trim = store.put, broker.trim

    async def noting_put(key, body, *, crc32c, condition=None):
        done = await put(key, body, crc32c=crc32c, condition=condition)
        order.append(key.rpartition(".")[2] if key.endswith(("log", "index")) else "manifest")
        return done

    async def noting_trim(leadership, log, *, before_offset, needs_every_replica):
        order.append("trim")
        return await trim(leadership, log, before_offset=before_offset)

    store.put, broker.trim = noting_put, noting_trim
    archiver = archiver_of(writer, archive_in(store), broker)

    result = await archiver.step(observed(writer, target_bytes=0))

    assert (result.uploaded, result.trimmed, result.made_progress) == (1, 1, False)
    assert order == ["manifest", "log", "index", "manifest", "trim"]


async def test_trim_is_refused_once_leadership_has_moved(writer, archive, trimmer, broker, metrics):
    """The broker leads again, and under a later epoch: what was decided before it is off."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    seen = observed(writer, target_bytes=0)
    broker.epochs[writer.name] = 2
    with capture_logs() as lines:
        for _ in range(3):
            assert await trimmer.trim(manifest, seen) == 0
    assert [one["event"] for one in lines] == ["trim failed"], "it is said once"
    assert writer.log_start_offset == 0
    labels = {"topic": "orders", "error": "LeadershipChanged"}
    assert metrics.registry.get_sample_value("tieringd_trim_failures_total", labels) == 3


async def test_leader_that_does_not_know_its_successor_trims_nothing(writer, archive, broker, trimmer_with):
    """The leader asks before a trim whether the manifest is current, also for a trim that is on record."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    answers = [False, True]

    async def is_current() -> bool:
        return answers.pop(0)

    trimmer = trimmer_with(is_current=is_current)
    seen = observed(writer, target_bytes=0)
    assert await trimmer.trim(manifest, seen) == 0
    assert (broker.trims, writer.log_start_offset) == ([], 0)
    assert await trimmer.trim(manifest, seen) == 1


async def test_leader_that_does_not_know_its_successor_trims_nothing_that_expired(
    writer, archive, broker, clock, trimmer_with
):
    """The successor may have cut the archive back, and its log may have other records below the old start."""
    writer.closed_segment()
    manifest = (await archived(writer, archive)).expired(1, now_ms=clock())
    answers = [False, True]

    async def is_current() -> bool:
        return answers.pop(0)

    trimmer = trimmer_with(is_current=is_current)
    seen = observed(writer)
    assert await trimmer.trim_expired(manifest, seen) == 0
    assert (broker.trims, writer.log_start_offset) == ([], 0)
    assert await trimmer.trim_expired(manifest, seen) == 1


async def test_trim_waits_for_all_replicas_where_another_could_be_elected(writer, archive, trimmer, broker):
    """A replica that lacks the records may lead one day. A full disk does not wait for it."""
    for _ in range(2):
        writer.closed_segment()
    manifest = await archived(writer, archive)
    broker.lagging.add(writer.name)
    risky = observed(writer, target_bytes=0, may_elect_uncleanly=True)
    assert await trimmer.trim(manifest, risky) == 0
    trimmer.request_space(writer.bases[1])
    kept = observed(writer, may_elect_uncleanly=True)
    assert await trimmer.trim(manifest, kept) == 1
    broker.lagging.clear()
    assert await trimmer.trim(manifest, observed(writer, target_bytes=0, may_elect_uncleanly=True)) == 1


async def test_replica_that_lags_holds_no_trim_up_where_it_cannot_be_elected(
    writer, archive, trimmer, broker
):
    """A clean election loses nothing that is committed, and a broker may be away for days."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    broker.lagging.add(writer.name)
    assert await trimmer.trim(manifest, observed(writer, target_bytes=0)) == 1


async def test_what_was_proved_is_remembered_while_it_is_on_disk(writer, archive, metrics, broker):
    """Proofs are forgotten with the files that they are about, also if the broker's retention took these."""
    archiver = archiver_of(writer, archive, broker, metrics=metrics)
    for _ in range(20):
        writer.closed_segment()
        while (await archiver.step(observed(writer))).uploaded:
            pass
        while len(writer.bases_on_disk) > 2:
            writer.drop_head()
    await archiver.step(observed(writer))
    assert len(archiver._trimmer._proved) <= 2


class NoChange:
    """A change of the manifest that its step has only to come to."""

    async def commit(self, claim, stored):
        return stored


@pytest.fixture
async def elsewhere(tmp_path, archive):
    """Archive a log of segments with two records, and return another replica's, which cut them elsewhere."""
    first, second = LogWriter(tmp_path / "first"), LogWriter(tmp_path / "second")
    for writer, last_records in ((first, {1, 3, 5}), (second, {0, 2, 4, 5})):
        for record in range(6):
            writer.append()
            if record in last_records:
                writer.roll()
    await archived(first, archive)
    second.begin_epoch(1)
    return second


@pytest.mark.parametrize("key_of", [data_key, index_key])
async def test_damaged_stored_copy_puts_off_the_trim_and_nothing_else(
    elsewhere, store, archive, clock, key_of
):
    """A step goes on to retention and offers; the damaged object is read and named once an hour."""
    (first, *_) = stored_manifest(store, elsewhere).segments
    key = key_of(elsewhere.identified, first)
    rot(store, key)

    def reads_of(key):
        return [one for one, of in store.requests if of == key and one != "put"]

    broker = FakeBroker(elsewhere)
    archiver = archiver_of(elsewhere, archive, broker, now_ms=clock)
    with capture_logs() as lines:
        for _ in range(3):
            offer = archiver.offer(NoChange())
            await archiver.step(observed(elsewhere, target_bytes=0))
            assert await ended(offer)
        assert len(reads_of(key)) == 1
        clock.now_ms += DIFFERS_MS
        await archiver.step(observed(elsewhere, target_bytes=0))
    assert len([one for one in lines if "is damaged; the segment is not trimmed" in one["event"]]) == 2
    assert broker.trims == []
    retention = {"total": TotalRetention(None, 1), "retention_pace": RetentionPace(1000, 1000)}
    for _ in range(2):
        clock.now_ms += 1000
        await archiver.step(observed(elsewhere, target_bytes=0, **retention))
    assert first.base_offset not in bases(store, elsewhere)
