"""Erasure: no object that a manifest names has the key any more, and all else reads as before."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archive_in, archived
from tests.fakes.dying_store import Dying, Killed
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import stored_manifest
from tests.fakes.memory_store import MemoryStore
from tests.support.examples import examples
from tests.unit.spark.rewriting import Job, records_of
from tests.unit.spark.test_compaction import (
    assert_sound,
    open_in,
    readings,
    spill_all_but,
    write,
)
from tieringd.archive.retired_objects import delete_retired
from tieringd.errors import CorruptDataError
from tieringd.formats.object_keys import data_key
from tieringd.formats.records import iter_records


def without(records, keys):
    return [one for one in records if one.key not in keys]


async def stored_keys(store, manifest) -> set[bytes | None]:
    """Return every key in the objects that a manifest names, also of records that readers skip."""
    archive, found = archive_in(store), set()
    for segment in manifest.segments:
        index = await archive.remote_log.index_of(manifest.partition, segment)
        async for batch in archive.reader.batches(
            data_key(manifest.partition, segment), index, from_offset=0
        ):
            if not batch.header.is_control:
                found |= {record.key for record in iter_records(batch.data)}
    return found


# Long: 150 archives are written, erased from, and read by both kinds of readers.
@given(
    random=st.randoms(use_true_random=False),
    segments=st.integers(1, 8),
    keys=st.sets(st.sampled_from([b"", b"a", b"b", b"c", b"last", b"never written"]), min_size=1),
)
@settings(max_examples=examples(150), deadline=None)
def test_erased_keys_are_gone_and_nothing_else(random, segments, keys):
    """Both kinds of readers see all other records, of which some have no key; a deep scrub finds no fault."""
    directory = Path(tempfile.mkdtemp())
    try:
        asyncio.run(_erased(directory, random, segments, keys))
    finally:
        shutil.rmtree(directory)


async def _erased(directory, random, segments, keys) -> None:
    store, writer = MemoryStore(), LogWriter(directory)
    write(writer, random, segments=segments)
    before = await archived(writer, archive_in(store))
    expected = [without(records, keys) for records in await readings(store, before)]
    was_there = await stored_keys(store, before) & keys

    swapped = await Job(store, writer.identified).erase(keys)

    after = stored_manifest(store, writer)
    assert (swapped is not None) == bool(was_there)
    assert await readings(store, after) == expected
    assert not await stored_keys(store, after) & keys
    assert (after.start_offset, after.next_offset, after.epochs, after.crossing) == (
        0,
        before.next_offset,
        before.epochs,
        before.crossing,
    )
    untouched = [one for one in after.segments if one in list(before.segments)]
    assert [one.is_rewritten for one in after.segments] == [one not in untouched for one in after.segments]
    assert await open_in(store, after) == set()
    await assert_sound(store, after)
    assert await Job(store, writer.identified, job_id="e2").erase(keys) is None


async def test_unreadable_records_are_erased_as_well(writer, store):
    """Records of an aborted transaction, or before the archive's start, are in objects all the same."""
    writer.append(b"before the start", keys=[b"secret"])
    writer.append(b"kept", keys=[b"other"])
    writer.roll()
    writer.append(b"aborted", b"too", keys=[b"secret", b"other"], producer_id=7)
    writer.abort(7)
    writer.roll()
    archive = archive_in(store)
    manifest = await archived(writer, archive)
    stored = await archive.manifests.load(writer.identified)
    cut = manifest.starting_inside(manifest.segments[0], 1, now_ms=1)
    await archive.manifests.commit(stored, cut, leader_epoch=0)

    await Job(store, writer.identified).erase([b"secret"])

    after = stored_manifest(store, writer)
    assert await stored_keys(store, after) == {b"other"}
    assert [[one.offset for one in each] for each in await readings(store, after)] == [[1, 3], [1]]
    assert after.start_offset == 1


async def test_aborted_transaction_over_two_segments_stays_aborted(writer, store):
    """One of the segments is rewritten: it still has the transaction, and keeps the marker of both."""
    writer.append(b"1", keys=[b"a"], producer_id=7)
    writer.roll()
    writer.append(b"2", b"3", keys=[b"secret", b"b"], producer_id=7)
    writer.abort(7)
    writer.append(b"4", keys=[b"c"], producer_id=7)
    writer.commit(7)
    writer.roll()
    await archived(writer, archive_in(store))

    await Job(store, writer.identified).erase([b"secret"])

    after = stored_manifest(store, writer)
    assert [one.is_rewritten for one in after.segments] == [False, True]
    assert [[one.key for one in each] for each in await readings(store, after)] == [
        [b"a", b"b", b"c"],
        [b"c"],
    ]


async def test_markers_have_no_key_that_could_be_erased(writer, store):
    """A marker's bytes in the place of a key say which end it is, and a client's record may have the same."""
    writer.append(b"1", b"2", keys=[b"\0\0\0\1", b"a"], producer_id=7)
    writer.commit(7)
    writer.roll()
    await archived(writer, archive_in(store))

    await Job(store, writer.identified).erase([b"\0\0\0\1"])

    after = stored_manifest(store, writer)
    assert await stored_keys(store, after) == {b"a"}
    assert await open_in(store, after) == set()


async def test_no_key_is_not_the_empty_key(writer, store):
    """A record without a key is never erased."""
    writer.append(b"1", b"2", keys=[None, b""])
    writer.roll()
    await archived(writer, archive_in(store))

    await Job(store, writer.identified).erase([b""])

    assert await stored_keys(store, stored_manifest(store, writer)) == {None}


async def test_replaced_objects_have_the_keys_until_they_are_deleted(writer, store):
    """Readers that began before go on; deleting takes just what left the manifest, and is forgotten."""
    writer.append(b"value of the secret", b"other", keys=[b"secret", b"b"])
    writer.roll()
    writer.append(b"untouched", keys=[b"c"])
    writer.roll()
    before = await archived(writer, archive_in(store))
    read_before = await readings(store, before)
    job = Job(store, writer.identified)
    await job.erase([b"secret"])
    assert await readings(store, before) == read_before
    assert any(b"value of the secret" in data for data, _ in store.objects.values())

    manifests = job.archive.manifests
    assert await delete_retired(store, manifests, writer.identified, retired_until_ms=4_999) == ()
    deleted = await delete_retired(store, manifests, writer.identified, retired_until_ms=5_000)

    assert deleted == (before.segments[0],)
    after = stored_manifest(store, writer)
    assert after.retired == ()
    assert not any(b"value of the secret" in data for data, _ in store.objects.values())
    await assert_sound(store, after)
    assert await delete_retired(store, manifests, writer.identified, retired_until_ms=5_000) == ()


@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
async def test_crash_at_any_request_loses_nothing(tmp_path, after_effect):
    """An erasure that dies at any request leaves everything readable. Another run erases what is left."""
    died = 0
    for number in range(1, 400):
        store, writer = MemoryStore(), LogWriter(tmp_path / f"{number}")
        write(writer, Random(9), segments=5)
        archive = archive_in(store)
        before = await archived(writer, archive)
        whole = await readings(store, before)
        erased = [without(records, {b"a"}) for records in whole]
        dying = Dying(store, number, after_effect=after_effect)
        try:
            job = Job(dying, writer.identified)
            await job.erase([b"a"])
            await delete_retired(dying, job.archive.manifests, writer.identified, retired_until_ms=10**15)
        except Killed:
            died += 1
        assert await readings(store, stored_manifest(store, writer)) in (whole, erased)
        again = Job(store, writer.identified, job_id="e2")
        await again.erase([b"a"])
        await delete_retired(store, again.archive.manifests, writer.identified, retired_until_ms=10**15)
        after = stored_manifest(store, writer)
        assert await readings(store, after) == erased
        assert after.retired == ()
        await assert_sound(store, after)
        if died < number:
            break
    else:
        pytest.fail("it never came to an end")
    assert died >= 20


async def test_what_can_be_erased_is_when_a_part_was_replaced_meanwhile(writer, store):
    """Each segment is swapped for itself; a segment that replaced one has to be read again."""
    for _ in range(3):
        writer.append(b"1", b"2", keys=[b"secret", b"b"])
        writer.roll()
    await archived(writer, archive_in(store))
    job, other = Job(store, writer.identified), Job(store, writer.identified, job_id="e2")
    prepared = await job.erased(await job.manifest(), [b"secret"])
    middle = (await other.manifest()).segments[1]
    _, replacement, _ = await other.erased(await other.manifest(), [b"b"])
    await other.swap.rewrite(writer.identified, [replacement], is_whole=False)

    swapped = await job.swap.rewrite(writer.identified, prepared, is_whole=False)

    assert (len(swapped.done), swapped.left) == (2, 1)
    after = stored_manifest(store, writer)
    assert after.segments[1] == replacement.segment != middle
    assert [one.key for one in (await readings(store, after))[0]] == [b"b", b"secret", b"b"]


async def test_spilled_history_is_erased_and_spilled_again(writer, store):
    """Only the parts from the first replaced segment on are taken back."""
    for number in range(140):
        writer.append(b"%d" % number, b"x", keys=[b"secret" if number == 70 else b"a", b"b"])
        writer.roll()
    archive = archive_in(store)
    before = await archived(writer, archive)
    expected = [without(records, {b"secret"}) for records in await readings(store, before)]
    await spill_all_but(archive, writer, 40, rows_of_part=50)
    spilled_before = stored_manifest(store, writer)
    job = Job(store, writer.identified, target_manifest_bytes=1)

    await job.erase([b"secret"])

    after = stored_manifest(store, writer)
    assert await readings(store, after) == expected
    assert after.segment_count == spilled_before.segment_count == 140
    names = await archive_in(store).manifests.spillovers.names(after, from_offset=0)
    before_names = await archive_in(store).manifests.spillovers.names(spilled_before, from_offset=0)
    assert names[0] == before_names[0]
    assert after.spillover.segments == 82
    whole = await job.manifest()
    assert whole.size_bytes == after.size_bytes
    await assert_sound(store, after)


async def test_damaged_segment_is_not_taken_for_one_without_the_key(writer, store):
    """A batch with another checksum is a fault, and so is an object of other batches."""
    writer.append(b"1", keys=[b"a"])
    writer.append(b"2", keys=[b"b"])
    writer.roll()
    manifest = await archived(writer, archive_in(store))
    key = data_key(writer.identified, manifest.segments[0])
    data = store.objects[key][0]
    half = len(data) // 2
    job = Job(store, writer.identified)

    store.add(key, data[:half] + data[:half])
    with pytest.raises(CorruptDataError):
        await job.erase([b"secret"])
    store.add(key, data[:-1] + b"!")
    with pytest.raises(CorruptDataError, match="CRC"):
        await job.erase([b"secret"])


async def test_time_queries_go_on(writer, store):
    """The first record at or after a time is found in what was rewritten."""
    for number in range(6):
        times = DEFAULT_TIME_MS + 10 * number
        writer.append(b"%d" % number, b"x", keys=[b"secret", b"b"], timestamp_ms=times)
    writer.roll()
    await archived(writer, archive_in(store))
    await Job(store, writer.identified).erase([b"secret"])
    archive = archive_in(store)
    after = stored_manifest(store, writer)
    left = await records_of(archive, after, read_committed=False)
    for time_ms in range(DEFAULT_TIME_MS - 1, DEFAULT_TIME_MS + 60):
        expected = next((one.offset for one in left if one.timestamp_ms >= time_ms), after.next_offset)
        assert await archive.records.offset_for_time(after, time_ms) == expected
