"""
The rest of KIP-405's operations: look-ups by epoch, reading on, side files, deleting.

The tables marked as Kafka's own are cases that its remote log manager is tested with, in our words.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archive_in, archived
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import stored_manifest
from tests.unit.model.values import remote, stored
from tieringd.archive.archive_reader import floor_position
from tieringd.archiving.remote_log import SideFileKind
from tieringd.errors import ObjectNotFound
from tieringd.formats.checkpoints import parse_epoch_checkpoint
from tieringd.formats.index_files import parse_transaction_index
from tieringd.formats.log_names import LogFileKind, encode_file_name
from tieringd.formats.object_keys import data_key, index_key
from tieringd.model.manifest_parts import Gap
from tieringd.model.segment import IndexEntry, SegmentIndex
from tieringd.model.spilling import part_to_spill, spilled, spillover_expired


@pytest.fixture
def partition(writer):
    return writer.identified


@pytest.fixture
def remote_log(archive):
    return archive.remote_log


async def put_manifest(archive, manifest, writer, *, leader_epoch=0):
    """Store a manifest that names what need not be there."""
    manifest = replace(manifest, partition=writer.identified)
    stored_one = await archive.manifests.load(writer.identified)
    return await archive.manifests.commit(stored_one, manifest, leader_epoch=leader_epoch)


async def spill(archive, writer, *parts):
    """Spill the oldest segments, so many in each of *parts*."""
    stored_one = await archive.manifests.load(writer.identified)
    manifest = stored_one.existing
    for rows in parts:
        part = part_to_spill(manifest, rows)
        manifest = spilled(manifest, part, await archive.manifests.spillovers.put(part))
    await archive.manifests.commit(stored_one, manifest, leader_epoch=manifest.leader_epoch)


async def filled(writer, archive, *, segments=6):
    """Archive segments of one record each, a second apart; return their bases."""
    bases = []
    for number in range(segments):
        bases.append(writer.next_offset)
        writer.append(b"%d" % number, timestamp_ms=DEFAULT_TIME_MS - 60_000 + number * 1000)
        writer.roll()
    await archived(writer, archive)
    return bases


# --- Look-ups ---


async def test_nothing_of_an_unknown_partition_is_found(remote_log, partition):
    """Kafka's own: without a segment the earliest and the highest offset are -1, and a list is empty."""
    assert await remote_log.earliest_offset(partition) == -1
    assert await remote_log.highest_offset(partition, leader_epoch=0) == -1
    assert await remote_log.list_segments(partition) == ()
    assert await remote_log.segment_of(partition, 0, leader_epoch=0) is None


async def test_archive_of_which_all_has_expired_is_empty(remote_log, archive, writer, partition):
    """A manifest without a segment has no earliest offset either, spilled ones included."""
    bases = await filled(writer, archive)
    await spill(archive, writer, 2, 2)
    assert await remote_log.earliest_offset(partition) == 0
    held = await archive.manifests.load(partition)
    left = held.existing
    async with aclosing(archive.manifests.spillovers.parts(left, from_offset=0)) as parts:
        async for part in parts:
            left = spillover_expired(left, part.segments, now_ms=DEFAULT_TIME_MS)
    left = left.expired(len(left.segments), now_ms=DEFAULT_TIME_MS)
    await archive.manifests.commit(held, left, leader_epoch=0)
    assert await remote_log.earliest_offset(partition) == -1
    assert await remote_log.list_segments(partition) == ()
    assert stored_manifest(archive.store, writer).next_offset == bases[-1] + 1


EPOCHS = ((0, 0), (1, 20), (2, 80), (3, 240), (4, 370))
SEGMENTS = [remote(0, 100), remote(101, 200), remote(201, 300), remote(301, 400)]


@pytest.mark.parametrize(
    ("leader_epoch", "highest"), [(0, 19), (1, 79), (2, 239), (3, 369), (4, 400), (5, -1), (-1, -1)]
)
async def test_highest_offset_is_that_of_the_epoch(archive, writer, leader_epoch, highest):
    """Kafka's own: the last archived offset of each epoch, also after a segment of it was deleted."""
    manifest = stored(SEGMENTS).appended((), EPOCHS)
    await put_manifest(archive, manifest, writer)
    assert await archive.remote_log.highest_offset(writer.identified, leader_epoch=leader_epoch) == highest
    await put_manifest(archive, manifest.expired(1, now_ms=1), writer)
    assert await archive.remote_log.highest_offset(writer.identified, leader_epoch=leader_epoch) == highest


async def test_epoch_that_wrote_nothing_has_no_highest_offset(remote_log, archive, writer, partition):
    """An epoch that ends where it began, or begins past the archive, has no offset in it."""
    manifest = stored([remote(0, 99)]).appended((), ((0, 0), (1, 50), (2, 50), (3, 100)))
    await put_manifest(archive, manifest, writer)
    found = [await remote_log.highest_offset(partition, leader_epoch=epoch) for epoch in range(4)]
    assert found == [49, -1, 99, -1]


@pytest.mark.parametrize(
    ("lookup", "base"),
    [
        *[((1, 40), 0), ((2, 110), 101), ((3, 240), 201), ((3, 250), 201), ((4, 375), 301)],
        *[((1, 110), None), ((4, 401), None), ((5, 301), None)],
        *[((0, 0), 0), ((0, 19), 0), ((0, 20), None), ((1, 20), 0), ((4, -1), None)],
    ],
)
@pytest.mark.parametrize("is_spilled", [False, True])
async def test_segment_is_found_by_epoch_and_offset(archive, writer, lookup, base, is_spilled):
    """Kafka's own: an offset is found only under the epoch that wrote it, in whichever manifest it is."""
    leader_epoch, offset = lookup
    await put_manifest(archive, stored(SEGMENTS).appended((), EPOCHS), writer)
    if is_spilled:
        await spill(archive, writer, 1, 2)
    found = await archive.remote_log.segment_of(writer.identified, offset, leader_epoch=leader_epoch)
    assert (found.base_offset if found else None) == base


async def test_segment_of_a_gap_is_none(remote_log, archive, writer, partition):
    """A recorded gap has an epoch, and no segment."""
    manifest = stored([remote(0, 9)]).with_gap(Gap(10, 19, "gone", 1)).appended([remote(20, 29)], ((0, 0),))
    await put_manifest(archive, manifest, writer)
    assert await remote_log.segment_of(partition, 15, leader_epoch=0) is None


@pytest.mark.parametrize("parts", [(), (2,), (1, 1, 2)])
async def test_lists_ascend_from_a_base_offset(remote_log, archive, writer, partition, parts):
    """The list has spilled segments as well, and nothing before the base offset."""
    bases = await filled(writer, archive)
    await spill(archive, writer, *parts)
    for number, base in enumerate(bases):
        found = await remote_log.list_segments(partition, min_base_offset=base)
        assert [one.base_offset for one in found] == bases[number:]
    assert await remote_log.list_segments(partition, min_base_offset=bases[-1] + 1) == ()
    assert await remote_log.earliest_offset(partition) == bases[0]


@pytest.mark.parametrize(
    ("entries", "offset", "position"),
    [
        ((), 92, 0),
        ((), 45, 0),
        (((45, 0), (46, 10), (47, 23), (48, 37)), 45, 0),
        (((45, 0), (46, 10), (47, 23), (48, 37)), 46, 10),
        (((45, 0), (46, 10), (48, 37)), 47, 10),
        (((45, 0), (46, 10), (47, 23), (48, 37)), 99, 37),
        (((46, 10),), 45, 0),
    ],
)
def test_position_is_that_of_the_entry_before(entries, offset, position):
    """Kafka's own: a look-up gives the greatest entry up to the offset, or the segment's begin."""
    index = SegmentIndex(
        45, 99, 100, 0, 0, 0, (), (), tuple(IndexEntry(*one, max_timestamp_ms=0) for one in entries)
    )
    assert floor_position(index, offset) == position


@pytest.mark.parametrize(("after_ms", "found"), [(0, (121, 1)), (1, (121, 1)), (2, (122, 2)), (3, None)])
@pytest.mark.parametrize("parts", [(), (1,)])
async def test_offset_of_a_time_is_of_the_first_record_as_late(tmp_path, store, after_ms, found, parts):
    """Kafka's own: of records a moment before, one after and two after a time, the first not earlier one."""
    writer, archive = LogWriter(tmp_path / "log", first_offset=119), archive_in(store)
    for number, time in enumerate((-9, -1, 1, 2)):
        writer.append(b"%d" % number, timestamp_ms=DEFAULT_TIME_MS + time)
        if number != 1:
            writer.roll()
    await archived(writer, archive)
    await spill(archive, writer, *parts)
    record = await archive.records.first_record_at(stored_manifest(store, writer), DEFAULT_TIME_MS + after_ms)
    assert (record and (record.offset, record.timestamp_ms - DEFAULT_TIME_MS)) == found


# --- Reading ---


@pytest.mark.parametrize("parts", [(), (1,), (2, 1)])
async def test_read_goes_on_where_compaction_left_something(remote_log, archive, writer, partition, parts):
    """A read at a compacted offset returns the next batch, from a later segment if its own has no more."""
    for number in range(4):
        writer.append(b"a%d" % number)
        writer.append(b"b%d" % number)
        writer.roll()
    writer.compact(0, without=[1])
    writer.compact(2, without=[2, 3])
    await archived(writer, archive)
    await spill(archive, writer, *parts)
    read = remote_log.read
    fourth = await read(partition, offset=4, size_bytes_max=1)
    assert fourth == writer.data_of(4)[: len(fourth)]
    for offset in (1, 2, 3):
        assert await read(partition, offset=offset, size_bytes_max=1) == fourth
    assert await read(partition, offset=1, size_bytes_max=1, at_least_one_batch=False) == b""
    assert await read(partition, offset=1, size_bytes_max=10**6) == writer.data_of(4)


async def test_read_ends_before_a_gap(remote_log, archive, writer, partition):
    """
    A read returns nothing if no record is left before a recorded gap.

    A read inside the gap is an error.
    """
    writer.append(b"gone")
    writer.roll()
    writer.compact(0, without=[0])
    manifest = (await archived(writer, archive)).with_gap(Gap(1, 5, "lost", 1)).appended([remote(6, 9)])
    await put_manifest(archive, manifest, writer)
    assert await remote_log.read(partition, offset=0, size_bytes_max=100) == b""
    with pytest.raises(ObjectNotFound, match="offset 3 of orders-0"):
        await remote_log.read(partition, offset=3, size_bytes_max=100)


@pytest.mark.parametrize(
    ("size_bytes_max", "at_least_one", "batches"),
    [(1, True, 1), (1, False, 0), (199, True, 1), (10**6, True, 3), (10**6, False, 3)],
)
async def test_read_honours_its_limit(archive, writer, size_bytes_max, at_least_one, batches):
    """Kafka's own: at most so many bytes, but one batch at the least where that is asked for."""
    for number in range(3):
        writer.append(b"%100d" % number)
    data = writer.data_of(0)
    writer.roll()
    await archived(writer, archive)
    found = await archive.remote_log.read(
        writer.identified, offset=0, size_bytes_max=size_bytes_max, at_least_one_batch=at_least_one
    )
    assert found == data[: batches * len(data) // 3]


# --- Side files ---

FILES = {
    SideFileKind.OFFSET_INDEX: LogFileKind.OFFSET_INDEX,
    SideFileKind.TIME_INDEX: LogFileKind.TIME_INDEX,
    SideFileKind.TRANSACTION_INDEX: LogFileKind.TRANSACTION_INDEX,
    SideFileKind.PRODUCER_SNAPSHOT: LogFileKind.PRODUCER_SNAPSHOT,
}


async def with_aborted(writer, archive):
    """Archive a transaction whose data is in segment 0, and whose abort marker is in segment 4."""
    writer.append(b"undone", producer_id=7)
    writer.roll()
    writer.append(b"b", b"c")
    writer.roll()
    writer.begin_epoch(3)
    writer.append(b"d")
    writer.abort(7)
    writer.roll()
    return await archived(writer, archive)


@pytest.mark.parametrize("kind", FILES)
async def test_side_file_is_the_brokers_own(remote_log, archive, writer, partition, kind):
    """A follower gets the file as the broker had it, byte for byte."""
    manifest = await with_aborted(writer, archive)
    segment = manifest.segments[2]
    base = segment.next_offset if kind is SideFileKind.PRODUCER_SNAPSHOT else segment.base_offset
    expected = (writer.path / encode_file_name(base, FILES[kind])).read_bytes()
    assert await remote_log.side_file(partition, segment, kind) == expected != b""


async def test_side_file_that_the_broker_had_not_is_not_found(remote_log, archive, writer, partition):
    """Kafka's own: a segment without an aborted transaction has no transaction index."""
    manifest = await with_aborted(writer, archive)
    with pytest.raises(ObjectNotFound, match=r"segment 1 of .* has no \.txnindex"):
        await remote_log.side_file(partition, manifest.segments[1], SideFileKind.TRANSACTION_INDEX)


@pytest.mark.parametrize("parts", [(), (1,), (1, 1)])
async def test_side_files_are_made_where_the_broker_had_none(remote_log, archive, writer, partition, parts):
    """
    Indexes are made if the broker had none.

    The transaction index has transactions that end in the segment.
    """
    roll = writer.roll

    def bare_roll():
        roll()
        for path in [*writer.path.glob("*index"), *writer.path.glob("*.snapshot")]:
            path.unlink()

    writer.roll = bare_roll
    manifest = await with_aborted(writer, archive)
    await spill(archive, writer, *parts)
    last = manifest.segments[2]
    found = parse_transaction_index(
        await remote_log.side_file(partition, last, SideFileKind.TRANSACTION_INDEX)
    )
    assert [(one.producer_id, one.first_offset, one.last_offset) for one in found] == [(7, 0, 4)]
    assert await remote_log.side_file(partition, last, SideFileKind.OFFSET_INDEX) == b""
    assert len(await remote_log.side_file(partition, last, SideFileKind.TIME_INDEX)) == 12
    for segment, kind in (
        (manifest.segments[0], SideFileKind.TRANSACTION_INDEX),
        (last, SideFileKind.PRODUCER_SNAPSHOT),
    ):
        with pytest.raises(ObjectNotFound, match=kind.value):
            await remote_log.side_file(partition, segment, kind)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(0, [(0, 0)], id="its epochs begin later"),
        pytest.param(1, [(0, 0), (2, 100)], id="one that wrote nothing is left out"),
        pytest.param(2, [(0, 0), (2, 100), (3, 250)], id="from the beginning, not from the segment"),
    ],
)
async def test_leader_epochs_are_those_up_to_the_segments_end(archive, writer, row, expected):
    """Kafka's own: the history is clipped at the segment's end only."""
    segments = [remote(0, 99), remote(100, 199), remote(200, 299)]
    history = ((0, 0), (1, 100), (2, 100), (3, 250), (4, 300))
    await put_manifest(archive, stored(segments).appended((), history), writer)
    data = await archive.remote_log.side_file(writer.identified, segments[row], SideFileKind.LEADER_EPOCHS)
    assert list(parse_epoch_checkpoint(data)) == expected


async def test_leader_epochs_of_an_unknown_partition_are_not_found(remote_log, partition):
    """A partition without a manifest has no epoch history."""
    with pytest.raises(ObjectNotFound, match="not in the archive"):
        await remote_log.side_file(partition, remote(0, 9), SideFileKind.LEADER_EPOCHS)


# --- Deleting ---


async def test_segments_are_deleted_in_batches(remote_log, archive, partition):
    """Many segments take several requests, each with no more names than a store takes, and all go."""
    rows = [remote(number, number) for number in range(1200)]
    for row in rows:
        archive.store.add(data_key(partition, row), b"x")
        archive.store.add(index_key(partition, row), b"x")
    await remote_log.delete_segments(partition, rows)
    assert archive.store.objects == {}
    assert len([one for one in archive.store.requests if one[0].startswith("delete")]) == 3
