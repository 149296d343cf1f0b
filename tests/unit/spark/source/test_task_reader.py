"""What tasks read: every record once, whatever becomes of the objects in the meantime."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.counted_calls import CountedCalls
from tieringd.archive.archive_reader import ArchiveReader, ceiling_position, floor_position
from tieringd.archive.manifest_store import ManifestStore
from tieringd.errors import CorruptDataError, DataLossError, ObjectNotFound
from tieringd.formats.batch_offsets import places_in
from tieringd.formats.record_batch import LENGTH_STARTS_AT
from tieringd.model.segment import IndexEntry, SegmentIndex
from tieringd.spark.source.data_loss import LossRule
from tieringd.spark.source.planning import plan_tasks, spans_of
from tieringd.spark.source.segment_runs import BatchRun, sections
from tieringd.spark.source.segment_spans import OffsetRange, find_stretches
from tieringd.spark.source.task_reader import ReadingRules, TaskReader, _end_of

EVERYTHING = 2**40


class Reading:
    """One reading of one log, planned when it is made."""

    def __init__(self, bucket, archive, writer, *, from_offset=0, next_offset=None, tasks=1, **rules):
        manifest = archive.manifest(writer)
        self.loss = LossRule(is_fatal=rules.pop("fail_on_data_loss", True))
        end = manifest.next_offset if next_offset is None else next_offset
        wanted = OffsetRange(writer.name, manifest, from_offset, end)
        stretches = find_stretches(bucket, [wanted], rule=self.loss)
        planned = plan_tasks(stretches, task_bytes=EVERYTHING, tasks_min=tasks)
        self.tasks = [tuple(spans_of(task)) for task in planned]
        values = {"columns": ("offset", "value"), "read_committed": False, "skip_corrupt": False}
        self.reader = TaskReader(bucket, ReadingRules(**values | rules, loss=self.loss))

    def batches(self):
        """Yield what the tasks yield, one after another."""
        for task in self.tasks:
            yield from self.reader.batches(task)

    def records(self):
        """Return every record's offset and value, in the order in which they are read."""
        return [(row["offset"], row["value"]) for batch in self.batches() for row in batch.to_pylist()]


def written(writer, *, from_offset=0, next_offset=EVERYTHING, read_committed=False):
    values = writer.values(read_committed=read_committed)
    return [(offset, value) for offset, value in values.items() if from_offset <= offset < next_offset]


@pytest.fixture
def writer(archive):
    """Give a log of four segments, with transactions in it that cross their ends."""
    writer = archive.writer()
    for number in range(4):
        writer.append(b"aborted %d" % number, producer_id=7)
        for turn in range(6):
            writer.append(b"plain %d %d" % (number, turn), b"b", b"c" * 50)
            writer.append(b"kept %d %d" % (number, turn), producer_id=8)
        if number % 2:
            writer.abort(7)
            writer.commit(8)
        writer.roll()
    archive.add(writer)
    return writer


@pytest.mark.parametrize("read_committed", [False, True])
@pytest.mark.parametrize("tasks", [1, 3, 20, 500])
def test_tasks_read_every_record_once(bucket, archive, writer, tasks, read_committed):
    """Tasks read every record once, however many tasks there are, in either isolation level."""
    reading = Reading(bucket, archive, writer, tasks=tasks, read_committed=read_committed)
    assert abs(len(reading.tasks) - min(tasks, writer.next_offset)) <= 1
    assert reading.records() == written(writer, read_committed=read_committed)


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (5, 9), (26, 29), (40, 104), (104, 104)])
def test_range_is_read_exactly(bucket, archive, writer, begin, end):
    """A range is read exactly, even if it begins and ends inside a batch."""
    reading = Reading(bucket, archive, writer, from_offset=begin, next_offset=end)
    assert reading.records() == written(writer, from_offset=begin, next_offset=end)


def test_spilled_segments_are_read(bucket, archive, writer):
    """The spillover manifests are loaded when a range needs them."""
    archive.spill(writer, 2)
    reading = Reading(bucket, archive, writer, from_offset=20)
    assert reading.records() == written(writer, from_offset=20)


class Counting(ArchiveReader):
    """Counts the bytes that are asked for."""

    asked_bytes = 0

    async def runs(self, key, position, end, chunk_bytes=8192, **options):
        """Yield what there is."""
        self.asked_bytes += end - position
        async for item in super().runs(key, position, end, chunk_bytes, **options):
            yield item


def test_part_of_a_segment_is_read_from_its_index_entry(bucket, archive):
    """A part of a segment is read from its index entry to its end. All parts together are the segment."""
    writer = archive.writer()
    for number in range(200):
        writer.append(b"%d" % number * 2000, b"b" * 2000)
    writer.roll()
    archive.add(writer)
    size_bytes = archive.manifest(writer).segments.total_bytes
    bucket.reader = Counting(bucket.store)

    part = Reading(bucket, archive, writer, from_offset=41, next_offset=47)
    assert part.records() == written(writer, from_offset=41, next_offset=47)
    assert bucket.reader.asked_bytes < size_bytes / 4

    bucket.reader.asked_bytes = 0
    assert Reading(bucket, archive, writer, tasks=5).records() == written(writer)
    assert bucket.reader.asked_bytes < size_bytes * 1.5


def test_columns_are_those_that_are_asked_for(bucket, archive, writer):
    """A batch has the columns that were asked for, in their order, and no other."""
    reading = Reading(bucket, archive, writer, columns=("timestampType", "topic", "partition"))
    (batch, *_) = reading.batches()
    assert batch.schema.names == ["timestampType", "topic", "partition"]
    assert batch.to_pylist()[0] == {"timestampType": 0, "topic": "orders", "partition": 0}


@pytest.mark.parametrize("tasks", [1, 3, 20])
def test_plan_outlives_its_segments(bucket, archive, writer, tasks):
    """A table that was planned long ago is read as it was, from what its segments were merged into."""
    reading = Reading(bucket, archive, writer, tasks=tasks, read_committed=True)
    archive.merge(writer)
    assert reading.records() == written(writer, read_committed=True)


class Interrupted(ArchiveReader):
    """Fetches few bytes at a time, and lets something happen after some of them."""

    def __init__(self, store, *, after_runs, happening):
        super().__init__(store)
        self._runs_left = after_runs
        self._happening = happening

    async def runs(self, key, position, end, chunk_bytes=150, **options):
        """Yield what there is, with the happening in between."""
        async for item in super().runs(key, position, end, chunk_bytes, **options):
            yield item
            self._runs_left -= 1
            if self._runs_left == 0:
                await asyncio.to_thread(self._happening)


@pytest.mark.parametrize("after_runs", [1, 2, 3, 5, 8, 13])
def test_segment_that_goes_while_it_is_read(bucket, archive, writer, after_runs):
    """Reading goes on at the next offset: nothing comes twice, and nothing is left out."""
    reading = Reading(bucket, archive, writer)
    bucket.reader = Interrupted(bucket.store, after_runs=after_runs, happening=lambda: archive.merge(writer))
    assert reading.records() == written(writer)
    assert len(archive.manifest(writer).segments) == 1


def test_offsets_that_expire_meanwhile_are_an_error(bucket, archive, writer):
    """The error names the offsets, which were there when they were asked for."""
    reading = Reading(bucket, archive, writer, from_offset=10)
    archive.expire(writer, 2)
    first = archive.manifest(writer).start_offset
    with pytest.raises(DataLossError, match=f"offsets 10 to {first - 1} of orders-0: the archive begins at"):
        reading.records()


@pytest.mark.parametrize("tasks", [1, 6])
def test_offsets_that_expire_meanwhile_may_be_missing(bucket, archive, writer, warnings, tasks):
    """The rest is read."""
    reading = Reading(bucket, archive, writer, tasks=tasks, fail_on_data_loss=False)
    archive.expire(writer, 2)
    first = archive.manifest(writer).start_offset
    assert reading.records() == written(writer, from_offset=first)
    assert "records are not in the archive" in warnings.events()


def test_archive_that_is_deleted_meanwhile(bucket, archive, writer, warnings):
    """Nothing is left of it, and that is a loss as well."""
    strict = Reading(bucket, archive, writer)
    lenient = Reading(bucket, archive, writer, fail_on_data_loss=False)
    archive.delete(writer, *archive.manifest(writer).segments)
    archive.forget(writer)
    with pytest.raises(DataLossError, match="orders-0: the topic's archive was deleted while it was read"):
        strict.records()
    assert lenient.records() == []


def test_other_partitions_are_read_when_one_has_gone(bucket, archive, writer):
    """A task may hold spans of several."""
    other = archive.filled("orders", 1)
    first = Reading(bucket, archive, writer, fail_on_data_loss=False)
    second = Reading(bucket, archive, other)
    archive.delete(writer, *archive.manifest(writer).segments)
    archive.forget(writer)
    (task,), (other_task,) = first.tasks, second.tasks
    offsets = [
        offset
        for batch in first.reader.batches((*task, *other_task))
        for offset in batch.column("offset").to_pylist()
    ]
    assert offsets == list(other.values())


def test_partition_after_another_is_read_from_its_own_beginning(bucket, archive, writer):
    """How far the one before it was read says nothing."""
    other = archive.filled("orders", 1)
    (task,), (other_task,) = (Reading(bucket, archive, one).tasks for one in (writer, other))
    reader = Reading(bucket, archive, writer).reader
    archive.merge(writer)
    found = [
        (row["offset"], row["value"])
        for batch in reader.batches((*other_task, *task))
        for row in batch.to_pylist()
    ]
    assert found == written(other) + written(writer)


@pytest.mark.parametrize("suffix", ["", ".index"])
def test_object_that_is_missing_for_no_reason(bucket, archive, writer, suffix):
    """The manifest still names it: an operator has to look, and no loss was agreed to."""
    path = archive.object_of(writer, 1)
    path.with_name(path.name + suffix).unlink()
    reading = Reading(bucket, archive, writer, fail_on_data_loss=False)
    offset = archive.manifest(writer).segments[1].base_offset
    told = f"offset {offset} of orders-0 .*names an object that the bucket does not have.*archive scrub"
    with pytest.raises(ObjectNotFound, match=told):
        reading.records()


def test_recorded_gap_is_an_error(bucket, archive, writer):
    """The error names the gap with its reason, when the plan is made."""
    archive.lose(writer, b"x", b"y")
    gone = writer.next_offset
    with pytest.raises(
        DataLossError, match=f"offsets {gone - 2} to {gone - 1} of orders-0: .*broker deleted"
    ):
        Reading(bucket, archive, writer)
    assert Reading(bucket, archive, writer, next_offset=gone - 2).records() == written(
        writer, next_offset=gone - 2
    )


def test_recorded_gap_may_be_read_across(bucket, archive, writer, warnings):
    """Records on both sides are read, and the gap is reported as far as it was asked for."""
    begin = writer.next_offset
    archive.lose(writer, b"x", b"y", b"z")
    writer.closed_segment(b"after")
    archive.add(writer)
    reading = Reading(bucket, archive, writer, from_offset=begin + 1, fail_on_data_loss=False)
    assert reading.records() == [(begin + 3, b"after")]
    (told,) = warnings.of("records are not in the archive")
    assert (told["base_offset"], told["last_offset"]) == (begin + 1, begin + 2)


def damage(path, position, data=b"\xff\xff\xff\xff"):
    content = bytearray(path.read_bytes())
    content[position : position + len(data)] = data
    path.write_bytes(content)


def test_corrupt_batch_is_an_error(bucket, archive, writer):
    """The error of a corrupt batch names the object, the position and the offset for an operator."""
    damage(archive.object_of(writer, 0), 62)
    with pytest.raises(CorruptDataError, match=r"CRC .*\(in .*\.log, position 0, offset 0\)"):
        Reading(bucket, archive, writer).records()


def test_corrupt_batch_may_be_passed_over(bucket, archive, writer, warnings):
    """The batch's records are missing, those of other batches are there, and a warning names the place."""
    damage(archive.object_of(writer, 0), 62)
    assert Reading(bucket, archive, writer, skip_corrupt=True).records() == written(writer, from_offset=1)
    (told,) = warnings.of("corrupt batch passed over")
    assert (told["position"], told["offset"]) == (0, 0)


def test_what_was_read_behind_a_corrupt_batch_is_not_read_again(archive, writer):
    """
    A read resumes behind the last sound batch of a run, even if a corrupt batch came before that one.

    The reader asks for the rest when the segment was replaced meanwhile.
    """
    data = bytearray(archive.object_of(writer, 0).read_bytes())
    second = LENGTH_STARTS_AT + int.from_bytes(data[8:12], "big")
    next_offset = archive.manifest(writer).segments[0].next_offset
    data[second + 62] ^= 0xFF

    assert _end_of(BatchRun(0, memoryview(data), 0, INDEX), 0) == next_offset


def test_damaged_base_offset_hides_nothing_of_what_is_read_anew(archive, writer):
    """It claims offsets past its segment: where the object is gone the rest would not be read elsewhere."""
    data = bytearray(archive.object_of(writer, 0).read_bytes())
    first, second = list(places_in(memoryview(bytes(data)), 0))[:2]
    data[second.position : second.position + 8] = (second.base_offset + 2**40).to_bytes(8, "big")
    assert _end_of(BatchRun(0, memoryview(bytes(data[: second.position + 200])), 0, INDEX), 0) == (
        first.next_offset
    )


def test_bytes_that_are_no_batches_may_be_passed_over(bucket, archive, writer, warnings):
    """A wrong length loses the rest of that part of the object. Other segments are read."""
    damage(archive.object_of(writer, 1), 8, b"\x00\x0f\xff\xff")
    following = archive.manifest(writer).segments[2].base_offset
    first = archive.manifest(writer).segments[1].base_offset
    records = Reading(bucket, archive, writer, skip_corrupt=True).records()
    assert records == written(writer, next_offset=first) + written(writer, from_offset=following)
    assert warnings.events() == ["bytes that are no batches passed over"]


def test_batches_that_cannot_be_told_apart_may_be_passed_over(bucket, archive, writer, warnings):
    """A length that leads into the middle of a batch costs no more than the rest of that part."""
    damage(archive.object_of(writer, 1), 8, b"\x00\x00\x00\x40")
    following = archive.manifest(writer).segments[2].base_offset
    first = archive.manifest(writer).segments[1].base_offset
    records = Reading(bucket, archive, writer, skip_corrupt=True).records()
    sound = [one for one in records if not first <= one[0] < following]
    assert sound == written(writer, next_offset=first) + written(writer, from_offset=following)
    assert warnings.events()


INDEX = SegmentIndex(
    base_offset=100,
    last_offset=199,
    size_bytes=1000,
    crc32c=0,
    record_count=0,
    batch_count=0,
    epochs=(),
    aborted=(),
    entries=tuple(IndexEntry(offset, (offset - 100) * 10, 0) for offset in (100, 120, 150, 190)),
)


@pytest.mark.parametrize(
    ("begin", "end", "positions"),
    [
        pytest.param(100, 200, (0, 1000), id="all"),
        pytest.param(120, 150, (200, 500), id="at entries"),
        pytest.param(121, 149, (200, 500), id="between entries"),
        pytest.param(119, 121, (0, 500), id="around an entry"),
        pytest.param(191, 195, (900, 1000), id="after the last entry"),
    ],
)
def test_range_of_offsets_is_a_range_of_bytes(begin, end, positions):
    """A range of bytes goes from the entry at or before the first offset to the one at or after the end."""
    assert (floor_position(INDEX, begin), ceiling_position(INDEX, end)) == positions


def test_sections_begin_at_entries():
    """A section can be read although the one before it cannot."""
    assert sections(INDEX, 0, 1000, section_bytes=400) == [0, 500, 900, 1000]
    assert sections(INDEX, 200, 500, section_bytes=100) == [200, 500]
    assert sections(INDEX, 200, 200) == [200]


def test_tasks_of_a_process_load_a_changed_manifest_once(bucket, archive, writer, monkeypatch):
    """A merge makes each task look for its segments anew, and a manifest may have tens of megabytes."""
    reading = Reading(bucket, archive, writer, tasks=8)
    archive.merge(writer)
    loads = CountedCalls.of(monkeypatch, ManifestStore, "load")

    assert reading.records() == written(writer)
    assert [arguments for _, arguments, _ in loads.calls] == [(writer.identified,)]
