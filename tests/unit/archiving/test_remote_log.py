"""KIP-405's operations on a bucket, as an archiver uses them: copy, compare, list, read, index."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import Clock, archive_in, archived
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import store_unavailable
from tests.fakes.virtual_loop import virtually
from tieringd.archiving.segment_copier import CopyRequest
from tieringd.broker import segment_file
from tieringd.compiled import loading
from tieringd.errors import (
    CorruptDataError,
    LeadershipChanged,
    LocalFileError,
    ObjectNotFound,
    StorageUnavailable,
)
from tieringd.formats.object_keys import data_key, index_key, manifest_key
from tieringd.formats.sidecar import decode_sidecar
from tieringd.model.partition import Leadership
from tieringd.model.segment import AbortedTransaction, CrossingTransaction, FilePart, SegmentSlice
from tieringd.policies.upload_control import CPU, UploadPace


@pytest.fixture
def partition(writer):
    return writer.identified


@pytest.fixture
def leadership(partition):
    return Leadership(partition, 3)


@pytest.fixture
def remote_log(archive):
    return archive.remote_log


def is_open(path: Path) -> bool:
    """Say whether this process has the file open."""
    return str(path) in {os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()}


async def copied(remote_log, leadership, writer, base_offset):
    log = writer.local_log()
    segment = next(each for each in log.segments if each.base_offset == base_offset)
    return await remote_log.copy_segment(CopyRequest(leadership, log, SegmentSlice.whole(segment)))


async def test_batch_of_a_later_leader_is_never_stored_under_an_earlier_epoch(writer, remote_log, store):
    """The file was written to by another leader since this broker was seen to lead: it is scanned again."""
    writer.append(b"old")
    writer.begin_epoch(4)
    base = writer.bases[-1]
    writer.append(b"new")
    writer.roll()
    with pytest.raises(LeadershipChanged, match="holds a batch of leader epoch 4"):
        await copied(remote_log, Leadership(writer.identified, 3), writer, base)
    assert store.objects == {}
    assert await copied(remote_log, Leadership(writer.identified, 4), writer, base)


async def test_part_that_keeps_its_end_is_copied_with_the_hole_there(writer, remote_log, leadership, store):
    """The copy of a part has the batches that are left of it. A batch over its end stores nothing."""
    for values in ((b"0",), (b"1",), (b"2",), (b"3", b"4"), (b"5",)):
        writer.append(*values)
    writer.roll()
    writer.compact(0, without=[2])
    log = writer.local_log()
    (segment, _) = log.segments
    part = SegmentSlice.between(segment, 1, 3)

    copy = await remote_log.copy_segment(CopyRequest(leadership, log, part))

    assert (copy.remote.base_offset, copy.remote.last_offset, copy.index.record_count) == (1, 2, 1)
    data, _ = store.objects[data_key(leadership.partition, copy.remote)]
    assert data == writer.data_of(0)[len(data) : 2 * len(data)]
    (found,) = await remote_log.local_parts(segment, (1, 3))
    assert found == FilePart(copy.remote.size_bytes, copy.remote.crc32c)
    stored = set(store.objects)
    with pytest.raises(CorruptDataError, match=r"offset 4, .* is inside the batch from 3 to 4"):
        await remote_log.copy_segment(CopyRequest(leadership, log, SegmentSlice.between(segment, 1, 4)))
    assert set(store.objects) == stored


async def test_copy_stores_the_bytes_and_their_index(writer, remote_log, leadership, store):
    """The data object is the file, byte for byte, and the index beside it describes it."""
    base = writer.closed_segment(b"a", b"b")

    copy = await copied(remote_log, leadership, writer, base)

    data, info = store.objects[data_key(leadership.partition, copy.remote)]
    assert data == writer.data_of(base)
    assert info.crc32c == copy.remote.crc32c
    sidecar = store.objects[index_key(leadership.partition, copy.remote)][0]
    assert decode_sidecar(sidecar) == copy.index
    assert len(sidecar) == copy.remote.index_size_bytes
    remote = copy.remote
    assert (remote.base_offset, remote.last_offset, remote.leader_epoch, remote.writer_id) == (0, 1, 3, "a1")


async def test_copy_leaves_the_manifest_alone(writer, remote_log, leadership, partition, store):
    """A copied segment does not exist for readers until a commit names it."""
    await copied(remote_log, leadership, writer, writer.closed_segment())

    assert manifest_key(partition) not in store.objects
    assert await remote_log.list_segments(partition) == ()
    assert await remote_log.earliest_offset(partition) == -1


async def test_copy_keeps_the_brokers_own_indexes(writer, remote_log, leadership):
    """The side files are in the index, as the broker wrote them."""
    base = writer.closed_segment()

    with capture_logs() as logs:
        broker = (await copied(remote_log, leadership, writer, base)).index.broker

    assert broker.offset_index == writer.log_path(base).with_suffix(".index").read_bytes()
    assert broker.time_index == writer.log_path(base).with_suffix(".timeindex").read_bytes()
    assert broker.transaction_index is None
    assert broker.producer_snapshot == b"producer state"
    assert logs == []


async def test_copy_leaves_out_a_side_file_that_is_wrong(writer, remote_log, leadership):
    """A side file that does not agree with the log is reported and not archived."""
    base = writer.closed_segment()
    writer.log_path(base).with_suffix(".index").write_bytes(b"\xff" * 8)

    with capture_logs() as logs:
        broker = (await copied(remote_log, leadership, writer, base)).index.broker

    assert broker.offset_index is None
    assert broker.time_index is not None
    assert [each["event"] for each in logs] == ["broker index left out of the archive"]


async def test_copy_names_the_transactions_that_end_in_later_segments(writer, remote_log, leadership):
    """A segment's index has each aborted transaction with data in it, wherever the marker is."""
    writer.append(producer_id=7)
    writer.append(producer_id=8)
    base = 0
    writer.roll()
    writer.append(producer_id=7)
    writer.roll()
    writer.commit(8)
    writer.abort(7)
    marker = writer.next_offset - 1
    middle = writer.bases[1]

    first = await copied(remote_log, leadership, writer, base)
    second = await copied(remote_log, leadership, writer, middle)

    assert first.index.aborted == (AbortedTransaction(7, 0, marker),)
    assert second.index.aborted == (AbortedTransaction(7, middle, marker),)
    assert first.crossing == (
        CrossingTransaction(8, 3, marker - 1, 0),
        CrossingTransaction(7, 0, marker, 0),
    )
    assert second.crossing == (CrossingTransaction(7, middle, marker, 0),)


async def test_copy_with_an_undecided_transaction_is_refused(writer, remote_log, leadership, store):
    """A segment whose transactions have no end in the log is not copied, whatever the plan said."""
    writer.append(producer_id=7)
    writer.roll()

    with pytest.raises(LocalFileError, match="has no marker"):
        await copied(remote_log, leadership, writer, 0)
    assert store.objects == {}


async def test_copy_of_a_corrupt_segment_stores_nothing(writer, remote_log, leadership, store):
    """Every batch is checked before the first byte goes out."""
    base = writer.closed_segment()
    writer.flip_byte(base)

    with pytest.raises(CorruptDataError) as caught:
        await copied(remote_log, leadership, writer, base)
    assert caught.value.source == str(writer.log_path(base))
    assert store.objects == {}


async def test_copy_of_a_file_that_is_not_the_scanned_one_is_refused(writer, remote_log, leadership, store):
    """A file that changed between the scan and the copy is scanned again first."""
    base = writer.closed_segment()
    log = writer.local_log()
    writer.flip_byte(base)

    with pytest.raises(LocalFileError, match="changed after it was listed"):
        await remote_log.copy_segment(CopyRequest(leadership, log, SegmentSlice.whole(log.segments[0])))
    assert store.objects == {}


class BusyStore(MemoryStore):
    """A bucket that does something before it takes a data object, or waits for ever."""

    def __init__(self, before_data=None) -> None:
        super().__init__()
        self._before_data = before_data
        self.begun = asyncio.Event()

    async def put(self, key, body, *, crc32c: int, condition=None):
        self.begun.set()
        if self._before_data is None:
            await asyncio.get_running_loop().create_future()
        elif key.endswith(".log"):
            self._before_data()
        return await super().put(key, body, crc32c=crc32c, condition=condition)


async def test_file_truncated_while_it_is_sent_is_refused(writer, leadership):
    """A file that ends before the bytes that were checked never gets a name in the bucket."""
    base = writer.closed_segment()
    store = BusyStore(lambda: os.truncate(writer.log_path(base), 10))

    with pytest.raises(LocalFileError):
        await copied(archive_in(store).remote_log, leadership, writer, base)
    assert store.objects == {}


async def test_file_rewritten_while_it_is_sent_is_refused(writer, leadership):
    """Other bytes of the same length have another checksum than announced: the store refuses them."""
    base = writer.closed_segment()
    store = BusyStore(lambda: writer.flip_byte(base))

    with pytest.raises(Exception, match="checksum of the bytes is not the expected one"):
        await copied(archive_in(store).remote_log, leadership, writer, base)
    assert store.objects == {}


async def test_failed_upload_is_the_callers_to_repeat(writer, remote_log, leadership, store):
    """
    A copy fails if the store does not take the index.

    The caller can repeat it: no manifest names the data.
    """
    base = writer.closed_segment()
    put = store.put

    async def no_index(key, body, *, crc32c, condition=None):
        if key.endswith(".index"):
            raise store_unavailable("put")
        return await put(key, body, crc32c=crc32c, condition=condition)

    store.put = no_index
    with pytest.raises(StorageUnavailable):
        await copied(remote_log, leadership, writer, base)
    store.put = put

    assert (await copied(remote_log, leadership, writer, base)).remote.base_offset == base


async def test_cancelled_copy_leaves_nothing_open_and_nothing_named(writer, leadership):
    """Copies that are cancelled in the middle close their files, and no manifest knows of them."""
    base = writer.closed_segment()
    store = BusyStore()
    remote_log = archive_in(store).remote_log
    copy = asyncio.create_task(copied(remote_log, leadership, writer, base))
    await store.begun.wait()
    assert is_open(writer.log_path(base))

    copy.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copy

    assert store.objects == {}
    assert not is_open(writer.log_path(base))


@virtually
async def test_copy_cancelled_anywhere_leaves_no_file_open(tmp_path):
    """A copy leaves no file open, wherever it is cancelled, even while it opens its file."""
    writer = LogWriter(tmp_path)
    base = writer.closed_segment()
    remote_log = archive_in(MemoryStore(latency_seconds=0.01)).remote_log
    for step in range(40):
        copy = asyncio.create_task(copied(remote_log, Leadership(writer.identified, 0), writer, base))
        await asyncio.sleep(step * 0.002)
        copy.cancel()
        await asyncio.gather(copy, return_exceptions=True)
    # Threads go on when no task waits for them any more.
    await asyncio.sleep(1)

    assert not is_open(writer.log_path(base))


async def test_closing_cancels_every_copy(writer, leadership):
    """A remote log that is closed leaves no copy behind."""
    base = writer.closed_segment()
    store = BusyStore()
    remote_log = archive_in(store).remote_log
    copy = asyncio.create_task(copied(remote_log, leadership, writer, base))
    await store.begun.wait()

    await remote_log.close()

    with pytest.raises(asyncio.CancelledError):
        await copy


async def test_copies_that_wait_have_the_compiled_walk_loaded(writer, archive, leadership, monkeypatch):
    """A backlog waits at the gate in an outage. Its bytes are worth the walk before one is checked."""
    bases = [writer.closed_segment(bytes(1000)) for _ in range(3)]
    sizes = [segment.size_bytes for segment in writer.local_log().closed_segments]
    begun = []
    monkeypatch.setattr(loading, "_is_begun", False)
    monkeypatch.setattr(loading, "load", lambda: begun.append(1))
    monkeypatch.setattr(loading, "_checked_bytes", 0)
    monkeypatch.setattr(loading, "WORTH_BYTES", sum(sizes))
    archive.gate.set_pace(UploadPace(1, None, is_listening=True))
    async with asyncio.TaskGroup() as tasks:
        waiting = []
        for base in bases:
            assert not loading._is_begun
            waiting.append(tasks.create_task(copied(archive.remote_log, leadership, writer, base)))
            await asyncio.sleep(0)
        assert archive.gate.waiting_uploads == len(bases)
        assert loading._is_begun
        for task in waiting:
            task.cancel()


async def test_copy_of_a_segment_that_was_just_closed_passes_the_brake(writer, leadership, store):
    """A copy keeps up or catches up by the age of its file; only catching up waits for the brake."""
    archive = archive_in(store, now_ms=(clock := Clock()))
    archive.gate.set_pace(UploadPace(1, 1, held_by=CPU, new_uploads=2))
    first, second = writer.closed_segment(), writer.closed_segment()
    closed_ms = writer.local_log().segments[-1].modified_ns // 1_000_000
    clock.now_ms = closed_ms + 60_000
    await copied(archive.remote_log, leadership, writer, first)

    late = asyncio.create_task(copied(archive.remote_log, leadership, writer, second))
    await asyncio.sleep(0)
    assert archive.gate.held_by == CPU
    assert not late.done()
    # Copies of one partition begin in order: a new one does not overtake one that waits.
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late

    clock.now_ms = closed_ms + 5_000
    assert await copied(archive.remote_log, leadership, writer, second)


async def test_local_checksum_is_that_of_the_whole_file(writer, remote_log, archive):
    """The checksum before a trim is the stored one, and a file that changed has none."""
    base = writer.closed_segment()
    manifest = await archived(writer, archive)
    segment = writer.local_log().segments[0]

    assert await remote_log.local_checksums(segment, [segment.size_bytes]) == (manifest.segments[0].crc32c,)
    writer.flip_byte(base)
    with pytest.raises(LocalFileError, match="changed after it was listed"):
        await remote_log.local_checksums(segment, [segment.size_bytes])


async def test_local_checksum_covers_files_larger_than_the_buffer(writer, remote_log, archive):
    """A file is read to its end, piece by piece."""
    writer.closed_segment(os.urandom(segment_file.READ_BUFFER_BYTES + 1000))
    manifest = await archived(writer, archive)

    segment = writer.local_log().segments[0]
    (crc32c,) = await remote_log.local_checksums(segment, [segment.size_bytes])

    assert crc32c == manifest.segments[0].crc32c


async def test_listing_begins_where_it_is_asked_to(writer, remote_log, archive, partition):
    """Segments come in order, from a base offset on."""
    bases = [writer.closed_segment() for _ in range(3)]
    manifest = await archived(writer, archive)

    assert list(await remote_log.list_segments(partition)) == list(manifest.segments)
    found = await remote_log.list_segments(partition, min_base_offset=bases[1])
    assert [each.base_offset for each in found] == bases[1:]
    assert await remote_log.earliest_offset(partition) == bases[0]


async def test_read_returns_whole_batches_from_an_offset_on(writer, remote_log, archive, partition):
    """The batch that holds the offset comes first, and no batch is cut."""
    batches = [writer.append(b"%d" % number, b"more") for number in range(3)]
    data = writer.data_of(0)
    writer.roll()
    await archived(writer, archive)
    size_bytes = len(data) // 3

    middle = data[size_bytes : 2 * size_bytes]
    read = remote_log.read
    assert await read(partition, offset=batches[1] + 1, size_bytes_max=2 * size_bytes - 1) == middle
    assert await read(partition, offset=batches[1], size_bytes_max=len(data)) == data[size_bytes:]
    assert await read(partition, offset=0, size_bytes_max=1) == data[:size_bytes]
    assert await read(partition, offset=0, size_bytes_max=1, at_least_one_batch=False) == b""


@pytest.mark.parametrize("offset", [100, 3])
async def test_read_of_an_offset_that_is_not_stored_says_so(writer, remote_log, archive, partition, offset):
    """An offset outside of the archive is not found, and the message names the partition."""
    writer.closed_segment()
    await archived(writer, archive)

    with pytest.raises(ObjectNotFound, match=f"offset {offset} of orders-0"):
        await remote_log.read(partition, offset=offset, size_bytes_max=1)


async def test_read_of_a_partition_without_manifest_says_so(remote_log, partition):
    """Nothing of an unknown partition is found."""
    with pytest.raises(ObjectNotFound):
        await remote_log.read(partition, offset=0, size_bytes_max=1)


async def test_index_of_another_object_is_refused(writer, remote_log, archive, partition, store):
    """An index has to describe the object that it lies beside."""
    writer.closed_segment()
    writer.closed_segment()
    first, second = (await archived(writer, archive)).segments
    store.add(index_key(partition, first), store.objects[index_key(partition, second)][0])

    with pytest.raises(CorruptDataError, match="another data object"):
        await remote_log.index_of(partition, first)


async def test_damaged_index_is_named(writer, remote_log, archive, partition, store):
    """An index that cannot be read is an error that names the object."""
    writer.closed_segment()
    (segment,) = (await archived(writer, archive)).segments
    store.add(index_key(partition, segment), b"damage")

    with pytest.raises(CorruptDataError) as caught:
        await remote_log.index_of(partition, segment)
    assert caught.value.source == index_key(partition, segment)


async def test_copy_with_another_index_has_another_name(writer, remote_log, leadership, store):
    """The objects of the first upload stay as they were when a later one has other indexes."""
    base = writer.closed_segment()
    first = await copied(remote_log, leadership, writer, base)
    before = dict(store.objects)
    writer.log_path(base).with_suffix(".timeindex").unlink()

    second = await copied(remote_log, leadership, writer, base)

    assert second.index.broker.time_index is None
    assert {key: store.objects[key] for key in before} == before
    assert await remote_log.index_of(leadership.partition, first.remote) == first.index
    assert await remote_log.index_of(leadership.partition, second.remote) == second.index


async def test_copy_made_again_has_the_same_name_and_bytes(writer, remote_log, leadership, store):
    """Uploading again what could not be committed leaves no second copy, however often it happens."""
    base = writer.closed_segment()
    first = await copied(remote_log, leadership, writer, base)
    before = {key: data for key, (data, _) in store.objects.items()}

    second = await copied(remote_log, leadership, writer, base)

    assert data_key(leadership.partition, second.remote) == data_key(leadership.partition, first.remote)
    assert {key: data for key, (data, _) in store.objects.items()} == before


async def test_index_that_another_upload_stored_is_not_taken_for_the_committed_one(
    writer, remote_log, leadership, store
):
    """A whole index of the same object, and not the one that the manifest names, is damage."""
    base = writer.closed_segment()
    first = await copied(remote_log, leadership, writer, base)
    writer.log_path(base).with_suffix(".timeindex").unlink()
    second = await copied(remote_log, leadership, writer, base)
    key = index_key(leadership.partition, first.remote)
    store.add(key, store.objects[index_key(leadership.partition, second.remote)][0])

    with pytest.raises(CorruptDataError, match="not the one that the manifest names") as caught:
        await remote_log.index_of(leadership.partition, first.remote)
    assert caught.value.source == key
