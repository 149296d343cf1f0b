"""The search for orphans: page by page through a whole bucket, of which much belongs to others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.archive import archive_in, archiver_of, observed
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.unit.housekeeping.scrub.buckets import DAY_MS, Bucket
from tieringd.formats.object_keys import (
    data_key,
    index_key,
    manifest_key,
    parse_data_key,
    spillover_key,
    topic_manifest_key,
)
from tieringd.housekeeping.scrub import WholeScrub
from tieringd.model.spilling import part_to_spill
from tieringd.policies.scrub import FaultKind
from tieringd.policies.topic_lifecycle import BEYOND_RETURN


async def searched(bucket, named=None, **options):
    """Return what all pages of a search say together."""
    named = named if named is not None else await bucket.parts.search.names([bucket.writer.identified])
    orphans, objects, start_after = [], 0, None
    while True:
        page = await bucket.parts.search.page(named, start_after=start_after, **options)
        orphans += page.orphans
        objects += page.objects
        start_after = page.next_start_after
        if start_after is None:
            return orphans, objects


@pytest.fixture
def two(tmp_path, bucket):
    """Give two partitions' archives in one bucket."""
    other = Bucket(LogWriter(tmp_path / "2", "payments"), work_directory=tmp_path, store=bucket.store)
    bucket.clock = other.clock
    return bucket, other


async def test_named_objects_are_no_orphans_however_old(bucket):
    """Live, spilled and retired segments, their indexes and parts stay, and so does what is not ours."""
    await bucket.fill(8, local=3)
    bucket.store.add("a/file/of/another/program.log", b"x")
    bucket.store.add(data_key(bucket.writer.identified, bucket.manifest.segments[0])[1:], b"a wrong hash")
    bucket.clock.now_ms += 99 * DAY_MS
    for named in (None, await bucket.parts.search.names([])):
        orphans, objects = await searched(bucket, named)
        assert orphans == []
        assert objects == len(bucket.store.objects)


async def test_orphans_are_found_over_pages(bucket):
    """A listing of many pages gives each orphan once: data, index and spilled part."""
    await bucket.fill(6, local=2)
    keys = {bucket.orphan(number) for number in range(5)}
    for key in list(keys):
        bucket.store.add(f"{key}.index", b"x")
        keys.add(f"{key}.index")
    part = part_to_spill(bucket.manifest, 1)
    segments = part.segments.head(0).appended([replace(part.segments[0], writer_id="dead")])
    name = await bucket.archive.manifests.spillovers.put(replace(part, segments=segments))
    keys.add(spillover_key(bucket.writer.identified, name))
    bucket.clock.now_ms += 2 * DAY_MS
    list_page = bucket.store.list_page

    async def short(prefix, *, start_after=None, limit=1000):
        return await list_page(prefix, start_after=start_after, limit=3 if not prefix else limit)

    bucket.store.list_page = short
    orphans, objects = await searched(bucket)
    assert sorted(one.stored.key for one in orphans) == sorted(keys)
    assert objects == len(bucket.store.objects)


async def test_what_is_committed_after_the_listing_began_is_no_orphan(bucket):
    """Names are taken first, and a suspect is judged by a manifest that is read after it was listed."""
    await bucket.fill(2)
    named = await bucket.parts.search.names([bucket.writer.identified])
    bucket.writer.closed_segment(b"later")
    await bucket.step()
    bucket.clock.now_ms += 99 * DAY_MS
    assert data_key(bucket.writer.identified, bucket.manifest.segments[-1]) not in named
    assert (await searched(bucket, named))[0] == []


async def test_no_manifest_is_read_for_what_is_young(bucket):
    """Uploads that go on while the bucket is listed cost the search nothing."""
    await bucket.fill(2)
    named = await bucket.parts.search.names([bucket.writer.identified])
    bucket.orphan(1)
    bucket.store.requests.clear()
    assert (await searched(bucket, named))[0] == []
    assert {operation for operation, _ in bucket.store.requests} == {"list_page"}
    bucket.clock.now_ms += DAY_MS
    assert len((await searched(bucket, named))[0]) == 1


async def test_missing_manifest_of_young_objects_is_a_fault(bucket):
    """A partition without its manifest is reported at once, however young its objects are."""
    await bucket.fill(2)
    bucket.store.remove(manifest_key(bucket.writer.identified))
    assert [one.kind.value for one in (await bucket.scrub()).findings] == ["manifest_missing"]


async def test_archive_whose_manifest_was_lost_is_kept_and_reported(bucket):
    """A daemon that began after the loss has begun a new manifest, where the local log begins."""
    await bucket.fill(6)
    objects = [key for key in bucket.store.stored_keys() if ".log" in key]
    assert len(objects) == 12
    bucket.store.remove(manifest_key(bucket.writer.identified))
    for _ in range(4):
        bucket.writer.drop_head()
    bucket.clock.now_ms += DAY_MS
    archive = archive_in(bucket.store, writer_id="b2", now_ms=bucket.clock)
    anew = archiver_of(bucket.writer, archive, FakeBroker(bucket.writer), now_ms=bucket.clock)
    await anew.step(observed(bucket.writer))
    assert bucket.manifest.start_offset > 0
    bucket.clock.now_ms += 99 * DAY_MS
    report = await bucket.scrub(fix=True)
    assert set(objects) <= set(bucket.store.objects)
    (fault,) = [one for one in report.findings if one.kind is FaultKind.MANIFEST_MISSING]
    assert "objects are older than this one" in fault.detail


async def test_only_partitions_that_are_ours_are_judged(two):
    """The manifests of others are not even read."""
    ours, other = two
    await ours.fill(2)
    await other.fill(2)
    wanted, _ = ours.orphan(1), other.orphan(2)
    ours.clock.now_ms += 2 * DAY_MS
    ours.store.clock.now_ms = ours.clock.now_ms
    ours.store.requests.clear()
    orphans, _ = await searched(ours, is_ours=lambda one: one == ours.writer.identified)
    assert [one.stored.key for one in orphans] == [wanted]
    assert ("get", manifest_key(other.writer.identified)) not in ours.store.requests


async def test_orphans_of_unknown_topics_need_an_operator(bucket):
    """Objects without topic manifest and manifest are orphans, and only a fix by hand moves them."""
    await bucket.fill(2)
    keys = [key for key in bucket.store.stored_keys() if parse_data_key(key.removesuffix(".index"))]
    bucket.store.remove(topic_manifest_key(bucket.topic_key))
    bucket.store.remove(manifest_key(bucket.writer.identified))
    bucket.clock.now_ms += 2 * DAY_MS

    report = await bucket.scrub()
    assert sorted(one.stored.key for one in report.orphans) == keys
    assert all(one.needs_operator for one in report.orphans)
    assert report.findings == []

    assert len((await bucket.scrub(fix=True)).moved) == len(keys)
    assert bucket.store.stored_keys() == []


async def test_manifests_that_no_topic_manifest_leads_to_are_scrubbed(bucket):
    """A missing topic manifest is a fault, its partitions are scrubbed, and nothing is moved."""
    await bucket.fill(4)
    bucket.store.remove(topic_manifest_key(bucket.topic_key))
    gone = (await bucket.data_keys())[1]
    bucket.store.remove(gone)
    bucket.clock.now_ms += 2 * DAY_MS

    report = await bucket.scrub()

    assert {one.key for one in report.findings} == {gone, topic_manifest_key(bucket.topic_key)}
    assert report.orphans == []
    (stretch,) = report.partitions
    assert stretch.segments == 4


async def test_topic_that_is_being_deleted_is_left_to_its_purge(bucket):
    """The objects of the topic are on their way out, so only a fix by hand moves them."""
    await bucket.fill(2)
    await bucket.archive.manifests.change_topic(
        bucket.topic_key, lambda found: replace(found, lifecycle="purging")
    )
    bucket.orphan(1)
    bucket.clock.now_ms += 2 * DAY_MS
    (orphan,) = (await bucket.scrub()).orphans
    assert orphan.needs_operator


@pytest.mark.parametrize("lifecycle", BEYOND_RETURN)
async def test_topic_that_is_being_purged_has_no_faults_and_nothing_is_mended(bucket, lifecycle):
    """The manifests name objects that the sweep has taken. That is no fault, and nothing is put back."""
    await bucket.fill(3)
    await bucket.archive.manifests.change_topic(
        bucket.topic_key, lambda found: replace(found, lifecycle=lifecycle)
    )
    assert (await bucket.scrub()).partitions == []
    bucket.store.remove((await bucket.data_keys())[-1])
    before = dict(bucket.store.objects)

    report = await bucket.scrub(fix=True)

    assert (report.partitions, report.findings, report.orphans) == ([], [], [])
    assert bucket.store.objects == before


async def test_topic_whose_purge_begins_under_the_scrub_has_no_faults(bucket):
    """An object that goes after the topic was listed as live is no fault, and is not mended."""
    await bucket.fill(3)
    gone = (await bucket.data_keys())[-1]
    scrub = bucket.parts.partitions.scrub

    async def purged_meanwhile(partition, *, deep):
        await bucket.archive.manifests.change_topic(
            bucket.topic_key, lambda found: replace(found, lifecycle="purging")
        )
        bucket.store.remove(gone)
        return await scrub(partition, deep=deep)

    bucket.parts.partitions.scrub = purged_meanwhile
    report = await bucket.scrub(fix=True)
    assert report.findings == []
    assert gone not in bucket.store.objects


async def test_topic_whose_purge_begins_during_the_scrub_has_no_fault(bucket):
    """A purge says what it is about before it deletes manifests: these are not missed."""
    await bucket.fill(2)
    partition, get = bucket.writer.identified, bucket.store.get
    named = await bucket.parts.search.names([])

    async def purged_meanwhile(key):
        if key == manifest_key(partition) and key in bucket.store.objects:
            await bucket.archive.manifests.change_topic(
                bucket.topic_key, lambda found: replace(found, lifecycle="purging")
            )
            bucket.store.remove(key)
        return await get(key)

    bucket.store.get = purged_meanwhile
    page = await bucket.parts.search.page(named, start_after=None)
    assert page.findings == []
    assert manifest_key(partition) not in bucket.store.objects


async def test_one_topic_can_be_scrubbed_alone(two):
    """Other topics have no findings, and none of their objects is moved."""
    ours, other = two
    await ours.fill(2)
    await other.fill(2)
    ours.store.remove((await other.data_keys())[0])
    kept = other.orphan(1)
    ours.clock.now_ms += 2 * DAY_MS
    ours.store.clock.now_ms = ours.clock.now_ms
    whole = WholeScrub(ours.parts, ours.store, ours.archive.manifests, topic="orders")
    report = await whole.run(deep=False, fix=True)
    assert (report.findings, report.orphans) == ([], [])
    assert [one.partition for one in report.partitions] == [ours.writer.identified]
    assert kept in ours.store.objects


async def test_index_of_a_named_segment_is_named(bucket):
    """An index goes by its data object's name."""
    await bucket.fill(1)
    named = await bucket.parts.search.names([bucket.writer.identified])
    segment = bucket.manifest.segments[0]
    assert index_key(bucket.writer.identified, segment) in named
    assert data_key(bucket.writer.identified, segment) in named
    assert data_key(bucket.writer.identified, replace(segment, writer_id="b2")) not in named
