"""Reading a partition while retention takes its head, its archive grows, or an object goes missing."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.fakes.archive import archived, archiver_of, observed
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tieringd.errors import ObjectNotFound
from tieringd.formats.object_keys import data_key, index_key
from tieringd.model.manifest_parts import Gap
from tieringd.reading.history import EXPIRED, NOT_ARCHIVED, LogReader


@pytest.fixture
def gaps():
    """Give a list for the gaps that a reader hands on."""
    return []


def reader_of(writer, archive, gaps, *, from_offset=0):
    return LogReader(
        writer.identified,
        manifests=archive.manifests,
        records=archive.records,
        from_offset=from_offset,
        on_gap=gaps.append,
    )


async def offsets_of(reader, *, read_committed=False) -> list[int]:
    return [record.offset async for record in reader.records(read_committed=read_committed)]


async def expire(writer, archive, segments: int, *, deletes: bool = True) -> None:
    """Let retention take the first segments, objects and all."""
    stored = await archive.manifests.load(writer.identified)
    gone = [stored.existing.segments[row] for row in range(segments)]
    await archive.manifests.commit(stored, stored.existing.expired(segments, now_ms=1), leader_epoch=0)
    if deletes:
        await archive.remote_log.delete_segments(writer.identified, gone)


async def test_reader_reads_all_and_then_what_came_since(writer, archive, gaps):
    """A second call goes on where the first ended, and reads nothing twice."""
    writer.closed_segment(), writer.closed_segment()
    await archived(writer, archive)
    reader = reader_of(writer, archive, gaps)
    assert await offsets_of(reader) == [0, 1, 2, 3, 4, 5]
    assert await offsets_of(reader) == []
    writer.closed_segment()
    await archived(writer, archive)
    assert await offsets_of(reader) == [6, 7, 8]
    assert (reader.next_offset, gaps) == (9, [])


async def test_retention_under_a_reader_is_a_gap_and_not_a_failure(writer, archive, gaps):
    """Records that retention took before the reader came to them are reported, and reading goes on."""
    for _ in range(4):
        writer.closed_segment()
    await archived(writer, archive)
    reader = reader_of(writer, archive, gaps)
    found = []
    async for record in reader.records(read_committed=False):
        found.append(record.offset)
        if record.offset == 2:
            await expire(writer, archive, 3)
    assert found == [0, 1, 2, 9, 10, 11]
    assert gaps == [Gap(3, 8, EXPIRED, 1)]


async def test_reader_with_an_old_manifest_reads_on_while_the_objects_are_there(writer, archive, gaps):
    """The delay between the manifest and the deletion of objects is for such readers."""
    for _ in range(3):
        writer.closed_segment()
    await archived(writer, archive)
    reader = reader_of(writer, archive, gaps)
    found = []
    async for record in reader.records(read_committed=False):
        found.append(record.offset)
        if record.offset == 2:
            await expire(writer, archive, 2, deletes=False)
    assert found == list(range(9))
    assert gaps == []


async def test_reader_that_begins_before_the_archive_begins_with_it(writer, archive, gaps):
    """Records that retention took are reported."""
    first = writer.closed_segment()
    writer.closed_segment()
    await archived(writer, archive)
    await expire(writer, archive, 1)
    assert await offsets_of(reader_of(writer, archive, gaps, from_offset=first)) == [3, 4, 5]
    assert gaps == [Gap(0, 2, EXPIRED, 1)]


async def test_offsets_before_an_archive_that_lost_nothing_are_reported(tmp_path, archive, gaps):
    """The archive began behind the wanted offset: what lies between is not archived either."""
    writer = LogWriter(tmp_path / "later", first_offset=10)
    writer.closed_segment()
    await archived(writer, archive)
    assert await offsets_of(reader_of(writer, archive, gaps, from_offset=3)) == [10, 11, 12]
    assert gaps == [Gap(3, 9, NOT_ARCHIVED, 0)]


async def test_object_that_the_newest_manifest_names_is_missing(writer, archive, store, gaps):
    """Reading the manifest again does not help, and reading does not go in circles."""
    for _ in range(2):
        writer.closed_segment()
    manifest = await archived(writer, archive)
    for name in (data_key, index_key):
        await store.delete_many([name(writer.identified, manifest.segments[1])])
    reader = reader_of(writer, archive, gaps)
    with pytest.raises(ObjectNotFound):
        await offsets_of(reader)
    assert reader.next_offset == 3


@pytest.mark.parametrize("wanted", [0, 3, 4, 5, 6])
async def test_reader_that_begins_inside_a_gap_is_told_the_rest_of_it(writer, archive, gaps, wanted):
    """The wanted offsets that are missing are reported, and those before them are not."""
    writer.closed_segment()
    await archived(writer, archive)
    stored = await archive.manifests.load(writer.identified)
    with_gap = stored.existing.with_gap(Gap(3, 5, "lost", 7))
    await archive.manifests.commit(stored, with_gap, leader_epoch=0)
    reader = reader_of(writer, archive, gaps, from_offset=wanted)
    assert await offsets_of(reader) == [offset for offset in range(3) if offset >= wanted]
    assert gaps == ([Gap(max(3, wanted), 5, "lost", 7)] if wanted < 6 else [])


async def test_records_that_were_read_are_no_part_of_a_gap(writer, archive, gaps):
    """A segment that is lost while it is read counts as missing from the next record on."""
    writer.closed_segment()
    await archived(writer, archive)
    reader = reader_of(writer, archive, gaps)
    async with aclosing(reader.records(read_committed=False)) as records:
        assert (await anext(records)).offset == 0
    stored = await archive.manifests.load(writer.identified)
    lost = replace(stored.existing, segments=stored.existing.segments.head(0), gaps=(Gap(0, 2, "lost", 7),))
    await archive.manifests.commit(stored, lost, leader_epoch=0)
    assert await offsets_of(reader) == []
    assert gaps == [Gap(1, 2, "lost", 7)]


async def test_gap_that_is_read_across_is_told_once(writer, archive, gaps):
    """A gap is reported once, even if the reader reads the manifest again behind it."""
    for _ in range(3):
        writer.closed_segment()
    archiver = archiver_of(writer, archive, FakeBroker(writer))
    await archiver.step(observed(writer))
    stored = await archive.manifests.load(writer.identified)
    first, lost, last = stored.existing.segments
    table = stored.existing.segments
    with_gap = replace(
        stored.existing,
        segments=table.head(1).appended([last]),
        gaps=(Gap(lost.base_offset, lost.last_offset, "lost", 7),),
    )
    await archive.manifests.commit(stored, with_gap, leader_epoch=0)
    reader = reader_of(writer, archive, gaps)
    assert await offsets_of(reader) == [0, 1, 2, 6, 7, 8]
    assert await offsets_of(reader) == []
    assert gaps == [Gap(3, 5, "lost", 7)]
    assert first.base_offset == 0


async def test_partition_that_is_not_archived_is_an_error(writer, archive, gaps):
    """There is nothing to begin with."""
    with pytest.raises(ObjectNotFound, match="the bucket holds nothing of"):
        await offsets_of(reader_of(writer, archive, gaps))
