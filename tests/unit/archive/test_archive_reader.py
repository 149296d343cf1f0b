"""Batches of a stored object: found by offset or time, fetched ahead, checked one by one."""

from __future__ import annotations

import asyncio

import pytest
from crc32c import crc32c

from tests.fakes.archive import archive_in, archived
from tests.fakes.memory_store import MemoryStore
from tieringd.archive.archive_reader import (
    ArchiveReader,
    floor_position,
    offset_at_or_after_time,
    whole_batches_bytes,
)
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import data_key
from tieringd.formats.segment_scan import DEFAULT_INDEX_INTERVAL_BYTES
from tieringd.model.segment import IndexEntry, SegmentIndex

_VALUE = b"x" * 24_000


@pytest.fixture
async def stored(writer, archive):
    """Archive a segment of eight batches, more than one index entry long; give its key and index."""
    for number in range(8):
        writer.append(b"%d" % number, _VALUE)
    writer.roll()
    manifest = await archived(writer, archive)
    segment = manifest.segments[0]
    assert segment.size_bytes > 2 * DEFAULT_INDEX_INTERVAL_BYTES
    return data_key(writer.identified, segment), await archive.remote_log.index_of(writer.identified, segment)


async def batches_of(reader, key, index, from_offset, **options):
    return [each async for each in reader.batches(key, index, from_offset=from_offset, **options)]


@pytest.mark.parametrize("chunk_bytes", [9_000, 24_010, 30_000, 1 << 20])
async def test_batches_are_whole_whatever_the_chunk(writer, archive, stored, chunk_bytes):
    """Chunks that cut batches anywhere give the same batches, at the same positions."""
    key, index = stored
    found = await batches_of(archive.reader, key, index, 0, chunk_bytes=chunk_bytes)

    data = writer.data_of(0)
    assert b"".join(bytes(each.data) for each in found) == data
    assert [data[each.position : each.position + len(each.data)] for each in found] == [
        bytes(each.data) for each in found
    ]
    assert [each.header.base_offset for each in found] == list(range(0, 16, 2))


@pytest.mark.parametrize("offset", range(17))
async def test_batches_begin_with_the_one_that_holds_the_offset(archive, stored, offset):
    """Every offset of a batch leads to that batch; one past the end to none."""
    key, index = stored
    found = await batches_of(archive.reader, key, index, offset)

    assert [each.header.base_offset for each in found] == list(range(offset // 2 * 2, 16, 2))


async def test_reading_starts_at_the_index_entry(store, archive, stored):
    """Bytes before the index entry of the offset are not fetched."""
    key, index = stored
    asked: list[int] = []
    get_range = store.get_range

    async def noting(key, *, position, size_bytes):
        asked.append(position)
        return await get_range(key, position=position, size_bytes=size_bytes)

    store.get_range = noting
    await batches_of(archive.reader, key, index, 15)

    assert asked == [floor_position(index, 15)]
    assert asked[0] > 0


async def test_next_chunk_is_fetched_while_one_is_read(store, archive, stored):
    """The request for what follows is under way before the reader asks for it."""
    key, index = stored
    reading = archive.reader.batches(key, index, from_offset=0, chunk_bytes=30_000)

    await anext(reading)
    await asyncio.sleep(0)

    assert [operation for operation, _ in store.requests].count("get_range") == 2
    await reading.aclose()


async def test_reader_that_stops_early_leaves_no_request_behind(stored):
    """A reader that is closed cancels the fetch that is under way, and waits for its end."""
    key, index = stored

    class StuckStore(MemoryStore):
        under_way = 0

        async def get_range(self, key, *, position, size_bytes):
            StuckStore.under_way += 1
            try:
                if position:
                    await asyncio.get_running_loop().create_future()
                return self.objects[key][0][position : position + size_bytes]
            finally:
                StuckStore.under_way -= 1

    store = StuckStore()
    store.add(key, b"\0" * index.size_bytes)
    reading = ArchiveReader(store).batches(key, index, from_offset=0, chunk_bytes=30_000)
    with pytest.raises(CorruptDataError):
        await anext(reading)

    assert StuckStore.under_way == 0


async def test_damaged_batch_is_named_by_object_and_position(writer, store, archive, stored):
    """The batch's own checksum shows a flipped byte, and the error has the batch's place."""
    key, index = stored
    data = bytearray(store.objects[key][0])
    third = (await batches_of(archive.reader, key, index, 0))[2]
    data[third.position + 100] ^= 1
    store.add(key, bytes(data))

    with pytest.raises(CorruptDataError) as caught:
        await batches_of(archive.reader, key, index, 0)
    assert (caught.value.source, caught.value.position) == (key, third.position)
    assert [each.header.base_offset for each in await batches_of(archive.reader, key, index, 14)] == [14]


@pytest.mark.parametrize("missing_bytes", [1, 1000, 50_000])
async def test_object_shorter_than_its_index_is_damage(store, archive, stored, missing_bytes):
    """An object that ends early is an error, not an end."""
    key, index = stored
    store.add(key, store.objects[key][0][:-missing_bytes])

    with pytest.raises(CorruptDataError, match="shorter than its index says"):
        await batches_of(archive.reader, key, index, 0)


async def test_object_that_has_gone_is_not_found(store, archive, stored):
    """A deleted object tells the reader to read the manifest again."""
    key, index = stored
    await store.delete_many([key])

    with pytest.raises(ObjectNotFound):
        await batches_of(archive.reader, key, index, 0)


async def test_index_that_ends_inside_a_batch_is_damage(archive, stored):
    """Bytes left over at the end are reported with their number."""
    key, index = stored
    short = SegmentIndex(
        base_offset=0,
        last_offset=15,
        size_bytes=index.size_bytes - 7,
        crc32c=0,
        record_count=0,
        batch_count=0,
        epochs=(),
        aborted=(),
        entries=(),
    )

    with pytest.raises(CorruptDataError, match="cut short"):
        await batches_of(archive.reader, key, short, 0)


def index_of(*entries: IndexEntry) -> SegmentIndex:
    return SegmentIndex(10, 39, 300, 0, 0, 0, (), (), entries)


def test_floor_position_is_the_entry_at_or_before():
    """The last entry at or before an offset counts; without one, the start does."""
    index = index_of(IndexEntry(10, 0, 100), IndexEntry(20, 80, 200), IndexEntry(30, 160, 300))

    assert [floor_position(index, offset) for offset in (5, 10, 19, 20, 29, 30, 99)] == [
        0, 0, 0, 80, 80, 160, 160,
    ]  # fmt: skip
    assert floor_position(index_of(), 12) == 0


def test_time_leads_to_an_offset_at_or_before_its_record():
    """The scan for a time starts at the last entry whose times are all earlier."""
    index = index_of(IndexEntry(10, 0, 100), IndexEntry(20, 80, 200), IndexEntry(30, 160, 300))

    assert [offset_at_or_after_time(index, time) for time in (50, 100, 101, 200, 201, 999)] == [
        10, 10, 10, 10, 20, 30,
    ]  # fmt: skip


def test_whole_batches_end_before_what_is_cut(writer):
    """Only bytes of batches that are there whole are counted."""
    writer.append(b"a")
    first = len(writer.data_of(0))
    writer.append(b"b")
    data = writer.data_of(0)
    ends = (0, 60, first - 1, first, len(data) - 1, len(data))

    assert [whole_batches_bytes(data[:end]) for end in ends] == [0, 0, 0, first, first, len(data)]


async def test_reader_needs_no_state_between_objects(writer, stored):
    """A second reader over the same bucket finds the same batches."""
    key, index = stored
    store = MemoryStore()
    store.add(key, writer.data_of(0))

    assert len(await batches_of(archive_in(store).reader, key, index, 0)) == 8


def with_size(data: bytes, position: int, size_bytes: int) -> bytes:
    """Return *data* whose batch at *position* says that it has *size_bytes*."""
    changed = bytearray(data)
    changed[position + 8 : position + 12] = (size_bytes - 12).to_bytes(4, "big")
    return bytes(changed)


class CountedRanges(MemoryStore):
    """Counts the bytes that readers have asked for."""

    asked_bytes = 0

    async def get_range(self, key, *, position, size_bytes):
        self.asked_bytes += size_bytes
        return await super().get_range(key, position=position, size_bytes=size_bytes)


@pytest.fixture
async def damaged(stored, store):
    """Give a function that damages the size of a batch, and returns a reader, its store, and the index."""
    key, index = stored
    data, _ = await store.get(key)

    async def damage(position, size_bytes):
        changed = CountedRanges()
        content = with_size(data, position, size_bytes)
        await changed.put(key, content, crc32c=crc32c(content))
        return ArchiveReader(changed), changed, key, index

    return damage


@pytest.mark.parametrize(
    "size_bytes", [(1 << 31) + 11, 8 * 24_084 - 24_084 + 1], ids=["largest", "one-too-large"]
)
async def test_impossible_size_is_refused_at_once(damaged, size_bytes):
    """The batches before it are given, and what follows is not gathered in memory."""
    reader, store, key, index = await damaged(24_084, size_bytes)
    runs = reader.runs(key, 0, index.size_bytes, 30_000)
    data, position = await anext(runs)
    assert (position, len(data)) == (0, 24_084)
    with pytest.raises(CorruptDataError, match="a batch says") as failed:
        await anext(runs)
    assert failed.value.position == 24_084
    assert store.asked_bytes <= 3 * 30_000


async def test_size_that_reaches_over_an_index_entry_is_refused_at_once(damaged):
    """The index knows where batches begin: a size that the object has room for is damaged all the same."""
    reader, store, key, index = await damaged(0, 6 * 24_084)
    second = index.entries[1].position
    assert second < 6 * 24_084 < index.size_bytes
    with pytest.raises(CorruptDataError, match=f"and {second} are left for it"):
        [each async for each in reader.batches(key, index, from_offset=0, chunk_bytes=30_000)]
    assert store.asked_bytes <= 2 * 30_000


@pytest.mark.parametrize("chunk_bytes", [1, 7, 61, 62, 1_000, 24_083, 24_084, 24_085])
async def test_large_batch_is_gathered_from_small_chunks(stored, archive, store, chunk_bytes):
    """Headers, batches and chunks may begin and end anywhere."""
    key, index = stored
    data, _ = await store.get(key)
    end = 24_084 if chunk_bytes < 61 else index.size_bytes
    runs = [(position, bytes(run)) async for run, position in archive.reader.runs(key, 0, end, chunk_bytes)]
    assert b"".join(run for _, run in runs) == data[:end]
    assert [position for position, _ in runs] == [
        sum(len(run) for _, run in runs[:n]) for n in range(len(runs))
    ]
