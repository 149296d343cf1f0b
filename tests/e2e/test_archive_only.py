"""
A bucket without its broker: clients that are not ours read the whole archive, as the broker gave it.

The broker is only there to fill the bucket, and to say what is right.
"""

# Long: endpoints start and stop, and several clients read whole archives.

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import confluent_kafka
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as ClientPartition
from aiokafka.errors import GroupAuthorizationFailedError, PolicyViolationError

from tests.e2e.archives import archived_manifest
from tests.e2e.conftest import BUCKET
from tests.e2e.endpoints import serving
from tests.e2e.sample_topics import (
    FIRST_TIME_MS,
    ISOLATIONS,
    SAMPLE_TOPICS,
    SEGMENTS,
    STEP_MS,
    TRANSACTIONS,
    SeenRecord,
    codec_topic,
    consumed,
)
from tests.support.daemon import run_command
from tests.support.foreign_clients import read_go, read_records
from tests.support.gateway_clients import run_tool
from tests.support.kafka_messages import fetch_request, milliseconds
from tests.support.raw_kafka import connected
from tieringd.endpoint.refusals import READ_ONLY

_CONSOLE = "org.apache.kafka.tools.consumer.ConsoleConsumer"
_VALUES = [bytes([number]) * 100_000 for number in range(25)]
_TIMESTAMP_TYPES = {confluent_kafka.TIMESTAMP_CREATE_TIME: "CreateTime"}


@pytest.fixture
def archive_of_samples(seaweedfs, samples, tmp_path):
    """Give an endpoint of the sample topics."""
    with serving(seaweedfs, tmp_path, samples.prefix) as endpoint:
        yield endpoint


def read_confluent(bootstrap, topic, isolation, *, first=confluent_kafka.OFFSET_BEGINNING):
    """Read a partition to its end with librdkafka."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "not used",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": isolation,
        }
    )
    found = []
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, first)])
        while True:
            message = consumer.poll(180)
            assert message is not None, f"{topic}: nothing came for three minutes after {len(found)} records"
            if message.error() is not None:
                assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF, message.error()
                return found
            kind, time_ms = message.timestamp()
            found.append(
                SeenRecord(
                    message.offset(),
                    time_ms,
                    _TIMESTAMP_TYPES.get(kind, "LogAppendTime"),
                    message.key(),
                    message.value(),
                    tuple(message.headers() or ()),
                )
            )
    finally:
        consumer.close()


# Long: every record of every kind of topic, by two clients.
@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_clients_read_the_archive_as_they_read_the_broker(
    kafka, archive_of_samples, sample_objects, isolation
):
    """Every kind of topic, record by record, with aiokafka and librdkafka."""
    through = SimpleNamespace(bootstrap=archive_of_samples.bootstrap)
    for topic in SAMPLE_TOPICS:
        end = archived_manifest(sample_objects, topic).next_offset
        expected = [one for one in await consumed(kafka, topic, isolation) if one.offset < end]
        assert await asyncio.to_thread(read_confluent, through.bootstrap, topic, isolation) == expected
        assert await read_to(through.bootstrap, topic, isolation, expected[-1].offset) == expected


async def read_to(bootstrap, topic, isolation, last_offset, *, first=None):
    """Read a partition up to an offset with aiokafka."""
    partition = ClientPartition(topic, 0)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level=isolation, enable_auto_commit=False
    )
    await consumer.start()
    found = []
    try:
        consumer.assign([partition])
        if first is None:
            await consumer.seek_to_beginning(partition)
        else:
            consumer.seek(partition, first)
        while not found or found[-1].offset < last_offset:
            one = await asyncio.wait_for(consumer.getone(), 180)
            kind = ("CreateTime", "LogAppendTime")[one.timestamp_type]
            found.append(SeenRecord(one.offset, one.timestamp, kind, one.key, one.value, tuple(one.headers)))
        return found
    finally:
        await consumer.stop()


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_java_consumer_reads_the_same_offsets(kafka, archive_of_samples, sample_objects, isolation):
    """Kafka's own console consumer, over transactions that were aborted and committed."""
    end = archived_manifest(sample_objects, TRANSACTIONS).next_offset
    expected = [one.offset for one in await consumed(kafka, TRANSACTIONS, isolation) if one.offset < end]
    printed = await run_tool(
        SimpleNamespace(cluster=kafka),
        _CONSOLE,
        *("--bootstrap-server", archive_of_samples.bootstrap, "--topic", TRANSACTIONS, "--partition", "0"),
        *("--offset", "earliest", "--max-messages", str(len(expected)), "--timeout-ms", "180000"),
        *("--isolation-level", isolation),
        *("--property", "print.offset=true", "--property", "print.value=false"),
    )
    assert [int(found) for found in re.findall(r"^Offset:(\d+)$", printed, re.MULTILINE)] == expected


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_client_in_go_reads_the_same_offsets(kafka, archive_of_samples, sample_objects, isolation):
    """franz-go reads the archived part of a topic with transactions as Kafka's consumer reads the broker."""
    archived = archived_manifest(sample_objects, TRANSACTIONS)
    expected = [
        one for one in await consumed(kafka, TRANSACTIONS, isolation) if one.offset < archived.next_offset
    ]
    read = await read_go(archive_of_samples.bootstrap, TRANSACTIONS, isolation, len(expected))
    assert read == read_records(expected)


async def test_seeks_and_times_are_found(kafka, archive_of_samples, sample_objects):
    """Any offset and any time is found as the broker finds it, and the ends are those of the archive."""
    topic = codec_topic("lz4")
    partition = ClientPartition(topic, 0)
    manifest = archived_manifest(sample_objects, topic)
    expected = await consumed(kafka, topic, "read_uncommitted")
    bootstrap = archive_of_samples.bootstrap
    for first in (0, 1, 57, manifest.segments[1].base_offset, manifest.next_offset - 1):
        read = await read_to(bootstrap, topic, "read_committed", manifest.next_offset - 1, first=first)
        assert read == expected[first : manifest.next_offset]
    times = [
        FIRST_TIME_MS - 5,
        *(FIRST_TIME_MS + n * STEP_MS + 1 for n in range(0, manifest.next_offset - 1, 9)),
    ]
    found = []
    for each in (kafka.bootstrap, bootstrap):
        consumer = AIOKafkaConsumer(bootstrap_servers=each)
        await consumer.start()
        try:
            answers = [(await consumer.offsets_for_times({partition: time}))[partition] for time in times]
            found.append([(one.offset, one.timestamp) for one in answers])
            ends = await consumer.end_offsets([partition])
            starts = await consumer.beginning_offsets([partition])
        finally:
            await consumer.stop()
    assert found[0] == found[1]
    assert (starts[partition], ends[partition]) == (0, manifest.next_offset)


@pytest.fixture
def endpoint_of_prefix(seaweedfs, prefix, tmp_path):
    """Give a function that serves this test's part of the bucket, and reads it often."""
    changes = {"cloud_storage_readreplica_manifest_sync_timeout_ms": 200}
    return lambda: serving(seaweedfs, tmp_path, prefix, **changes)


async def test_reader_at_the_end_gets_what_another_upload_adds(
    kafka, write_kafka_config, endpoint_of_prefix, objects, topic
):
    """The endpoint reads the bucket again by itself."""
    config = write_kafka_config(topics={topic: {"remote.storage.enable": True}})
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES, max_batch_size=200_000)
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    first = archived_manifest(objects, topic).next_offset
    with endpoint_of_prefix() as endpoint:
        consumer = AIOKafkaConsumer(bootstrap_servers=endpoint.bootstrap)
        await consumer.start()
        try:
            consumer.assign([ClientPartition(topic, 0)])
            await consumer.seek_to_beginning()
            offsets = [(await asyncio.wait_for(consumer.getone(), 180)).offset for _ in range(first)]
            assert offsets == list(range(first))
            waiting = asyncio.create_task(consumer.getone())
            await kafka.produce(topic, _VALUES, max_batch_size=200_000)
            done = await asyncio.to_thread(run_command, "run", "--once", "--config", str(config))
            assert done.returncode == 0
            assert (await asyncio.wait_for(waiting, 180)).offset == first
        finally:
            await consumer.stop()
    assert archived_manifest(objects, topic).next_offset > first


async def test_no_client_writes_and_no_group_keeps_offsets(kafka, archive_of_samples):
    """Three clients hear at once, and for good, that this is no broker."""
    bootstrap, topic = archive_of_samples.bootstrap, TRANSACTIONS
    for idempotence in (False, True):
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=idempotence) as producer:
            with pytest.raises(PolicyViolationError):
                await producer.send_and_wait(topic, b"no", partition=0)
        told = []
        settings = {"bootstrap.servers": bootstrap, "enable.idempotence": idempotence}
        confluent = confluent_kafka.Producer(settings)
        confluent.produce(
            topic, b"no", partition=0, on_delivery=lambda error, _, told=told: told.append(error)
        )
        assert await asyncio.to_thread(confluent.flush, 180) == 0
        assert [error.code() for error in told] == [confluent_kafka.KafkaError.POLICY_VIOLATION]
    arguments = kafka.broker.command(
        "org.apache.kafka.tools.ConsoleProducer", "--bootstrap-server", bootstrap, "--topic", topic
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    output, errors = await asyncio.wait_for(process.communicate(b"no\n"), 240)
    assert READ_ONLY in (output + errors).decode()
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, group_id="group")
    with pytest.raises(GroupAuthorizationFailedError):
        await consumer.start()
    await consumer.stop()
    subscriber = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": "group"})
    try:
        subscriber.subscribe([topic])
        message = await asyncio.to_thread(subscriber.poll, 180)
    finally:
        subscriber.close()
    assert message.error().code() == confluent_kafka.KafkaError.GROUP_AUTHORIZATION_FAILED


async def test_admin_tools_see_the_archive(kafka, archive_of_samples, sample_objects):
    """Topics, offsets, settings and sizes, with Kafka's own tools."""
    topic = codec_topic("zstd")
    manifest = archived_manifest(sample_objects, topic)
    behind = SimpleNamespace(cluster=kafka)
    bootstrap = ("--bootstrap-server", archive_of_samples.bootstrap)
    tools = "org.apache.kafka.tools"
    listed = await run_tool(behind, f"{tools}.TopicCommand", *bootstrap, "--list")
    assert set(SAMPLE_TOPICS) <= set(listed.splitlines())
    described = await run_tool(behind, f"{tools}.TopicCommand", *bootstrap, "--describe", "--topic", topic)
    assert f"TopicId: {manifest.partition.topic_id}" in described
    offsets = await run_tool(behind, f"{tools}.GetOffsetShell", *bootstrap, "--topic", topic)
    assert f"{topic}:0:{manifest.next_offset}" in offsets
    directories = await run_tool(
        behind, f"{tools}.LogDirsCommand", *bootstrap, "--describe", "--topic-list", topic
    )
    assert f'"remote://{BUCKET}"' in directories
    assert f'"size":{manifest.segments.total_bytes}' in directories
    settings = await run_tool(
        behind,
        "kafka.admin.ConfigCommand",
        *(*bootstrap, "--describe", "--entity-type", "topics", "--entity-name", topic, "--all"),
    )
    assert "cleanup.policy=delete" in settings


async def test_signal_answers_waiting_clients(seaweedfs, samples, sample_objects, tmp_path):
    """A consumer at the end of the archive has its answer, and then its connection ends; nothing is cut."""
    end = archived_manifest(sample_objects, TRANSACTIONS).next_offset
    with serving(seaweedfs, tmp_path, samples.prefix) as endpoint:
        assert endpoint.get("/readyz") == (200, "ok\n")
        async with connected(int(endpoint.bootstrap.rpartition(":")[2])) as client:
            at_end = fetch_request(
                12, {TRANSACTIONS: {0: {"fetch_offset": end}}}, max_wait=milliseconds(25_000), max_bytes=1000
            )
            client.send(at_end)
            first = fetch_request(12, {TRANSACTIONS: {0: {}}}, max_bytes=1000)
            async with connected(int(endpoint.bootstrap.rpartition(":")[2])) as other:
                # What was sent before on another connection has arrived by now.
                await other.ask(first)
            await asyncio.to_thread(endpoint.stop)
            (answer,) = (await client.answer(at_end)).responses[0].partitions
            assert (answer.high_watermark, answer.records) == (end, b"")
            assert await client.reader.read() == b""
