"""A damaged base offset, which no batch's checksum covers: every reader of stored segments names it."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from tests.fakes.archive import archived
from tieringd.archive.object_joiner import ObjectJoiner, index_of_parts, store_merged
from tieringd.archive.segment_part import PartRequest, SegmentParts
from tieringd.archive.segment_rewriter import SegmentRewriter
from tieringd.errors import ChecksumRejected, CorruptDataError
from tieringd.formats.batch_check import check_batches
from tieringd.formats.batch_offsets import ExpectedBatches, places_in
from tieringd.formats.object_keys import data_key

MIDDLE = 1


class KeepsAll:
    """A cut that removes nothing."""

    removed_records = 0
    keeps_aborted = True

    def begin(self, index):
        """Begin a segment."""

    def left_of(self, batch):
        """Return the same bytes."""
        return batch.data


@pytest.fixture
async def damaged(writer, store, archive):
    """Archive two segments of three batches, and damage one batch of the first."""
    for _ in range(2):
        for number in range(3):
            writer.append(b"%d" % number, b"x")
        writer.roll()
    manifest = await archived(writer, archive)
    key = data_key(manifest.partition, manifest.segments[0])
    data = bytearray((await store.get(key))[0])
    place = list(places_in(memoryview(bytes(data)), 0))[MIDDLE]
    data[place.position : place.position + 8] = (place.base_offset + 1).to_bytes(8, "big")
    store.add(key, bytes(data))
    return manifest, key, place


async def read_batches(archive, manifest, **_):
    """Read as `archive cat`, restores and comparisons do."""
    index = await archive.remote_log.index_of(manifest.partition, manifest.segments[0])
    key = data_key(manifest.partition, manifest.segments[0])
    async with aclosing(archive.reader.batches(key, index, from_offset=0)) as batches:
        async for _batch in batches:
            pass


async def read_records(archive, manifest, **_):
    """Read as `tieringd read` does."""
    records = archive.records.records(manifest, from_offset=0, read_committed=False, on_gap=print)
    async with aclosing(records):
        async for _record in records:
            pass


async def read_chunk(archive, manifest, *, store, **_):
    """Check a chunk as the gateway does before it sends one."""
    index = await archive.remote_log.index_of(manifest.partition, manifest.segments[0])
    key = data_key(manifest.partition, manifest.segments[0])
    data, _ = await store.get(key)
    try:
        check_batches(memoryview(data), ExpectedBatches.of_index(index))
    except CorruptDataError as error:
        raise error.located(key) from error


async def rewrite(archive, manifest, *, store, directory):
    """Rewrite a segment as erasures and compactions do."""
    rewriter = SegmentRewriter(store, archive.reader, writer_id="rewritten-e1", work_directory=directory)
    await rewriter.rewrite(manifest.partition, (manifest.segments[0],), KeepsAll())


async def split(archive, manifest, *, store, directory):
    """Store the part of a segment before an offset, as an unclean election may require."""
    parts = SegmentParts(store, archive.reader, writer_id="a1", work_directory=directory)

    async def no_ends(_open):
        return {}

    await parts.store(PartRequest(manifest.partition, manifest.segments[0], 4, 1, no_ends))


@pytest.mark.parametrize("read", [read_batches, read_records, read_chunk, rewrite, split])
async def test_reader_names_object_and_position(archive, store, damaged, tmp_path, read):
    """No reader gives, or stores, a record under another offset than it has."""
    manifest, key, place = damaged
    options = {} if read in {read_batches, read_records} else {"store": store}
    if read in {rewrite, split}:
        options["directory"] = tmp_path
    keys = set(store.objects)
    with pytest.raises(CorruptDataError, match="base offset, which its checksum does not cover") as caught:
        await read(archive, manifest, **options)
    assert (caught.value.source, caught.value.position) == (key, place.position)
    assert set(store.objects) == keys


async def test_deep_scrub_finds_it(archive, damaged):
    """The checksum of the whole object shows the damage to a deep scrub."""
    manifest, key, _ = damaged
    report = await archive.verifier.verify(manifest, deep=True)
    assert [fault for fault in report.faults if key in fault]


async def test_merge_does_not_take_it(archive, store, damaged, tmp_path):
    """The joined object has another checksum than its parts' indexes say."""
    manifest, _, _ = damaged
    parts = tuple(manifest.segments)
    index = await index_of_parts(archive.remote_log, manifest.partition, parts)
    joiner = ObjectJoiner(store, work_directory=tmp_path)
    with pytest.raises(ChecksumRejected):
        await store_merged(store, joiner, manifest.partition, parts, index, leader_epoch=1, writer_id="a1")
