"""Records of the archive: both isolation levels, by time, across segments and gaps."""

from __future__ import annotations

from random import Random

import pytest
from crc32c import crc32c

from tests.builders import DEFAULT_TIME_MS, batch
from tests.fakes.archive import archive_in, archived, archiver_of, observed, values_in, written_below
from tests.fakes.broker import FakeBroker
from tieringd.archive.archive_reader import LOOKUP_BYTES
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import data_key
from tieringd.formats.record_batch import HEADER_BYTES, parse_header, sealed
from tieringd.policies.chunk_layout import history_part


@pytest.fixture
async def transacted(writer, archive):
    """Archive three segments over which committed and aborted transactions reach."""
    writer.append(b"plain")
    writer.append(b"aborted 1", producer_id=7)
    writer.append(b"committed 1", producer_id=8)
    writer.roll()
    writer.append(b"aborted 2", producer_id=7)
    writer.append(b"committed 2", producer_id=8)
    writer.roll()
    writer.abort(7)
    writer.append(b"second try", producer_id=7)
    writer.commit(8)
    writer.commit(7)
    writer.roll()
    return await archived(writer, archive)


async def test_uncommitted_reading_shows_every_record(writer, archive, transacted):
    """Uncommitted reading gives all clients' records, and no control record."""
    found = await values_in(archive, transacted)

    assert found == written_below(writer, transacted.next_offset)
    assert b"aborted 2" in found.values()


async def test_committed_reading_leaves_out_what_was_aborted(writer, archive, transacted):
    """Aborted records are left out in every segment, and the producer's next transaction is not."""
    found = await values_in(archive, transacted, read_committed=True)

    assert list(found.values()) == [b"plain", b"committed 1", b"committed 2", b"second try"]
    assert found == written_below(writer, transacted.next_offset, read_committed=True)


@pytest.mark.parametrize("read_committed", [False, True])
async def test_reading_starts_at_any_offset(writer, archive, transacted, read_committed):
    """A read from any offset gives the records of a read from the start, less those before the offset."""
    whole = await values_in(archive, transacted, read_committed=read_committed)

    for offset in range(transacted.next_offset + 2):
        found = await values_in(archive, transacted, from_offset=offset, read_committed=read_committed)
        assert found == {each: value for each, value in whole.items() if each >= offset}


async def test_records_inside_a_batch_before_the_offset_are_left_out(writer, archive):
    """An offset in the middle of a batch begins there, not at the batch."""
    writer.closed_segment(b"a", b"b", b"c")
    manifest = await archived(writer, archive)

    assert await values_in(archive, manifest, from_offset=1) == {1: b"b", 2: b"c"}


@pytest.fixture
async def with_gap(writer, archive, store):
    """Archive a segment, lose one, and archive another."""
    writer.closed_segment(b"a")
    archiver = archiver_of(writer, archive, FakeBroker(writer))
    await archiver.step(observed(writer))
    writer.closed_segment(b"lost")
    writer.closed_segment(b"b")
    writer.drop_head()
    writer.drop_head()
    for _ in range(2):
        await archiver.step(observed(writer))
    return archiver.manifest


async def test_gap_is_told_in_its_place(archive, with_gap):
    """A recorded gap is handed over between the records around it."""
    seen: list[object] = []
    records = archive.records.records(with_gap, from_offset=0, read_committed=False, on_gap=seen.append)
    async for record in records:
        seen.append(record.value)  # noqa: PERF401 - the order of both kinds is the point

    assert seen == [b"a", with_gap.gaps[0], b"b"]


async def test_gap_is_told_only_to_readers_across_it(archive, with_gap):
    """A reader that begins inside a gap hears of it, one that begins behind does not."""
    for from_offset, expected in ((1, [with_gap.gaps[0]]), (2, [])):
        told: list[object] = []
        records = archive.records.records(
            with_gap, from_offset=from_offset, read_committed=False, on_gap=told.append
        )
        assert [record.value async for record in records] == [b"b"]
        assert told == expected


async def test_gap_at_the_end_is_told(archive, writer, with_gap):
    """A gap that no segment follows yet is reported when the records are over."""
    ends_with_gap = with_gap.with_gap(
        type(with_gap.gaps[0])(with_gap.next_offset, with_gap.next_offset, "a test", 0)
    )
    told: list[object] = []
    async for _ in archive.records.records(
        ends_with_gap, from_offset=2, read_committed=True, on_gap=told.append
    ):
        assert told == []
    assert told == [ends_with_gap.gaps[-1]]


async def test_offset_for_time_is_the_first_record_as_late(writer, archive):
    """A time leads to the first record with it or later, in whichever segment."""
    offsets = []
    for number in range(4):
        offsets.append(writer.append(b"x", b"y", timestamp_ms=DEFAULT_TIME_MS + 100 * number))
        if number % 2:
            writer.roll()
    manifest = await archived(writer, archive)
    offset_for_time = archive.records.offset_for_time

    assert await offset_for_time(manifest, 0) == 0
    for number, offset in enumerate(offsets):
        time = DEFAULT_TIME_MS + 100 * number
        assert await offset_for_time(manifest, time) == offset
        # Records of a batch are a millisecond apart.
        assert await offset_for_time(manifest, time + 1) == offset + 1
        assert await offset_for_time(manifest, time + 2) == (offset + 2)
    assert await offset_for_time(manifest, DEFAULT_TIME_MS + 10_000) == manifest.next_offset


async def test_offset_for_time_finds_late_records_behind_earlier_ones(writer, archive):
    """Times need not ascend: the first record that is late enough counts."""
    writer.append(b"late", timestamp_ms=DEFAULT_TIME_MS + 500)
    writer.append(b"early", timestamp_ms=DEFAULT_TIME_MS)
    writer.append(b"later", timestamp_ms=DEFAULT_TIME_MS + 900)
    writer.roll()
    manifest = await archived(writer, archive)

    assert await archive.records.offset_for_time(manifest, DEFAULT_TIME_MS + 400) == 0
    assert await archive.records.offset_for_time(manifest, DEFAULT_TIME_MS + 600) == 2


async def test_empty_manifest_has_no_records(writer, archive):
    """A partition of which nothing is stored reads as empty."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    nothing = type(manifest).begin(manifest.partition, start_offset=0)

    assert await values_in(archive, nothing) == {}
    assert await archive.records.offset_for_time(nothing, 0) == 0


async def test_object_that_has_gone_is_not_an_end(writer, archive, store):
    """A segment without its object is an error; records are never silently fewer."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    await store.delete_many([data_key(writer.identified, manifest.segments[0])])

    with pytest.raises(ObjectNotFound):
        await values_in(archive, manifest)


async def test_records_that_cannot_be_parsed_name_their_object(writer, store):
    """The error of a batch with a right checksum and wrong records has object, position and offset."""
    writer.append(b"good")
    archive = archive_in(store)
    writer.roll()
    manifest = await archived(writer, archive)
    (segment,) = manifest.segments
    key = data_key(writer.identified, segment)
    # The batch of another count of records, sealed anew: only parsing can tell.
    damaged = broken_batch(segment.size_bytes)
    store.add(key, damaged)

    with pytest.raises(CorruptDataError) as caught:
        await values_in(archive, manifest)
    assert (caught.value.source, caught.value.position, caught.value.offset) == (key, 0, 0)


def broken_batch(size_bytes: int) -> bytes:
    """Return a sound batch of *size_bytes* whose header counts a record too many."""
    whole = batch(0, [b"good"])
    assert len(whole) == size_bytes
    header = parse_header(whole)
    return sealed(header._replace(record_count=header.record_count + 1), whole[HEADER_BYTES:])


@pytest.mark.parametrize("seed", range(8))
async def test_time_is_found_among_small_and_large_batches(writer, archive, seed):
    """The first record that is as late, from headers or from records; times go back and forth."""
    random = Random(seed)
    times = {}
    for _ in range(40):
        size = random.choice([10, 10, 3_000, LOOKUP_BYTES, 2 * LOOKUP_BYTES])
        values = [random.randbytes(size) for _ in range(random.choice([1, 3]))]
        time_ms = DEFAULT_TIME_MS + random.randrange(500)
        base_offset = writer.next_offset
        writer.append(*values, timestamp_ms=time_ms)
        times |= {base_offset + number: time_ms + number for number in range(len(values))}
        if random.random() < 0.1:
            writer.roll()
    writer.roll()
    manifest = await archived(writer, archive)

    for time_ms in range(DEFAULT_TIME_MS - 1, DEFAULT_TIME_MS + 505, 7):
        wanted = next((offset for offset, each in sorted(times.items()) if each >= time_ms), None)
        record = await archive.records.first_record_at(manifest, time_ms)
        assert (None if record is None else record.offset) == wanted
        assert await archive.records.first_offset_at(manifest, time_ms) == wanted


async def test_damaged_time_of_a_large_batch_is_noticed(writer, archive, store):
    """The header of a batch has no checksum of its own, so the batch is read if the index contradicts it."""
    for number in range(4):
        writer.append(bytes(2 * LOOKUP_BYTES), timestamp_ms=DEFAULT_TIME_MS + number)
    writer.roll()
    manifest = await archived(writer, archive)
    key = data_key(writer.identified, manifest.segments[0])
    data = bytearray((await store.get(key))[0])
    at = len(data) // 2
    data[at + 35 : at + 43] = (DEFAULT_TIME_MS - 9).to_bytes(8, "big")
    await store.put(key, bytes(data), crc32c=crc32c(bytes(data)))

    assert await archive.records.first_offset_at(manifest, DEFAULT_TIME_MS + 1) == 1
    with pytest.raises(CorruptDataError):
        await archive.records.first_offset_at(manifest, DEFAULT_TIME_MS + 2)


@pytest.mark.parametrize("value", [b"a", b"a" * 5000], ids=["sparse", "dense"])
@pytest.mark.parametrize("end_offset", [1, 3, 4, 5, 6, 9])
async def test_part_of_a_merged_segment_has_the_records_before_its_end(writer, archive, *, end_offset, value):
    """A part that ends inside a segment has no record and no time from past its end."""
    for number in range(4):
        writer.append(value, value, value, timestamp_ms=DEFAULT_TIME_MS + 1000 * number)
    writer.roll()
    manifest = await archived(writer, archive)
    part = history_part(manifest, end_offset=end_offset, next_start=end_offset + 2)
    assert sorted(await values_in(archive, part)) == list(range(end_offset))
    for offset in range(12):
        record = await archive.records.first_record_at(
            part, DEFAULT_TIME_MS + 1000 * (offset // 3) + offset % 3
        )
        assert (record and record.offset) == (offset if offset < end_offset else None)
    latest = await archive.records.latest_record(part)
    whole = end_offset // 3
    latest_ms = DEFAULT_TIME_MS + 1000 * (whole - 1) + 2 if whole else None
    assert (latest and latest.timestamp_ms) == latest_ms
    assert (await archive.records.latest_record(manifest)).timestamp_ms == DEFAULT_TIME_MS + 3002


async def test_latest_record_is_the_marker_that_is_later_than_its_transaction(writer, archive):
    """The marker has the clock of the coordinator, which ends the transaction after its last record."""
    writer.append(producer_id=7, timestamp_ms=DEFAULT_TIME_MS)
    writer.commit(7, timestamp_ms=DEFAULT_TIME_MS + 500)
    writer.append(timestamp_ms=DEFAULT_TIME_MS + 100)
    writer.roll()
    manifest = await archived(writer, archive)
    latest = await archive.records.latest_record(manifest)
    assert (latest.offset, latest.timestamp_ms) == (3, DEFAULT_TIME_MS + 500)
    # A reader by time gets records, and no marker.
    assert await archive.records.first_record_at(manifest, DEFAULT_TIME_MS + 500) is None


@pytest.mark.parametrize("start_offset", [3, 4])
async def test_latest_record_is_one_that_is_left(writer, archive, start_offset):
    """The newest record of the first segment is deleted, and the batch after it may be left in part."""
    writer.append(timestamp_ms=DEFAULT_TIME_MS + 9000)
    writer.append(b"a", b"b", b"c", timestamp_ms=DEFAULT_TIME_MS + 5000)
    writer.roll()
    writer.append(timestamp_ms=DEFAULT_TIME_MS)
    writer.roll()
    manifest = await archived(writer, archive)
    latest = await archive.records.latest_record(manifest.seen_from(start_offset))
    assert (latest.offset, latest.timestamp_ms) == (5, DEFAULT_TIME_MS + 5002)
