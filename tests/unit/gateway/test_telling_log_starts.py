"""Every answer that passes tells where the whole log begins: bytes in and bytes out, in every version."""

from __future__ import annotations

import uuid

import pytest
from kio.schema.errors import ErrorCode

from tests.fakes.gateway_peers import MIB, TopicArchive, fetch, fetched, produce, running
from tests.support.archive_endpoints import until
from tests.support.kafka_messages import (
    FETCH_VERSIONS,
    PRODUCE_VERSIONS,
    fetch_request,
    fields_of,
    milliseconds,
    produce_response,
    request_frame,
    request_module,
    response_frame,
    response_module,
    topic_fields,
)
from tests.support.raw_kafka import connected
from tieringd.errors import StorageUnavailable
from tieringd.formats.kafka_wire.request_header import KNOWN_VERSIONS, InspectedApi
from tieringd.gateway.archive_answers import ListedOffset

TIERED, PLAIN = uuid.UUID(int=7), uuid.UUID(int=8)
FAULT = StorageUnavailable("away")


class BegunArchive(TopicArchive):
    """Knows that the log of topic "tiered" begins at 40, or at `start`."""

    def __init__(self, start=40):
        super().__init__()
        self.start = start
        self.deleted = {}
        self.leader_epoch = 7
        self.listed = {}

    def may_have(self, topic, partition):
        return topic in {"tiered", "new", TIERED}

    def log_start(self, topic, partition, broker_offset):
        return min(self.start, broker_offset) if topic in {"tiered", TIERED} else broker_offset

    async def leader_epochs(self, asked):
        return dict.fromkeys(asked, self.leader_epoch)

    async def delete_records(self, before, leader_epochs):
        self.deleted |= {key: (offset, leader_epochs[key]) for key, offset in before.items()}
        return {key: self.start for key in before if key[0] == "tiered"}

    async def list_offsets(self, asked, *, read_committed):
        return {key: self.listed[key] for key in asked if key in self.listed}


def names(version, first_with_ids):
    return (TIERED, PLAIN) if version >= first_with_ids else ("tiered", "plain")


def fetched_from(version, starts, **values):
    """Return what a Fetch is answered: two partitions of a tiered topic, and one of a plain one."""
    tiered, plain = names(version, 13)
    one, two, other = ({"log_start_offset": start, "high_watermark": 900} | values for start in starts)
    return {tiered: {0: one, 5: two}, plain: {0: other}}


@pytest.mark.parametrize("size", [0, 40_000, 400_000])
@pytest.mark.parametrize("version", FETCH_VERSIONS)
async def test_fetch_tells_where_the_whole_log_begins(broker, version, size):
    """
    Eight bytes of the answer change and the rest stays the same.

    The answer is held, or passes in parts.
    """
    async with running(broker, BegunArchive()) as server, connected(server.port) as client:
        client.send(fetch_request(version, {names(version, 13)[0]: {0: {}, 5: {}}}, max_bytes=9 * MIB))
        head, _, answers = await broker.next()
        said = fetched_from(version, (50, 30, 50), records=bytes(size), aborted_transactions=[(1, 2)])
        answers.write(fetched(head, said, version=version))
        told = fetched_from(version, (40, 30, 50), records=bytes(size), aborted_transactions=[(1, 2)])
        assert await client.frame() == fetched(head, told, version=version)
        assert server.counters.archived_answers == 0


async def test_log_start_is_told_however_the_answer_arrives(broker):
    """No split of the bytes is special."""
    async with running(broker, BegunArchive()) as server, connected(server.port) as client:
        for at in range(8, 170, 3):
            client.send(fetch(("tiered",)))
            head, _, answers = await broker.next()
            frame = fetched(head, fetched_from(12, (50, 30, 50), records=bytes(70_000)))
            before = server.counters.from_broker_bytes
            answers.write(frame[:at])
            await answers.drain()
            await until(lambda before=before: server.counters.from_broker_bytes > before)
            answers.write(frame[at:])
            told = fetched_from(12, (40, 30, 50), records=bytes(70_000))
            assert await client.frame() == fetched(head, told)


async def test_log_start_that_is_not_known_is_told_as_unknown(broker):
    """Clients take -1 for that; the broker's would be taken for the whole log's."""
    async with running(broker, BegunArchive(start=-1)) as server, connected(server.port) as client:
        client.send(fetch(("tiered",)))
        head, _, answers = await broker.next()
        answers.write(fetched(head, fetched_from(12, (50, 0, 50))))
        # Nothing lies before offset 0.
        assert await client.frame() == fetched(head, fetched_from(12, (-1, 0, 50)))


async def test_replica_hears_of_the_brokers_own_log(broker):
    """A replica copies the broker's own log, and begins where that log begins."""
    async with running(broker, BegunArchive()) as server, connected(server.port) as client:
        client.send(fetch_request(12, {"tiered": {0: {}}}, replica_id=3))
        head, _, answers = await broker.next()
        frame = fetched(head, fetched_from(12, (50, 30, 50)))
        answers.write(frame)
        assert await client.frame() == frame


def produced(version, *starts, errors=(0, 0)):
    tiered, plain = names(version, 13)
    one, two = (
        {"log_start_offset": start, "error_code": error} for start, error in zip(starts, errors, strict=True)
    )
    return produce_response(version, {tiered: {4: one}, plain: {4: two}})


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
async def test_produce_tells_where_the_whole_log_begins(broker, version):
    """Versions 3 and 4 have no log start, and pass as they are."""
    module = request_module(0, version)
    request = produce(3, acks=1)
    if version >= 13:
        request = module.ProduceRequest(
            acks=1,
            timeout=milliseconds(5),
            topic_data=(
                module.TopicProduceData(
                    **topic_fields(module.TopicProduceData, TIERED),
                    partition_data=(module.PartitionProduceData(index=4, records=b"r"),),
                ),
            ),
        )
    else:
        request = produce(version, acks=1)
    async with running(broker, BegunArchive()) as server, connected(server.port) as client:
        for _ in range(2):
            client.send(request)
            head, _, answers = await broker.next()
            frame = response_frame(produced(version, 50, 50), correlation_id=head.correlation_id)
            for at in range(0, len(frame), 11):
                answers.write(frame[at : at + 11])
                await answers.drain()
            told = response_frame(produced(version, 40, 50), correlation_id=head.correlation_id)
            assert await client.frame() == told


async def test_producer_that_the_broker_forgot_hears_of_the_brokers_own_log(broker):
    """The producer learns from it whether the broker has deleted what it wrote last, and then begins anew."""
    async with running(broker, BegunArchive()) as server, connected(server.port) as client:
        client.send(produce(9, acks=1))
        head, _, answers = await broker.next()
        frame = response_frame(produced(9, 50, 50, errors=(59, 59)), correlation_id=head.correlation_id)
        answers.write(frame)
        assert await client.frame() == frame


def deletion(version, **topics):
    """Return a request to delete the records of partition 0 of topics before an offset."""
    module = request_module(InspectedApi.DELETE_RECORDS, version)
    return module.DeleteRecordsRequest(
        timeout=milliseconds(1000),
        topics=tuple(
            module.DeleteRecordsTopic(
                name=name,
                partitions=(module.DeleteRecordsPartition(partition_index=0, offset=offset),),
            )
            for name, offset in topics.items()
        ),
    )


def deleted(version, **topics):
    """Return the answer: a low watermark, or an error."""
    module = response_module(InspectedApi.DELETE_RECORDS, version)
    return module.DeleteRecordsResponse(
        throttle_time=milliseconds(0),
        topics=tuple(
            module.DeleteRecordsTopicResult(
                name=name,
                partitions=(
                    module.DeleteRecordsPartitionResult(
                        partition_index=0,
                        low_watermark=-1 if isinstance(said, ErrorCode) else said,
                        error_code=said if isinstance(said, ErrorCode) else ErrorCode.none,
                    ),
                ),
            )
            for name, said in topics.items()
        ),
    )


@pytest.mark.parametrize("version", KNOWN_VERSIONS[InspectedApi.DELETE_RECORDS])
async def test_deletion_is_told_to_the_archive_and_its_start_to_the_client(broker, version):
    """A deletion that the broker refuses, or that the archive cannot have, is none."""
    archive = BegunArchive()
    async with running(broker, archive) as server, connected(server.port) as client:
        request = deletion(version, tiered=30, plain=10, new=20)
        client.send(request)
        head, _, answers = await broker.next()
        said = deleted(version, tiered=50, plain=10, new=ErrorCode.topic_authorization_failed)
        answers.write(response_frame(said, correlation_id=head.correlation_id))
        told = deleted(version, tiered=40, plain=10, new=ErrorCode.topic_authorization_failed)
        assert await client.answer(request) == told
        assert archive.deleted == {("tiered", 0): (30, 7)}


async def test_deletion_of_everything_ends_where_the_broker_says(broker):
    """Offset -1 asks for all."""
    archive = BegunArchive(start=70)
    async with running(broker, archive) as server, connected(server.port) as client:
        request = deletion(2, tiered=-1)
        client.send(request)
        head, _, answers = await broker.next()
        answers.write(response_frame(deleted(2, tiered=70), correlation_id=head.correlation_id))
        assert await client.answer(request) == deleted(2, tiered=70)
        assert archive.deleted == {("tiered", 0): (70, 7)}


async def test_trim_of_a_daemon_is_no_deletion(broker):
    """A daemon is recognised by its client id, and gets the broker's own answer."""
    archive = BegunArchive()
    async with running(broker, archive) as server, connected(server.port) as client:
        frame = response_frame(deleted(2, tiered=50), correlation_id=1)
        client.writer.write(request_frame(deletion(2, tiered=50), correlation_id=1, client_id="tieringd"))
        _, _, answers = await broker.next()
        answers.write(frame)
        assert await client.frame() == frame
        assert archive.deleted == {}


async def test_deletion_is_under_an_epoch_that_had_begun_before_the_broker_got_it(broker):
    """The broker loses the partition and leads it again before its answer is handled."""
    archive = BegunArchive()
    async with running(broker, archive) as server, connected(server.port) as client:
        request = deletion(2, tiered=30)
        client.send(request)
        head, _, answers = await broker.next()
        archive.leader_epoch = 9
        answers.write(response_frame(deleted(2, tiered=50), correlation_id=head.correlation_id))
        assert await client.answer(request) == deleted(2, tiered=40)
        assert archive.deleted == {("tiered", 0): (30, 7)}


async def test_deletion_whose_epoch_is_not_known_reaches_the_broker_and_is_asked_for_again(broker):
    """The archive hides the records at once, and the client's next request records the deletion."""
    archive = BegunArchive()

    async def unknown(asked):
        raise FAULT

    archive.leader_epochs = unknown
    async with running(broker, archive) as server, connected(server.port) as client:
        request = deletion(2, tiered=30)
        client.send(request)
        head, _, answers = await broker.next()
        answers.write(response_frame(deleted(2, tiered=50), correlation_id=head.correlation_id))
        assert await client.answer(request) == deleted(2, tiered=40)
        assert archive.deleted == {("tiered", 0): (30, FAULT)}


async def test_deletion_that_is_not_recorded_is_an_error_of_that_partition(broker):
    """The client asks again, and the broker accepts the same offset again."""
    archive = BegunArchive(start=FAULT)
    async with running(broker, archive) as server, connected(server.port) as client:
        request = deletion(2, tiered=50, plain=10)
        client.send(request)
        head, _, answers = await broker.next()
        answers.write(response_frame(deleted(2, tiered=50, plain=10), correlation_id=head.correlation_id))
        told = deleted(2, tiered=ErrorCode.kafka_storage_error, plain=10)
        assert await client.answer(request) == told


def list_offsets(version, timestamps):
    """Return a question for an offset of partition 0 of each topic."""
    module = request_module(InspectedApi.LIST_OFFSETS, version)
    return module.ListOffsetsRequest(
        replica_id=-1,
        topics=tuple(
            module.ListOffsetsTopic(
                name=name, partitions=(module.ListOffsetsPartition(partition_index=0, timestamp=at),)
            )
            for name, at in timestamps.items()
        ),
        **fields_of(module.ListOffsetsRequest, isolation_level=0, timeout=milliseconds(5000)),
    )


def listed(version, offsets):
    """Return the answer: an offset, or an error and what the broker had said."""
    module = response_module(InspectedApi.LIST_OFFSETS, version)
    return module.ListOffsetsResponse(
        topics=tuple(
            module.ListOffsetsTopicResponse(
                name=name,
                partitions=(
                    module.ListOffsetsPartitionResponse(partition_index=0, error_code=error, offset=offset),
                ),
            )
            for name, (error, offset) in offsets.items()
        ),
        **fields_of(module.ListOffsetsResponse, throttle_time=milliseconds(0)),
    )


@pytest.mark.parametrize("version", KNOWN_VERSIONS[InspectedApi.LIST_OFFSETS])
async def test_earliest_is_told_by_partition(broker, version):
    """An unknown start of one partition spoils no other, and never a certain one."""
    archive = BegunArchive()
    archive.listed = {("tiered", 0): ListedOffset(40), ("new", 0): FAULT}
    async with running(broker, archive) as server, connected(server.port) as client:
        request = list_offsets(version, {"tiered": -2, "new": -2, "plain": -2})
        client.send(request)
        head, _, answers = await broker.next()
        none, refused = ErrorCode.none, ErrorCode.kafka_storage_error
        said = {"tiered": (none, 50), "new": (none, 30), "plain": (none, 7)}
        answers.write(response_frame(listed(version, said), correlation_id=head.correlation_id))
        told = {"tiered": (none, 40), "new": (refused, 30), "plain": (none, 7)}
        assert await client.answer(request) == listed(version, told)


@pytest.mark.parametrize("timestamp", [-2, 0, 1_700_000_000_000])
async def test_offset_0_is_certain_without_an_archive(broker, timestamp):
    """A new topic is not waited for: nothing can be before its first record."""
    archive = BegunArchive()
    archive.listed = {("new", 0): FAULT}
    async with running(broker, archive) as server, connected(server.port) as client:
        client.send(list_offsets(7, {"new": timestamp}))
        head, _, answers = await broker.next()
        frame = response_frame(listed(7, {"new": (ErrorCode.none, 0)}), correlation_id=head.correlation_id)
        answers.write(frame)
        assert await client.frame() == frame


@pytest.mark.parametrize("timestamp", [-2, 1_700_000_000_000])
async def test_daemon_is_told_where_the_brokers_own_log_begins(broker, timestamp):
    """A daemon's bootstrap address may lead to a gateway, and it needs the bounds of the broker's log."""
    archive = BegunArchive()
    archive.listed = {("tiered", 0): ListedOffset(40)}
    async with running(broker, archive) as server, connected(server.port) as client:
        asked = list_offsets(7, {"tiered": timestamp})
        client.writer.write(request_frame(asked, correlation_id=1, client_id="tieringd"))
        _, _, answers = await broker.next()
        frame = response_frame(listed(7, {"tiered": (ErrorCode.none, 50)}), correlation_id=1)
        answers.write(frame)
        assert await client.frame() == frame
