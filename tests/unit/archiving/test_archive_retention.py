"""Archive retention within the archiver's step: out of the manifest, out of the bucket, off the disk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.archive import SCAN_NUMBERS, archive_in, archiver_of, observed, values_in
from tests.fakes.broker import FakeBroker
from tests.fakes.manifests import bases, stored_manifest
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import store_unavailable
from tieringd.archive.archive_reader import SegmentIndexes
from tieringd.archive.object_joiner import ObjectJoiner, index_of_parts, store_merged
from tieringd.archive.retired_objects import GoneSince
from tieringd.archive.segment_swap import SegmentSwap, Successor
from tieringd.config.topic import ClusterDefaults, resolve_topic
from tieringd.errors import FencedError, StorageUnavailable
from tieringd.formats.object_keys import data_key, index_key, manifest_key
from tieringd.policies.local_retention import ClusterLocalTarget
from tieringd.policies.total_retention import RetentionPace, TotalRetention
from tieringd.storage.base import ObjectInfo

MINUTE_MS, DAY_MS = 60_000, 86_400_000
PACE = RetentionPace(interval_ms=MINUTE_MS, delete_delay_ms=10 * MINUTE_MS)
ALL = TotalRetention(limit_ms=0, limit_bytes=None)
"""Keeps nothing that was uploaded."""
UNLIMITED = TotalRetention(limit_ms=None, limit_bytes=None)


@pytest.fixture
def store(clock):
    """Give a store that dates objects by the clock of the test."""
    return MemoryStore(now_ms=clock)


@pytest.fixture
def archiver(writer, archive, broker, metrics, clock):
    return archiver_of(writer, archive, broker, metrics=metrics, now_ms=clock)


def observe(writer, total=ALL, **changes):
    return observed(writer, total=total, retention_pace=PACE, **changes)


def later(seen):
    """Return a later observation that found nothing new."""
    return seen.renumbered(next(SCAN_NUMBERS))


def objects(store, writer) -> list[int]:
    """Return the bases of the segments of which the bucket holds data; each has its index as well."""
    keys = [key.rpartition("/")[2] for key in store.objects]
    data = sorted(int(name.partition("-")[0]) for name in keys if name.endswith(".log"))
    indexes = sorted(int(name.partition("-")[0]) for name in keys if name.endswith(".index"))
    assert data == indexes
    return data


async def settled(archiver, writer, clock, *, minutes: int = 3, total=ALL, **changes) -> None:
    """Let so many minutes pass, with a step in each."""
    for _ in range(minutes):
        await archiver.step(observe(writer, total, **changes))
        clock.now_ms += MINUTE_MS


async def test_what_one_check_finds_goes_with_the_next(writer, archiver, store, clock):
    """A deletion takes two checks an interval apart; steps in between change nothing."""
    first, second = writer.closed_segment(), writer.closed_segment()
    await archiver.step(observe(writer))
    assert bases(store, writer) == [first, second]

    clock.now_ms += MINUTE_MS - 1
    assert (await archiver.step(observe(writer))).expired == 0
    assert bases(store, writer) == [first, second]

    clock.now_ms += 1
    assert (await archiver.step(observe(writer))).expired == 2
    manifest = stored_manifest(store, writer)
    assert (len(manifest.segments), manifest.start_offset) == (0, writer.bases[-1])
    assert manifest.expired_at_ms == clock()


async def test_what_the_second_check_does_not_find_stays(writer, archiver, store, clock):
    """A limit that was wrong for a moment, as after a typing error, deletes nothing."""
    kept = writer.closed_segment()
    await archiver.step(observe(writer))
    clock.now_ms += MINUTE_MS
    forever = TotalRetention(limit_ms=None, limit_bytes=None)
    assert (await archiver.step(observe(writer, forever))).expired == 0
    clock.now_ms += MINUTE_MS
    assert (await archiver.step(observe(writer))).expired == 0
    assert bases(store, writer) == [kept]


async def test_second_check_takes_no_more_than_the_first_found(writer, archiver, store, clock):
    """Segments that only the second check finds past retention wait for another check."""
    old = writer.closed_segment()
    young = writer.bases[-1]
    writer.append(timestamp_ms=clock() + 30_000)
    writer.roll()
    limits = TotalRetention(limit_ms=MINUTE_MS, limit_bytes=None)
    clock.now_ms += MINUTE_MS + 10
    await archiver.step(observe(writer, limits))
    clock.now_ms += MINUTE_MS
    assert (await archiver.step(observe(writer, limits))).expired == 1
    assert bases(store, writer) == [young]
    clock.now_ms += MINUTE_MS
    assert (await archiver.step(observe(writer, limits))).expired == 1
    assert (bases(store, writer), old) == ([], 0)


async def test_objects_outlive_their_segment_by_the_delay(writer, archiver, store, clock, metrics):
    """A reader that has the old manifest finds its objects; after the delay they are gone, and forgotten."""
    writer.closed_segment(), writer.closed_segment()
    await settled(archiver, writer, clock, minutes=2)
    assert bases(store, writer) == []
    assert objects(store, writer) == [0, 3]

    clock.now_ms = stored_manifest(store, writer).expired_at_ms + PACE.delete_delay_ms - 1
    assert (await archiver.step(observe(writer))).expired == 0
    assert objects(store, writer) == [0, 3]
    clock.now_ms += 1
    assert (await archiver.step(observe(writer))).expired == 2
    assert objects(store, writer) == []
    assert stored_manifest(store, writer).retired == ()
    value = metrics.registry.get_sample_value
    for name in ("expired_segments", "deleted_segments"):
        assert value(f"tieringd_archive_{name}_total", {"topic": "orders"}) == 2


async def test_uploads_go_on_where_the_archive_ended(writer, archiver, archive, store, clock):
    """An archive that retention emptied goes on from its end, and is read from its new start."""
    writer.closed_segment()
    await settled(archiver, writer, clock)
    base = writer.closed_segment(b"later")
    await archiver.step(observe(writer, TotalRetention(None, None)))
    manifest = stored_manifest(store, writer)
    assert [one.base_offset for one in manifest.segments] == [base]
    assert await values_in(archive, manifest) == {base: b"later"}


async def test_size_removal_ends_at_or_under_the_limit(writer, archiver, store, clock):
    """Each offset counts once: what is in both tiers as it is stored, and the rest as it is on disk."""
    closed = [writer.closed_segment() for _ in range(4)]
    writer.append()
    sizes = [len(writer.data_of(base)) for base in writer.bases]
    limits = TotalRetention(limit_ms=None, limit_bytes=sum(sizes[2:]))
    await settled(archiver, writer, clock, total=limits)
    assert bases(store, writer) == closed[2:]

    less = TotalRetention(limit_ms=None, limit_bytes=sum(sizes[3:]) - 1)
    await settled(archiver, writer, clock, total=less)
    assert bases(store, writer) == []


async def test_local_log_lets_go_of_what_retention_took(writer, archiver, broker, store, clock):
    """There is no copy any more and none is asked for; what was never uploaded stays."""
    writer.closed_segment(), writer.closed_segment()
    stays = writer.bases[-1]
    writer.append()
    await settled(archiver, writer, clock)
    assert broker.trims == [(writer.name, stays)]
    assert writer.bases_on_disk == [stays]


async def test_local_segment_is_let_go_only_whole(writer, archive, broker, store, clock):
    """One that reaches past what retention took stays, with all before its end."""
    archiver = archiver_of(writer, archive, broker, now_ms=clock)
    writer.closed_segment()
    await archiver.step(observe(writer, TotalRetention(None, None)))
    stored = await archive.manifests.load(writer.identified)
    first = stored.existing.segments[0]
    half = replace(first, last_offset=first.base_offset)
    rest = replace(first, base_offset=first.base_offset + 1)
    cut = replace(stored.existing, segments=stored.existing.segments.head(0).appended([half, rest]))
    await archive.manifests.commit(stored, cut.expired(1, now_ms=clock()), leader_epoch=0)

    again = archiver_of(writer, archive, broker, now_ms=clock)
    await again.step(observe(writer, TotalRetention(None, None)))
    assert broker.trims == []
    assert writer.bases_on_disk == writer.bases


async def test_topic_that_is_never_trimmed_keeps_its_local_log(writer, archiver, broker, clock):
    """Kafka refuses for some topics, and then the broker is not even asked."""
    writer.closed_segment()
    await settled(archiver, writer, clock, never_trimmed_because="Kafka refuses")
    assert broker.trims == []


async def test_topic_that_is_not_read_remotely_waits_for_the_broker(writer, archiver, store, clock):
    """Clients have only what the broker still has, so its segments stay in the archive."""
    first, second = writer.closed_segment(), writer.closed_segment()
    limits = replace(ALL, is_read_remotely=False)
    await settled(archiver, writer, clock, total=limits)
    assert bases(store, writer) == [first, second]
    writer.drop_head()
    await settled(archiver, writer, clock, total=limits)
    assert bases(store, writer) == [second]


@pytest.mark.parametrize("delay_ms", [0, PACE.delete_delay_ms])
async def test_compact_only_topic_keeps_everything(writer, archiver, store, clock, delay_ms):
    """A topic without `delete` in its `cleanup.policy` keeps everything, however old it is."""
    kept = writer.closed_segment()
    clock.now_ms += 1000 * DAY_MS + delay_ms
    await settled(archiver, writer, clock, total=replace(ALL, deletes=False))
    assert bases(store, writer) == [kept]


@pytest.mark.parametrize("is_kafka", [True, False])
async def test_topic_with_an_empty_cleanup_policy_keeps_everything(writer, archive, store, clock, is_kafka):
    """Neither `retention.ms` nor `retention.bytes` counts, and on Kafka the log keeps its records as well."""
    told = {"cleanup.policy": "", "retention.ms": "1", "retention.bytes": "1", "local.retention.ms": "1"}
    defaults = ClusterDefaults(
        enabled=True,
        remote_write=True,
        remote_read=True,
        local_target=ClusterLocalTarget(None, None, is_strict=True),
        is_kafka=is_kafka,
        pace=PACE,
    )
    topic = resolve_topic("orders", overrides={}, broker_properties=told, defaults=defaults)
    kept = [writer.closed_segment(), writer.closed_segment()]
    archiver = archiver_of(writer, archive, broker := FakeBroker(writer), now_ms=clock)
    for _ in range(15):
        clock.now_ms += MINUTE_MS
        await archiver.step(replace(observe(writer), topic=topic))
    assert bases(store, writer) == kept
    assert bool(broker.trims) is not is_kafka


class StubbornStore(MemoryStore):
    """A bucket that deletes nothing for so many calls, or does and says it did not."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0
        self.deletes_anyway = False
        self.deletions: list[list[str]] = []

    async def delete_many(self, keys) -> None:
        self.deletions.append(list(keys))
        if self.failures:
            self.failures -= 1
            if self.deletes_anyway:
                await super().delete_many(keys)
            raise store_unavailable("delete_many")
        await super().delete_many(keys)


class SlowStore(MemoryStore):
    """Lets its clock pass before a put takes effect."""

    delay_ms = 0

    async def put(self, key, body, **options) -> ObjectInfo:
        self.now_ms.now_ms += self.delay_ms
        return await super().put(key, body, **options)


@pytest.mark.parametrize("is_answered", [True, False])
async def test_delay_begins_when_the_commit_takes_effect(writer, broker, clock, is_answered):
    """A commit may be on its way for long, and its process may end before the answer comes."""
    store = SlowStore(now_ms=clock)
    archiver = archiver_of(writer, archive_in(store, now_ms=clock), broker, now_ms=clock)
    writer.closed_segment()
    for _ in range(2):
        await archiver.step(observe(writer, UNLIMITED))
    store.delay_ms = 5 * MINUTE_MS
    while not stored_manifest(store, writer).retired:
        clock.now_ms += MINUTE_MS
        await archiver.step(observe(writer))
    store.delay_ms = 0
    (retired,) = stored_manifest(store, writer).retired
    in_effect_ms = clock.now_ms
    assert in_effect_ms == retired.retired_at_ms + 5 * MINUTE_MS
    if not is_answered:
        clock.now_ms += MINUTE_MS
        archiver = archiver_of(
            writer, archive_in(store, writer_id="next", now_ms=clock), broker, now_ms=clock
        )
        await archiver.step(observe(writer))

    clock.now_ms = in_effect_ms + PACE.delete_delay_ms - 1
    await archiver.step(observe(writer))
    assert objects(store, writer) == [0]
    clock.now_ms = in_effect_ms + PACE.delete_delay_ms + 1000
    await archiver.step(observe(writer))
    assert objects(store, writer) == []


async def test_times_of_what_is_deleted_are_forgotten(writer, archiver, archive, clock):
    """Each expiry has a mark of its own, and the times are kept for those that the manifest still has."""
    gone_since = GoneSince()
    for _ in range(20):
        writer.closed_segment()
        await settled(archiver, writer, clock)
        stored = await archive.manifests.load(writer.identified)
        gone_since.note(stored)
        assert gone_since.times == len(stored.existing.retired) <= 5
    assert stored.existing.retired


@pytest.mark.parametrize("deletes_anyway", [False, True])
async def test_deletion_that_failed_is_done_again(writer, broker, clock, deletes_anyway):
    """The manifest names the objects until the store has said that they are gone."""
    store = StubbornStore()
    archiver = archiver_of(writer, archive_in(store, now_ms=clock), broker, now_ms=clock)
    writer.closed_segment()
    await settled(archiver, writer, clock, minutes=2)
    clock.now_ms += PACE.delete_delay_ms
    store.failures, store.deletes_anyway = 1, deletes_anyway
    with pytest.raises(StorageUnavailable):
        await archiver.step(observe(writer))
    assert len(stored_manifest(store, writer).retired) == 1
    await archiver.step(observe(writer))
    assert stored_manifest(store, writer).retired == ()
    assert objects(store, writer) == []
    assert len(store.deletions) == 2


async def test_deposed_leader_deletes_nothing(writer, archive, store, broker, clock):
    """Segments that were due when another leader took over are the new leader's to delete."""
    # It would read the manifest by itself a little later.
    pace = RetentionPace(interval_ms=MINUTE_MS, delete_delay_ms=MINUTE_MS - 10_000)
    seen = replace(observe(writer).topic, retention_pace=pace)

    def at_pace():
        return replace(observe(writer), topic=seen)

    writer.closed_segment()
    old = archiver_of(writer, archive, broker, now_ms=clock)
    await old.step(at_pace())
    clock.now_ms += MINUTE_MS
    await old.step(at_pace())
    assert objects(store, writer) == [0]
    before = at_pace()
    writer.begin_epoch(1)
    new_archive = archive_in(store, writer_id="new", now_ms=clock)
    new = archiver_of(writer, new_archive, FakeBroker(writer), leader_epoch=1, now_ms=clock)
    await new.step(at_pace())
    clock.now_ms += pace.delete_delay_ms
    await old.step(before)
    assert objects(store, writer) == [0]
    with pytest.raises(FencedError):
        await old.step(before)
    await new.step(at_pace())
    assert objects(store, writer) == []


async def test_idle_archiver_notices_a_job_s_edit(writer, archive, archiver, store, clock):
    """An idle archiver learns of the edit without a commit of its own, and deletes what the job replaced."""
    for _ in range(3):
        writer.append(b"1")
        writer.roll()
    seen = observe(writer, UNLIMITED)
    for _ in range(3):
        await archiver.step(seen)
    assert archiver.is_at_rest(seen)
    await merge_first_two(store, writer, archive, clock)
    clock.now_ms += PACE.edits_interval_ms - 1
    assert archiver.is_at_rest(seen)
    clock.now_ms += 1
    assert not archiver.is_at_rest(seen)

    await archiver.step(seen)

    assert [one.base_offset for one in archiver.manifest.segments] == [0, 2]
    assert archiver.manifest == stored_manifest(store, writer)
    assert objects(store, writer) == [0, 0, 1, 2]
    while not archiver.is_at_rest(seen):
        await archiver.step(seen)
    clock.now_ms += PACE.delete_delay_ms - PACE.edits_interval_ms
    # A read manifest counts as in effect a second after the store's time, which has no fractions.
    clock.now_ms += 1000
    assert not archiver.is_at_rest(seen)
    await archiver.step(seen)
    assert objects(store, writer) == [0, 2]


async def merge_first_two(store, writer, archive, clock) -> None:
    """Merge two segments as a job does, beside the archiver."""
    jobs = archive_in(store, writer_id="0b", now_ms=clock).manifests
    manifest = stored_manifest(store, writer)
    parts = manifest.segments.overlapping(0, 2)
    index = await index_of_parts(SegmentIndexes(store), writer.identified, parts)
    joiner = ObjectJoiner(store, work_directory=writer.path.parent)
    names = {"leader_epoch": 0, "writer_id": "spark-0b"}
    merge = await store_merged(store, joiner, writer.identified, parts, index, **names)
    swap = SegmentSwap(store, jobs, now_ms=clock, target_manifest_bytes=1 << 20)
    await swap.merge(writer.identified, [Successor(merge.parts, merge.segment)])


async def test_manifest_that_was_removed_is_not_begun_anew(writer, archiver, store, clock):
    """A new one would name nothing of what is there, and scrub would take all of it away."""
    writer.closed_segment()
    seen = observe(writer, UNLIMITED)
    for _ in range(3):
        await archiver.step(seen)
    await store.delete_many([manifest_key(writer.identified)])
    clock.now_ms += PACE.edits_interval_ms

    for _ in range(2):
        with pytest.raises(FencedError, match="was deleted from the bucket"):
            await archiver.step(seen)

    assert stored_manifest(store, writer) is None
    assert objects(store, writer) == [0]


async def test_poll_for_edits_costs_one_request(writer, archiver, store, clock):
    """A poll for edits sends one HEAD request, and reads nothing if nothing has changed."""
    writer.closed_segment()
    seen = observe(writer, UNLIMITED)
    for _ in range(3):
        await archiver.step(seen)
    clock.now_ms += PACE.edits_interval_ms
    before = len(store.requests)
    await archiver.step(seen)
    assert [operation for operation, _ in store.requests[before:]] == ["head"]


@pytest.mark.parametrize(
    ("interval_ms", "delete_delay_ms", "expected"),
    [
        (300_000, 3_600_000, 1_800_000),
        (300_000, 1_200_000, 600_000),
        (300_000, 0, 300_000),
        (300_000, 365 * DAY_MS, 1_800_000),
        (DAY_MS, 3_600_000, DAY_MS),
    ],
)
def test_edits_are_noticed_before_their_deletion_is_due(interval_ms, delete_delay_ms, expected):
    """The check runs no more often than housekeeping, and at least every half hour where that allows it."""
    assert RetentionPace(interval_ms, delete_delay_ms).edits_interval_ms == expected


async def test_deletion_touches_no_other_object(writer, archiver, store, clock):
    """Retention deletes by name, and only the two objects of each segment that left the manifest."""
    writer.closed_segment(), writer.closed_segment()
    await archiver.step(observe(writer))
    keys = {
        name(writer.identified, one)
        for one in stored_manifest(store, writer).segments
        for name in (data_key, index_key)
    }
    others = set(store.objects) - keys
    clock.now_ms += MINUTE_MS
    await settled(archiver, writer, clock, minutes=30)
    assert set(store.objects) == others


async def test_large_deletion_is_done_in_turns(writer, archive, broker, store, clock):
    """One step deletes so many at most, and says that there is more to do."""
    archiver = archiver_of(writer, archive, broker, now_ms=clock)
    base = writer.closed_segment()
    await archiver.step(observe(writer, TotalRetention(None, None)))
    stored = await archive.manifests.load(writer.identified)
    (first,) = stored.existing.segments
    count = PACE.deleted_at_once_max + 7
    writer.append(*[b""] * (count - 1))
    rows = [replace(first, base_offset=number, last_offset=number) for number in range(count)]
    many = replace(
        stored.existing, segments=stored.existing.segments.head(0).appended(rows), next_offset=count
    )
    await archive.manifests.commit(stored, many.expired(count, now_ms=clock()), leader_epoch=0)
    clock.now_ms += PACE.delete_delay_ms + 1000
    again = archiver_of(writer, archive, broker, now_ms=clock)
    results = [await again.step(observe(writer, never_trimmed_because="of the test")) for _ in range(3)]
    assert [one.expired for one in results] == [PACE.deleted_at_once_max, 7, 0]
    assert [one.made_progress for one in results] == [True, True, False]
    assert base == 0


async def test_archiver_at_rest_wakes_when_retention_is_due(writer, archiver, clock):
    """Retention wakes only archivers of partitions in which something is past it."""
    writer.closed_segment()
    limits = TotalRetention(limit_ms=3 * MINUTE_MS, limit_bytes=None)
    seen = observe(writer, limits)
    for _ in range(3):
        await archiver.step(seen)
    assert archiver.is_at_rest(seen)
    clock.now_ms += 2 * MINUTE_MS
    assert archiver.is_at_rest(seen)
    clock.now_ms += MINUTE_MS + writer.next_offset
    assert not archiver.is_at_rest(seen)
    seen = later(seen)
    await archiver.step(seen)
    assert archiver.is_at_rest(seen)
    clock.now_ms += MINUTE_MS
    assert not archiver.is_at_rest(seen)
    await archiver.step(seen)
    assert not archiver.manifest.retired, "one observation has confirmed itself"
    await archiver.step(later(seen))
    assert archiver.manifest.retired
    seen = observe(writer, limits)
    for _ in range(3):
        await archiver.step(seen)
    assert archiver.is_at_rest(seen)
    clock.now_ms += PACE.delete_delay_ms
    assert not archiver.is_at_rest(seen)


async def test_archiver_of_an_empty_archive_rests(writer, archiver, clock):
    """A partition without a closed segment has nothing that retention could check, now or later."""
    writer.append()
    seen = observe(writer, TotalRetention(limit_ms=MINUTE_MS, limit_bytes=1))
    await archiver.step(seen)
    await archiver.step(seen)
    assert archiver.is_at_rest(seen)
    clock.now_ms += PACE.edits_interval_ms - 1
    assert archiver.is_at_rest(seen)


async def test_next_leader_goes_on_with_what_is_to_be_deleted(writer, archive, store, broker, clock):
    """A process that ended in between leaves a manifest that says what is left to do."""
    writer.closed_segment()
    await settled(archiver_of(writer, archive, broker, now_ms=clock), writer, clock, minutes=2)
    clock.now_ms += PACE.delete_delay_ms
    another = archiver_of(writer, archive_in(store, writer_id="new", now_ms=clock), broker, now_ms=clock)
    await another.step(observe(writer))
    assert objects(store, writer) == []


# Long: retention runs by real time on a real broker.
async def test_msk_example_from_t0_to_t3(writer, archiver, broker, store, clock):
    """Retention five days, local retention two: on disk, then on both, then archived, then nowhere."""
    topic = {
        "total": TotalRetention(limit_ms=5 * DAY_MS, limit_bytes=None),
        "target_ms": 2 * DAY_MS,
        "retention_pace": RetentionPace(interval_ms=MINUTE_MS, delete_delay_ms=MINUTE_MS),
    }
    start_ms = clock()
    zero = writer.closed_segment()
    one = writer.bases[-1]
    writer.append()

    async def days(count: float) -> tuple[list[int], list[int]]:
        """Let time pass, with a step a minute at its end; return the bases on disk and in the archive."""
        clock.now_ms = int(start_ms + count * DAY_MS)
        for _ in range(4):
            await archiver.step(observed(writer, **topic))
            clock.now_ms += MINUTE_MS
        return writer.bases_on_disk, objects(store, writer)

    assert (writer.bases_on_disk, objects(store, writer)) == ([zero, one], []), "T0: it is not tiered yet"
    assert await days(1) == ([zero, one], [zero]), "T1: copied, and still local; 1 is not eligible"
    assert await days(1.99) == ([zero, one], [zero])
    assert await days(2.01) == ([one], [zero]), "T2: gone from the local disk"
    assert await days(4.99) == ([one], [zero])
    assert await days(5.01) == ([one], []), "T3: gone from the archive"
    assert await days(100) == ([one], []), "1 never closed"
