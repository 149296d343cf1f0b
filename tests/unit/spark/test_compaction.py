"""Compaction: the latest of each key stays, in both isolation levels, whatever the log and its segments."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archive_in, archived, archiver_of, observed
from tests.fakes.broker import FakeBroker
from tests.fakes.dying_store import Dying, Killed
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import stored_manifest
from tests.fakes.memory_store import MemoryStore
from tests.support.examples import examples
from tests.unit.spark.rewriting import Job, assert_sound, latest_of, open_in, records_of, write
from tieringd.errors import CorruptDataError, ObjectNotFound, StorageUnavailable
from tieringd.formats.object_keys import data_key, index_key
from tieringd.model.manifest_parts import Gap
from tieringd.model.segment_table import SegmentTable
from tieringd.model.spilling import part_to_spill, spilled
from tieringd.model.tail_cut import cut_back


async def readings(store, manifest):
    """Return what both kinds of readers see."""
    archive = archive_in(store)
    return [await records_of(archive, manifest, read_committed=one) for one in (False, True)]


@given(
    random=st.randoms(use_true_random=False),
    segments=st.integers(1, 8),
    target_bytes=st.sampled_from([1, 300, 1 << 30]),
    due=st.none() | st.integers(-1, 1001),
    drops_keyless=st.booleans(),
)
@settings(max_examples=examples(150), deadline=None)
def test_latest_record_of_each_key_is_left(random, segments, target_bytes, due, drops_keyless):
    """Both kinds of readers see just that; a deep scrub finds no fault; and another run writes nothing."""
    directory = Path(tempfile.mkdtemp())
    try:
        rules = {
            "due_before_ms": None if due is None else DEFAULT_TIME_MS + due,
            "drops_keyless": drops_keyless,
        }
        asyncio.run(_latest_is_left(directory, random, segments, target_bytes, rules))
    finally:
        shutil.rmtree(directory)


async def _latest_is_left(directory, random, segments, target_bytes, rules) -> None:
    store, writer = MemoryStore(), LogWriter(directory)
    write(writer, random, segments=segments)
    before = await archived(writer, archive_in(store))
    _, committed = await readings(store, before)
    job = Job(store, writer.identified)

    swapped = await job.compact(target_bytes=target_bytes, **rules)

    after = stored_manifest(store, writer)
    expected = latest_of(committed, **rules)
    assert await readings(store, after) == [expected, expected]
    assert (after.start_offset, after.next_offset, after.epochs) == (0, before.next_offset, before.epochs)
    await assert_sound(store, after)
    assert await open_in(store, after) == set()
    again = Job(store, writer.identified, job_id="e2")
    assert await again.compact(target_bytes=target_bytes, **rules) is None
    if swapped is not None:
        assert {one for each in swapped.done for one in each.parts} == {
            one for table in after.retired for one in table.segments
        }


async def test_compacted_segments_are_joined_up_to_the_target(writer, store):
    """Many segments of which little is left become one, and not over the first offset of a leader epoch."""
    for number in range(6):
        if number == 4:
            writer.begin_epoch(3)
        writer.append(b"%d" % number, b"x" * 50, keys=[b"a", b"only-%d" % number])
        writer.roll()
    await archived(writer, archive_in(store))

    swapped = await Job(store, writer.identified).compact()

    after = stored_manifest(store, writer)
    assert [(one.base_offset, one.last_offset) for one in after.segments] == [(0, 7), (8, 9), (10, 11)]
    assert [len(one.parts) for one in swapped.done] == [4, 1]
    assert [one.is_rewritten for one in after.segments] == [True, True, False]


async def test_ends_of_transactions_go_with_their_records(writer, store):
    """Markers whose transactions may have begun earlier stay. The index names no aborted transactions."""
    for number in range(20):
        writer.append(b"x", keys=[b"a"], producer_id=7)
        (writer.abort if number % 4 == 1 else writer.commit)(7)
    writer.roll()
    writer.append(b"in both", keys=[b"b"], producer_id=8)
    writer.roll()
    writer.append(b"z", keys=[b"c"], producer_id=8)
    writer.abort(8)
    writer.append(b"last", keys=[b"d"])
    writer.roll()
    before = await archived(writer, archive_in(store))
    expected = latest_of((await readings(store, before))[1])

    await Job(store, writer.identified).compact()

    (after,) = stored_manifest(store, writer).segments
    index = await archive_in(store).remote_log.index_of(writer.identified, after)
    # Two records, the end of the transaction of one of them, and the first end of all.
    assert (index.batch_count, index.record_count, index.aborted) == (4, 4, ())
    assert (await readings(store, stored_manifest(store, writer)))[0] == expected
    assert len(expected) == 2


async def test_marker_that_the_cleaner_emptied_stays(writer, store):
    """An emptied marker is kept as it is, and the transactions around it keep their ends."""
    for number in range(20):
        writer.append(b"x", keys=[b"a"], producer_id=8)
        if number == 10:
            writer.add_emptied_marker(7)
        (writer.abort if number % 4 == 1 else writer.commit)(8)
    writer.roll()
    writer.append(b"z", keys=[b"b"])
    writer.roll()
    before = await archived(writer, archive_in(store))
    expected = latest_of((await readings(store, before))[1])

    await Job(store, writer.identified).compact()

    manifest = stored_manifest(store, writer)
    after, _ = manifest.segments
    index = await archive_in(store).remote_log.index_of(writer.identified, after)
    # A record, the end of its transaction, the first end of all, and the emptied marker.
    assert (index.batch_count, index.record_count, index.aborted) == (4, 3, ())
    assert (await readings(store, manifest))[0] == expected
    assert len(expected) == 2
    await assert_sound(store, manifest)


async def test_tombstone_without_a_time_stays(writer, store):
    """The age of such a tombstone is unknown."""
    writer.append(None, keys=[b"a"], timestamp_ms=-1)
    writer.append(None, b"x", keys=[b"b", b"c"], timestamp_ms=DEFAULT_TIME_MS)
    writer.roll()
    await archived(writer, archive_in(store))

    await Job(store, writer.identified).compact(due_before_ms=DEFAULT_TIME_MS * 2)

    after = stored_manifest(store, writer)
    assert [one.key for one in (await readings(store, after))[0]] == [b"a", b"c"]


async def test_segment_of_which_nothing_is_left_is_empty(writer, store):
    """An empty segment holds its offsets, so the archive has no hole, and reading goes over it."""
    for _ in range(2):
        writer.append(b"x", keys=[b"a"])
        writer.begin_epoch(writer.epochs[-1][0] + 1)
        writer.roll()
    await archived(writer, archive_in(store))

    await Job(store, writer.identified).compact()

    after = stored_manifest(store, writer)
    assert after.segments[0].size_bytes == 0
    assert [one.offset for one in (await readings(store, after))[0]] == [1]
    await assert_sound(store, after)


async def test_records_before_the_start_neither_win_nor_stay(writer, store):
    """A user deleted them: they are in the first segment, and readers skip them."""
    writer.append(b"1", b"2", b"3", keys=[b"gone", b"a", b"a"])
    writer.roll()
    writer.append(b"4", keys=[b"a"])
    writer.roll()
    archive = archive_in(store)
    manifest = await archived(writer, archive)
    stored = await archive.manifests.load(writer.identified)
    cut = manifest.starting_inside(manifest.segments[0], 1, now_ms=1)
    await archive.manifests.commit(stored, cut, leader_epoch=0)

    await Job(store, writer.identified).compact()

    after = stored_manifest(store, writer)
    assert (after.start_offset, after.segments[0].base_offset) == (1, 0)
    assert [one.offset for one in (await readings(store, after))[0]] == [3]
    data = store.objects[data_key(writer.identified, after.segments[0])][0]
    assert b"gone" not in data


async def test_age_counts_as_before(writer, store):
    """The newest record of a segment was compacted away, and retention lets the rest go no earlier."""
    writer.append(b"1", keys=[b"a"], timestamp_ms=DEFAULT_TIME_MS - 5_000)
    writer.append(b"2", keys=[b"b"], timestamp_ms=DEFAULT_TIME_MS - 1_000)
    writer.roll()
    writer.append(b"3", keys=[b"b"], timestamp_ms=DEFAULT_TIME_MS - 10)
    writer.roll()
    await archived(writer, archive_in(store))

    await Job(store, writer.identified).compact(target_bytes=1)

    first = stored_manifest(store, writer).segments[0]
    assert (first.max_timestamp_ms, first.broker_timestamp_ms) == (
        DEFAULT_TIME_MS - 5_000,
        DEFAULT_TIME_MS - 1_000,
    )


@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
async def test_crash_at_any_request_leaves_all_or_nothing(tmp_path, after_effect):
    """A compaction that dies at any request leaves the old records or the new. Another run does the rest."""
    died = 0
    for number in range(1, 300):
        store, writer = MemoryStore(), LogWriter(tmp_path / f"{number}")
        write(writer, Random(4), segments=6)
        before = await archived(writer, archive_in(store))
        uncompacted = await readings(store, before)
        compacted = [latest_of(uncompacted[1])] * 2
        try:
            await Job(Dying(store, number, after_effect=after_effect), writer.identified).compact(
                target_bytes=300
            )
        except Killed:
            died += 1
        found = await readings(store, stored_manifest(store, writer))
        assert found in (uncompacted, compacted)
        await Job(store, writer.identified, job_id="e2").compact(target_bytes=300)
        after = stored_manifest(store, writer)
        assert await readings(store, after) == compacted
        assert await readings(store, before) == uncompacted
        await assert_sound(store, after)
        if died < number:
            break
    else:
        pytest.fail("it never came to an end")
    assert died >= 20


async def test_archive_that_grew_meanwhile_is_compacted_where_it_was_read(writer, store):
    """The archiver goes on, before the swap and after it, and what it uploads stays."""
    writer.append(b"1", b"2", keys=[b"a", b"a"])
    writer.roll()
    archive = archive_in(store)
    archiver = archiver_of(writer, archive, FakeBroker(writer))
    await archiver.step(observed(writer))
    job = Job(store, writer.identified)
    prepared = await job.compacted(await job.manifest())
    writer.append(b"3", keys=[b"a"])
    writer.roll()
    await archiver.step(observed(writer))

    swapped = await job.swap.rewrite(writer.identified, prepared, is_whole=True)
    writer.append(b"4", keys=[b"a"])
    writer.roll()
    with pytest.raises(StorageUnavailable, match="a job edited"):
        await archiver.step(observed(writer))
    await archiver.step(observed(writer))

    assert (len(swapped.done), swapped.left) == (1, 0)
    after = stored_manifest(store, writer)
    assert [one.value for one in (await readings(store, after))[1]] == [b"2", b"3", b"4"]
    assert after.leader_epoch == 0


async def test_swap_that_was_overtaken_is_given_up(writer, store):
    """Another job compacted the same segments: the partition and its objects stay as that job left them."""
    write(writer, Random(1), segments=3)
    await archived(writer, archive_in(store))
    slow, quick = Job(store, writer.identified), Job(store, writer.identified, job_id="e2")
    prepared = await slow.compacted(await slow.manifest(), target_bytes=1)
    await quick.compact(target_bytes=1)
    before = stored_manifest(store, writer)

    swapped = await slow.swap.rewrite(writer.identified, prepared, is_whole=True)

    assert (swapped.done, swapped.left) == ((), len(prepared))
    assert stored_manifest(store, writer) == before


async def test_compaction_is_whole_or_not_at_all(writer, store):
    """No segment is replaced if one was replaced meanwhile: its tombstone may have hidden a record."""
    for value in (b"1", b"2", None):
        writer.append(value, b"x" * 30, keys=[b"a", b"only %r" % value])
        writer.roll()
    await archived(writer, archive_in(store))
    job, other = Job(store, writer.identified), Job(store, writer.identified, job_id="e2")
    prepared = await job.compacted(await job.manifest(), target_bytes=1, due_before_ms=DEFAULT_TIME_MS * 2)
    assert len(prepared) == 3
    await other.erase([b"only b'1'"])
    before = stored_manifest(store, writer)

    swapped = await job.swap.rewrite(writer.identified, prepared, is_whole=True)

    assert (swapped.done, swapped.left) == ((), 3)
    assert stored_manifest(store, writer) == before


async def test_partition_with_a_recorded_gap_is_compacted(writer, store):
    """A winner after the gap removes the record before it, and an election that cuts it off undoes that."""
    archive = archive_in(store)
    for value in (b"1", b"lost", b"2"):
        writer.append(value, keys=[b"a"])
        writer.roll()
    await archived(writer, archive)
    job = Job(store, writer.identified)

    async def with_gap(found):
        gap = Gap(1, 1, "the broker deleted it", DEFAULT_TIME_MS)
        first, _, last = found.segments
        return replace(found, segments=SegmentTable.of([first]), next_offset=1).with_gap(gap).appended([last])

    before = (await archive.manifests.edit(writer.identified, with_gap)).existing
    swapped = await job.compact(target_bytes=1)

    assert (len(swapped.done), swapped.left_because) == (1, "")
    after = stored_manifest(store, writer)
    assert [one.offset for one in (await readings(store, after))[1]] == [2]
    await assert_sound(store, after)
    undone = cut_back(after, 2, leader_epoch=1, now_ms=9)
    assert list(undone.segments) == list(before.segments)[:1]
    assert undone.faults() == ()


async def test_expired_segments_are_left_out_of_a_swap(writer, store):
    """Retention took the oldest segments meanwhile, and the rest is swapped."""
    for number in range(3):
        writer.append(b"%d" % number, b"y", keys=[b"a", b"only-%d" % number])
        writer.roll()
    archive = archive_in(store)
    manifest = await archived(writer, archive)
    job = Job(store, writer.identified)
    prepared = await job.compacted(manifest, target_bytes=1)
    assert len(prepared) == 2
    stored = await archive.manifests.load(writer.identified)
    await archive.manifests.commit(stored, manifest.expired(1, now_ms=1), leader_epoch=0)

    swapped = await job.swap.rewrite(writer.identified, prepared, is_whole=True)

    assert (swapped.done, swapped.left) == (tuple(prepared[1:]), 0)
    after = stored_manifest(store, writer)
    assert [one.offset for one in (await readings(store, after))[0]] == [3, 4, 5]
    await assert_sound(store, after)


async def spill_all_but(archive, writer, rows_left: int, *, rows_of_part: int) -> None:
    stored = await archive.manifests.load(writer.identified)
    manifest = stored.existing
    while len(manifest.segments) > rows_left:
        part = part_to_spill(manifest, rows_of_part)
        manifest = spilled(manifest, part, await archive.manifests.spillovers.put(part))
    await archive.manifests.commit(stored, manifest, leader_epoch=0)


@pytest.mark.parametrize("target_bytes", [1, 300])
async def test_spilled_history_is_compacted_and_spilled_again(writer, store, target_bytes):
    """Readers see the latest of each key, the live manifest has no more, and the counts are right."""
    for number in range(140):
        writer.append(b"%d" % number, b"y", keys=[b"a", b"only-%d" % number])
        writer.roll()
    archive = archive_in(store)
    before = await archived(writer, archive)
    _, committed = await readings(store, before)
    await spill_all_but(archive, writer, 40, rows_of_part=50)
    live_offset = stored_manifest(store, writer).live_offset
    assert live_offset == before.segments[100].base_offset

    job = Job(store, writer.identified, target_manifest_bytes=1)
    await job.compact(target_bytes=target_bytes)

    after = stored_manifest(store, writer)
    assert await readings(store, after) == [latest_of(committed)] * 2
    whole = await job.manifest()
    assert (whole.spillover, len(whole.segments)) == (None, after.segment_count)
    assert whole.size_bytes == after.size_bytes
    if target_bytes == 1:
        # Parts have 32 segments at the least.
        assert 0 < after.live_offset <= live_offset
        assert after.spillover.segments == 96
    await assert_sound(store, after)
    assert await Job(store, writer.identified, job_id="e2").compact(target_bytes=target_bytes) is None


async def test_damaged_object_is_not_compacted(writer, store):
    """Whole batches that are not the manifest's are faults, as damaged ones are."""
    writer.append(b"1", keys=[b"a"])
    writer.append(b"2", keys=[b"b"])
    writer.roll()
    writer.append(b"3", keys=[b"a"])
    writer.roll()
    manifest = await archived(writer, archive_in(store))
    first, second = manifest.segments
    job = Job(store, writer.identified)
    prepared = await job.compacted(manifest)
    key = data_key(writer.identified, first)
    data = store.objects[key][0]
    half = len(data) // 2
    store.add(key, data[:half] + data[:half])

    with pytest.raises(CorruptDataError):
        await job.compacted(manifest)
    store.add(key, data[:-1] + b"!")
    with pytest.raises(CorruptDataError, match="CRC"):
        await job.compacted(manifest)
    assert second in prepared[0].parts or first in prepared[0].parts


@pytest.mark.parametrize("name", [data_key, index_key])
async def test_swap_whose_objects_are_gone_changes_nothing(writer, store, name):
    """A job took so long that a scrub took its objects for orphans."""
    write(writer, Random(1), segments=3)
    await archived(writer, archive_in(store))
    job = Job(store, writer.identified)
    prepared = await job.compacted(await job.manifest())
    before = stored_manifest(store, writer)
    store.remove(name(writer.identified, prepared[0].segment))

    with pytest.raises(ObjectNotFound):
        await job.swap.rewrite(writer.identified, prepared, is_whole=True)
    assert stored_manifest(store, writer) == before
