"""Unmodified clients through the daemon's gateway: one log from the archive's first offset to the tail."""

# Long: many clients read through daemons that start, stop and lose their store.

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import confluent_kafka
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import RecordsToDelete
from aiokafka.errors import KafkaError
from confluent_kafka.admin import AdminClient

from tests.e2e.archives import archived_manifest, until_trimmed
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import ISOLATIONS, SEGMENTS, TRANSACTIONS, consumed, write_transactions
from tests.support.daemon import (
    endpoint_properties,
    kafka_config,
    run_command,
    run_json,
    running_daemon,
    write_config,
)
from tests.support.fault_proxy import Answer, ResetAnswer, fault_proxy
from tests.support.foreign_clients import grouped_headers, read_go, read_node, read_records
from tests.support.gateway_clients import read_aiokafka, read_librdkafka, run_tool
from tieringd.formats.object_keys import data_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.support.daemon import Daemon

_VALUES = [bytes([number]) * 100_000 for number in range(65)]
_WHOLE = list(enumerate(_VALUES))
_TIERED = {"remote.storage.enable": True, "local.retention.bytes": 1 << 20}


class Through:
    """A cluster as clients of the gateway see it."""

    def __init__(self, bootstrap):
        self.bootstrap = bootstrap


@pytest.fixture
def through(behind):
    """Give the cluster as clients of the gateway see it."""
    return Through(behind.bootstrap)


@pytest.fixture
def config_of(behind, seaweedfs, tmp_path, prefix):
    """Give a function that writes the configuration of a daemon with a gateway."""

    def write(topic, properties=_TIERED, **changes):
        config = kafka_config(
            behind.cluster,
            seaweedfs,
            tmp_path / "state",
            bucket=BUCKET,
            prefix=prefix,
            **({"topics": {topic: properties}, "gateway": behind.gateway_config} | changes),
        )
        return write_config(tmp_path / "tieringd.yaml", config)

    return write


@contextmanager
def trimmed(config) -> Iterator[Daemon]:
    """Run a daemon, and go on once it has trimmed the log."""
    with running_daemon(config) as daemon:
        until_trimmed(daemon)
        yield daemon


@asynccontextmanager
async def consumer_of(bootstrap, topic, **settings) -> AsyncIterator[AIOKafkaConsumer]:
    """Open a consumer of partition 0."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, **settings)
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, 0)])
        yield consumer
    finally:
        await consumer.stop()


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_every_client_reads_the_same_before_and_after_a_trim(
    behind, through, config_of, topic, isolation
):
    """Trimmed records come from the archive and the others from the broker, for three client libraries."""
    cluster = behind.cluster
    await cluster.create_topic(topic, configs=SEGMENTS)
    await cluster.produce(topic, _VALUES, max_batch_size=200_000)
    before = await consumed(cluster, topic, isolation)
    java = (
        *("--topic", topic, "--partition", "0", "--offset", "earliest", "--isolation-level", isolation),
        *("--max-messages", str(len(_VALUES)), "--timeout-ms", "180000"),
        *("--property", "print.offset=true", "--property", "print.timestamp=true"),
    )

    async def read_all(bootstrap):
        settings = {"isolation.level": isolation}
        console = "org.apache.kafka.tools.consumer.ConsoleConsumer"
        printed = await run_tool(behind, console, "--bootstrap-server", bootstrap, *java)
        return (
            await read_aiokafka(bootstrap, topic, len(_VALUES), isolation_level=isolation),
            await asyncio.to_thread(read_librdkafka, bootstrap, topic, len(_VALUES), **settings),
            [line for line in printed.splitlines() if line.startswith("CreateTime:")],
        )

    direct = await read_all(cluster.bootstrap)
    assert direct[0] == direct[1] == _WHOLE
    assert len(direct[2]) == len(_VALUES)
    with trimmed(config_of(topic)) as daemon:
        assert len(await consumed(cluster, topic, isolation)) < len(before)
        assert await consumed(through, topic, isolation) == before
        assert await read_all(behind.bootstrap) == direct
        assert daemon.metric("tieringd_cache_hits_total", kind="chunk")


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_transactions_are_filtered_in_the_archive_too(behind, through, config_of, isolation):
    """Long, short, committed and aborted ones, over the seam of archive and broker."""
    topic = f"{TRANSACTIONS}.{isolation}"
    await write_transactions(behind.cluster, topic)
    before = await consumed(behind.cluster, topic, isolation)
    with trimmed(config_of(topic)):
        assert len(await consumed(behind.cluster, topic, isolation)) < len(before)
        assert await consumed(through, topic, isolation) == before


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_clients_in_go_and_javascript_read_the_same(behind, through, config_of, isolation):
    """franz-go and KafkaJS read archive and tail, and share the offsets that a group commits."""
    topic = f"{TRANSACTIONS}.languages.{isolation}"
    await write_transactions(behind.cluster, topic)
    before = read_records(await consumed(behind.cluster, topic, isolation))
    count, some = len(before), len(before) // 3
    with trimmed(config_of(topic)):
        assert len(await consumed(behind.cluster, topic, isolation)) < count
        at = (behind.bootstrap, topic, isolation)
        assert await read_go(*at, count) == before
        assert await read_go(*at, some, group=topic) == before[:some]
        # KafkaJS 2.2.4 also gives records of aborted transactions, from a broker as well.
        if isolation == "read_uncommitted":
            found = await read_node(*at, some, group=topic)
            assert found == grouped_headers(before[some : 2 * some])
        else:
            assert await read_go(*at, some, group=topic) == before[some : 2 * some]
        assert await read_go(*at, count - 2 * some, group=topic) == before[2 * some :]


async def test_client_in_javascript_reads_committed_records(behind, config_of, topic):
    """KafkaJS reads archive and tail of a topic without transactions in its stricter mode."""
    await behind.cluster.create_topic(topic, configs=SEGMENTS)
    await behind.cluster.produce(topic, _VALUES, max_batch_size=200_000)
    with trimmed(config_of(topic)):
        found = await read_node(behind.bootstrap, topic, "read_committed", len(_VALUES), group=topic)
        assert [(one.offset, one.value) for one in found] == _WHOLE


async def test_transactions_cost_each_object_once(behind, config_of, seaweedfs, objects, prefix):
    """
    A reader of transactions downloads each byte and each index once; the next ones, of both kinds, nothing.

    Kafka's own scenario counts the same: fetches of segments, of offset indexes and of transaction indexes.
    """
    topic, through = f"{TRANSACTIONS}.counted", Through(behind.bootstrap)
    await write_transactions(behind.cluster, topic)
    before = {isolation: await consumed(behind.cluster, topic, isolation) for isolation in ISOLATIONS}
    async with fault_proxy(seaweedfs.endpoint_url) as proxy:
        # The daemon's cache is empty: what it archives it does not read.
        with running_daemon(config_of(topic, **endpoint_properties(proxy.url))) as daemon:
            await asyncio.to_thread(until_trimmed, daemon)
            proxy.exchanges.clear()
            assert await consumed(through, topic, "read_committed") == before["read_committed"]
            data, indexes = downloads(proxy, prefix)
            # The archive answers below the broker's start, which may be the offset of a marker.
            start = daemon.events("local log trimmed")[-1]["log_start_offset"]
            manifest = archived_manifest(objects, topic)
            read = [one for one in manifest.segments if one.base_offset < start]
            wanted = {data_key(manifest.partition, one) for one in read}
            # An answer that has room goes on with the segment that both have, if the client still waits.
            (shared,) = (
                data_key(manifest.partition, one) for one in manifest.segments if one.base_offset == start
            )
            found = {key for key, _ in data}
            assert wanted <= found <= wanted | {shared}
            assert len(read) > 2
            # No byte comes twice, and no index.
            assert len(data) == len(set(data))
            assert len(indexes) == len(set(indexes))
            assert len(indexes) <= len(read) + 1
            proxy.exchanges.clear()
            for isolation in ISOLATIONS:
                assert await consumed(through, topic, isolation) == before[isolation]
            again, indexes = downloads(proxy, prefix)
            left = {shared} - found
            assert {key for key, _ in again} <= left
            assert len(again) == len(set(again))
            assert len(indexes) <= len(left)


def downloads(proxy, prefix) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the key and the range of each download of data, and the key of each one of an index."""
    found = [
        (unquote(urlsplit(one.path).path).partition(f"/{prefix}/")[2], one.headers.get("range", ""))
        for one in proxy.exchanges
        if one.method == "GET"
    ]
    return (
        [one for one in found if one[0].endswith(".log")],
        [key for key, _ in found if key.endswith(".index")],
    )


async def test_seeks_and_times_reach_into_the_archive(behind, config_of, topic):
    """One consumer seeks by offset, forwards and back, by time, and to both ends."""
    await behind.cluster.create_topic(topic, configs=SEGMENTS)
    async with behind.cluster.producer() as producer:
        for number, value in _WHOLE:
            time_ms = 1_700_000_000_000 + number * 1000
            await producer.send_and_wait(topic, value, partition=0, timestamp_ms=time_ms)
    partition = TopicPartition(topic, 0)
    with trimmed(config_of(topic)):
        async with consumer_of(behind.bootstrap, topic) as consumer:
            for wanted in (3, 60, 17, 0, 64, 40):
                consumer.seek(partition, wanted)
                record = await consumer.getone()
                assert (record.offset, record.value) == (wanted, _VALUES[wanted])
            for number in (0, 9, 33, 64):
                asked = {partition: 1_700_000_000_000 + number * 1000 - 1}
                found = (await consumer.offsets_for_times(asked))[partition]
                assert (found.offset, found.timestamp) == (number, 1_700_000_000_000 + number * 1000)
            await consumer.seek_to_beginning(partition)
            assert (await consumer.getone()).offset == 0
            assert (await consumer.end_offsets([partition]))[partition] == len(_VALUES)


async def test_groups_begin_where_the_whole_log_does(behind, config_of, topic):
    """A new group resets to the archive's first offset, and one that committed there goes on there."""
    await behind.cluster.create_topic(topic, configs=SEGMENTS)
    await behind.cluster.produce(topic, _VALUES, max_batch_size=200_000)

    def first_of(group, *, commit):
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": behind.bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        consumer.subscribe([topic])
        try:
            (record,) = consumer.consume(1, 180)
            assert record.error() is None, record.error()
            if commit is not None:
                offset = confluent_kafka.TopicPartition(topic, 0, commit)
                consumer.commit(offsets=[offset], asynchronous=False)
            return record.offset()
        finally:
            consumer.close()

    with trimmed(config_of(topic)):
        assert await asyncio.to_thread(first_of, topic, commit=21) == 0
        assert await asyncio.to_thread(first_of, topic, commit=None) == 21
        # An offset behind the end is out of range everywhere: the reset leads to the archive's begin.
        assert await asyncio.to_thread(first_of, topic, commit=5000) == 21
        assert await asyncio.to_thread(first_of, topic, commit=None) == 0


def offsets_until_end(consumer) -> list[int]:
    """Consume up to the last record, and return the offsets in the order in which they came."""
    read: list[int] = []
    for _ in range(1800):
        read += [one.offset() for one in consumer.consume(1000, 0.1) if one.error() is None]
        if read and read[-1] == len(_VALUES) - 1:
            break
    return read


async def test_librdkafka_finds_the_beginning_after_records_of_the_broker(behind, config_of, topic, tmp_path):
    """The client librdkafka keeps the last answer's log start, for seeks and for groups without commits."""
    await behind.cluster.create_topic(topic, configs=SEGMENTS)
    await behind.cluster.produce(topic, _VALUES, max_batch_size=200_000)
    last, whole = len(_VALUES) - 1, list(range(len(_VALUES)))
    settings = {
        "bootstrap.servers": behind.bootstrap,
        "group.id": topic,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }

    def seek_back():
        consumer = confluent_kafka.Consumer(settings)
        partition = confluent_kafka.TopicPartition(topic, 0, last)
        try:
            consumer.assign([partition])
            assert offsets_until_end(consumer) == [last], "a record that the broker has"
            partition.offset = confluent_kafka.OFFSET_BEGINNING
            consumer.seek(partition)
            return offsets_until_end(consumer)
        finally:
            consumer.close()

    def assigned_again():
        consumer = confluent_kafka.Consumer(settings)
        try:
            read = []
            for _ in range(2):
                consumer.subscribe([topic])
                read.append(offsets_until_end(consumer))
                consumer.unsubscribe()
            return read
        finally:
            consumer.close()

    def deleted_before(offset):
        asked = confluent_kafka.TopicPartition(topic, 0, offset)
        admin = AdminClient({"bootstrap.servers": behind.bootstrap})
        (future,) = admin.delete_records([asked]).values()
        return future.result(120).low_watermark

    with trimmed(config_of(topic)):
        assert await asyncio.to_thread(seek_back) == whole
        assert await asyncio.to_thread(assigned_again) == [whole, whole]
    # The first answers after a start tell no start of the broker's either.
    with running_daemon(config_of(topic), tmp_path / "again.log"):
        assert await asyncio.to_thread(seek_back) == whole
        assert await asyncio.to_thread(deleted_before, 5) == 5
        assert await asyncio.to_thread(seek_back) == whole[5:]


async def test_deleted_records_never_come_back(behind, config_of, topic, objects, tmp_path):
    """
    Records deleted through the gateway or by command stay away, also after each restart of the daemon.

    The deletions end at a segment's base, inside a segment, and inside the local log.
    """
    await behind.cluster.create_topic(topic, configs=SEGMENTS)
    await behind.cluster.produce(topic, _VALUES, max_batch_size=200_000)
    before = await consumed(behind.cluster, topic, "read_uncommitted")
    config, through = config_of(topic), Through(behind.bootstrap)

    def deleted_before(offset):
        asked = confluent_kafka.TopicPartition(topic, 0, offset)
        admin = AdminClient({"bootstrap.servers": behind.bootstrap})
        (future,) = admin.delete_records([asked]).values()
        return future.result(120).low_watermark

    def by_command(offset):
        done = run_json("topic", "delete-records", topic, "--before", str(offset), "--config", str(config))
        (row,) = done["partitions"]
        assert row["fault"] is None
        assert done["record"].removeprefix("audit/deletions/").endswith("-done.json")
        return row["archive_start_offset"]

    with trimmed(config):
        _, second, third, *_ = archived_manifest(objects, topic).segments
        assert await asyncio.to_thread(deleted_before, second.base_offset) == second.base_offset
        assert archived_manifest(objects, topic).start_offset == second.base_offset
        assert await consumed(through, topic, "read_uncommitted") == before[second.base_offset :]
        assert by_command(third.base_offset) == third.base_offset, "only the archive has these"
    with running_daemon(config, tmp_path / "again.log") as daemon:
        daemon.until_rounds(1)
        assert await consumed(through, topic, "read_uncommitted") == before[third.base_offset :]
        # Inside the local log, and inside a segment: the daemon follows while it runs.
        middle = before[-8].offset
        start_offset = by_command(middle)
        assert start_offset == min(middle, archived_manifest(objects, topic).next_offset)
        gauge = "tieringd_archive_start_offset"
        daemon.until(lambda: daemon.metric(gauge, topic=topic) == start_offset, "the daemon has followed")
        assert await consumed(through, topic, "read_uncommitted") == before[middle:]
    with running_daemon(config, tmp_path / "third.log") as daemon:
        daemon.until_rounds(1)
        assert await consumed(through, topic, "read_uncommitted") == before[middle:]
    end = str(before[-1].offset + 2)
    refused = run_command("topic", "delete-records", topic, "--before", end, "--config", str(config))
    assert refused.returncode == 2
    assert b"is past the end of" in refused.stderr
    assert len([key for key in objects.keys() if key.startswith("audit/")]) == 4  # noqa: SIM118


async def test_new_topic_is_told_of_before_a_round_has_seen_it(behind, config_of, topic):
    """The broker's answers pass at once: where it begins and ends, and what it has of a time."""
    first = f"{topic}.first"
    await behind.cluster.create_topic(first)
    with running_daemon(config_of(first, cloud_storage_reconciliation_interval_ms=60_000)) as daemon:
        daemon.until_rounds(1)
        consumer = confluent_kafka.Consumer({"bootstrap.servers": behind.bootstrap, "group.id": topic})

        def asked(name):
            partition = confluent_kafka.TopicPartition(name, 0, 1_700_000_000_000)
            (at,) = consumer.offsets_for_times([partition], timeout=120)
            return consumer.get_watermark_offsets(partition, timeout=120), at.error, at.offset

        try:
            for number in range(5):
                name = f"{topic}.{number}"
                await behind.cluster.create_topic(name)
                nothing = (0, 0), None, confluent_kafka.OFFSET_END
                assert await asyncio.to_thread(asked, name) == nothing
        finally:
            consumer.close()
        assert daemon.events("the archive cannot answer now; the client is told to try again") == []


async def test_log_dirs_show_what_the_archive_holds(behind, config_of, topic, objects):
    """The admin client sees the bucket as one more directory."""
    await behind.cluster.create_topic(topic, configs=SEGMENTS)
    await behind.cluster.produce(topic, _VALUES, max_batch_size=200_000)
    with trimmed(config_of(topic)):
        told = await run_tool(
            behind,
            "org.apache.kafka.tools.LogDirsCommand",
            *("--bootstrap-server", behind.bootstrap, "--describe", "--topic-list", topic),
        )
    size_bytes = archived_manifest(objects, topic).segments.total_bytes
    assert f'"logDir":"remote://{BUCKET}"' in told
    assert f'"size":{size_bytes},' in told


async def test_reader_waits_while_the_store_fails(behind, seaweedfs, config_of, topic):
    """Requests are refused, reset and cut off in the middle: the client tries again, and misses nothing."""
    await behind.cluster.create_topic(topic, configs=SEGMENTS)
    await behind.cluster.produce(topic, _VALUES, max_batch_size=200_000)
    async with fault_proxy(seaweedfs.endpoint_url) as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")
        config = config_of(topic, cloud_storage_api_endpoint=host, cloud_storage_api_endpoint_port=int(port))
        # The daemon runs in a process of its own, and is waited for in a thread: the proxy is on this loop.
        with running_daemon(config) as daemon:
            await asyncio.to_thread(until_trimmed, daemon)
            for _ in range(4):
                proxy.spoil(Answer("503 Slow Down"), where=_reads_data)
                proxy.spoil(ResetAnswer(after_bytes=100_000), where=_reads_data)
            assert await read_aiokafka(behind.bootstrap, topic, len(_VALUES)) == _WHOLE
            assert proxy.faults_left == 0


def _reads_data(exchange):
    return exchange.method == "GET" and ".log" in exchange.path


# Long: the store stays away for longer than a client's requests last.
async def test_store_that_is_away_costs_a_client_no_record(behind, config_of, topic, seaweedfs):
    """Clients are not told that records are gone while the archive is unreadable. Then reading goes on."""
    await behind.cluster.create_topic(topic, configs=SEGMENTS)
    await behind.cluster.produce(topic, _VALUES, max_batch_size=200_000)
    partition = TopicPartition(topic, 0)
    with trimmed(config_of(topic)):
        async with consumer_of(behind.bootstrap, topic, auto_offset_reset="none") as consumer:
            await asyncio.to_thread(seaweedfs.stop)
            try:
                consumer.seek(partition, 0)
                assert await consumer.getmany(timeout_ms=4000) == {}
                consumer.seek(partition, len(_VALUES) - 1)
                assert (await consumer.getone()).offset == len(_VALUES) - 1
                consumer.seek(partition, 0)
                reading = asyncio.create_task(consumer.getone())
            finally:
                await asyncio.to_thread(seaweedfs.launch)
            record = await asyncio.wait_for(reading, 240)
            assert (record.offset, record.value) == (0, _VALUES[0])


async def test_topic_without_remote_read_is_the_brokers_alone(behind, config_of, topic, objects):
    """The topic's archive stays in the bucket, and the gateway changes no answer."""
    await behind.cluster.create_topic(topic, configs=SEGMENTS)
    await behind.cluster.produce(topic, _VALUES, max_batch_size=200_000)
    properties = {"redpanda.remote.write": True, "redpanda.remote.read": False}
    with running_daemon(config_of(topic, properties)) as daemon:
        daemon.until(lambda: daemon.next_offset(topic), "something is archived")
        async with behind.cluster.admin() as admin:
            await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=20)})
        daemon.until_rounds(3)
        async with consumer_of(behind.bootstrap, topic, auto_offset_reset="earliest") as consumer:
            partition = TopicPartition(topic, 0)
            assert (await consumer.beginning_offsets([partition]))[partition] == 20
            consumer.seek(partition, 3)
            assert (await consumer.getone()).offset == 20
    assert archived_manifest(objects, topic).start_offset == 0


async def test_full_disk_refuses_writes_and_serves_reads(behind, config_of, topic):
    """Producers hear an error of policy while a disk is degraded; consumers notice nothing."""
    await behind.cluster.create_topic(topic, configs=SEGMENTS)
    await behind.cluster.produce(topic, _VALUES, max_batch_size=200_000)
    with trimmed(config_of(topic, storage_min_free_bytes=1 << 60)) as daemon:
        daemon.until(lambda: daemon.metric("tieringd_producers_held_back"), "producers are held back")
        async with (
            AIOKafkaProducer(bootstrap_servers=behind.bootstrap) as patient,
            AIOKafkaProducer(
                bootstrap_servers=behind.bootstrap, request_timeout_ms=10_000, retry_backoff_ms=200
            ) as impatient,
        ):
            with pytest.raises(KafkaError):
                await impatient.send_and_wait(topic, b"refused", partition=0)
            assert await read_aiokafka(behind.bootstrap, topic, len(_VALUES)) == _WHOLE
            config_of(topic, storage_min_free_bytes=0)
            daemon.send_signal(signal.SIGHUP)
            daemon.until(lambda: not daemon.metric("tieringd_producers_held_back"), "they are let go")
            sent = await patient.send_and_wait(topic, b"taken", partition=0)
    assert sent.offset == len(_VALUES)


@pytest.mark.leaves_damage("a topic may be deleted before it is on record, and the daemon is stopped at once")
async def test_topics_and_groups_are_administered_through_the_gateway(behind, config_of, topic):
    """Admin clients create, describe and delete topics through the gateway, with an archive behind it."""
    with running_daemon(config_of(topic)) as daemon:
        daemon.until_rounds(1)
        admin = AdminClient({"bootstrap.servers": behind.bootstrap})

        def partitions():
            return sorted(admin.list_topics(topic, timeout=120).topics[topic].partitions)

        new = confluent_kafka.admin.NewTopic(topic, 3, 1)
        await asyncio.to_thread(admin.create_topics([new])[topic].result, 120)
        # A broker may tell of a new topic a moment after the controller has made it.
        daemon.until(lambda: partitions() == [0, 1, 2], "the topic is there")
        await asyncio.to_thread(admin.delete_topics([topic])[topic].result, 120)
        daemon.until(lambda: not partitions(), "the topic is gone")
