"""Damage that no checksum of a batch covers, and damage of whole objects, as the Spark source meets it."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from tests.unit.spark.source.test_task_reader import Reading, written
from tieringd.errors import CorruptDataError, DataLossError
from tieringd.formats.batch_offsets import places_in

LENIENT = {"skip_corrupt": True, "fail_on_data_loss": False}


@pytest.fixture
def writer(archive):
    """Give a log of three segments of four batches, with three records in each batch."""
    return archive.filled(segments=3, batches=4)


def renumber(path, number, base_offset):
    """Give batch *number* of an object another base offset, which is a function of the right one."""
    data = bytearray(path.read_bytes())
    batch = list(places_in(memoryview(bytes(data)), 0))[number]
    data[batch.position : batch.position + 8] = base_offset(batch.base_offset).to_bytes(8, "big", signed=True)
    path.write_bytes(data)
    return batch


MOVES = {
    "2**40 more": lambda offset: offset + 2**40,
    "to 3": lambda _offset: 3,
    "to 0": lambda _offset: 0,
    "7 more": lambda offset: offset + 7,
    "1 more": lambda offset: offset + 1,
    "2**63-1": lambda _offset: 2**63 - 1,
    "2**63-3": lambda _offset: 2**63 - 3,
    "2**62": lambda _offset: 2**62,
    "-1": lambda _offset: -1,
}


@pytest.mark.parametrize(("number", "tasks"), [(0, 1), (1, 1), (3, 1), (0, 6), (1, 6), (3, 6)])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_damaged_base_offset(archive, writer, bucket, move, number, tasks):  # noqa: PLR0917
    """The error names the object. Only the records of that batch are missing if damage may be skipped."""
    path = archive.object_of(writer, 1)
    batch = renumber(path, number, move)
    with pytest.raises(CorruptDataError, match=path.name) as caught:
        Reading(bucket, archive, writer, tasks=tasks).records()
    assert caught.value.position == batch.position
    lost = range(batch.base_offset, batch.next_offset)
    left = [one for one in written(writer) if one[0] not in lost]
    assert Reading(bucket, archive, writer, tasks=tasks, skip_corrupt=True).records() == left


def test_batch_that_stands_twice_is_an_error(bucket, archive, writer):
    """An older upload's bytes may be sound batches, and not those that the index describes."""
    path = archive.object_of(writer, 1)
    data = path.read_bytes()
    _, second, third, fourth = places_in(memoryview(data), 0)
    again = data[second.position : third.position]
    path.write_bytes(data[: third.position] + again + data[fourth.position :])
    with pytest.raises(CorruptDataError, match=path.name):
        Reading(bucket, archive, writer).records()
    left = [one for one in written(writer) if not third.base_offset <= one[0] < third.next_offset]
    assert Reading(bucket, archive, writer, skip_corrupt=True).records() == left


def test_other_bytes_than_the_index_says(bucket, archive, writer, warnings):
    """The checksum of the object shows a changed leader epoch, which no checksum of a batch covers."""
    path = archive.object_of(writer, 1)
    data = bytearray(path.read_bytes())
    data[15] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match=f"checksum {crc32c(bytes(data)):08x}.*{path.name}"):
        Reading(bucket, archive, writer).records()
    assert Reading(bucket, archive, writer, skip_corrupt=True).records() == written(writer)
    assert warnings.events() == ["an object is damaged, but none of its batches"]


@pytest.mark.parametrize("is_index", [False, True], ids=["data", "index"])
def test_missing_object_may_be_passed_over(bucket, archive, writer, warnings, is_index):
    """A missing object is passed over if both options allow it, and the warning names the object."""
    segment = archive.manifest(writer).segments[1]
    path = archive.object_of(writer, 1)
    gone = path.with_name(f"{path.name}.index") if is_index else path
    gone.unlink()
    left = [one for one in written(writer) if not segment.base_offset <= one[0] <= segment.last_offset]
    assert Reading(bucket, archive, writer, **LENIENT).records() == left
    (told,) = warnings.of("records are not in the archive")
    assert (told["base_offset"], told["last_offset"]) == (segment.base_offset, segment.last_offset)
    assert gone.name in told["reason"]
    with pytest.raises(DataLossError, match=gone.name):
        Reading(bucket, archive, writer, skip_corrupt=True).records()


def test_damaged_index_may_be_passed_over(bucket, archive, writer, warnings):
    """Nothing tells what its segment holds, so the segment is lost, and no other one."""
    segment = archive.manifest(writer).segments[1]
    path = archive.object_of(writer, 1)
    index = path.with_name(f"{path.name}.index")
    data = bytearray(index.read_bytes())
    data[len(data) // 2] ^= 0xFF
    index.write_bytes(data)
    with pytest.raises(CorruptDataError, match=f"{index.name}.*offset {segment.base_offset}"):
        Reading(bucket, archive, writer, fail_on_data_loss=False).records()
    left = [one for one in written(writer) if not segment.base_offset <= one[0] <= segment.last_offset]
    assert Reading(bucket, archive, writer, **LENIENT).records() == left
    assert index.name in warnings.of("records are not in the archive")[0]["reason"]


def test_whole_batches_before_a_cut_are_read(bucket, archive, writer, warnings):
    """An object that is cut short loses what is cut off, and not its beginning."""
    path = archive.object_of(writer, 1)
    data = path.read_bytes()
    third = list(places_in(memoryview(data), 0))[2]
    path.write_bytes(data[: third.position + 18])
    with pytest.raises(CorruptDataError, match=path.name):
        Reading(bucket, archive, writer).records()
    end = archive.manifest(writer).segments[1].next_offset
    left = [one for one in written(writer) if not third.base_offset <= one[0] < end]
    assert Reading(bucket, archive, writer, skip_corrupt=True).records() == left
    assert warnings.events() == ["bytes that are no batches passed over"]
