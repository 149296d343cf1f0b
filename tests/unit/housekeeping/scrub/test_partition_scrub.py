"""Scrubbing one partition: in stretches, and beside daemons that change what is scrubbed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.store import store_unavailable
from tests.unit.housekeeping.scrub.buckets import Bucket, DatedStore
from tieringd.archive.scrub.partition_scrub import PartitionScrubber
from tieringd.errors import ObjectNotFound, StorageUnavailable
from tieringd.formats.object_keys import data_key, index_key, manifest_key, spillover_key
from tieringd.policies.total_retention import TotalRetention

ALL_GOES = TotalRetention(limit_ms=0, limit_bytes=None)


@pytest.mark.parametrize("requests_max", [1, 4, 7, 1000])
@pytest.mark.parametrize("deep", [False, True])
async def test_scrub_in_stretches_finds_what_a_whole_one_does(bucket, deep, requests_max):
    """Each segment is checked once, and all faults are found, however short the stretches are."""
    await bucket.fill(8, local=3)
    keys = await bucket.data_keys()
    gone = {keys[0], keys[3], keys[6], keys[7]}
    for key in gone:
        bucket.store.remove(key)
    partition, cursor = bucket.writer.identified, None
    found, segments, stretches = set(), 0, 0
    while stretches == 0 or cursor is not None:
        stretch = await bucket.parts.partitions.scrub(
            partition, deep=deep, requests_max=requests_max, cursor=cursor
        )
        cursor, stretches = stretch.cursor, stretches + 1
        assert stretch.segments > 0
        found |= {one.key for one in stretch.findings}
        segments += stretch.segments

    assert found == gone
    assert segments == 8
    assert stretches == 8 or requests_max > 1
    assert (stretches == 1) == (requests_max == 1000)


async def test_cursor_survives_a_merge_over_it(bucket):
    """Segments that were merged over the place where a stretch ended are checked by the next."""
    await bucket.fill(4)
    partition = bucket.writer.identified
    stretch = await bucket.parts.partitions.scrub(partition, deep=False, requests_max=1)
    assert stretch.cursor.before_offset == 6
    merged = await merge_all(bucket)
    bucket.store.remove(data_key(partition, merged))

    stretch = await bucket.parts.partitions.scrub(partition, deep=False, cursor=stretch.cursor)

    assert [one.key for one in stretch.findings] == [data_key(partition, merged)]


async def merge_all(bucket):
    """Merge all live segments into one, as a commit of the archiver does it; return that."""
    manifest, segments = bucket.manifest, list(bucket.manifest.segments)
    data = b"".join(bucket.store.bytes_of(data_key(manifest.partition, one)) for one in segments)
    merged = replace(
        segments[0],
        last_offset=segments[-1].last_offset,
        size_bytes=len(data),
        writer_id="b2",
    )
    index = bucket.store.bytes_of(index_key(manifest.partition, segments[0]))
    bucket.store.add(data_key(manifest.partition, merged), data)
    bucket.store.add(index_key(manifest.partition, merged), index)
    stored = await bucket.archive.manifests.load(manifest.partition)
    await bucket.claim.commit(stored, manifest.merged(merged, now_ms=bucket.clock()))
    return merged


class Meddler(DatedStore):
    """A bucket in which something else happens whenever an object is asked for that is gone."""

    def __init__(self, clock) -> None:
        super().__init__(clock)
        self.before_read = None

    async def head(self, key):
        await self._meddle(key)
        return await super().head(key)

    async def get_range(self, key, *, position, size_bytes):
        await self._meddle(key)
        return await super().get_range(key, position=position, size_bytes=size_bytes)

    async def _meddle(self, key):
        if self.before_read is not None and ".log" in key:
            happening, self.before_read = self.before_read, None
            await happening(key)


@pytest.fixture
def busy(writer, tmp_path, clock):
    """Give a bucket with a hand in it."""
    return Bucket(writer, work_directory=tmp_path, store=Meddler(clock))


@pytest.mark.parametrize("deep", [False, True])
async def test_what_a_merge_took_out_meanwhile_is_no_fault(busy, deep):
    """Objects that have gone since their names left the manifest are not missed."""
    await busy.fill(4)

    async def merge_and_delete(_):
        await merge_all(busy)
        for one in busy.manifest.retired[0].segments:
            busy.store.remove(data_key(busy.writer.identified, one))
            busy.store.remove(data_key(busy.writer.identified, one) + ".index")

    busy.store.before_read = merge_and_delete
    stretch = await busy.parts.partitions.scrub(busy.writer.identified, deep=deep)

    assert stretch.findings == ()
    assert len(busy.manifest.segments) == 1


async def test_fault_beside_a_merge_is_told_all_the_same(busy):
    """A segment that the manifest goes on naming is missed, whatever else has changed."""
    await busy.fill(4)
    gone = (await busy.data_keys())[3]

    async def upload(_):
        busy.writer.closed_segment(b"new")
        await busy.step()

    busy.store.remove(gone)
    busy.store.before_read = upload
    stretch = await busy.parts.partitions.scrub(busy.writer.identified, deep=False)

    assert [one.key for one in stretch.findings] == [gone]


@pytest.mark.parametrize("deep", [False, True])
async def test_what_retention_took_out_meanwhile_is_no_fault(busy, deep):
    """Spilled segments, their parts and live ones may expire and be deleted during a scrub."""
    await busy.fill(8, local=3)

    async def expire_all(_):
        for _ in range(60):
            busy.clock.now_ms += 700_000
            await busy.step(total=ALL_GOES)

    busy.store.before_read = expire_all
    stretch = await busy.parts.partitions.scrub(busy.writer.identified, deep=deep)

    assert stretch.findings == ()
    assert busy.manifest.segment_count == 0
    assert not [key for key in busy.store.stored_keys() if ".log" in key]


async def test_what_was_taken_back_meanwhile_is_no_fault(busy):
    """Parts that a leader takes back into its manifest, and that are gone then, are not missed."""
    await busy.fill(8, local=3)
    spillovers = busy.archive.manifests.spillovers

    async def take_back(_):
        partition = busy.writer.identified
        names = await spillovers.names(busy.manifest, from_offset=0)
        stored = await busy.archive.manifests.load(partition)
        await busy.claim.commit(stored, await spillovers.with_history(stored.existing))
        for name in names:
            busy.store.remove(spillover_key(partition, name))

    busy.store.before_read = take_back
    stretch = await busy.parts.partitions.scrub(busy.writer.identified, deep=False)

    assert busy.manifest.spillover is None
    assert stretch.findings == ()


async def test_expired_segments_may_be_gone(bucket):
    """Objects of expired segments are not missed, and those of held segments are."""
    await bucket.fill(8, local=3)
    held = (await bucket.data_keys())[-1]
    bucket.clock.now_ms += 70_000
    await bucket.step(total=ALL_GOES)
    bucket.clock.now_ms += 70_000
    await bucket.step(total=ALL_GOES)
    manifest = bucket.manifest
    assert manifest.start_offset > 0
    assert manifest.spillover is not None or manifest.retired
    kept = await bucket.data_keys()
    for key in bucket.store.stored_keys():
        if key.endswith(".log") and key not in kept:
            bucket.store.remove(key)
    assert (await bucket.scrub()).findings == []
    if held in kept:
        bucket.store.remove(held)
        assert len((await bucket.scrub()).findings) == 1


async def test_manifest_that_is_whole_at_the_second_read_is_no_fault(bucket):
    """An answer that was damaged on its way is asked for again."""
    await bucket.fill(2)
    key = manifest_key(bucket.writer.identified)
    data = bucket.store.bytes_of(key)
    calls = []
    get = bucket.store.get

    async def damaged_once(wanted):
        found, info = await get(wanted)
        if wanted == key and not calls:
            calls.append(wanted)
            return found[:-1], info
        return found, info

    bucket.store.get = damaged_once
    stretch = await bucket.parts.partitions.scrub(bucket.writer.identified, deep=False)
    assert (stretch.findings, stretch.segments, calls) == ((), 2, [key])
    assert bucket.store.bytes_of(key) == data


async def test_object_that_is_there_at_the_second_read_is_no_fault(bucket):
    """A store that says once that an object is missing, and then gives it, has lost nothing."""
    await bucket.fill(2)
    head, missed = bucket.store.head, set()

    async def forgetful(key):
        if key not in missed:
            missed.add(key)
            raise ObjectNotFound(f"{key}: there is no such object", key=key)
        return await head(key)

    bucket.store.head = forgetful
    stretch = await bucket.parts.partitions.scrub(bucket.writer.identified, deep=False)
    assert (stretch.findings, len(missed)) == ((), 4)


@pytest.mark.parametrize(("operation", "deep"), [("head", False), ("get", True), ("get_range", True)])
async def test_store_that_does_not_answer_is_no_fault(bucket, operation, deep):
    """Objects that could not be asked for have no findings."""
    await bucket.fill(2)
    bucket.store.fail_next(operation, lambda: store_unavailable(operation))
    with pytest.raises(StorageUnavailable):
        await bucket.parts.partitions.scrub(bucket.writer.identified, deep=deep)


async def test_partition_without_a_manifest_has_nothing_to_scrub(bucket):
    """Nothing was archived: nothing can be wrong."""
    stretch = await PartitionScrubber(bucket.store, bucket.archive.manifests).scrub(
        bucket.writer.identified, deep=True
    )
    assert (stretch.findings, stretch.segments, stretch.cursor) == ((), 0, None)
