"""A topic that goes on from an older archive, served with no broker: one log, from the old one's begin."""

from __future__ import annotations

import asyncio
import threading

import pytest
from kio.schema.errors import ErrorCode

from tests.fakes.archive import archive_in
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.support.archive_endpoints import (
    EARLIEST,
    LATEST,
    MAX_TIMESTAMP,
    archive_topic,
    asking,
    epoch_ends,
    fetched,
    listed,
)
from tieringd.endpoint.fetch_answers import PartitionReads
from tieringd.endpoint.served_manifests import ServedPartitions
from tieringd.errors import StorageUnavailable
from tieringd.formats.history_link import HistoryLink
from tieringd.formats.object_keys import TopicKey, data_key, history_link_key
from tieringd.formats.record_batch import parse_header
from tieringd.storage.threads import in_thread

OLD_ID = "AAAAAAAAAAAAAAAAAAAAAQ"
HUNG_SECONDS = 20


def key_of(writer):
    one = writer.identified
    return TopicKey(one.cluster, one.topic, one.topic_id)


class HungDisk(MemoryStore):
    """A store whose reads of one object end only when a thread does, as those of a file store."""

    def __init__(self):
        super().__init__()
        self.hung_key = ""
        self.goes_on = threading.Event()

    async def get(self, key):
        """Return an object whole."""
        if key == self.hung_key:
            await in_thread(self.goes_on.wait, HUNG_SECONDS)
        return await super().get(key)


@pytest.fixture
async def joined(tmp_path, archive):
    """Give the writers of an old archive, of a topic whose id is another's now, and of the new one."""
    return await join(tmp_path, archive)


async def join(tmp_path, archive):
    """Archive an old topic of six records, and a new one of three that goes on from it."""
    old = LogWriter(tmp_path / "old", "before")
    old.begin_epoch(37)
    old.closed_segment(), old.closed_segment()
    new = LogWriter(tmp_path / "new", first_offset=6)
    new.closed_segment()
    await archive_topic(old, archive)
    await archive_topic(new, archive)
    await archive.history.link(HistoryLink(key_of(new), key_of(old), ((0, 6),)))
    return old, new


async def test_both_archives_are_one_log(joined, archive, tmp_path):
    """Fetch comes across, under leader epochs that the new cluster knows; before the history is nothing."""
    offset, epochs = 0, []
    async with asking(archive, tmp_path / "state") as client:
        while offset < 9:
            found = await fetched(client, "orders", offset, max_bytes=1)
            assert (found.error_code, found.high_watermark) == (ErrorCode.none, 9)
            # Also of the new archive's records: a client seeks to the beginning by the last one that it saw.
            assert found.log_start_offset == 0
            header = parse_header(found.records)
            assert header.base_offset == offset
            epochs.append(header.leader_epoch)
            offset = header.next_offset
        outside = await fetched(client, "orders", -1)
    assert epochs == [0, 0, 0]
    assert (outside.error_code, outside.log_start_offset) == (ErrorCode.offset_out_of_range, 0)


async def test_history_that_is_away_leaves_the_log_start_unknown(joined, archive, store, tmp_path):
    """The new archive is read without it; its own start would be taken for the log's."""
    async with asking(archive, tmp_path / "state") as client:
        # The manifest is known then, and nothing else.
        await listed(client, "orders", LATEST)
        store.fail_next("get", lambda: StorageUnavailable("away"))
        found = await fetched(client, "orders", 6)
        assert (found.error_code, found.log_start_offset) == (ErrorCode.none, -1)
        assert parse_header(found.records).base_offset == 6
        assert (await fetched(client, "orders", 6)).log_start_offset == 0


async def test_disk_that_hangs_under_the_history_holds_up_no_records_of_the_new_archive(tmp_path):
    """The read of the history goes on, and a later Fetch tells where the log begins."""
    store = HungDisk()
    archive = archive_in(store)
    _, new = await join(tmp_path, archive)
    async with asking(archive, tmp_path / "state") as client:
        await listed(client, "orders", LATEST)
        store.hung_key = history_link_key(key_of(new))
        now = asyncio.get_running_loop().time
        begun_at = now()
        found = await fetched(client, "orders", 6)
        assert (found.error_code, found.log_start_offset) == (ErrorCode.none, -1)
        assert parse_header(found.records).base_offset == 6
        assert now() - begun_at < HUNG_SECONDS / 2
        store.goes_on.set()
        while (await fetched(client, "orders", 6)).log_start_offset != 0:
            assert now() - begun_at < HUNG_SECONDS


async def test_read_of_the_history_ends_at_its_deadline_although_the_disk_hangs(tmp_path):
    """Its client is answered. The read ends when the disk does."""
    store = HungDisk()
    archive = archive_in(store)
    _, new = await join(tmp_path, archive)
    partitions = ServedPartitions(archive.manifests, interval_seconds=60)
    reads = PartitionReads(partitions, reader=None, history=archive.history)
    store.hung_key = history_link_key(key_of(new))
    begun_at = asyncio.get_running_loop().time()
    (read,) = await reads.read(
        [(new.identified, 3)], with_records=True, due_at=begun_at, deadline=begun_at + 0.3
    )
    assert read.held is None
    assert asyncio.get_running_loop().time() - begun_at < HUNG_SECONDS / 2
    store.goes_on.set()
    await partitions.close()


async def test_offsets_and_times_are_those_of_both(joined, archive, tmp_path):
    """The earliest one and the first ones of a time are the old archive's."""
    old, new = joined
    (segment,) = (await archive.manifests.load(new.identified)).existing.segments
    begun = (await archive.manifests.load(old.identified)).existing.segments[1]
    async with asking(archive, tmp_path / "state") as client:
        found = await listed(client, "orders", EARLIEST, LATEST, begun.base_timestamp_ms, MAX_TIMESTAMP)
    assert [one.offset for one in found[:3]] == [0, 9, 3]
    assert found[3].timestamp == segment.max_timestamp_ms


async def test_old_segment_that_has_gone_is_searched_in_the_newest_manifest(joined, archive, store, tmp_path):
    """Clients try again if the newest manifest does not help either: nothing is skipped."""
    old, _ = joined
    first = (await archive.manifests.load(old.identified)).existing.segments[0]
    store.remove(data_key(old.identified, first))
    async with asking(archive, tmp_path / "state") as client:
        found = await fetched(client, "orders", 0)
    assert found.error_code != ErrorCode.none
    assert not found.records


async def test_epoch_of_the_history_ends_where_nothing_is_archived_behind_it(archive, tmp_path):
    """A client that read the history would be told otherwise that its log was cut, and begin anew."""
    old = LogWriter(tmp_path / "old", "before")
    old.closed_segment(), old.closed_segment()
    new = LogWriter(tmp_path / "new", first_offset=6)
    await archive_topic(old, archive)
    await archive_topic(new, archive)
    await archive.history.link(HistoryLink(key_of(new), key_of(old), ((0, 6),)))
    async with asking(archive, tmp_path / "state") as client:
        header = parse_header((await fetched(client, "orders", 3)).records)
        assert (header.base_offset, header.leader_epoch) == (3, 0)
        found = await epoch_ends(client, "orders", header.leader_epoch)
    assert found == [(ErrorCode.none, 0, 6)]
