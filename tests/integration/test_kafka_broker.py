"""KafkaBroker against a real Kafka broker on loopback."""

# Long: a broker's own timing: retention, deletions, new listeners with users.

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from tests.support.bounds import bounds_of
from tieringd.broker.base import topic_settings
from tieringd.broker.directory_broker import DirectoryBroker
from tieringd.broker.kafka import KafkaBroker, KafkaSettings
from tieringd.broker.log_dir import read_local_log, scan_log_dirs
from tieringd.errors import BrokerDenied, BrokerUnavailable, ConfigError, LeadershipChanged
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.partition import Leadership, LogBounds, TopicIdPartition, TopicPartition

if TYPE_CHECKING:
    from tests.support.kafka import KafkaCluster

_OLD_ID = "cmVjcmVhdGVkLXRvcGljIQ"
_TOPIC_NUMBERS = count()
_LARGE = b"x" * 100_000
_SEGMENT = {"segment.bytes": str(1024 * 1024), "retention.ms": "-1"}

CLEAN = {"unclean.leader.election.enable": "false"}
"""A default of the broker that is told of every topic."""


@pytest.fixture
async def broker(kafka: KafkaCluster):
    """Give a client of the shared broker."""
    broker = KafkaBroker(KafkaSettings((kafka.bootstrap,), request_timeout_seconds=60))
    yield broker
    await broker.close()


@pytest.fixture
def topic():
    """Give a topic name that no other test uses."""
    return f"a.b_c-d-{next(_TOPIC_NUMBERS)}"


async def until_equal(value, expected, *, seconds: float = 180) -> None:
    """Return when the awaited *value()* is *expected*; a broker does not report when it is done."""
    deadline = time.monotonic() + seconds
    while (seen := await value()) != expected:
        assert time.monotonic() < deadline, f"the broker stays at {seen}, not {expected}"
        await asyncio.sleep(0.05)


async def local_partition(kafka: KafkaCluster, topic: str, partition: int = 0) -> LocalPartition:
    directory = kafka.log_dir() / f"{topic}-{partition}"
    # A new leader writes this file in the background.
    await until_equal(lambda: asyncio.to_thread((directory / "partition.metadata").exists), expected=True)
    text = (directory / "partition.metadata").read_text()
    topic_id = text.split("topic_id:")[1].strip()
    return LocalPartition(TopicPartition(topic, partition), topic_id, str(directory), str(kafka.log_dir()))


async def local_log(kafka: KafkaCluster, topic: str, partition: int = 0) -> LocalLog:
    return LocalLog(await local_partition(kafka, topic, partition), (), ())


def bases(kafka: KafkaCluster, topic: str) -> list[int]:
    return sorted(int(each.stem) for each in (kafka.log_dir() / f"{topic}-0").glob("*.log"))


def led(kafka: KafkaCluster, log: LocalLog, *, leader_epoch: int = 0) -> Leadership:
    name = log.partition.topic_partition
    partition = TopicIdPartition(kafka.cluster_id, name.topic, log.partition.topic_id, name.partition)
    return Leadership(partition, leader_epoch)


async def test_cluster_id_is_the_one_the_broker_was_formatted_with(kafka, broker):
    """The cluster id is the one in the broker's own storage."""
    assert await broker.cluster_id() == kafka.cluster_id


async def led_by(broker, found):
    """Return the leader epochs of those of *found* that the broker leads."""
    replicas = (await broker.replicas(found)).replicas
    return {name: one.leader_epoch for name, one in replicas.items() if one.is_leader}


async def test_topic_ids_are_those_that_the_cluster_has_now(kafka, broker, topic):
    """A deleted topic has none, one that is created again has another; asking creates none."""
    await kafka.create_topic(topic)
    old_id = (await local_partition(kafka, topic)).topic_id
    never = f"{topic}-never"
    assert await broker.topic_ids([topic, never]) == {topic: frozenset({old_id}), never: frozenset()}
    await kafka.delete_topic(topic)
    await until_equal(lambda: broker.topic_ids([topic]), {topic: frozenset()})
    await kafka.create_topic(topic)
    (new_id,) = (await broker.topic_ids([topic, never]))[topic]
    assert new_id != old_id
    assert await broker.topic_ids([]) == {}
    assert (await broker.topic_ids([never])) == {never: frozenset()}


async def test_led_partitions_gives_every_partition_with_its_epoch(kafka, broker, topic):
    """Partitions of a new topic are led, since epoch 0, by the broker that holds them."""
    await kafka.create_topic(topic, partitions=2)
    found = [await local_partition(kafka, topic, number) for number in (0, 1)]

    assert await led_by(broker, found) == {TopicPartition(topic, 0): 0, TopicPartition(topic, 1): 0}


async def test_led_partitions_leaves_out_a_directory_of_another_topic_id(kafka, broker, topic):
    """A directory whose topic id is not the cluster's belongs to a deleted topic and is not led."""
    await kafka.create_topic(topic, partitions=2)
    current, old = [await local_partition(kafka, topic, number) for number in (0, 1)]

    led = await led_by(broker, [current, replace(old, topic_id=_OLD_ID)])

    assert led == {TopicPartition(topic, 0): 0}


async def test_led_partitions_leaves_out_an_unknown_topic(kafka, broker):
    """A directory whose topic the cluster does not know is not led, and the topic is not created."""
    unknown = LocalPartition(TopicPartition("never-created", 0), _OLD_ID, "/nowhere", "/")

    assert await led_by(broker, [unknown]) == {}
    assert not (kafka.log_dir() / "never-created-0").exists()


async def test_led_partitions_of_another_broker_are_left_out(kafka, topic):
    """A partition whose leader has another node id is not led."""
    await kafka.create_topic(topic)
    other = KafkaBroker(KafkaSettings((kafka.bootstrap,), node_id=2, request_timeout_seconds=60))
    try:
        assert await led_by(other, [await local_partition(kafka, topic)]) == {}
        with pytest.raises(BrokerUnavailable, match="broker 2 is not among the live brokers"):
            await bounds_of(other, await local_log(kafka, topic))
    finally:
        await other.close()


async def test_led_partitions_without_a_known_node_id_is_denied(kafka, topic):
    """A broker that advertises another address than our bootstrap is not taken for ours."""
    await kafka.create_topic(topic)
    broker = KafkaBroker(KafkaSettings((f"localhost:{kafka.broker.port}",), request_timeout_seconds=60))
    try:
        with pytest.raises(BrokerDenied, match=r"Set broker\.node_id"):
            await led_by(broker, [await local_partition(kafka, topic)])
    finally:
        await broker.close()


async def test_log_bounds_of_plain_records_end_at_the_high_watermark(kafka, broker, topic):
    """Records without transactions are stable up to the high watermark."""
    await kafka.create_topic(topic, partitions=2)
    await kafka.produce(topic, [b"a", b"b", b"c"], partition=1)

    bounds = await bounds_of(broker, await local_log(kafka, topic, 0), await local_log(kafka, topic, 1))

    assert bounds == {
        TopicPartition(topic, 0): LogBounds(0, 0, 0),
        TopicPartition(topic, 1): LogBounds(0, 3, 3),
    }


async def test_log_bounds_hold_the_stable_offset_back_at_an_open_transaction(kafka, broker, topic):
    """An open transaction holds the last stable offset while the high watermark moves on."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, [b"plain"] * 5)
    log = await local_log(kafka, topic)
    name = log.partition.topic_partition
    async with kafka.producer(transactional_id=f"{topic}-writer") as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"open", partition=0)
        await kafka.produce(topic, [b"plain"] * 4)
        while_open = await bounds_of(broker, log)
        await producer.commit_transaction()

    assert while_open == {name: LogBounds(0, 5, 10)}
    # The commit marker is a record too, and it is written after the commit was acknowledged.
    await until_equal(lambda: bounds_of(broker, log), {name: LogBounds(0, 11, 11)})


async def test_log_bounds_answer_for_a_partition_without_a_leader_is_its_error(kafka, broker, topic):
    """A partition that the broker cannot answer for has an error of its own; others have bounds."""
    await kafka.create_topic(topic)
    missing = LocalLog(
        replace(await local_partition(kafka, topic), topic_partition=TopicPartition(topic, 9)), (), ()
    )

    bounds = await bounds_of(broker, await local_log(kafka, topic), missing)

    assert bounds[TopicPartition(topic, 0)] == LogBounds(0, 0, 0)
    error = bounds[TopicPartition(topic, 9)]
    assert isinstance(error, BrokerUnavailable)
    assert "UNKNOWN_TOPIC_OR_PARTITION" in str(error)


async def test_topic_configs_holds_what_is_set_and_how_the_broker_deletes(kafka, broker, topic):
    """Other defaults of the broker are left out, and so is a topic that does not exist."""
    await kafka.create_topic(topic, configs={"retention.ms": "-1", "cleanup.policy": "compact,delete"})
    await kafka.create_topic(f"{topic}-plain")

    configs = await broker.topic_configs([topic, f"{topic}-plain", "never-created"])

    assert configs == {
        topic: {"retention.ms": "-1", "retention.bytes": "-1", "cleanup.policy": "compact,delete", **CLEAN},
        f"{topic}-plain": {
            "retention.ms": str(7 * 24 * 3600 * 1000),
            "retention.bytes": "-1",
            "cleanup.policy": "delete",
            **CLEAN,
        },
    }


async def test_altered_setting_leaves_the_others_and_goes_back(kafka, broker, topic):
    """One setting is set and taken away again; what else is set on the topic stays."""
    await kafka.create_topic(topic, configs={"retention.ms": "1000000", "segment.bytes": "1048576"})
    await broker.alter_topic(topic, {"retention.ms": "-1", "retention.bytes": "-1"})
    altered = {"retention.ms": "-1", "retention.bytes": "-1", "segment.bytes": "1048576"}
    await until_equal(lambda: broker.topic_overrides(topic), altered)
    await broker.alter_topic(topic, {"retention.ms": "1000000", "retention.bytes": None})
    restored = {"retention.ms": "1000000", "segment.bytes": "1048576"}
    await until_equal(lambda: broker.topic_overrides(topic), restored)


async def test_topic_configs_of_many_topics_are_asked_in_parts(kafka, broker):
    """More topics than one request holds are all answered."""
    unknown = [f"never-created-{number}" for number in range(450)]
    await kafka.create_topic("known-among-many", configs={"retention.bytes": "5"})

    configs = await broker.topic_configs([*unknown, "known-among-many"])

    assert configs.keys() == {"known-among-many"}
    assert configs["known-among-many"]["retention.bytes"] == "5"


async def test_trim_moves_the_log_start_and_the_broker_deletes_the_files(kafka, broker, topic):
    """Trimming to a segment's base moves the log start there, and whole files go soon after."""
    await kafka.create_topic(topic, configs={**_SEGMENT, "file.delete.delay.ms": "100"})
    await kafka.produce(topic, [_LARGE] * 40, max_batch_size=200_000)
    log = await local_log(kafka, topic)
    before = bases(kafka, topic)
    assert len(before) >= 4

    low_watermark = await broker.trim(led(kafka, log), log, before_offset=before[2])

    assert low_watermark == before[2]
    assert await bounds_of(broker, log) == {log.partition.topic_partition: LogBounds(before[2], 40, 40)}
    await until_equal(lambda: asyncio.to_thread(bases, kafka, topic), before[2:])


async def test_trim_of_a_compacted_topic_is_denied(kafka, broker, topic):
    """Kafka refuses to trim a compact-only topic, for good, and the error says why."""
    await kafka.create_topic(topic, configs={"cleanup.policy": "compact"})
    async with kafka.producer() as producer:
        await producer.send_and_wait(topic, b"value", key=b"key", partition=0)
    log = await local_log(kafka, topic)

    with pytest.raises(BrokerDenied, match=r"POLICY_VIOLATION.*without delete in its cleanup.policy"):
        await broker.trim(led(kafka, log), log, before_offset=1)


async def test_trim_past_the_high_watermark_is_unavailable(kafka, broker, topic):
    """An offset that the broker has not committed is refused for now, and nothing is trimmed."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, [b"a", b"b"])
    log = await local_log(kafka, topic)

    with pytest.raises(BrokerUnavailable, match="holds no committed record there"):
        await broker.trim(led(kafka, log), log, before_offset=3)

    assert await bounds_of(broker, log) == {log.partition.topic_partition: LogBounds(0, 2, 2)}


async def test_trim_of_a_former_topic_does_not_touch_the_new_one(kafka, broker, topic):
    """A topic that was created again keeps every record when its old self is trimmed."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, [b"a", b"b", b"c"])
    log = await local_log(kafka, topic)
    former = replace(log, partition=replace(log.partition, topic_id=_OLD_ID))

    with pytest.raises(BrokerUnavailable, match="does not lead"):
        await broker.trim(led(kafka, former), former, before_offset=2)

    assert await bounds_of(broker, log) == {log.partition.topic_partition: LogBounds(0, 3, 3)}


async def test_directory_broker_reads_the_bounds_that_the_broker_gives(kafka, broker, topic):
    """The bounds read from the files are the broker's own, open transaction included."""
    await kafka.create_topic(topic, configs=_SEGMENT)
    await kafka.produce(topic, [_LARGE] * 25, max_batch_size=200_000)
    async with kafka.producer(transactional_id=f"{topic}-writer") as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"open", partition=0)
        await kafka.produce(topic, [_LARGE] * 25, max_batch_size=200_000)
        log = read_local_log(await local_partition(kafka, topic))
        from_files = await bounds_of(DirectoryBroker([str(kafka.log_dir())]), log)
        from_broker = await bounds_of(broker, log)
        await producer.abort_transaction()

    assert len(log.closed_segments) >= 3
    assert from_files == from_broker == {log.partition.topic_partition: LogBounds(0, 25, 51)}


async def test_directory_broker_does_not_unlink_under_a_running_broker(kafka, topic):
    """The lock that a real broker holds keeps us from unlinking its files."""
    await kafka.create_topic(topic, configs=_SEGMENT)
    await kafka.produce(topic, [_LARGE] * 25, max_batch_size=200_000)
    log = read_local_log(await local_partition(kafka, topic))
    before = bases(kafka, topic)

    with pytest.raises(BrokerDenied, match="a broker is running"):
        await DirectoryBroker([str(kafka.log_dir())]).trim(led(kafka, log), log, before_offset=before[1])

    assert bases(kafka, topic) == before


async def test_scan_finds_what_the_broker_leads(kafka, broker, topic):
    """A scan of a real broker's directory names its owner, its partitions and their topic ids."""
    await kafka.create_topic(topic, partitions=2)
    for number in (0, 1):
        await local_partition(kafka, topic, number)

    scan = await asyncio.to_thread(scan_log_dirs, [str(kafka.log_dir())])

    led = await led_by(broker, scan.partitions)
    assert (scan.cluster_id, scan.node_id, scan.problems) == (kafka.cluster_id, 1, ())
    assert str(kafka.log_dir() / "__cluster_metadata-0") in scan.left_alone
    assert {TopicPartition(topic, 0), TopicPartition(topic, 1)} <= led.keys()


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_broker_restart_is_survived_by_the_same_client(kafka, broker, topic, end):
    """Calls fail while the broker is away, and the same client works again when it is back."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, [b"a"])
    log = await local_log(kafka, topic)
    name = log.partition.topic_partition
    assert await bounds_of(broker, log) == {name: LogBounds(0, 1, 1)}

    await getattr(kafka, end)()
    try:
        with pytest.raises(BrokerUnavailable, match="cannot be reached"):
            await bounds_of(broker, log)
    finally:
        await kafka.launch()

    await until_equal(lambda: bounds_of(broker, log), {name: LogBounds(0, 1, 1)})
    (epoch,) = (await led_by(broker, [log.partition])).values()
    assert epoch >= 1
    for other in (0, epoch + 1):
        # Bounds and trims that were decided under another leadership are refused.
        refused = await broker.log_bounds([log], leader_epochs={name: other})
        assert isinstance(refused[name], LeadershipChanged)
        with pytest.raises(LeadershipChanged, match=f"under leader epoch {epoch} now, not {other}"):
            await broker.trim(led(kafka, log, leader_epoch=other), log, before_offset=1)
    assert await bounds_of(broker, log) == {name: LogBounds(0, 1, 1)}
    assert await broker.trim(led(kafka, log, leader_epoch=epoch), log, before_offset=1) == 1


async def test_broker_that_hangs_is_unavailable_within_the_request_timeout(kafka, topic):
    """A paused broker costs one request timeout, and a resumed one answers the same client."""
    broker = KafkaBroker(KafkaSettings((kafka.bootstrap,), request_timeout_seconds=8))

    async def cluster_id():
        # A broker of a busy machine may need longer than a timeout that a test waits for.
        try:
            return await broker.cluster_id()
        except BrokerUnavailable as error:
            return str(error)

    try:
        await until_equal(cluster_id, kafka.cluster_id)
        kafka.broker.pause()
        try:
            with pytest.raises(BrokerUnavailable, match="did not answer within 8 s"):
                await broker.cluster_id()
        finally:
            kafka.broker.resume()
        await until_equal(cluster_id, kafka.cluster_id)
    finally:
        await broker.close()


async def test_connection_that_fell_silent_is_replaced(kafka):
    """The next call after a timeout opens a new connection, because the old one may stay silent."""
    silent: list[bool] = []
    served: list[asyncio.Task[None]] = []

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_first: bool) -> None:
        while data := await reader.read(65536):
            if not (is_first and silent):
                writer.write(data)
        writer.close()
        await writer.wait_closed()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        is_first = len(served) == 1
        from_broker, to_broker = await asyncio.open_connection("127.0.0.1", kafka.broker.port)
        async with asyncio.TaskGroup() as group:
            group.create_task(forward(reader, to_broker, is_first=is_first))
            group.create_task(forward(from_broker, writer, is_first=is_first))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        broker = KafkaBroker(KafkaSettings((address,), request_timeout_seconds=8))
        assert await broker.cluster_id() == kafka.cluster_id
        silent.append(True)
        with pytest.raises(BrokerUnavailable, match="did not answer"):
            await broker.cluster_id()
        assert await broker.cluster_id() == kafka.cluster_id
        await broker.close()
        await asyncio.gather(*served)
    assert len(served) == 2


@pytest.fixture
async def reader(guarded):
    """Give a client of the guarded broker that may see no topic."""
    broker = KafkaBroker(guarded_settings(guarded, password="right"))
    yield broker
    await broker.close()


def guarded_settings(guarded, *, password) -> KafkaSettings:
    return KafkaSettings(
        (f"127.0.0.1:{guarded.broker.listener_ports['GUARDED']}",),
        security_protocol="SASL_PLAINTEXT",
        sasl_username="reader",
        sasl_password=password,
        request_timeout_seconds=60,
    )


async def test_wrong_password_is_denied(guarded):
    """A password that the broker refuses is for an operator to mend, not for a retry."""
    broker = KafkaBroker(guarded_settings(guarded, password="wrong"))
    with pytest.raises(BrokerDenied, match="refuses to authenticate"):
        await broker.cluster_id()
    await broker.close()


async def test_hidden_topic_is_not_led_and_said_once(guarded, reader, topic):
    """A topic that we may not describe is not led, and the log says so once."""
    await guarded.create_topic(topic, replicas=[[1]])
    partition = await local_partition(guarded, topic)

    with capture_logs() as logs:
        assert await led_by(reader, [partition]) == {}
        assert await led_by(reader, [partition]) == {}

    assert await reader.cluster_id() == guarded.cluster_id
    assert [(each["topic"], each["log_level"]) for each in logs] == [(topic, "warning")]


async def test_hidden_topic_has_a_denial_in_place_of_bounds(guarded, reader, topic):
    """The bounds of a topic that we may not describe are an error that names the missing right."""
    await guarded.create_topic(topic, replicas=[[1]])

    bounds = await bounds_of(reader, await local_log(guarded, topic))

    error = bounds[TopicPartition(topic, 0)]
    assert isinstance(error, BrokerDenied)
    assert "ACLs DESCRIBE" in str(error)


async def test_hidden_topic_settings_are_denied(guarded, reader, topic):
    """Settings that we may not read are the topic's error, never taken for the defaults."""
    await guarded.create_topic(topic, replicas=[[1]])

    (error,) = (await reader.topic_configs([topic])).values()
    assert isinstance(error, BrokerDenied)
    assert "TOPIC_AUTHORIZATION_FAILED" in str(error)
    with pytest.raises(BrokerDenied, match="TOPIC_AUTHORIZATION_FAILED"):
        await topic_settings(reader, topic)


async def test_unreachable_bootstrap_names_every_address():
    """The error names every address if none answers."""
    with socket.socket() as first, socket.socket() as second:
        addresses = []
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{each.getsockname()[1]}")
        broker = KafkaBroker(KafkaSettings(tuple(addresses), request_timeout_seconds=30))
        with pytest.raises(BrokerUnavailable, match=f"{addresses[0]} cannot.*{addresses[1]} cannot"):
            await broker.cluster_id()
        await broker.close()


async def test_second_bootstrap_address_is_used_when_the_first_is_dead(kafka):
    """A dead bootstrap address does not keep us from the next one."""
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        addresses = (f"127.0.0.1:{dead.getsockname()[1]}", kafka.bootstrap)
        broker = KafkaBroker(KafkaSettings(addresses, request_timeout_seconds=60))
        try:
            assert await broker.cluster_id() == kafka.cluster_id
        finally:
            await broker.close()


async def test_peer_that_is_not_kafka_is_unavailable():
    """Bytes that are no Kafka message become an error of ours."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        broker = KafkaBroker(KafkaSettings((f"127.0.0.1:{port}",), request_timeout_seconds=30))
        with pytest.raises(BrokerUnavailable):
            await broker.cluster_id()
        await broker.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(KafkaSettings(()), "bootstrap is empty", id="no-bootstrap"),
        pytest.param(KafkaSettings(("host:port",)), "not host:port", id="bad-port"),
        pytest.param(KafkaSettings(("a:1",), security_protocol="TLS"), "protocol is 'TLS'", id="protocol"),
        pytest.param(
            KafkaSettings(("a:1",), security_protocol="SASL_SSL", sasl_mechanism="GSSAPI"),
            "sasl_mechanism is 'GSSAPI'",
            id="mechanism",
        ),
        pytest.param(
            KafkaSettings(("a:1",), security_protocol="SASL_PLAINTEXT"), "needs a user", id="no-user"
        ),
        pytest.param(
            KafkaSettings(("a:1",), security_protocol="SSL", ssl_ca_file="/nowhere/ca.pem"),
            "/nowhere/ca.pem",
            id="no-ca-file",
        ),
    ],
)
async def test_settings_that_cannot_work_are_refused_at_once(settings, message):
    """A setting that cannot work is an error before anything is connected."""
    with pytest.raises(ConfigError, match=message):
        KafkaBroker(settings)


def test_settings_do_not_show_the_password():
    """The password is not in the text form that logs may show."""
    assert "secret" not in repr(KafkaSettings(("a:1",), sasl_username="u", sasl_password="secret"))
