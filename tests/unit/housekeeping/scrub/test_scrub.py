"""The scrub as housekeeping: turns, times, what it mends and shows, and what it leaves alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.fakes.store import rot, store_unavailable
from tests.unit.housekeeping.scrub.buckets import DAY_MS, HOUR_MS
from tieringd.archive.object_joiner import ObjectJoiner
from tieringd.errors import StorageDenied, StorageUnavailable
from tieringd.formats.object_keys import manifest_key, quarantined_key, topic_manifest_key
from tieringd.housekeeping.merging import SegmentMerger
from tieringd.housekeeping.scrub import ScrubJob
from tieringd.metrics import Metrics
from tieringd.model.partition import Leadership
from tieringd.policies.scrub import ScrubPace
from tieringd.policies.segment_merge import MergeLimits
from tieringd.policies.total_retention import TotalRetention
from tieringd.storage.archive_clock import ArchiveClock

PACE = ScrubPace(
    is_enabled=True,
    partial_interval_ms=HOUR_MS,
    full_interval_ms=12 * HOUR_MS,
    jitter_ms=0,
    orphan_grace_ms=DAY_MS,
    quarantine_ms=7 * DAY_MS,
)


class Scrubbing:
    """A job over one bucket, and its metrics."""

    def __init__(self, bucket, pace=PACE, clock=None) -> None:
        self.bucket = bucket
        self.metrics = Metrics()
        self.led = [bucket.writer.identified]
        self.job = ScrubJob(
            bucket.parts,
            led=lambda: self.led,
            pace=pace,
            metrics=self.metrics,
            clock=clock or bucket.archive.clock,
            jitter=lambda: 0.5,
        )

    async def turns(self, *, requests_max: int = 1000) -> int:
        """Give turns for as long as there is more; return how many."""
        done = 0
        while True:
            done += 1
            if not (await self.job.turn(requests_max=requests_max)).has_more:
                return done

    def shown(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"tieringd_scrub_{name}", labels)


@pytest.fixture
async def scrubbing(bucket):
    await bucket.fill(6, local=2)
    return Scrubbing(bucket)


async def test_job_is_off_by_default_and_asks_nothing(bucket):
    """A job that is not enabled makes no request."""
    await bucket.fill(2)
    bucket.store.requests.clear()
    scrubbing = Scrubbing(bucket, replace(PACE, is_enabled=False))
    assert await scrubbing.turns() == 1
    assert bucket.store.requests == []
    assert scrubbing.job.name == "scrub"


async def test_whole_scrub_comes_again_after_its_interval(scrubbing, bucket):
    """A partition is scrubbed once, and again after the full interval and not before."""
    await scrubbing.turns()
    assert scrubbing.shown("objects_total") == 6 * 2 + 4
    assert scrubbing.shown("last_full_timestamp_seconds") == bucket.clock() / 1000
    bucket.store.requests.clear()
    bucket.clock.now_ms += 12 * HOUR_MS - 1
    await scrubbing.turns()
    assert bucket.store.requests == []
    bucket.clock.now_ms += 1
    await scrubbing.turns()
    assert scrubbing.shown("objects_total") == 2 * (6 * 2 + 4)


async def test_clock_that_is_set_back_delays_no_scrub(bucket):
    """A host whose clock was years ahead scrubs at the usual pace when the clock is set right."""
    error_ms = 3000 * DAY_MS
    clock = ArchiveClock(
        wall_ms=lambda: bucket.clock() + error_ms, steady_seconds=lambda: bucket.clock() / 1000
    )
    await bucket.fill(1)
    scrubbing = Scrubbing(bucket, clock=clock)
    await scrubbing.turns()
    error_ms = 0
    bucket.clock.now_ms += 12 * HOUR_MS
    await scrubbing.turns()
    assert scrubbing.shown("objects_total") == 4


async def test_first_scrub_waits_for_the_jitter(bucket):
    """Daemons that start together do not all scrub at once."""
    await bucket.fill(1)
    scrubbing = Scrubbing(bucket, replace(PACE, jitter_ms=1000))
    await scrubbing.turns()
    assert scrubbing.shown("objects_total") == 0
    bucket.clock.now_ms += 500
    await scrubbing.turns()
    assert scrubbing.shown("objects_total") == 2


async def test_cut_scrub_goes_on_after_the_partial_interval(scrubbing, bucket):
    """Each turn does what it may, and the next one goes on from there."""
    key = (await bucket.data_keys())[0]
    bucket.local_log = lambda: None
    bucket.store.remove(key)
    shown = []
    for _ in range(12):
        await scrubbing.turns(requests_max=1)
        shown.append(scrubbing.shown("bytes_total"))
        bucket.clock.now_ms += HOUR_MS
    total = sum(one.size_bytes for one in (await bucket.whole_manifest()).segments)
    assert shown[:6] == sorted(set(shown[:6]))
    assert shown[5] == shown[-1] == total
    assert scrubbing.shown("faults", kind="data_missing") == 1


async def test_fault_is_mended_and_counted(scrubbing, bucket):
    """Bytes that the local log still holds are stored again in the same turn, and no fault is left."""
    key = (await bucket.data_keys())[-1]
    data = bucket.store.bytes_of(key)
    bucket.store.remove(key)
    await scrubbing.turns()
    assert bucket.store.bytes_of(key) == data
    assert scrubbing.shown("mended_total", kind="data_missing") == 1
    assert scrubbing.shown("faults", kind="data_missing") == 0


async def test_fault_is_shown_until_a_scrub_does_not_find_it(scrubbing, bucket):
    """A gauge by kind holds what is broken, through later scrubs, until it is whole again."""
    key = (await bucket.data_keys())[0]
    data, info = bucket.store.remove(key)
    for _ in range(3):
        await scrubbing.turns()
        assert scrubbing.shown("faults", kind="data_missing") == 1
        bucket.clock.now_ms += 12 * HOUR_MS
    bucket.store.place(key, data, info)
    await scrubbing.turns()
    assert scrubbing.shown("faults", kind="data_missing") == 0


async def test_orphans_are_moved_and_deleted_in_time(scrubbing, bucket):
    """Orphans go to quarantine after the first grace, and are deleted after the second. Both are counted."""
    key = bucket.orphan(1)
    await scrubbing.turns()
    assert key in bucket.store.objects
    bucket.clock.now_ms += DAY_MS
    await scrubbing.turns()
    assert key not in bucket.store.objects
    assert quarantined_key(key) in bucket.store.objects
    assert scrubbing.shown("quarantined_objects_total") == 1
    bucket.clock.now_ms += 7 * DAY_MS + 1
    await scrubbing.turns()
    assert not [one for one in bucket.store.objects if one.startswith("quarantine/")]
    assert scrubbing.shown("deleted_objects_total") == 1


async def test_fault_whose_mending_fails_stays_shown_and_the_others_are_mended(scrubbing, bucket):
    """A put that the store refuses costs one fault its mending, until the next scrub."""
    for key in (await bucket.data_keys())[-2:]:
        bucket.store.remove(key)
    bucket.store.fail_next("put", lambda: StorageDenied("put: access denied"))
    await scrubbing.turns()
    assert scrubbing.shown("faults", kind="data_missing") == 1
    assert scrubbing.shown("mended_total", kind="data_missing") == 1
    bucket.clock.now_ms += 12 * HOUR_MS
    await scrubbing.turns()
    assert scrubbing.shown("faults", kind="data_missing") == 0


async def test_one_bad_object_does_not_keep_the_others_from_quarantine_or_out_of_it(scrubbing, bucket):
    """An orphan that rotted stays, and so does a named copy that rotted; all others go their way."""
    keys = [bucket.orphan(number) for number in range(3)]
    rot(bucket.store, keys[1])
    named = (await bucket.data_keys())[0]
    bucket.store.add(quarantined_key(named), bucket.store.bytes_of(named))
    rot(bucket.store, quarantined_key(named))
    bucket.store.remove(named)
    bucket.clock.now_ms += 2 * DAY_MS
    await scrubbing.turns()
    assert scrubbing.shown("quarantined_objects_total") == 2
    assert scrubbing.shown("orphans") == 1
    bucket.clock.now_ms += 7 * DAY_MS + 1
    await scrubbing.turns()
    assert scrubbing.shown("deleted_objects_total") == 2
    assert quarantined_key(named) in bucket.store.objects
    assert keys[1] in bucket.store.objects


async def test_orphans_of_a_leaving_topic_are_counted_and_left(scrubbing, bucket):
    """Orphans that need an operator are shown, and not touched."""
    key = bucket.orphan(1)
    bucket.store.remove(topic_manifest_key(bucket.topic_key))
    bucket.clock.now_ms += 2 * DAY_MS
    await scrubbing.turns()
    assert key in bucket.store.objects
    assert scrubbing.shown("orphans") == 1
    assert scrubbing.shown("orphan_bytes") == len(b"left behind 1")


async def test_partitions_that_are_not_led_are_left_alone(scrubbing, bucket):
    """A partition that another broker leads is not scrubbed, nor shown here, nor are its orphans moved."""
    bucket.store.remove((await bucket.data_keys())[0])
    key = bucket.orphan(1)
    await scrubbing.turns()
    assert scrubbing.shown("faults", kind="data_missing") == 1
    scrubbing.led = []
    bucket.clock.now_ms += 3 * DAY_MS
    bucket.store.requests.clear()
    await scrubbing.turns()
    assert scrubbing.shown("faults", kind="data_missing") == 0
    assert key in bucket.store.objects
    assert ("get", manifest_key(bucket.writer.identified)) not in bucket.store.requests


async def test_turn_that_fails_waits_and_goes_on(scrubbing, bucket):
    """A store that does not answer costs a partition its turn, and the next one does what was left."""
    bucket.store.fail_next("head", lambda: store_unavailable("head"))
    with pytest.raises(StorageUnavailable):
        await scrubbing.job.turn(requests_max=1000)
    await scrubbing.turns()
    assert scrubbing.shown("objects_total") == 0
    bucket.clock.now_ms += HOUR_MS
    await scrubbing.turns()
    assert scrubbing.shown("objects_total") == 16


async def test_search_that_fails_is_not_taken_for_a_whole_one(scrubbing, bucket):
    """A listing that broke off goes on after a while, and what it had not come to is found then."""
    bucket.orphan(1)
    bucket.clock.now_ms += 2 * DAY_MS
    assert (await scrubbing.job.turn(requests_max=1000)).has_more
    bucket.store.fail_next("list_page", lambda: store_unavailable("list_page"))
    with pytest.raises(StorageUnavailable):
        await scrubbing.job.turn(requests_max=1000)
    assert scrubbing.shown("quarantined_objects_total") == 0
    bucket.clock.now_ms += HOUR_MS
    await scrubbing.turns()
    assert scrubbing.shown("quarantined_objects_total") == 1


async def test_cut_search_goes_on_where_it_was(scrubbing, bucket):
    """A search of one page for each turn finds each orphan once, also if a turn in between fails."""
    keys = [bucket.orphan(number) for number in range(6)]
    bucket.store.remove(topic_manifest_key(bucket.topic_key))
    bucket.clock.now_ms += 2 * DAY_MS
    assert (await scrubbing.job.turn(requests_max=1000)).has_more
    list_page, listed = bucket.store.list_page, []

    async def short(prefix, *, start_after=None, limit=1000):
        if not prefix:
            listed.append(start_after)
        return await list_page(prefix, start_after=start_after, limit=4)

    bucket.store.list_page = short
    await scrubbing.job.turn(requests_max=1)
    await scrubbing.job.turn(requests_max=1)
    bucket.store.fail_next("list_page", lambda: store_unavailable("list_page"))
    with pytest.raises(StorageUnavailable):
        await scrubbing.job.turn(requests_max=1)
    bucket.clock.now_ms += HOUR_MS
    await scrubbing.turns(requests_max=1)
    assert scrubbing.shown("orphans") == len(keys)
    assert listed.count(None) == 1
    assert len(set(listed)) == len(listed) - 1


class Counted(list):
    """Partitions, and how often all of them were walked over."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


async def test_turns_are_bounded_however_many_partitions_are_led(scrubbing, bucket):
    """A search reads the manifests of all before its first page, and takes the turns that it needs."""
    one = bucket.writer.identified
    led = scrubbing.led = Counted(replace(one, partition=number) for number in range(400))
    keys = [bucket.orphan(number) for number in range(3)]
    bucket.clock.now_ms += 2 * DAY_MS
    turns, requests = 0, []
    while True:
        done = await scrubbing.job.turn(requests_max=40)
        turns, requests = turns + 1, [*requests, done.requests]
        if not done.has_more:
            break
    # Each partition has a turn of its own, and the search some more.
    assert turns > 400
    assert max(requests) < 40 + 20
    assert led.walks == 1
    assert all(quarantined_key(key) in bucket.store.objects for key in keys)


async def test_leadership_that_comes_and_goes_leaves_no_due_times(scrubbing, bucket):
    """Each return sets a time that is long before its scrub, and the time of before is outdated."""
    one = bucket.writer.identified
    for _ in range(300):
        for led in ([one], [one, replace(one, partition=1)]):
            scrubbing.led = led
            await scrubbing.job.turn(requests_max=1)
    assert scrubbing.job.due_times < 100
    bucket.clock.now_ms += 2 * DAY_MS
    await scrubbing.turns()
    assert scrubbing.shown("objects_total") > 0


async def test_turn_that_fails_among_the_names_goes_on_there(scrubbing, bucket):
    """Manifests that were read before are not read again, and no orphan is overlooked."""
    one = bucket.writer.identified
    scrubbing.led = [replace(one, partition=number) for number in range(30)]
    bucket.orphan(1)
    bucket.clock.now_ms += 2 * DAY_MS
    for _ in scrubbing.led:
        await scrubbing.job.turn(requests_max=10)
    asked = []
    get = bucket.store.get

    async def counted(key):
        asked.append(key)
        return await get(key)

    bucket.store.get = counted
    await scrubbing.job.turn(requests_max=10)
    bucket.store.fail_next("get", lambda: store_unavailable("get"))
    with pytest.raises(StorageUnavailable):
        await scrubbing.job.turn(requests_max=10)
    bucket.clock.now_ms += HOUR_MS
    await scrubbing.turns(requests_max=10)
    assert scrubbing.shown("quarantined_objects_total") == 1
    manifests = [manifest_key(replace(one, partition=number)) for number in range(1, 30)]
    assert max(map(asked.count, manifests)) <= 2


async def test_new_pace_holds_from_the_next_turn(scrubbing, bucket):
    """A reload turns the job off, and changes the grace."""
    key = bucket.orphan(1)
    bucket.clock.now_ms += HOUR_MS
    scrubbing.job.set_pace(replace(PACE, is_enabled=False))
    await scrubbing.turns()
    assert scrubbing.shown("objects_total") == 0
    scrubbing.job.set_pace(replace(PACE, orphan_grace_ms=HOUR_MS))
    await scrubbing.turns()
    assert quarantined_key(key) in bucket.store.objects


async def test_scrub_beside_a_busy_archiver_says_and_moves_nothing(bucket, tmp_path):
    """Uploads, spills, merges and retention between all its requests: no finding, nothing is moved."""
    await bucket.fill(4, local=2)
    fast = replace(PACE, partial_interval_ms=1, full_interval_ms=1, orphan_grace_ms=HOUR_MS)
    scrubbing = Scrubbing(bucket, fast)
    is_busy = True

    async def archive() -> None:
        nonlocal is_busy
        try:
            for number in range(40):
                bucket.clock.now_ms += HOUR_MS
                bucket.writer.closed_segment(b"a%d" % number, b"b%d" % number)
                bucket.writer.closed_segment(b"c%d" % number)
                await bucket.step(total=TotalRetention(limit_ms=20 * HOUR_MS, limit_bytes=None))
                await merge(bucket, tmp_path)
                if number % 2 == 0:
                    bucket.writer.drop_head()
        finally:
            is_busy = False

    async def scrub() -> None:
        while is_busy:
            bucket.clock.now_ms += 2
            await scrubbing.turns(requests_max=9)

    async with asyncio.TaskGroup() as group:
        group.create_task(archive())
        group.create_task(scrub())
    assert [one for one in scrubbing.metrics.scrub.faults.collect()[0].samples if one.value] == []
    assert scrubbing.shown("objects_total") > 150
    assert scrubbing.shown("quarantined_objects_total") == 0
    assert bucket.manifest.start_offset > 0
    assert any(one.writer_id == "b2" for one in (await bucket.whole_manifest()).segments)


async def merge(bucket, work_directory) -> None:
    """Merge two small live segments, prepared and committed as housekeeping does it."""
    merger = SegmentMerger(
        Leadership(bucket.writer.identified, 0),
        bucket.store,
        joiner=ObjectJoiner(bucket.store, work_directory=work_directory),
        writer_id="b2",
        metrics=Metrics(),
        now_ms=bucket.clock,
    )
    claim = bucket.claim
    stored = await claim.current(lambda: None)
    for run in merger.plan(stored.existing, MergeLimits(200, 100)).runs[:1]:
        prepared = await merger.prepare(stored.existing, run)
        stored = await merger.commit(claim, stored, prepared)
