"""
A gateway with an archive in front of a real broker that has trimmed its log.

The archive is a copy of the log made before the trim, so what is right is known: every record,
at its offset, for every client and every version of Fetch.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import confluent_kafka
import pytest
import pytest_asyncio
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import RecordsToDelete
from kio.schema.errors import ErrorCode

from tests.fakes.archived_log import ArchivedLogs, LogCopy
from tests.support.gateway_clients import read_aiokafka, read_librdkafka, records_in, run_tool
from tests.support.gateways import BrokerBehind
from tests.support.kafka_messages import fetch_request, fields_of, milliseconds, request_module
from tests.support.raw_kafka import connected
from tieringd.errors import StorageUnavailable
from tieringd.formats.record_batch import parse_header

VALUES = [b"%05d" % number + b"v" * 500 for number in range(4000)]
CUT = 2500
FETCH_OF_KAFKA_4 = range(4, 18)


@dataclass
class Trimmed:
    """A broker with trimmed topics, and copies of what they were."""

    behind: BrokerBehind
    plain: LogCopy
    transactions: LogCopy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trimmed(tmp_path_factory):
    """Give the broker, with most of two topics trimmed away."""
    directory = tmp_path_factory.mktemp("trimmed")
    behind = await BrokerBehind.start(directory)
    cluster = behind.cluster
    # The timestamps are of 2023: by default the broker would delete such records at once.
    await cluster.create_topic("plain", partitions=2, configs={"retention.ms": "-1"})
    async with cluster.producer(linger_ms=5) as producer:
        for value in VALUES:
            await producer.send("plain", value, partition=0, timestamp_ms=1_700_000_000_000 + int(value[:5]))
    await cluster.produce("plain", [b"tail" * 200] * 2000, partition=1)
    await cluster.create_topic("transactions")
    async with AIOKafkaProducer(bootstrap_servers=cluster.bootstrap, transactional_id="t") as producer:
        for number in range(8):
            await producer.begin_transaction()
            await producer.send_and_wait("transactions", b"%d" % number, partition=0)
            if number % 2:
                await producer.abort_transaction()
            else:
                await producer.commit_transaction()
    await cluster.until_stable("transactions")
    log_dir = cluster.broker.log_dir
    copies = [LogCopy.of(log_dir, name, 0, directory / name) for name in ("plain", "transactions")]
    async with cluster.admin() as admin:
        await admin.delete_records(
            {
                TopicPartition("plain", 0): RecordsToDelete(before_offset=CUT),
                TopicPartition("transactions", 0): RecordsToDelete(before_offset=12),
            }
        )
    yield Trimmed(behind, *copies)
    for copy in copies:
        copy.close()
    await cluster.kill()


@pytest.fixture
async def archive(trimmed):
    """Give the archive of the gateway, which runs."""
    archive = ArchivedLogs(trimmed.plain, trimmed.transactions)
    async with trimmed.behind.gateway(archive) as server:
        yield archive
        assert server.buffered_bytes == 0
    assert archive.released == archive.served


async def test_whole_log_is_read_by_unmodified_clients(trimmed, archive):
    """Directly a reader finds what is left; through the gateway it reads from the first record on."""
    expected = list(enumerate(VALUES))
    direct = trimmed.behind.cluster.bootstrap
    assert await read_aiokafka(direct, "plain", len(VALUES) - CUT) == expected[CUT:]
    assert await read_aiokafka(trimmed.behind.bootstrap, "plain", len(VALUES)) == expected
    assert (
        await asyncio.to_thread(read_librdkafka, trimmed.behind.bootstrap, "plain", len(VALUES)) == expected
    )
    java = await run_tool(
        trimmed.behind,
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        *("--bootstrap-server", trimmed.behind.bootstrap, "--topic", "plain", "--partition", "0"),
        *("--offset", "earliest", "--max-messages", str(len(VALUES)), "--timeout-ms", "180000"),
    )
    assert records_in(java) == VALUES
    assert archive.questions


async def test_aborted_transactions_of_the_archive_are_not_seen(trimmed, archive):
    """A reader of committed records sees the same as before the trim, across the end of the archive."""
    committed = [(number * 2, b"%d" % number) for number in range(0, 8, 2)]
    bootstrap = trimmed.behind.bootstrap
    read = await read_aiokafka(bootstrap, "transactions", 4, isolation_level="read_committed")
    assert read == committed
    read = await asyncio.to_thread(
        read_librdkafka, bootstrap, "transactions", 4, **{"isolation.level": "read_committed"}
    )
    assert read == committed
    assert any(question.read_committed for question in archive.questions)


async def test_archive_that_knows_nothing_changes_nothing(trimmed):
    """A client without an archive gets the broker's own answer: the offset is out of range."""
    async with trimmed.behind.gateway() as server, connected(trimmed.behind.port) as client:
        answer = await client.ask(fetch_request(12, {"plain": {0: {"fetch_offset": 0}}}))
        assert answer.responses[0].partitions[0].error_code == ErrorCode.offset_out_of_range
        assert server.counters.archived_answers == 0


@pytest.mark.parametrize("version", FETCH_OF_KAFKA_4)
async def test_archived_records_come_in_every_version_of_fetch(trimmed, archive, version):
    """One request for a trimmed offset and for one that the broker has is answered from both."""
    topic = trimmed.plain.topic_id if version >= 13 else "plain"
    request = fetch_request(
        version,
        {topic: {0: {"fetch_offset": 3, "partition_max_bytes": 100_000}, 1: {"fetch_offset": 10}}},
        session_id=0,
        session_epoch=0,
        isolation_level=1,
        max_bytes=10_000_000,
    )
    async with connected(trimmed.behind.port) as client:
        answer = await client.ask(request)
    partitions = {each.partition_index: each for each in answer.responses[0].partitions}
    assert set(partitions) == {0, 1}
    assert getattr(answer, "session_id", 0) == 0
    archived, local = partitions[0], partitions[1]
    assert (archived.error_code, local.error_code) == (ErrorCode.none, ErrorCode.none)
    begin, first = trimmed.plain.batches[0]
    assert begin == 0
    assert first.base_offset <= 3 <= first.last_offset
    assert archived.records == trimmed.plain.path.read_bytes()[: len(archived.records)]
    assert 0 < len(archived.records) <= 100_000
    header = parse_header(local.records)
    assert header.base_offset <= 10 <= header.last_offset


@pytest.mark.parametrize("version", FETCH_OF_KAFKA_4)
async def test_offset_past_the_end_stays_out_of_range(trimmed, archive, version):
    """The archive has nothing to say to it, and the broker's answer goes through."""
    topic = trimmed.plain.topic_id if version >= 13 else "plain"
    async with connected(trimmed.behind.port) as client:
        answer = await client.ask(fetch_request(version, {topic: {0: {"fetch_offset": 99_999}}}))
    assert answer.responses[0].partitions[0].error_code == ErrorCode.offset_out_of_range


async def test_archive_that_cannot_answer_now_is_tried_again(trimmed, archive):
    """A client must take neither the offset for gone, nor the broker's first offset for the log's."""
    archive.fault = StorageUnavailable("the store is away")
    async with connected(trimmed.behind.port) as client:
        answer = await client.ask(fetch_request(12, {"plain": {0: {"fetch_offset": 0}}}))
        assert answer.responses[0].partitions[0].error_code == ErrorCode.kafka_storage_error
        answer = await client.ask(list_offsets(7, -2))
        assert answer.topics[0].partitions[0].error_code == ErrorCode.kafka_storage_error
        answer = await client.ask(list_offsets(7, -1))
        assert answer.topics[0].partitions[0].offset == len(VALUES)
        archive.fault = None
        answer = await client.ask(list_offsets(7, -2))
        assert answer.topics[0].partitions[0].offset == 0


def list_offsets(version, timestamp, *, topic="plain"):
    module = request_module(2, version)
    asked = module.ListOffsetsPartition(partition_index=0, timestamp=timestamp)
    fields = fields_of(module.ListOffsetsRequest, isolation_level=0, timeout=milliseconds(5000))
    return module.ListOffsetsRequest(
        replica_id=-1, topics=(module.ListOffsetsTopic(name=topic, partitions=(asked,)),), **fields
    )


@pytest.mark.parametrize("version", range(1, 11))
async def test_offsets_are_listed_as_of_one_log(trimmed, archive, version):
    """Earliest and timestamps come from the archive, latest from the broker, in every version."""
    base = 1_700_000_000_000
    wanted = {-2: 0, -1: len(VALUES), base + 3999: None, base + 100: None}
    if version >= 8:
        wanted[-4] = CUT
    if version >= 9:
        wanted[-5] = len(VALUES) - 1
    async with connected(trimmed.behind.port) as client:
        for timestamp, offset in wanted.items():
            answer = await client.ask(list_offsets(version, timestamp))
            said = answer.topics[0].partitions[0]
            assert said.error_code == ErrorCode.none
            if offset is not None:
                assert said.offset == offset, timestamp
        early = (await client.ask(list_offsets(version, base + 100))).topics[0].partitions[0]
        assert early.offset <= 100
        late = (await client.ask(list_offsets(version, base + 3999))).topics[0].partitions[0]
        assert CUT < late.offset <= 3999


@pytest.mark.parametrize("version", [5, 10])
@pytest.mark.parametrize("rest", [bytes(3), b"xyz"])
async def test_bytes_after_a_request_are_ignored_as_the_broker_ignores_them(trimmed, archive, version, rest):
    """Bytes after a request are ignored by the broker, and by the gateway. librdkafka sends some."""
    own = int(trimmed.behind.cluster.bootstrap.rpartition(":")[2])
    for port, earliest in ((own, CUT), (trimmed.behind.port, 0)):
        async with connected(port) as client:
            for _ in range(2):
                answer = await client.ask(list_offsets(version, -2), rest=rest)
                said = answer.topics[0].partitions[0]
                assert (said.error_code, said.offset) == (ErrorCode.none, earliest)


@pytest.mark.parametrize("version", range(1, 5))
async def test_log_dirs_gain_a_row_for_the_bucket(trimmed, archive, version):
    """The broker's own rows stay, and only partitions that were asked for are in the answer."""
    module = request_module(35, version)
    asked = module.DescribableLogDirTopic(topic="plain", partitions=(0,))
    async with connected(trimmed.behind.port) as client:
        everything = await client.ask(module.DescribeLogDirsRequest(topics=None))
        some = await client.ask(module.DescribeLogDirsRequest(topics=(asked,)))
    own, remote = everything.results
    assert own.log_dir == str(trimmed.behind.cluster.broker.log_dir)
    assert remote.log_dir == "remote://copies"
    assert {topic.name for topic in remote.topics} == {"plain", "transactions"}
    (topic,) = some.results[1].topics
    assert topic.name == "plain"
    assert topic.partitions[0].partition_size == trimmed.plain.path.stat().st_size


@pytest.mark.parametrize("version", range(2, 5))
async def test_epochs_that_are_not_archived_are_the_brokers(trimmed, archive, version):
    """The current epoch ends where the log does."""
    module = request_module(23, version)
    asked = module.OffsetForLeaderPartition(partition=0, leader_epoch=0)
    topic = module.OffsetForLeaderTopic(topic="plain", partitions=(asked,))
    request = module.OffsetForLeaderEpochRequest(
        **fields_of(module.OffsetForLeaderEpochRequest, replica_id=-1), topics=(topic,)
    )
    async with connected(trimmed.behind.port) as client:
        answer = await client.ask(request)
    said = answer.topics[0].partitions[0]
    assert (said.error_code, said.end_offset) == (ErrorCode.none, len(VALUES))


async def test_writes_are_refused_while_no_client_may_write(trimmed, archive):
    """Every partition gets the error; reading goes on, and writing too as soon as it may."""
    errors = []

    def opened(timeout_ms):
        # librdkafka tries again until the message's time is over.
        settings = {"bootstrap.servers": trimmed.behind.bootstrap, "message.timeout.ms": timeout_ms}
        return confluent_kafka.Producer(settings)

    async def write(producer, value):
        producer.produce("plain", value, partition=1, callback=lambda error, _: errors.append(error))
        await asyncio.to_thread(producer.flush, 180)

    patient, impatient = opened(120_000), opened(1_000)
    archive.is_writable = False
    await write(impatient, b"refused")
    assert [error is not None for error in errors] == [True]
    archive.is_writable = True
    await write(patient, b"taken")
    assert errors[1:] == [None]
