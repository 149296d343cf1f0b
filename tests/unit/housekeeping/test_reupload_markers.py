"""Re-upload of compacted segments loses no marker of a transaction of which the archive has records."""

from __future__ import annotations

import itertools

import pytest

from tests.fakes.archive import archive_in, archived, values_in
from tests.fakes.manifests import stored_manifest
from tests.fakes.memory_store import MemoryStore
from tests.unit.housekeeping.test_reupload import Reuploading
from tests.unit.recovery.test_restorer import Site
from tieringd.archive.archive_reader import Batch, SegmentIndexes
from tieringd.archive.object_joiner import ObjectJoiner, index_of_parts, store_merged
from tieringd.archive.scrub.data_scan import DataIndexer, renamed_by
from tieringd.archiving.tombstone_keeper import TombstoneCut
from tieringd.errors import CorruptDataError
from tieringd.formats.index_files import parse_transaction_index
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.record_batch import ABORT_MARKER, COMMIT_MARKER, encode_marker, parse_header, sealed
from tieringd.formats.records import control_type, iter_records
from tieringd.formats.sidecar import decode_sidecar_of
from tieringd.model.segment import AbortedTransaction

COMMITTED = {2: b"committed", 4: b"other", 5: b"last"}
ALL = {0: b"aborted", **COMMITTED}


@pytest.fixture
def log(writer):
    """Give a log: a producer's data, and in the next segment its abort marker and a committed transaction."""
    writer.append(b"aborted", keys=[b"a"], producer_id=7)  # 0
    writer.roll()
    writer.abort(7)  # 1
    writer.append(b"committed", keys=[b"b"], producer_id=7)  # 2
    writer.commit(7)  # 3
    writer.append(b"other", keys=[b"c"])  # 4
    writer.roll()
    writer.append(b"last", keys=[b"d"])  # 5
    writer.roll()
    return writer


async def reuploaded(log, store):
    """
    Archive the log, trim its first segment, and upload the second again without its abort marker.

    The cleaner drops the marker `delete.retention.ms` later: its log has no record of the transaction.
    """
    await archived(log, archive_in(store))
    log.log_start_offset = 1
    log.trim_file(0)
    log.compact(1, without=[1])
    assert await Reuploading(store, log).step() == 1
    return stored_manifest(store, log)


def batches_of(data):
    """Yield the batches of *data*, with their headers."""
    while data:
        header = parse_header(data)
        yield header, data[: header.size_bytes]
        data = data[header.size_bytes :]


def client_keeps(batches, aborted) -> dict[int, bytes | None]:
    """Return what a `read_committed` client keeps of one answer, which lists *aborted* transactions."""
    pending = sorted((one.first_offset, one.producer_id) for one in aborted)
    gone, found = set(), {}
    for header, data in batches:
        while pending and pending[0][0] <= header.last_offset:
            gone.add(pending.pop(0)[1])
        if header.is_control:
            if control_type(data) == "abort":
                gone.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in gone):
            found |= {one.offset: one.value for one in iter_records(data)}
    return found


def consumed(place) -> dict[int, bytes | None]:
    """Return what a `read_committed` client of a broker gets of a log directory: one answer a segment."""
    logs = [list(batches_of(path.read_bytes())) for path in sorted(place.glob("*.log"))]
    indexes = [path.read_bytes() for path in sorted(place.glob("*.txnindex"))]
    entries = [entry for index in indexes for entry in parse_transaction_index(index)]
    found, offset = {}, 0
    for batches in filter(None, logs):
        end = batches[-1][0].next_offset
        listed = [one for one in entries if one.last_offset >= offset and one.first_offset < end]
        found |= client_keeps(batches, listed)
        offset = end
    return found


@pytest.fixture
def site(tmp_path, archive, log):
    return Site(tmp_path, archive, log.name)


async def test_clients_of_a_restored_log_get_all_that_is_committed(log, archive, site):
    """The producer's next transaction is not taken for aborted."""
    await site.restore(await archived(log, archive))
    assert consumed(site.place) == COMMITTED


async def test_clients_of_a_log_restored_after_a_reupload_get_all_that_is_committed(log, store, site):
    """The segment keeps the marker that the cleaner has dropped, and the restore ends no transaction."""
    manifest = await reuploaded(log, store)
    assert (await site.restore(manifest)).ended_transactions == 0
    assert consumed(site.place) == COMMITTED
    assert await values_in(archive_in(store), manifest) == ALL
    assert (await archive_in(store).verifier.verify(manifest, deep=True)).faults == ()


async def test_clients_get_all_that_is_committed_of_segments_merged_later(log, store, tmp_path):
    """The topic became `delete`: the segment with the records and that with the marker are merged."""
    manifest = await reuploaded(log, store)
    partition, parts = log.identified, tuple(manifest.segments)[:2]
    index = await index_of_parts(SegmentIndexes(store), partition, parts)
    joiner = ObjectJoiner(store, work_directory=tmp_path)
    merged = await store_merged(store, joiner, partition, parts, index, leader_epoch=0, writer_id="m1")
    data = store.objects[data_key(partition, merged.segment)][0]
    assert client_keeps(batches_of(data), index.aborted) == {2: b"committed", 4: b"other"}


async def test_segments_whose_marker_was_never_archived_are_not_merged(log, store):
    """
    The cleaner has dropped the marker before the first upload.

    In a merged segment the producer would seem aborted to the end. Each segment by itself is read right.
    """
    whole = await archived(log, archive_in(store))
    indexes, parts = SegmentIndexes(store), tuple(whole.segments)
    assert (await index_of_parts(indexes, log.identified, parts)).aborted == (AbortedTransaction(7, 0, 1),)
    log.compact(1, without=[1])
    other = MemoryStore()
    late = tuple((await archived(log, archive_in(other))).segments)
    for one, kind in itertools.product(parts[:1], (data_key, index_key)):
        other.add(kind(log.identified, one), store.objects[kind(log.identified, one)][0])
    parts = (parts[0], *late[1:])
    with pytest.raises(CorruptDataError, match="lacks the marker of producer 7's aborted transaction"):
        await index_of_parts(SegmentIndexes(other), log.identified, parts)
    assert (await index_of_parts(SegmentIndexes(other), log.identified, parts[1:])).aborted == ()


async def test_index_made_again_from_data_lists_what_was_aborted(log, store):
    """The producer's next marker, a commit, does not end the aborted transaction."""
    manifest = await reuploaded(log, store)
    first, archive = manifest.segments[0], archive_in(store)
    store.remove(index_key(log.identified, first))
    indexer = DataIndexer(store, archive.reader, archive.manifests.spillovers)
    sidecar = await indexer.from_data(manifest, first)
    index = decode_sidecar_of(sidecar, renamed_by(first, sidecar), key="x")
    assert index.aborted == (AbortedTransaction(7, 0, 1),)


async def test_marker_goes_after_the_records_of_its_transaction(log, store):
    """The log has all that the archive has: the run with the records goes first, and then the marker."""
    await archived(log, archive_in(store))
    log.compact(0, without=[0])
    log.compact(1, without=[1])
    reuploading = Reuploading(store, log)
    assert await reuploading.step() == 1
    assert await reuploading.step() == 1
    manifest = stored_manifest(store, log)
    assert await values_in(archive_in(store), manifest) == COMMITTED
    assert not any(one.is_rewritten for one in manifest.segments)


class Left:
    """What a cleaner left of batches, by their base offsets."""

    def __init__(self, batches=()):
        self._batches = dict(batches)

    def take(self, archived):
        left = self._batches.get(archived.base_offset)
        return None if left is None else memoryview(left)


def marker(offset, kind=ABORT_MARKER, *, producer_id=7) -> Batch:
    data = memoryview(
        encode_marker(
            offset, producer_id=producer_id, producer_epoch=0, marker=kind, timestamp_ms=1, leader_epoch=0
        )
    )
    return Batch(parse_header(data), data, 0)


def markers_kept(left: Left, *batches: Batch) -> int:
    """Return how many markers count as missing. All of them stay in any case."""
    cut = TombstoneCut(left)
    assert all(cut.left_of(one) is one.data for one in batches)
    return cut.kept_markers


@pytest.mark.parametrize("kind", [ABORT_MARKER, COMMIT_MARKER])
def test_first_marker_of_each_producer_is_needed(kind):
    """Its transaction may have begun before the segments. A later one began among them."""
    assert markers_kept(Left(), marker(10, kind), marker(12, kind)) == 1
    assert markers_kept(Left(), marker(10, kind), marker(12, kind, producer_id=8)) == 2
    assert markers_kept(Left({10: b""}), marker(10, kind), marker(12, kind)) == 0


def test_emptied_marker_is_a_missing_one():
    """A cleaner leaves an empty batch where the marker was its producer's last batch."""
    one = marker(10)
    emptied = sealed(one.header._replace(record_count=0), b"")
    assert markers_kept(Left({10: emptied}), one) == 1
    assert markers_kept(Left({10: one.data}), one) == 0
    gone = memoryview(emptied)
    assert markers_kept(Left(), Batch(parse_header(gone), gone, 0)) == 0
