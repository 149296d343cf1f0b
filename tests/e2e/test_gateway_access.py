"""
The broker decides which clients may read through the gateway: TLS on both sides, every SASL mechanism, ACLs.

The topic is trimmed, so that most of what a client asks for would come from the archive.
"""

from __future__ import annotations

import asyncio
import gc
import json
from base64 import urlsafe_b64decode
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

import confluent_kafka
import pytest
import pytest_asyncio
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError
from confluent_kafka.admin import AclOperation, AdminClient, ResourceType
from kio.schema.errors import ErrorCode

from tests.e2e.archives import until_trimmed
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import SEGMENTS
from tests.support.certificate import write_certificate
from tests.support.daemon import Daemon, kafka_config, run_command, running_daemon, write_config
from tests.support.gateway_clients import fetched, read_aiokafka, read_librdkafka
from tests.support.gateways import LISTENER, BrokerBehind
from tests.support.kafka_messages import fetch_request
from tests.support.kafka_users import (
    MECHANISMS,
    Login,
    add_rules,
    add_scram_users,
    allow,
    broker_properties,
    log_in,
    password_of,
    remove_rules,
    rule,
)
from tests.support.raw_kafka import connected
from tests.support.tls_relay import trusting
from tieringd.broker.log_dir import read_topic_id
from tieringd.formats.record_batch import parse_header

if TYPE_CHECKING:
    from pathlib import Path

TOPIC = "guarded"
USERS = ("reader", "describer", "stranger", "daemon")
"""The first may read the topic, the second describe it, the third has no rights. The last is a daemon's."""
VALUES = [bytes([number]) * 100_000 for number in range(45)]
WHOLE = list(enumerate(VALUES))
_DOCTOR = ("doctor", "--format", "json", "--timeout", "60")
_GROUP_REFUSED = confluent_kafka.KafkaError.GROUP_AUTHORIZATION_FAILED


@dataclass(frozen=True)
class Guarded:
    """A broker with users, and before it a daemon whose gateway has most of the topic in its archive."""

    behind: BrokerBehind
    daemon: Daemon
    certificate: Path

    @property
    def topic_id(self) -> UUID:
        """Return the topic's id."""
        path = self.behind.cluster.log_dir() / f"{TOPIC}-0"
        return UUID(bytes=urlsafe_b64decode(read_topic_id(str(path)) + "=="))

    def login(self, user: str, mechanism: str = "PLAIN", **changes: str) -> Login:
        return Login(user, mechanism, self.certificate, **changes)


# aiokafka abandons a connection whose broker refuses it, and the collector tells of it in any later test. The
# gateway and the broker are other processes, so nothing of ours is hidden.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module", autouse=True)
def spared():
    """Exclude what other tests have left from the collections below: it takes seconds to visit."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def collected(spared):
    """Collect abandoned connections in the test that made them."""
    yield
    gc.collect()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(tmp_path_factory, seaweedfs):
    """Give the broker and the daemon, once the log is trimmed."""
    directory = tmp_path_factory.mktemp("guarded")
    certificate = write_certificate(directory / "certificate.pem")
    behind = await BrokerBehind.start(
        directory / "broker",
        protocol="SASL_SSL",
        properties=broker_properties(LISTENER, USERS, certificate),
    )
    try:
        with running_daemon(await _prepared(behind, directory, certificate, seaweedfs)) as daemon:
            until_trimmed(daemon)
            yield Guarded(behind, daemon, certificate)
    finally:
        await behind.cluster.kill()


async def _prepared(behind, directory, certificate, seaweedfs):
    """Write the topic, let users in, and return the daemon's configuration."""
    cluster = behind.cluster
    add_scram_users(cluster.bootstrap, USERS)
    await cluster.create_topic(TOPIC, configs=SEGMENTS)
    allow(cluster.bootstrap, "reader", AclOperation.READ, AclOperation.DESCRIBE, topic=TOPIC)
    allow(cluster.bootstrap, "describer", AclOperation.DESCRIBE, topic=TOPIC)
    await cluster.produce(TOPIC, VALUES, max_batch_size=200_000)
    config = kafka_config(
        cluster,
        seaweedfs,
        directory / "state",
        bucket=BUCKET,
        prefix="e2e/guarded",
        topics={TOPIC: {"remote.storage.enable": True, "local.retention.bytes": 1 << 20}},
        gateway=behind.gateway_config
        | {
            "tls_cert_file": str(certificate),
            "tls_key_file": str(certificate),
            "broker_tls": True,
            "broker_tls_ca_file": str(certificate),
        },
    )
    return write_config(directory / "tieringd.yaml", config)


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_reader_gets_the_whole_log_with_every_mechanism(guarded, mechanism):
    """
    Passwords, challenges and tokens pass to the broker, and the archive's records come back.

    What is read counts for the user that the broker has let in, and nothing for an unknown one.
    """

    def fetches(user):
        return guarded.daemon.metric("tieringd_gateway_reader_fetches_total", principal=f"User:{user}") or 0

    before = fetches("reader"), fetches("ANONYMOUS")
    login = guarded.login("reader", mechanism)
    bootstrap = guarded.behind.bootstrap
    assert await read_aiokafka(bootstrap, TOPIC, len(VALUES), **login.aiokafka()) == WHOLE
    read = await asyncio.to_thread(read_librdkafka, bootstrap, TOPIC, len(VALUES), **login.librdkafka())
    assert read == WHOLE
    assert fetches("reader") > before[0]
    assert fetches("ANONYMOUS") == before[1]


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
async def test_wrong_password_is_the_brokers_to_refuse(guarded, mechanism):
    """The client hears what the broker says to it, and nothing is read."""
    login = guarded.login("reader", mechanism, password="wrong")
    consumer = AIOKafkaConsumer(bootstrap_servers=guarded.behind.bootstrap, **login.aiokafka())
    with pytest.raises(KafkaError, match=r"(?i)authentication|Unable to bootstrap"):
        await consumer.start()
    await consumer.stop()


@pytest.mark.parametrize("offset", [0, len(VALUES) - 1])
async def test_user_that_may_only_describe_gets_no_record(guarded, offset):
    """Archived offsets are refused as the broker's own are."""
    login = guarded.login("describer")
    consumer = AIOKafkaConsumer(bootstrap_servers=guarded.behind.bootstrap, **login.aiokafka())
    await consumer.start()
    try:
        partition = TopicPartition(TOPIC, 0)
        consumer.assign([partition])
        consumer.seek(partition, offset)
        with pytest.raises(TopicAuthorizationFailedError):
            await asyncio.wait_for(consumer.getone(), 180)
    finally:
        await consumer.stop()


@pytest.mark.parametrize("offset", [0, len(VALUES) - 1])
async def test_librdkafka_is_told_that_it_may_not_read(guarded, offset):
    """The client librdkafka gets the error for an offset of the archive, and for one of the broker."""
    error = await asyncio.to_thread(_first_of_librdkafka, guarded, guarded.login("describer"), offset)
    assert error == confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED


@pytest.mark.parametrize("version", [4, 12, 13, 17])
@pytest.mark.parametrize("user", USERS)
async def test_fetch_by_hand_is_judged_by_the_broker(guarded, user, version):
    """A client that asks for no metadata and knows the topic's id gets what its user may have."""
    topic = guarded.topic_id if version >= 13 else TOPIC
    async with logged_in(guarded, user) as client:
        partition = await fetched(client, topic, 0, version=version)
    if user == "reader":
        assert partition.error_code == ErrorCode.none
        assert parse_header(partition.records).base_offset == 0
    else:
        assert partition.error_code == ErrorCode.topic_authorization_failed
        assert not partition.records


async def test_fetch_without_authentication_ends_the_connection(guarded):
    """The broker closes it, and so does the gateway."""
    async with connected(guarded.behind.port, tls=trusting(guarded.certificate)) as client:
        client.send(fetch_request(12, {TOPIC: {0: {"fetch_offset": 0}}}))
        async with asyncio.timeout(180):
            assert await client.reader.read() == b""


@asynccontextmanager
async def logged_in(guarded, user):
    """Open a connection and authenticate on it, by hand."""
    async with connected(guarded.behind.port, tls=trusting(guarded.certificate)) as client:
        await log_in(client, user)
        yield client


def _first_of_librdkafka(guarded, login, offset):
    """Return the error of the first thing that a consumer gets of the topic; None when it is a record."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": guarded.behind.bootstrap, "group.id": "none", **login.librdkafka()}
    )
    try:
        consumer.assign([confluent_kafka.TopicPartition(TOPIC, 0, offset)])
        for _ in range(1800):
            found = consumer.poll(0.1)
            error = None if found is None else found.error()
            # These users may not join a group either, and librdkafka reports that first.
            if found is not None and (error is None or error.code() != _GROUP_REFUSED):
                return None if error is None else error.code()
        return "nothing"
    finally:
        consumer.close()


async def test_offsets_of_the_archive_need_the_right_to_describe(guarded):
    """A user that may describe the topic gets its first archived offset. Another user gets an error."""
    bootstrap = guarded.behind.bootstrap
    partition = confluent_kafka.TopicPartition(TOPIC, 0)

    def bounds(user):
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "none",
                **guarded.login(user).librdkafka(),
            }
        )
        try:
            return consumer.get_watermark_offsets(partition, timeout=120)
        finally:
            consumer.close()

    assert await asyncio.to_thread(bounds, "describer") == (0, len(VALUES))
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        await asyncio.to_thread(bounds, "stranger")
    # librdkafka asks for metadata first, in which the topic is not.
    assert refused.value.args[0].code() == confluent_kafka.KafkaError._UNKNOWN_PARTITION


async def test_topics_of_the_cluster_are_the_brokers_to_show(guarded):
    """Metadata comes from the broker: a stranger is shown no topic."""

    def topics(user):
        admin = AdminClient(
            {"bootstrap.servers": guarded.behind.bootstrap, **guarded.login(user).librdkafka()}
        )
        return set(admin.list_topics(timeout=120).topics)

    assert TOPIC in await asyncio.to_thread(topics, "reader")
    assert TOPIC not in await asyncio.to_thread(topics, "stranger")


async def test_plain_client_is_not_served(guarded):
    """A client without TLS gets no answer, and costs nothing but its own connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", guarded.behind.port)
    writer.write(b"\x00\x00\x00\x0a\x00\x12\x00\x03\x00\x00\x00\x01\x00\x00")
    answer = b""
    with suppress(ConnectionResetError):
        async with asyncio.timeout(180):
            answer = await reader.read()
    writer.close()
    # What there is of an answer is a TLS alert.
    assert answer[:1] in {b"", b"\x15"}
    login = guarded.login("reader")
    read = await read_aiokafka(guarded.behind.bootstrap, TOPIC, len(VALUES), **login.aiokafka())
    assert read == WHOLE


async def log_start(bootstrap: str) -> int:
    """Return where the broker's own log begins."""
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap) as consumer:
        name = TopicPartition(TOPIC, 0)
        return (await consumer.beginning_offsets([name]))[name]


async def test_doctor_reads_the_permissions_that_the_broker_lists(guarded, tmp_path, seaweedfs):
    """
    Each operation that is missing is named with the command that grants it; no record is deleted to find out.

    The store is tried as well, and has no object more than before.
    """
    cluster = guarded.behind.cluster
    config = kafka_config(cluster, seaweedfs, tmp_path / "state", bucket=BUCKET, prefix="doctor")
    config["broker"] |= {
        "bootstrap": [guarded.behind.gateway_config["broker"]],
        "security": {
            "protocol": "SASL_SSL",
            "sasl_mechanism": "PLAIN",
            "sasl_username": "describer",
            "sasl_password": password_of("describer"),
            "ssl_ca_file": str(guarded.certificate),
        },
    }
    config["topics"] = {TOPIC: {"redpanda.remote.write": True}}
    path = write_config(tmp_path / "doctor.yaml", config)
    before = await log_start(cluster.bootstrap)

    done = await asyncio.to_thread(run_command, *_DOCTOR, "--config", str(path))

    found = {one["check"]: one for one in json.loads(done.stdout)}
    assert done.returncode == 1
    assert {name: one["outcome"] for name, one in found.items() if name.startswith(("acl", "store"))} == {
        "store_read": "ok",
        "store_write": "ok",
        "store_checksum": found["store_checksum"]["outcome"],
        "store_conditional_write": "ok",
        "acl_cluster_describe": "fault",
        "acl_cluster_describe_configs": "warning",
        "acl_cluster_alter_configs": "warning",
        "acl_topic_describe": "ok",
        "acl_topic_describe_configs": "fault",
        "acl_topic_delete": "warning",
    }
    assert found["acl_topic_delete"]["subject"] == TOPIC
    assert found["acl_topic_delete"]["remedy"].endswith(
        f"--allow-principal User:describer --operation Delete --topic '{TOPIC}'"
    )
    assert found["pins"]["outcome"] == "ok"
    assert await log_start(cluster.bootstrap) == before

    config["broker"]["security"] = {}
    config["broker"]["bootstrap"] = [cluster.bootstrap]
    write_config(path, config)
    done = await asyncio.to_thread(run_command, *_DOCTOR, "--config", str(path))
    found = {one["check"]: one for one in json.loads(done.stdout)}
    assert [one for one in found.values() if one["check"].startswith("acl") and one["outcome"] != "ok"] == []
    assert done.returncode == 0, done.stdout


async def test_daemon_needs_just_these_rules(guarded, tmp_path, seaweedfs):
    """
    Four rules let a daemon archive and trim, and `doctor` names what is missing without any one of them.

    Kafka takes DELETE for DESCRIBE as well, and ALTER_CONFIGS for DESCRIBE_CONFIGS. Other topics stay hidden.
    """
    cluster, topic = guarded.behind.cluster, "least"
    await cluster.create_topic(topic, configs=SEGMENTS)
    await cluster.produce(topic, VALUES, max_batch_size=200_000)
    of_cluster = {"of": ResourceType.BROKER}
    # A broker lists no operations on what it does not show.
    needed = {
        rule("daemon", AclOperation.DESCRIBE, "kafka-cluster", **of_cluster): {
            "acl_cluster_describe",
            "acl_cluster_describe_configs",
            "acl_cluster_alter_configs",
        },
        rule("daemon", AclOperation.ALTER_CONFIGS, "kafka-cluster", **of_cluster): {
            "acl_cluster_describe_configs",
            "acl_cluster_alter_configs",
        },
        rule("daemon", AclOperation.DESCRIBE_CONFIGS, topic): {"acl_topic_describe_configs"},
        rule("daemon", AclOperation.DELETE, topic): {
            "acl_topic_describe",
            "acl_topic_describe_configs",
            "acl_topic_delete",
        },
    }
    add_rules(cluster.bootstrap, list(needed))
    local = {topic: {"redpanda.remote.write": True, "retention.local.target.bytes": 1 << 20}}
    config = kafka_config(
        *(cluster, seaweedfs, tmp_path / "state"), bucket=BUCKET, prefix="e2e/least", topics=local
    )
    config["broker"] |= {
        "bootstrap": [guarded.behind.gateway_config["broker"]],
        "security": {
            "protocol": "SASL_SSL",
            "sasl_mechanism": "PLAIN",
            "sasl_username": "daemon",
            "sasl_password": password_of("daemon"),
            "ssl_ca_file": str(guarded.certificate),
        },
    }
    path = write_config(tmp_path / "least.yaml", config)
    with running_daemon(path) as daemon:
        daemon.until(lambda: daemon.events("local log trimmed", topic=topic), "the log is trimmed")

    async def missing():
        done = await asyncio.to_thread(run_command, *_DOCTOR, "--config", str(path))
        found = [one for one in json.loads(done.stdout) if one["check"].startswith("acl")]
        return {one["check"] for one in found if one["outcome"] != "ok"}

    assert await missing() == set()
    for one, checks in needed.items():
        remove_rules(cluster.bootstrap, [one])
        assert await missing() == checks, one
        add_rules(cluster.bootstrap, [one])
