"""Fetch from an archive alone: every version, limits, isolation levels, the archive's end, and faults."""

from __future__ import annotations

import asyncio
import struct
from contextlib import AsyncExitStack
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from structlog.testing import capture_logs

from tests.fakes.archive import archive_in, archived
from tests.fakes.log_writer import LogWriter
from tests.fakes.slow_store import HoldingStore
from tests.fakes.store import rot
from tests.support.archive_endpoints import (
    archive_topic,
    asking,
    endpoint_config,
    fetched,
    open_files,
    running_endpoint,
    topic_uuid,
    until,
)
from tests.support.kafka_messages import FETCH_VERSIONS, fetch_request, milliseconds, request_frame
from tests.support.raw_kafka import connected
from tieringd.daemon.archive_endpoint import archive_endpoint_of
from tieringd.endpoint.access import EVERYTHING
from tieringd.endpoint.endpoint_settings import EndpointSettings
from tieringd.endpoint.fetch_answers import PARTITIONS_AT_ONCE, FetchAnswers, PartitionReads
from tieringd.endpoint.served_manifests import ServedPartitions
from tieringd.errors import StorageUnavailable
from tieringd.formats.kafka_wire.request_header import RequestHead
from tieringd.formats.object_keys import data_key, manifest_key
from tieringd.formats.record_batch import check_crc, parse_header
from tieringd.gateway.archive_answers import TRY_AGAIN
from tieringd.gateway.client_log import LINES_PER_ADDRESS
from tieringd.gateway.wire import MemoryBudget
from tieringd.metrics import Metrics
from tieringd.model.manifest_parts import Gap
from tieringd.reading.partition_reader import ArchivedBatches
from tieringd.storage.base import FileSlice

LONG = milliseconds(20_000)
PATIENCE_SECONDS = 20


def headers_in(data):
    """Return the header of every batch, each of them whole and checked."""
    found, at = [], 0
    while at < len(data or b""):
        header = parse_header(data, at)
        check_crc(memoryview(data), header, at)
        found.append(header)
        at += header.size_bytes
    return found


async def until_requested(store, operation, key):
    """Return when the store was asked for this."""
    await until(lambda: (operation, key) in store.requests)


@pytest.mark.parametrize("version", FETCH_VERSIONS)
async def test_fetch_gives_stored_batches_in_every_version(writer, archive, tmp_path, version):
    """A Fetch by name or by id starts with the batch that holds the offset, and has the log's bounds."""
    for _ in range(4):
        writer.append()
    writer.roll()
    await archive_topic(writer, archive)
    topic = topic_uuid(writer) if version >= 13 else "orders"
    async with asking(archive, tmp_path / "state") as client:
        found = await fetched(client, topic, 4, version=version, isolation_level=1)
    assert found.error_code == ErrorCode.none
    assert (found.high_watermark, found.last_stable_offset) == (12, 12)
    assert getattr(found, "log_start_offset", 0) == 0
    assert [one.base_offset for one in headers_in(found.records)] == [3, 6, 9]
    assert not found.aborted_transactions


async def test_whole_archive_is_read_over_segments_and_gaps(writer, archive, tmp_path):
    """A read goes from offset to offset to the archive's end, and gives nothing twice."""
    for _ in range(3):
        writer.closed_segment()
    manifest = (await archive_topic(writer, archive)).with_gap(Gap(9, 19, "lost", 0))
    known = await archive.manifests.load(writer.identified)
    await archive.manifests.commit(known, manifest, leader_epoch=0)
    offset, seen = 0, []
    async with asking(archive, tmp_path / "state") as client:
        while offset < 20:
            found = await fetched(client, "orders", offset, max_bytes=1)
            (header,) = headers_in(found.records)
            seen.append((header.base_offset, header.last_offset, header.is_control))
            offset = header.next_offset
        assert not (await fetched(client, "orders", 20)).records
    assert seen == [(0, 2, False), (3, 5, False), (6, 8, False), (9, 19, True)]


async def test_partitions_of_one_request_share_its_limit(archive, tmp_path):
    """The first batch comes whatever its size, and then only what fits."""
    writers = [LogWriter(tmp_path, "orders", number) for number in range(3)]
    for writer in writers:
        writer.append(b"v" * 1000)
        writer.append(b"v" * 1000)
        writer.roll()
        await archive_topic(writer, archive)
    size = (await archive.manifests.load(writers[0].identified)).existing.segments[0].size_bytes // 2
    async with asking(archive, tmp_path / "state") as client:
        for limit, expected in ((1, [1, 0, 0]), (2 * size, [2, 0, 0]), (3 * size, [2, 1, 0])):
            request = fetch_request(
                12, {"orders": {n: {"fetch_offset": 0} for n in range(3)}}, max_bytes=limit, isolation_level=0
            )
            answer = await client.ask(request)
            counts = [len(headers_in(one.records)) for one in answer.responses[0].partitions]
            assert counts == expected
        asked = {n: {"fetch_offset": 0, "partition_max_bytes": size} for n in range(3)}
        answer = await client.ask(
            fetch_request(12, {"orders": asked}, max_bytes=10 * size, isolation_level=0)
        )
        assert [len(headers_in(one.records)) for one in answer.responses[0].partitions] == [1, 1, 1]


@pytest.mark.parametrize("version", [4, 12, 17])
async def test_aborted_transactions_are_named_to_committed_readers(writer, archive, tmp_path, version):
    """Only readers of committed records get a list of aborted transactions, as from a broker."""
    writer.append(b"no", producer_id=7)
    writer.append(b"yes", producer_id=8)
    writer.abort(7)
    writer.commit(8)
    writer.roll()
    await archive_topic(writer, archive)
    topic = topic_uuid(writer) if version >= 13 else "orders"
    async with asking(archive, tmp_path / "state") as client:
        committed = await fetched(client, topic, 0, version=version, isolation_level=1)
        every = await fetched(client, topic, 0, version=version, isolation_level=0)
    assert [(one.producer_id, one.first_offset) for one in committed.aborted_transactions] == [(7, 0)]
    assert every.aborted_transactions is None
    assert committed.records == every.records


async def test_offset_outside_the_archive_is_out_of_range(archive, tmp_path):
    """An offset before the archive's start or after its end is out of range. Its end has no records yet."""
    writer = LogWriter(tmp_path, first_offset=100)
    writer.closed_segment()
    await archive_topic(writer, archive)
    async with asking(archive, tmp_path / "state") as client:
        for offset in (-1, 0, 99, 104):
            found = await fetched(client, "orders", offset)
            assert found.error_code == ErrorCode.offset_out_of_range
            assert (found.log_start_offset, found.high_watermark) == (100, 103)
        assert (await fetched(client, "orders", 103)).error_code == ErrorCode.none


@pytest.mark.parametrize(
    ("version", "topic", "error"),
    [
        (12, "other", ErrorCode.unknown_topic_or_partition),
        (13, UUID(int=5), ErrorCode.unknown_topic_id),
    ],
)
async def test_unknown_topic_is_an_error_of_its_own(archive, tmp_path, version, topic, error):
    """The error of an unknown topic makes clients ask for metadata."""
    async with asking(archive, tmp_path / "state") as client:
        assert (await fetched(client, topic, 0, version=version, max_wait=LONG)).error_code == error


async def test_unknown_partition_of_a_known_topic_is_an_error(writer, archive, tmp_path):
    """One that the topic has, and of which nothing is archived, is an empty log."""
    writer.closed_segment()
    await archive_topic(writer, archive, partitions=2)
    request = fetch_request(12, {"orders": {1: {}, 2: {}}}, isolation_level=0, max_bytes=100)
    async with asking(archive, tmp_path / "state") as client:
        answer = await client.ask(request)
    errors = {one.partition_index: one.error_code for one in answer.responses[0].partitions}
    assert errors == {1: ErrorCode.none, 2: ErrorCode.unknown_topic_or_partition}


async def test_no_session_is_ever_made(writer, archive, tmp_path):
    """A session that a broker gave at this address before gets the error that it is gone."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    async with asking(archive, tmp_path / "state") as client:
        first = fetch_request(12, {"orders": {0: {}}}, session_id=0, session_epoch=0, max_bytes=1000)
        answer = await client.ask(first)
        assert (answer.error_code, answer.session_id) == (ErrorCode.none, 0)
        later = fetch_request(12, {}, session_id=77, session_epoch=3, max_bytes=1000)
        answer = await client.ask(later)
        assert (answer.error_code, answer.session_id) == (ErrorCode.fetch_session_id_not_found, 0)
        assert answer.responses == ()


async def test_reader_at_the_end_gets_what_is_archived_next(writer, archive, store, tmp_path):
    """A reader at the end waits, the manifest is read again, and the answer comes before the wait is over."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    interval = {"cloud_storage_readreplica_manifest_sync_timeout_ms": 20}
    async with asking(archive, tmp_path / "state", **interval) as client:
        waiting = asyncio.create_task(fetched(client, "orders", 3, max_wait=LONG))
        await until_requested(store, "head", manifest_key(writer.identified))
        assert not waiting.done()
        writer.closed_segment()
        await archived(writer, archive)
        found = await asyncio.wait_for(waiting, PATIENCE_SECONDS)
    assert [one.base_offset for one in headers_in(found.records)] == [3]
    assert found.high_watermark == 6


async def test_unchanged_manifest_is_not_read_again(writer, archive, store, tmp_path):
    """The version of a manifest is asked for once in an interval. Within it, nothing is."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    key = manifest_key(writer.identified)
    store.requests.clear()
    async with asking(archive, tmp_path / "state") as client:
        for _ in range(3):
            await fetched(client, "orders", 3)
    assert [one for one in store.requests if one[1] == key] == [("get", key)]


async def test_wait_ends_without_records(writer, archive, tmp_path):
    """A client that waits for more than there is gets what there is when its time is over."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    async with asking(archive, tmp_path / "state") as client:
        found = await fetched(client, "orders", 0, min_bytes=1 << 20, max_wait=milliseconds(50))
        assert [one.base_offset for one in headers_in(found.records)] == [0]
        found = await fetched(client, "orders", 3, max_wait=milliseconds(50))
        assert (found.error_code, found.records) == (ErrorCode.none, b"")


@pytest.mark.parametrize("limits", [{"min_bytes": 1 << 20}, {"min_bytes": 100, "partition_max_bytes": 1}])
async def test_records_do_not_wait_where_more_is_archived_behind_them(writer, archive, tmp_path, limits):
    """Waiting brings nothing to the end of a segment: the next Fetch begins behind it."""
    for _ in range(3):
        writer.closed_segment()
    end = writer.next_offset
    await archive_topic(writer, archive)
    async with asking(archive, tmp_path / "state") as client:
        offset, now = 0, asyncio.get_running_loop().time
        while offset < end - 3:
            begun_at = now()
            found = await fetched(client, "orders", offset, max_wait=LONG, **limits)
            assert now() - begun_at < 10
            offset = headers_in(found.records)[-1].next_offset
        begun_at = now()
        await fetched(client, "orders", end - 1, min_bytes=1 << 20, max_wait=milliseconds(300))
        assert now() - begun_at >= 0.29


async def test_merged_segment_is_read_by_the_newest_manifest(writer, archive, store, tmp_path):
    """An object that has gone means that the manifest at hand is an old one."""
    writer.closed_segment()
    writer.closed_segment()
    manifest = await archive_topic(writer, archive)
    async with asking(archive, tmp_path / "state") as client:
        assert (await fetched(client, "orders", 6)).records == b""
        stored = await archive.manifests.load(writer.identified)
        await archive.manifests.commit(stored, manifest.expired(1, now_ms=0), leader_epoch=0)
        gone = manifest.segments[0]
        await store.delete_many(
            [data_key(writer.identified, gone), data_key(writer.identified, gone) + ".index"]
        )
        found = await fetched(client, "orders", 0)
        assert (found.error_code, found.log_start_offset) == (ErrorCode.offset_out_of_range, 3)
        assert headers_in((await fetched(client, "orders", 3)).records)


async def test_object_that_is_missing_is_an_error_to_try_again(writer, archive, store, tmp_path):
    """A missing object is not the end of the log: a client must not skip what is archived."""
    writer.closed_segment()
    manifest = await archive_topic(writer, archive)
    await store.delete_many([data_key(writer.identified, manifest.segments[0])])
    async with asking(archive, tmp_path / "state") as client:
        found = await fetched(client, "orders", 0, max_wait=LONG)
    assert (found.error_code, found.records) == (ErrorCode.kafka_storage_error, b"")


async def test_answer_of_errors_alone_waits_as_long_as_the_client(writer, archive, store, tmp_path):
    """An object that stays damaged is not downloaded again and again by a client that asks again at once."""
    writer.append()
    writer.roll()
    manifest = await archive_topic(writer, archive)
    rot(store, data_key(writer.identified, manifest.segments[0]))
    async with asking(archive, tmp_path / "state") as client:
        now = asyncio.get_running_loop().time
        begun_at = now()
        found = await fetched(client, "orders", 0, min_bytes=1, max_wait=milliseconds(300))
        assert found.error_code is TRY_AGAIN
        assert now() - begun_at >= 0.29
        begun_at = now()
        refused = await fetched(client, "nothing", 0, min_bytes=1, max_wait=LONG)
        assert refused.error_code is ErrorCode.unknown_topic_or_partition
        assert now() - begun_at < 10


async def test_records_do_not_wait_beside_an_error(archive, store, tmp_path):
    """They come at once, although they are fewer than the client wants."""
    for number in range(2):
        writer = LogWriter(tmp_path, "orders", number)
        writer.append()
        writer.roll()
        manifest = await archive_topic(writer, archive)
    rot(store, data_key(writer.identified, manifest.segments[0]))
    wanted = {"orders": {number: {"fetch_offset": 0} for number in range(2)}}
    request = fetch_request(12, wanted, isolation_level=0, min_bytes=1 << 20, max_wait=LONG)
    async with asking(archive, tmp_path / "state") as client, asyncio.timeout(PATIENCE_SECONDS / 2):
        answer = await client.ask(request)
    found = {one.partition_index: one for one in answer.responses[0].partitions}
    assert len(headers_in(found[0].records)) == 1
    assert found[1].error_code is TRY_AGAIN


async def test_log_has_a_few_lines_about_a_client_that_reads_a_damaged_object(
    writer, archive, store, tmp_path
):
    """The client decides how often it asks."""
    writer.append()
    writer.roll()
    manifest = await archive_topic(writer, archive)
    rot(store, data_key(writer.identified, manifest.segments[0]))
    async with asking(archive, tmp_path / "state") as client:
        with capture_logs() as events:
            for _ in range(2 * LINES_PER_ADDRESS):
                await fetched(client, "orders", 0)
    told = [one for one in events if one["event"] == "archived records cannot be read now"]
    assert len(told) == LINES_PER_ADDRESS


async def test_records_are_counted_when_they_are_sent(writer, archive, tmp_path):
    """A Fetch that waits for more records reads the same ones again."""
    writer.append()
    writer.roll()
    await archive_topic(writer, archive)
    metrics = Metrics()
    async with (
        running_endpoint(archive, tmp_path / "state", metrics=metrics) as endpoint,
        connected(endpoint.server.port) as client,
    ):
        found = await fetched(client, "orders", 0, min_bytes=1 << 20, max_wait=milliseconds(300))
    value = metrics.registry.get_sample_value
    bytes_sent = [
        value("tieringd_gateway_topic_archived_bytes_total", {"topic": "orders", "source": source}) or 0
        for source in ("store", "cache")
    ]
    assert sum(bytes_sent) == len(found.records)


async def test_store_that_is_away_leaves_cached_records_readable(writer, archive, store, tmp_path):
    """The known manifests stay true, and chunks that were read once are on this host."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    interval = {"cloud_storage_readreplica_manifest_sync_timeout_ms": 1}
    async with asking(archive, tmp_path / "state", **interval) as client:
        before = await fetched(client, "orders", 0)
        for operation in ("head", "get", "get_range", "list_page"):
            store.fail_next(operation, lambda: StorageUnavailable("away"), times=1000)
        assert (await fetched(client, "orders", 0)).records == before.records


async def test_records_without_a_cache_stay_within_the_budget(archive, tmp_path):
    """Records beyond the budget come one partition after another, and each comes."""
    writers = [LogWriter(tmp_path, "orders", number) for number in range(4)]
    for writer in writers:
        writer.append(b"v" * 600_000)
        writer.roll()
        await archive_topic(writer, archive)
    settings = {
        "cloud_storage_cache_size": 0,
        "cloud_storage_cache_size_percent": 0,
        "buffer_bytes": 1 << 20,
    }
    offsets = dict.fromkeys(range(4), 0)
    async with asking(archive, tmp_path / "state", **settings) as client:
        for _ in range(4):
            request = fetch_request(
                12,
                {
                    "orders": {
                        n: {"fetch_offset": offset, "partition_max_bytes": 1 << 20}
                        for n, offset in offsets.items()
                        if not offset
                    }
                },
                max_bytes=1 << 30,
                isolation_level=0,
            )
            answer = await client.ask(request)
            came = [one for one in answer.responses[0].partitions if one.records]
            assert len(came) == 1
            offsets[came[0].partition_index] = len(headers_in(came[0].records))
    assert offsets == dict.fromkeys(range(4), 1)


async def test_large_batches_in_five_partitions_stay_within_the_fetch(archive, tmp_path):
    """Batches of more than half of its limit come one by one; a Fetch whose client has gone keeps nothing."""
    size, limit = 3_000_000, 5_000_000
    for number in range(5):
        writer = LogWriter(tmp_path, "orders", number)
        writer.append(bytes(size))
        writer.roll()
        await archive_topic(writer, archive)
    wanted = set(range(5))
    # Without a cache the records are in memory.
    settings = {"cloud_storage_cache_size": 0, "cloud_storage_cache_size_percent": 0}

    def request():
        asked = {n: {"partition_max_bytes": limit} for n in wanted}
        return fetch_request(12, {"orders": asked}, max_bytes=limit, isolation_level=0)

    async with running_endpoint(archive, tmp_path / "state", **settings) as endpoint:
        for _ in range(3):
            async with connected(endpoint.server.port) as client:
                client.send(request())
                await client.reader.readexactly(100)
            await until(lambda: not endpoint.server.open_connections)
            assert endpoint.server.buffered_bytes == 0
        async with connected(endpoint.server.port) as client:
            for _ in range(5):
                answer = await client.ask(request())
                came = {one.partition_index: one for one in answer.responses[0].partitions if one.records}
                assert sum(len(one.records) for one in came.values()) <= limit
                assert came
                wanted -= came.keys()
    assert not wanted


async def test_client_that_leaves_gives_everything_back(writer, archive, tmp_path):
    """Files of the cache are closed when their bytes were sent, and when their client has gone."""
    writer.append(b"v" * 8_000_000)
    writer.roll()
    await archive_topic(writer, archive)
    async with running_endpoint(archive, tmp_path / "state") as endpoint:
        async with connected(endpoint.server.port) as client:
            await fetched(client, "orders", 0)
            before = open_files()
            client.send(fetch_request(12, {"orders": {0: {}}}, max_bytes=1 << 30, isolation_level=0))
            await client.reader.readexactly(100)
        await until(lambda: not endpoint.server.open_connections)
        assert open_files() < before


async def test_client_that_was_sent_too_much_waits_and_no_other(writer, archive, tmp_path):
    """An answer has what may be sent in a second, but for a first batch that is larger."""
    for size in (10, 10, 900_000):
        writer.append(b"v" * size)
    writer.roll()
    await archive_topic(writer, archive)
    async with (
        running_endpoint(archive, tmp_path / "state", client_archive_bytes_per_second="64KiB") as endpoint,
        connected(endpoint.server.port) as client,
    ):
        found = await fetched(client, "orders", 0)
        assert headers_in(found.records)[-1].base_offset < 2
        assert not endpoint.server.counters.delayed_answers
        found = await fetched(client, "orders", 2)
        assert [one.base_offset for one in headers_in(found.records)] == [2]
        await until(lambda: endpoint.server.counters.delayed_answers)
        client.send(fetch_request(12, {"orders": {0: {}}}, max_bytes=1 << 30, isolation_level=0))
        answer = asyncio.create_task(client.frame())
        async with connected(endpoint.server.port) as other:
            assert (await fetched(other, "orders", 0)).records
        assert not answer.done()
        answer.cancel()


async def test_endpoint_that_stops_answers_waiting_clients(writer, archive, store, tmp_path):
    """Clients and the caller of the stop do not have to wait."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    config = endpoint_config(tmp_path / "state")
    async with AsyncExitStack() as clients:
        async with archive_endpoint_of(config, archive, Metrics(), from_cluster=None) as endpoint:
            client = await clients.enter_async_context(connected(endpoint.server.port))
            store.requests.clear()
            waiting = asyncio.create_task(fetched(client, "orders", 3, max_wait=LONG))
            await until_requested(store, "get", manifest_key(writer.identified))
        assert endpoint.server.open_connections == 0
        found = await asyncio.wait_for(waiting, PATIENCE_SECONDS)
    assert (found.error_code, found.records) == (ErrorCode.none, b"")


@pytest.mark.parametrize("slow", [0, 1])
async def test_slow_partition_keeps_no_other_waiting(tmp_path, slow):
    """
    A slow partition has no records and no error at first, wherever it stands. The others have theirs.

    A later Fetch has the records of the slow one.
    """
    store = HoldingStore()
    archive = archive_in(store)
    writers = [LogWriter(tmp_path, "orders", number) for number in range(2)]
    for writer in writers:
        writer.closed_segment()
        await archive_topic(writer, archive)
    (segment,) = (await archive.manifests.load(writers[slow].identified)).existing.segments
    store.held_key = data_key(writers[slow].identified, segment)
    question = fetch_request(12, {"orders": {n: {"fetch_offset": 0} for n in range(2)}}, isolation_level=0)
    async with asking(archive, tmp_path / "state") as client:
        answer = await client.ask(question)
        found = {one.partition_index: one for one in answer.responses[0].partitions}
        assert [one.error_code for one in found.values()] == [ErrorCode.none] * 2
        assert [len(headers_in(found[n].records)) for n in (slow, 1 - slow)] == [0, 1]
        store.may_read.set()
        counts = []
        while counts != [1, 1]:
            answer = await client.ask(question)
            counts = [len(headers_in(one.records)) for one in answer.responses[0].partitions]


async def test_more_partitions_than_are_read_at_once_all_come(archive, tmp_path):
    """All partitions come in the order of the request, some after the others."""
    count = 2 * PARTITIONS_AT_ONCE + 1
    for number in range(count):
        writer = LogWriter(tmp_path, "orders", number)
        writer.closed_segment()
        await archive_topic(writer, archive)
    missing = count + 2
    wanted = {n: {"fetch_offset": 0} for n in (4, missing, 0, 3, 1, 2, *range(5, count))}
    question = fetch_request(12, {"orders": wanted}, isolation_level=0, max_wait=LONG)
    counts = {}
    async with asking(archive, tmp_path / "state") as client:
        # After a second without one of them, the answer has what is read. The next one has more.
        while counts != {number: number != missing for number in wanted}:
            found = (await client.ask(question)).responses[0].partitions
            assert [one.partition_index for one in found] == list(wanted)
            counts = {one.partition_index: len(headers_in(one.records)) for one in found}


class HugeBatch:
    """Reads of a partition whose first batch has more bytes than a response can have."""

    is_in_memory = False

    def __init__(self):
        self.closed = 0

    async def hold(self, manifest, offset):
        return self

    def take(self, *, size_bytes_max, needs_a_batch, before_offset):
        return ArchivedBatches(1 << 31, self.close, 3, FileSlice(0, 0, 1 << 31))

    def close(self):
        self.closed += 1


class OneTopic:
    """Serves the topic of one partition."""

    name = "orders"

    def __init__(self, partition):
        self._partition = partition

    def find(self, topic):
        return self

    def partition(self, number):
        return self._partition


async def test_response_that_cannot_be_composed_gives_its_files_back(writer, archive, tmp_path):
    """The connection ends by the defect, and nothing stays open."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    partitions = ServedPartitions(archive.manifests, interval_seconds=30.0, at_once=3)
    huge = HugeBatch()
    answers = FetchAnswers(
        OneTopic(writer.identified),
        partitions,
        huge,
        EndpointSettings("h", 1, "bucket"),
        budget=MemoryBudget(1 << 20),
        history=archive.history,
        on_topic=lambda topic, source, size_bytes: None,
    )
    frame = memoryview(request_frame(fetch_request(12, {"orders": {0: {}}})))
    with pytest.raises(struct.error):
        await answers.fetch(RequestHead.read(frame), frame, EVERYTHING)
    assert huge.closed == 1
    await partitions.close()


class EarlyAndLate:
    """Reads whose first one holds a chunk at once. As with a thread, nothing interrupts the second."""

    def __init__(self):
        self.chunks = []
        self.is_ended, self.may_end = asyncio.Event(), asyncio.Event()

    async def hold(self, manifest, offset):
        is_late = bool(self.chunks)
        self.chunks.append(HugeBatch())
        chunk = self.chunks[-1]
        while is_late and not self.may_end.is_set():
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                self.is_ended.set()
        return chunk


@pytest.mark.parametrize("is_gone", [True, False])
async def test_late_reads_that_are_ended_leave_nothing_open(writer, archive, is_gone):
    """The client leaves while they are ended, or has its response before they have."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    partitions = ServedPartitions(archive.manifests, interval_seconds=30.0, at_once=3)
    reader, now = EarlyAndLate(), asyncio.get_running_loop().time()
    wanted = [(writer.identified, 0)] * 2
    reading = asyncio.create_task(
        PartitionReads(partitions, reader, archive.history).read(
            wanted, with_records=True, due_at=now + 0.2, deadline=now + 60
        )
    )
    await reader.is_ended.wait()
    assert [chunk.closed for chunk in reader.chunks] == [0, 0]
    if is_gone:
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    else:
        for one in await reading:
            one.close()
    assert sorted(chunk.closed for chunk in reader.chunks) == [0, 1]
    reader.may_end.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [chunk.closed for chunk in reader.chunks] == [1, 1]
    await partitions.close()
