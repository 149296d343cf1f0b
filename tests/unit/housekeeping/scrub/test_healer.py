"""Mending: the very bytes that the manifest names, from wherever they still are, or nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from crc32c import crc32c

from tests.fakes.archive import archive_in, values_in, written_below
from tests.fakes.log_writer import LogWriter
from tests.fakes.spilling import spilled_names
from tests.unit.housekeeping.scrub.buckets import Bucket
from tieringd.errors import StorageDenied
from tieringd.formats.object_keys import data_key, index_key, quarantined_key, spillover_key
from tieringd.formats.sidecar import decode_sidecar, encode_sidecar
from tieringd.model.manifest_parts import Gap
from tieringd.model.segment import BrokerIndexes
from tieringd.model.segment_table import SegmentTable

DAMAGES = {
    "missing": lambda store, key: store.remove(key),
    "cut": lambda store, key: store.add(key, store.bytes_of(key)[:-1]),
    "changed": lambda store, key: store.add(key, store.bytes_of(key)[:-1] + b"\x01"),
}


def without_log(bucket) -> None:
    """Let this host have nothing of the partition."""
    bucket.local_log = lambda: None


async def expect_sound(bucket) -> None:
    assert (await bucket.scrub(deep=True)).findings == []


@pytest.mark.parametrize("damage", DAMAGES)
async def test_each_object_of_a_local_segment_is_mended_from_the_log(bucket, damage):
    """Data and index come back byte for byte, side files of the broker and all."""
    await bucket.fill(4)
    for key in [*(await bucket.data_keys()), *(await bucket.index_keys())]:
        data = bucket.store.bytes_of(key)
        DAMAGES[damage](bucket.store, key)

        report = await bucket.scrub(deep=True, fix=True)

        assert list(report.mended.values()) == ["from this broker's log"]
        assert report.faults == []
        assert bucket.store.bytes_of(key) == data
    await expect_sound(bucket)
    assert bucket.offered == []


async def test_what_no_one_holds_stays_broken(bucket):
    """A data object whose bytes are nowhere is a fault after a fix too, and nothing is stored for it."""
    await bucket.fill(4)
    key = (await bucket.data_keys())[1]
    bucket.store.remove(key)
    without_log(bucket)

    report = await bucket.scrub(fix=True)

    assert [one.key for one in report.faults] == [key]
    assert key not in bucket.store.objects


async def test_other_bytes_in_the_log_are_never_stored(bucket):
    """A local segment of the same offsets with another byte in it does not become the archive's."""
    await bucket.fill(4)
    key = (await bucket.data_keys())[1]
    bucket.store.remove(key)
    bucket.writer.flip_byte(2)
    assert [one.key for one in (await bucket.scrub(fix=True)).faults] == [key]
    assert key not in bucket.store.objects
    bucket.writer.flip_byte(2)
    assert (await bucket.scrub(fix=True)).faults == []


@pytest.mark.parametrize("keeps", ["all", "half"])
async def test_merged_segment_is_put_together_from_several_files(bucket, keeps):
    """The merged bytes are those of the parts' local segments, one after the other, if all are there."""
    await bucket.fill(4)
    manifest = bucket.manifest
    parts = list(manifest.segments)[1:]
    data = b"".join(bucket.writer.data_of(one.base_offset) for one in parts)
    index = encode_sidecar(decode_sidecar(bucket.store.bytes_of(index_key(manifest.partition, parts[0]))))
    merged = replace(
        parts[0],
        last_offset=parts[-1].last_offset,
        size_bytes=len(data),
        crc32c=crc32c(data),
        writer_id="b2",
    )
    bucket.store.add(index_key(manifest.partition, merged), index)
    stored = await bucket.archive.manifests.load(manifest.partition)
    await bucket.claim.commit(stored, manifest.merged(merged, now_ms=0))
    if keeps == "half":
        bucket.writer.drop_head()
        bucket.writer.drop_head()

    report = await bucket.scrub(fix=True)

    key = data_key(manifest.partition, merged)
    assert (bucket.store.objects.get(key) is not None) == (keeps == "all")
    assert [one.key for one in report.faults] == ([] if keeps == "all" else [key])
    if keeps == "all":
        assert bucket.store.bytes_of(key) == data


async def test_part_of_a_local_segment_is_found_inside_it(writer, tmp_path):
    """The part that was uploaded before its segment was closed is cut out of the closed file."""
    bucket = Bucket(writer, work_directory=tmp_path)
    bucket.archiver.set_limits(replace(bucket.archiver._limits, max_interval_ms=0))
    writer.append(b"one")
    await bucket.fill(0)
    writer.append(b"two")
    await bucket.step()
    writer.append(b"three")
    writer.roll()
    await bucket.step()
    assert [one.base_offset for one in bucket.manifest.segments] == [0, 1, 2]
    for key in [*(await bucket.data_keys()), *(await bucket.index_keys())]:
        data = bucket.store.bytes_of(key)
        bucket.store.remove(key)
        report = await bucket.scrub(deep=True, fix=True)
        assert report.faults == []
        assert bucket.store.bytes_of(key) == data
    await expect_sound(bucket)


async def test_index_is_built_from_its_data_where_that_gives_the_same(bucket):
    """An index is built from the data object alone if the broker had no side files."""
    bucket.writer._indexes = lambda _: {}
    snapshots = bucket.writer._write_file
    bucket.writer._write_file = lambda name, data: snapshots(name, data) if "snapshot" not in name else None
    await bucket.fill(3)
    without_log(bucket)
    for key in await bucket.index_keys():
        data = bucket.store.bytes_of(key)
        bucket.store.remove(key)
        report = await bucket.scrub(fix=True)
        assert list(report.mended.values()) == ["from its data object"]
        assert bucket.store.bytes_of(key) == data
    assert bucket.offered == []


async def with_transactions(writer, tmp_path) -> Bucket:
    """Archive segments with transactions over their ends, aborted and committed."""
    bucket = Bucket(writer, work_directory=tmp_path)
    writer.append(b"begun", producer_id=7)
    writer.append(b"kept", producer_id=8)
    writer.roll()
    writer.append(b"plain")
    writer.roll()
    writer.abort(7)
    writer.commit(8)
    writer.append(b"last")
    writer.roll()
    await bucket.fill(2)
    return bucket


@pytest.mark.parametrize("row", [0, 1, 2])
async def test_index_that_cannot_be_the_same_comes_with_a_new_name(writer, tmp_path, row):
    """The data is stored once more beside it, the manifest names both, and readers find what they did."""
    bucket = await with_transactions(writer, tmp_path)
    before = [await values_in(bucket.archive, bucket.manifest, read_committed=one) for one in (False, True)]
    assert before == [
        written_below(writer, bucket.manifest.next_offset, read_committed=one) for one in (False, True)
    ]
    without_log(bucket)
    old = bucket.manifest.segments[row]
    key = index_key(writer.identified, old)
    original = decode_sidecar(bucket.store.bytes_of(key))
    bucket.store.remove(key)

    report = await bucket.scrub(fix=True)

    assert list(report.mended.values()) == ["from its data object, under a new name"]
    manifest = bucket.manifest
    new = manifest.segments[row]
    assert data_key(writer.identified, new) != data_key(writer.identified, old)
    assert bucket.store.bytes_of(data_key(writer.identified, new)) == writer.data_of(old.base_offset)
    rebuilt = decode_sidecar(bucket.store.bytes_of(index_key(writer.identified, new)))
    assert rebuilt == replace(original, broker=BrokerIndexes())
    assert [list(one.segments) for one in manifest.retired] == [[old]]
    await expect_sound(bucket)
    reader = archive_in(bucket.store)
    after = [await values_in(reader, manifest, read_committed=one) for one in (False, True)]
    assert after == before


async def test_index_without_the_end_of_its_transactions_is_not_built(writer, tmp_path):
    """An index is not built if a transaction ends in no archived segment: its outcome is unknown."""
    bucket = await with_transactions(writer, tmp_path)
    without_log(bucket)
    manifest = bucket.manifest
    first = manifest.segments[0]
    alone = replace(manifest, segments=SegmentTable.of([first]), next_offset=first.next_offset)
    assert await bucket.parts.healer._rebuilder.from_data(alone, first) is None
    assert await bucket.parts.healer._rebuilder.from_data(manifest, first) is not None
    last = manifest.segments[2]
    holed = replace(
        manifest,
        segments=SegmentTable.of([first, last]),
        gaps=(Gap(first.next_offset, last.base_offset - 1, "lost", 0),),
    )
    assert await bucket.parts.healer._rebuilder.from_data(holed, first) is None


async def test_index_change_is_given_up_where_the_segment_is_gone(writer, tmp_path):
    """A merge that came first wins: nothing is named, and the fault is not taken for mended."""
    bucket = await with_transactions(writer, tmp_path)
    without_log(bucket)
    old = bucket.manifest.segments[0]
    bucket.store.remove(index_key(writer.identified, old))

    async def late(partition, change):
        stored = await bucket.archive.manifests.load(partition)
        other = replace(old, writer_id="b2")
        segments = SegmentTable.of([other, *list(stored.existing.segments)[1:]])
        await bucket.claim.commit(stored, replace(stored.existing, segments=segments))
        await bucket.take(partition, change)

    bucket.offer = late
    report = await bucket.scrub(fix=True)
    assert report.mended == {}
    assert bucket.manifest.segments[0].writer_id == "b2"


async def test_without_an_archiver_no_manifest_is_changed(writer, tmp_path):
    """A command beside a daemon leaves to it what needs a commit."""
    bucket = await with_transactions(writer, tmp_path)
    without_log(bucket)
    bucket.parts.healer._offer = None
    manifest = bucket.manifest
    bucket.store.remove(index_key(writer.identified, manifest.segments[0]))
    report = await bucket.scrub(fix=True)
    assert len(report.faults) == 1
    assert bucket.manifest == manifest


async def test_damaged_copy_in_quarantine_mends_nothing(bucket):
    """A copy of the right size with another byte in it is not taken."""
    await bucket.fill(3)
    without_log(bucket)
    key = (await bucket.data_keys())[0]
    data = bucket.store.bytes_of(key)
    bucket.store.add(f"quarantine/objects/{key}", data[:-1] + b"\x01")
    bucket.store.remove(key)
    assert [one.key for one in (await bucket.scrub(fix=True)).faults] == [key]
    assert key not in bucket.store.objects


@pytest.mark.parametrize("damage", DAMAGES)
async def test_spillover_manifest_is_mended_from_quarantine(bucket, damage):
    """
    The name of a part has its checksum, so only its own bytes are taken.

    Each part of the chain is found.
    """
    await bucket.fill(6, local=2)
    keys = [
        spillover_key(bucket.writer.identified, name) for name in spilled_names(bucket.store, bucket.writer)
    ]
    assert len(keys) > 2
    before = {key: bucket.store.bytes_of(key) for key in keys}
    for key in keys:
        DAMAGES[damage](bucket.store, key)
        bucket.store.add(quarantined_key(key), before[key][:-1])
    report = await bucket.scrub(fix=True)
    assert report.mended == {}

    for key in keys:
        bucket.store.add(quarantined_key(key), before[key])
    report = await bucket.scrub(fix=True)
    assert set(report.mended.values()) == {"from its copy in quarantine"}
    assert report.faults == []
    assert {key: bucket.store.bytes_of(key) for key in keys} == before
    await expect_sound(bucket)


async def test_log_of_another_partition_mends_nothing(bucket, tmp_path):
    """Segments at the same offsets with other bytes do not pass for these."""
    other = LogWriter(tmp_path / "other", "payments")
    await bucket.fill(3)
    for number in range(3):
        other.closed_segment(b"A%d" % number, b"B%d" % number)
    bucket.local_log = other.local_log
    key = (await bucket.data_keys())[0]
    bucket.store.remove(key)
    assert [one.key for one in (await bucket.scrub(fix=True)).faults] == [key]


async def test_mending_that_fails_is_told_and_the_others_go_on(bucket):
    """One put that the store refuses leaves that fault, with the reason, and no other."""
    await bucket.fill(4)
    keys = await bucket.data_keys()
    for key in keys:
        bucket.store.remove(key)
    bucket.store.fail_next("put", lambda: StorageDenied("put: access denied"))

    report = await bucket.scrub(fix=True)

    assert len(report.findings) == len(keys)
    assert len(report.mended) == len(keys) - 1
    (fault,) = report.faults
    assert report.left == [(fault.key, "the object could not be repaired: put: access denied")]
    assert report.listed_objects > 0
