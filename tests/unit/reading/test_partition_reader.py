"""Archived batches for a fetch: from any offset, within any limit, and over holes and gaps."""

from __future__ import annotations

import asyncio
import errno
import os
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.builders import batch
from tests.fakes.archive import archived
from tests.fakes.hydration import PARTITION, Host, Stored, read_batches, running
from tests.fakes.memory_store import MemoryStore
from tests.fakes.virtual_loop import virtually
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.errors import LocalFileError, ObjectNotFound
from tieringd.formats.object_keys import data_key
from tieringd.formats.record_batch import NO_PRODUCER_ID, check_crc, parse_header
from tieringd.formats.records import iter_records
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.policies.cache_trim import TrimLimits
from tieringd.policies.chunk_layout import history_part
from tieringd.reading import partition_reader
from tieringd.reading.chunk_download import DownloadLimits
from tieringd.reading.partition_reader import (
    NO_BATCH,
    HeldRead,
    PartitionReader,
    under_first_epoch,
    unfinished_reads,
)

CACHED = TrimLimits(size_bytes=1 << 30, objects=1000)
STREAMED = TrimLimits(size_bytes=0, objects=1000)


@pytest.fixture(params=[CACHED, STREAMED], ids=["cached", "streamed"])
def host(request, tmp_path, store):
    return Host(tmp_path / "cache", store, limits=request.param)


def content(batches) -> bytes:
    if batches.file is not None:
        return os.pread(batches.file.fd, batches.file.size_bytes, batches.file.position)
    return bytes(batches.data or b"")


def headers_in(data: bytes):
    """Return the header of every batch, each checked; the last one is whole as well."""
    found, at = [], 0
    while at < len(data):
        header = parse_header(data, at)
        check_crc(memoryview(data), header, at)
        found.append(header)
        at += header.size_bytes
    return found


def reader_of(hydrator):
    """Return a reader of archives of which nothing is spilled."""
    return PartitionReader(hydrator, SpilloverManifests(MemoryStore()))


async def read(hydrator, manifest, offset, *, size_bytes_max=1 << 30, needs_a_batch=True):
    """Return the headers of what is read; None when there is nothing to read."""
    found = await read_batches(
        reader_of(hydrator), manifest, offset, size_bytes_max=size_bytes_max, needs_a_batch=needs_a_batch
    )
    if found is None:
        return None
    try:
        data = content(found)
        assert len(data) == found.size_bytes
        headers = headers_in(data)
        if found.next_offset >= 0:
            # After what was compacted away at a chunk's end it may be more.
            assert found.next_offset > headers[-1].last_offset
        return headers
    finally:
        found.close()


async def test_read_begins_with_the_batch_that_holds_the_offset(writer, archive, host):
    """A read begins with the batch of its offset, at every offset of both segments, and nowhere else."""
    for _ in range(3):
        writer.append()
    writer.roll()
    for _ in range(3):
        writer.append()
    writer.roll()
    manifest = await archived(writer, archive)
    async with running(host) as hydrator:
        for offset in range(manifest.next_offset):
            first = (await read(hydrator, manifest, offset))[0]
            assert first.base_offset <= offset <= first.last_offset
        assert await read(hydrator, manifest, manifest.next_offset) is None
        assert await read(hydrator, manifest, -1) is None
        assert [one.base_offset for one in await read(hydrator, manifest, 4)] == [3, 6]


async def test_read_keeps_to_its_limit(writer, archive, host):
    """Whole batches only; the first one in any case, where one is needed."""
    for _ in range(4):
        writer.append()
    base = writer.roll()
    manifest = await archived(writer, archive)
    size_bytes = manifest.segments[0].size_bytes // 4
    async with running(host) as hydrator:
        assert len(await read(hydrator, manifest, 0, size_bytes_max=1)) == 1
        assert await read(hydrator, manifest, 0, size_bytes_max=1, needs_a_batch=False) == []
        assert await read(hydrator, manifest, 0, size_bytes_max=size_bytes - 1, needs_a_batch=False) == []
        for limit in (size_bytes, 2 * size_bytes + 5, 4 * size_bytes):
            found = await read(hydrator, manifest, 0, size_bytes_max=limit)
            assert 1 <= len(found) <= limit // size_bytes
        assert len(await read(hydrator, manifest, 0)) == 4
        reader = reader_of(hydrator)
        for limit, next_offset in ((1, 3), (size_bytes, 3), (4 * size_bytes, 12)):
            found = await read_batches(reader, manifest, 0, size_bytes_max=limit, needs_a_batch=True)
            found.close()
            assert found.next_offset == next_offset
    assert base == 12


async def test_read_goes_on_over_a_gap(writer, archive, host):
    """Lost offsets are passed over, as a client passes over compacted ones."""
    for _ in range(3):
        writer.closed_segment()
    whole = await archived(writer, archive)
    first, lost, last = whole.segments
    table = whole.segments.head(1).appended([last])
    manifest = replace(whole, segments=table, gaps=(Gap(lost.base_offset, lost.last_offset, "lost", 0),))
    async with running(host) as hydrator:
        assert [one.base_offset for one in await read(hydrator, manifest, lost.base_offset)] == [6]
    assert first.base_offset == 0


async def test_read_goes_on_over_what_a_cleaner_took_at_a_segments_end(writer, archive, host):
    """The last batches of a segment are gone: a client that asks for them gets what comes after."""
    for _ in range(3):
        writer.append()
    writer.roll()
    writer.closed_segment()
    writer.compact(0, without=[3, 6])
    manifest = await archived(writer, archive)
    assert [(one.base_offset, one.last_offset) for one in manifest.segments] == [(0, 8), (9, 11)]
    async with running(host) as hydrator:
        for offset in range(3, 9):
            assert [one.base_offset for one in await read(hydrator, manifest, offset)] == [9]
        found = await read_batches(
            reader_of(hydrator), manifest, 2, size_bytes_max=1 << 30, needs_a_batch=True
        )
        found.close()
        assert found.next_offset > 2


async def test_batches_that_a_cleaner_has_emptied_are_passed_over(store, host):
    """KafkaJS asks for ever where it gets nothing else. What comes after them takes it on."""
    emptied = batch(3, (), last_offset_delta=2)
    first = Stored(
        store, data=batch(0) + emptied + batch(6) + batch(9, (), last_offset_delta=2), next_offset=12
    )
    second = Stored(store, 12, batches=1)
    manifest = PartitionManifest.begin(PARTITION, start_offset=0)
    manifest = manifest.appended([first.segment, second.segment])
    async with running(host) as hydrator:
        for offset, base in ((3, 6), (5, 6), (9, 12), (11, 12)):
            assert (await read(hydrator, manifest, offset))[0].base_offset == base
        assert [one.record_count for one in await read(hydrator, manifest, 0)] == [3, 0, 3, 0]


@pytest.mark.parametrize("is_dense", [True, False], ids=["dense", "sparse"])
@pytest.mark.parametrize(("end_offset", "next_start"), [(12, 12), (12, 15), (13, 13), (14, 16), (2, 2)])
async def test_part_of_a_merged_segment_ends_at_its_end(
    writer, archive, store, host, *, is_dense, end_offset, next_start
):
    """
    A segment that the old cluster has merged across a link gives the batches before the link, and no other.

    A batch that is on both sides gives none of its records: a client would miss those of the new log.
    """
    if is_dense:
        manifest = PartitionManifest.begin(PARTITION, start_offset=0)
        manifest = manifest.appended([Stored(store, batches=7).segment])
    else:
        for _ in range(7):
            writer.append()
        writer.roll()
        manifest = await archived(writer, archive)
    part = history_part(manifest, end_offset=end_offset, next_start=next_start)
    size_bytes = manifest.segments[0].size_bytes // 7
    async with running(host) as hydrator:
        for limit in (1, size_bytes * 5 // 2, 1 << 30):
            offset, found = 0, []
            while offset < part.next_offset:
                headers = await read(hydrator, part, offset, size_bytes_max=limit)
                found += headers
                offset = headers[-1].next_offset
            assert offset == next_start
            bases = [one.base_offset for one in found if not one.is_control]
            assert bases == list(range(0, end_offset - 2, 3))
        assert await read(hydrator, part, next_start) is None


async def test_gap_at_the_end_is_a_marker_at_its_end(writer, archive, host):
    """
    A client that gets nothing would ask for ever, and one that gets an error would begin anew.

    KafkaJS asks for ever also where it gets a batch without any record.
    """
    writer.closed_segment()
    manifest = (await archived(writer, archive)).with_gap(Gap(3, 9, "lost", 0))
    async with running(host) as hydrator:
        (header,) = await read(hydrator, manifest, 5)
        assert (header.base_offset, header.last_offset, header.record_count) == (5, 9, 1)
        assert (header.is_control, header.producer_id) == (True, NO_PRODUCER_ID)
        found = await read_batches(
            reader_of(hydrator), manifest, 5, size_bytes_max=1 << 20, needs_a_batch=True
        )
        (marker,) = iter_records(memoryview(content(found)))
        assert (marker.offset, marker.key) == (9, b"\0\0\0\1")
        # franz-go would look for a negative time as for the log's end.
        assert marker.timestamp_ms == manifest.segments[0].max_timestamp_ms
        assert await read(hydrator, manifest, 10) is None


async def test_aborted_transactions_come_with_their_records(writer, archive, host):
    """A reader of committed records gets the list of transactions to leave out."""
    writer.append(b"no", producer_id=7)
    writer.append(b"yes", producer_id=8)
    writer.abort(7)
    writer.commit(8)
    writer.roll()
    manifest = await archived(writer, archive)
    async with running(host) as hydrator:
        found = await read_batches(
            reader_of(hydrator), manifest, 0, size_bytes_max=1 << 20, needs_a_batch=True
        )
        assert [(one.producer_id, one.first_offset) for one in found.aborted] == [(7, 0)]
        found.close()
        later = await read_batches(
            reader_of(hydrator), manifest, 3, size_bytes_max=1 << 20, needs_a_batch=True
        )
        assert later.aborted == ()
        later.close()


async def test_object_that_has_gone_is_for_the_caller(writer, archive, store, host):
    """The caller has to read the manifest again."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    await store.delete_many([data_key(writer.identified, manifest.segments[0])])
    async with running(host) as hydrator:
        with pytest.raises(ObjectNotFound):
            await read(hydrator, manifest, 0)


async def test_history_comes_under_the_first_epoch(writer, archive, host):
    """Batches of history get the first epoch in memory. The cached bytes stay as they are stored."""
    writer.begin_epoch(37)
    writer.append(), writer.append(), writer.roll()
    manifest = await archived(writer, archive)
    async with running(host) as hydrator:
        found = await read_batches(
            reader_of(hydrator), manifest, 0, size_bytes_max=1 << 30, needs_a_batch=True
        )
        stored = content(found)
        moved = under_first_epoch(found)
        headers = headers_in(content(moved))
        assert [one.leader_epoch for one in headers] == [0, 0]
        assert [one._replace(leader_epoch=37) for one in headers] == headers_in(stored)
        assert moved.size_bytes == len(stored)
        moved.close()
        assert [one.leader_epoch for one in await read(hydrator, manifest, 0)] == [37, 37]
    assert under_first_epoch(NO_BATCH) is NO_BATCH


async def test_gap_at_the_end_is_of_no_leader(writer, archive, host):
    """A client takes no epoch from a batch that no leader wrote."""
    writer.append(), writer.roll()
    manifest = await archived(writer, archive)
    manifest = manifest.with_gap(Gap(manifest.next_offset, manifest.next_offset + 4, "lost", 0))
    async with running(host) as hydrator:
        (header,) = await read(hydrator, manifest, manifest.next_offset - 1)
        assert header.leader_epoch == -1


async def test_rest_of_a_chunk_that_was_cut_is_read(tmp_path, store):
    """A whole segment fits neither cache nor memory. The next part is read behind a hole at a part's end."""
    data = b"".join(batch(base, [b"v" * 300] * 3) for base in (0, 10, 20, 30))
    stored = Stored(store, data=data, next_offset=40)
    manifest = PartitionManifest.begin(PARTITION, start_offset=0).appended([stored.segment])
    host = Host(tmp_path / "cache", store, limits=STREAMED)
    part_bytes = len(data) // 4
    limits = DownloadLimits(stream_bytes_max=part_bytes)
    async with running(host, is_whole=True, chunk_bytes=part_bytes, downloads=limits) as hydrator:
        for offset in range(33):
            (header,) = await read(hydrator, manifest, offset)
            assert header.base_offset == min(base for base in (0, 10, 20, 30) if base + 2 >= offset)


async def test_small_part_keeps_no_chunk_in_memory(tmp_path, writer, archive, store):
    """A slow client holds no more memory than the bytes that it was given."""
    for _ in range(6):
        writer.append(b"v" * 300)
    writer.roll()
    manifest = await archived(writer, archive)
    host = Host(tmp_path / "cache", store, limits=STREAMED)
    async with running(host, is_whole=True) as hydrator:
        found = await read_batches(reader_of(hydrator), manifest, 0, size_bytes_max=1, needs_a_batch=True)
        assert len(found.data.obj) == found.size_bytes < manifest.segments[0].size_bytes // 2
        found.close()


async def test_cached_file_that_cannot_be_read_is_mistrusted(host, writer, archive, monkeypatch):
    """The reader gets an error and nothing stays open. The file is fetched anew for the next reader."""
    writer.append(), writer.roll()
    manifest = await archived(writer, archive)

    def unreadable(*_: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    async with running(host) as hydrator:
        await read(hydrator, manifest, 0)
        if not host.keeper.directory.accounts.use().objects:
            return
        with monkeypatch.context() as disk:
            disk.setattr(partition_reader, "os", SimpleNamespace(pread=unreadable))
            with pytest.raises(LocalFileError, match="cannot be read"):
                await read(hydrator, manifest, 0)
        assert [one.base_offset for one in await read(hydrator, manifest, 0)] == [0]


class HeldChunk:
    """A chunk that counts how often it was given back."""

    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


@virtually
async def test_fetch_that_is_cancelled_twice_gives_its_chunks_back():
    """The client leaves, and the time of its Fetch is over before a read ends that a thread holds up."""
    early, late = HeldChunk(), HeldChunk()
    reads = [HeldRead(held=early), HeldRead()]

    async def held_up():
        # A thread is not interrupted, and its result is there in the end.
        work = asyncio.create_task(asyncio.sleep(1))
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(work)
        reads[1].held = late

    tasks = [asyncio.create_task(asyncio.sleep(0)), asyncio.create_task(held_up())]
    fetch = asyncio.create_task(unfinished_reads(tasks, reads, lambda pending: 10))
    await asyncio.sleep(0.1)
    fetch.cancel()
    await asyncio.sleep(0.1)
    # As `asyncio.timeout` does.
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    assert (early.closed, late.closed) == (1, 1)


async def test_cached_file_that_is_damaged_under_a_reader_is_mistrusted(tmp_path, store, writer, archive):
    """The headers before an offset cannot be walked over. The reader gets an error and nothing stays open."""
    for _ in range(3):
        writer.append()
    writer.roll()
    manifest = await archived(writer, archive)
    host = Host(tmp_path / "cache", store, limits=CACHED)
    async with running(host, is_whole=True) as hydrator:
        held = await reader_of(hydrator).hold(manifest, 0)
        (chunk,) = (tmp_path / "cache").rglob("*_chunks/*")
        whole = chunk.read_bytes()
        chunk.write_bytes(whole[:100] + bytes(len(whole) - 100))
        with pytest.raises(LocalFileError, match="cannot be read"):
            held.take(size_bytes_max=1 << 30, needs_a_batch=True, before_offset=8)
        assert host.keeper.open_chunks.in_use() == frozenset()
        # The next reader checks the file, and fetches it anew.
        headers = await read(hydrator, manifest, 0)
        assert [header.base_offset for header in headers] == [0, 3, 6]
