"""Offsets of an archive: its begin and end, of times, and of leader epochs."""

from __future__ import annotations

import asyncio

import pytest
from kio.schema.errors import ErrorCode

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.log_writer import LogWriter
from tests.support.archive_endpoints import (
    EARLIEST,
    EARLIEST_LOCAL,
    LATEST,
    LATEST_TIERED,
    MAX_TIMESTAMP,
    archive_topic,
    asking,
    epoch_ends,
    listed,
    listed_together,
)
from tieringd.errors import StorageUnavailable
from tieringd.formats.object_keys import index_key


@pytest.fixture
async def archived_log(archive, tmp_path):
    """Give a log with two epochs from offset 10 on, archived to offset 19."""
    writer = LogWriter(tmp_path, first_offset=10)
    writer.append(timestamp_ms=DEFAULT_TIME_MS)
    writer.roll()
    writer.begin_epoch(4)
    writer.append(timestamp_ms=DEFAULT_TIME_MS + 9000)
    writer.append(timestamp_ms=DEFAULT_TIME_MS + 5000)
    writer.roll()
    await archive_topic(writer, archive)
    return writer


@pytest.mark.parametrize("version", range(1, 12))
async def test_special_offsets_are_those_of_the_archive(archived_log, archive, tmp_path, version):
    """The end of the archive is the end of the log; nothing of it is local."""
    async with asking(archive, tmp_path / "state") as client:
        wanted = (EARLIEST, LATEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED)
        found = await listed(client, "orders", *wanted, version=version)
    assert [one.offset for one in found] == [10, 19, 15, 19, 18]
    assert {one.error_code for one in found} == {ErrorCode.none}
    assert found[2].timestamp == DEFAULT_TIME_MS + 9002
    if version >= 4:
        assert [one.leader_epoch for one in found] == [0, 4, 4, 4, 4]


async def test_time_finds_the_first_record_as_late(archived_log, archive, tmp_path):
    """A time finds a record, not a batch or a segment. A time past the last record finds nothing."""
    wanted = {0: (10, 0), 1: (11, 1), 2: (12, 2), 3: (13, 9000), 9002: (15, 9002)}
    async with asking(archive, tmp_path / "state") as client:
        found = await listed(client, "orders", *(DEFAULT_TIME_MS + after for after in wanted))
        assert [(one.offset, one.timestamp - DEFAULT_TIME_MS) for one in found] == list(wanted.values())
        (later,) = await listed(client, "orders", DEFAULT_TIME_MS + 9003)
    assert (later.offset, later.timestamp, later.error_code) == (-1, -1, ErrorCode.none)


async def test_times_of_several_partitions_are_looked_up_side_by_side(archive, store, tmp_path):
    """Each takes some requests to the store, and clients do not wait for hundreds of them in turn."""
    count = 4
    for number in range(count):
        writer = LogWriter(tmp_path, "orders", number)
        writer.closed_segment()
        await archive_topic(writer, archive)
    get, all_wait = store.get, asyncio.Barrier(count)

    async def together(key):
        if key.endswith(".index"):
            await asyncio.wait_for(all_wait.wait(), 10)
        return await get(key)

    async with asking(archive, tmp_path / "state") as client:
        for number in range(count):
            await listed(client, "orders", LATEST, partition=number)
        store.get = together
        found = await listed_together(client, "orders", DEFAULT_TIME_MS + 1, range(count))
    assert [(one.partition_index, one.error_code, one.offset) for one in found] == [
        (number, ErrorCode.none, 1) for number in range(count)
    ]


async def test_partition_of_which_nothing_is_archived_is_empty(archived_log, archive, tmp_path):
    """A partition without archived records begins and ends at 0."""
    key = archived_log.identified
    other = LogWriter(tmp_path, "orders", 1)
    assert other.identified.topic_id == key.topic_id
    await archive_topic(other, archive)
    async with asking(archive, tmp_path / "state") as client:
        found = await listed(client, "orders", EARLIEST, LATEST, MAX_TIMESTAMP, LATEST_TIERED, 5, partition=1)
        assert [one.offset for one in found] == [0, 0, -1, -1, -1]
        assert {one.error_code for one in found} == {ErrorCode.none}
        (unknown,) = await listed(client, "orders", LATEST, partition=2)
        assert unknown.error_code == ErrorCode.unknown_topic_or_partition


@pytest.mark.parametrize("version", range(2, 5))
async def test_leader_epochs_end_where_the_next_begins(archived_log, archive, tmp_path, version):
    """The last one ends with the archive, and what is newer is not known."""
    async with asking(archive, tmp_path / "state") as client:
        found = await epoch_ends(client, "orders", 0, 2, 4, 5, version=version)
        (unknown,) = await epoch_ends(client, "none", 0, version=version)
    ok = ErrorCode.none
    assert found == [(ok, 0, 13), (ok, 0, 13), (ok, 4, 19), (ok, -1, -1)]
    assert unknown == (ErrorCode.unknown_topic_or_partition, -1, -1)


async def test_store_that_is_away_is_an_error_to_try_again(archived_log, archive, store, tmp_path):
    """A missing manifest is an error to try again. The store is asked again, but not at once."""
    async with asking(archive, tmp_path / "state") as client:
        store.fail_next("get", lambda: StorageUnavailable("away"))
        store.requests.clear()
        (found,) = await listed(client, "orders", EARLIEST)
        assert found.error_code == ErrorCode.kafka_storage_error
        assert await epoch_ends(client, "orders", 0) == [(ErrorCode.kafka_storage_error, -1, -1)]
        assert len(store.requests) == 1
        while found.error_code != ErrorCode.none:
            (found,) = await listed(client, "orders", EARLIEST)
        assert found.offset == 10
        assert [key.endswith("/manifest") for _, key in store.requests].count(True) == 2


async def test_time_is_looked_up_in_the_newest_manifest(archived_log, archive, store, tmp_path):
    """The newest manifest is loaded if an index has gone, because the known one is old."""
    async with asking(archive, tmp_path / "state") as client:
        await listed(client, "orders", LATEST)
        stored = await archive.manifests.load(archived_log.identified)
        gone = stored.existing.segments[0]
        await archive.manifests.commit(stored, stored.existing.expired(1, now_ms=0), leader_epoch=4)
        await store.delete_many([index_key(archived_log.identified, gone)])
        (found,) = await listed(client, "orders", DEFAULT_TIME_MS)
    assert (found.error_code, found.offset) == (ErrorCode.none, 13)


async def test_end_of_an_epoch_is_not_that_of_an_older_manifest(archived_log, archive, tmp_path):
    """A client that has read on at another endpoint would take the older end for a log that was cut."""
    async with asking(archive, tmp_path / "state") as client:
        await listed(client, "orders", LATEST)
        archived_log.closed_segment()
        archived_log.begin_epoch(6)
        archived_log.closed_segment()
        await archive_topic(archived_log, archive)
        assert await epoch_ends(client, "orders", 4, 6) == [(ErrorCode.none, 4, 22), (ErrorCode.none, 6, 25)]
