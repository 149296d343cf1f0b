"""Kafka's own share consumer beside a daemon that trims (KIP-932)."""

# Long: share groups, whose locks and offsets Kafka moves at its own pace.

from __future__ import annotations

import asyncio
import subprocess

import pytest
from confluent_kafka.admin import AclOperation, ResourceType

from tests.e2e.archives import assert_whole, base_of_active, closed_segments
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import SEGMENTS
from tests.support.daemon import kafka_config, run_json, running_daemon, write_config
from tests.support.kafka import KafkaCluster
from tests.support.kafka_users import add_rules, rule
from tests.support.live_alerts import until_shown
from tieringd.broker.kafka import KafkaBroker, KafkaSettings
from tieringd.errors import BrokerUnavailable

GROUP = "workers"
VALUES = [b"record %03d " % number + bytes(99_000) for number in range(50)]
_PREVIEW = {
    # Share groups are a preview in this broker.
    "unstable.feature.versions.enable": "true",
    "unstable.api.versions.enable": "true",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
}
_RULES = {
    # Rules are followed, and what no rule names is allowed.
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}
_STATE_TOPIC = "__share_group_state"
_CONSUMER = "org.apache.kafka.tools.consumer.ConsoleShareConsumer"


@pytest.fixture
async def cluster(tmp_path):
    """Give a broker with share groups, whose group begins at the earliest record."""
    cluster = await KafkaCluster.start(tmp_path / "kafka", properties=_PREVIEW | _RULES)
    try:
        at = ("--bootstrap-server", cluster.bootstrap)
        run(cluster, "org.apache.kafka.tools.FeatureCommand", *at, "upgrade", "--feature", "share.version=1")
        to_group = ("--alter", "--entity-type", "groups", "--entity-name", GROUP)
        run(
            cluster,
            "kafka.admin.ConfigCommand",
            *(*at, *to_group, "--add-config", "share.auto.offset.reset=earliest"),
        )
        # The broker makes the topic of the group's state with the group's first request. On a slow machine
        # this broker's coordinator then keeps no state ("Metadata image is null").
        await cluster.create_topic(_STATE_TOPIC, configs={"cleanup.policy": "delete"})
        yield cluster
    finally:
        await cluster.kill()


def run(cluster, main_class, *arguments) -> bytes:
    """Run one of Kafka's own commands to its end, and return its output."""
    done = subprocess.run(
        cluster.broker.command(main_class, *arguments), capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def shared(cluster, topic, *, count) -> list[bytes]:
    """Return the first bytes of *count* records that the group reads and acknowledges."""
    told = run(
        cluster,
        _CONSUMER,
        *("--bootstrap-server", cluster.bootstrap, "--topic", topic, "--group", GROUP),
        *("--max-messages", str(count), "--timeout-ms", "120000"),
    )
    return [line[:10] for line in told.splitlines() if line.startswith(b"record ")]


# Long: six processes of Kafka's own commands, beside a broker of its own.
async def test_share_group_that_lags_behind_reads_every_record(cluster, seaweedfs, prefix, topic, tmp_path):
    """A trim leaves what the group needs, and says so; it goes on when the group does. Both alerts hold."""
    await cluster.create_topic(topic, configs=SEGMENTS)
    await cluster.produce(topic, VALUES, max_batch_size=200_000)
    settings = kafka_config(
        cluster,
        seaweedfs,
        tmp_path / "state",
        bucket=BUCKET,
        prefix=prefix,
        topics={topic: {"remote.storage.enable": True, "local.retention.bytes": 1}},
    )
    config = write_config(tmp_path / "tieringd.yaml", settings)
    directory = cluster.log_dir(1) / f"{topic}-0"
    closed = sorted(closed_segments(directory))

    read = shared(cluster, topic, count=12)
    broker = KafkaBroker(KafkaSettings(bootstrap=(cluster.bootstrap,), request_timeout_seconds=60))
    start = await group_start(broker, topic)
    await broker.close()
    assert closed[0] < start < closed[-1]
    needed = max(base for base in closed if base <= start)

    def log_start() -> int:
        return min(closed_segments(directory), default=base_of_active(directory))

    with running_daemon(config) as daemon:
        daemon.until(lambda: log_start() == needed, "what the group has read is trimmed")
        held = "tieringd_trim_held_by_share_groups_bytes"
        daemon.until(lambda: daemon.metric(held, topic=topic, partition="0"), "the metric tells what is held")
        until_shown(tmp_path, daemon, "TieringdShareGroupLags")
        daemon.until_rounds(3)
        assert log_start() == needed
        explained = run_json("explain", topic, "0", "--config", str(config))
        reasons = {row["reason"] for row in explained["segments"] if row["place"] == "both"}
        assert any(f"share group {GROUP} needs offset {start} and later" in reason for reason in reasons)

        read += shared(cluster, topic, count=len(VALUES) - len(read))
        assert sorted(read) == [value[:10] for value in VALUES]
        daemon.until(lambda: log_start() == base_of_active(directory), "the trim has gone on")
        daemon.until(
            lambda: daemon.metric(held, topic=topic, partition="0") == 0, "the metric tells that nothing is"
        )
        hidden = rule("ANONYMOUS", AclOperation.DESCRIBE, GROUP, of=ResourceType.GROUP, is_denied=True)
        add_rules(cluster.bootstrap, [hidden])
        kept = log_start()
        await cluster.produce(topic, VALUES, max_batch_size=200_000)
        until_shown(tmp_path, daemon, "TieringdShareGroupsUnknown")
        assert log_start() == kept
    assert_whole(config)


async def group_start(broker, topic) -> int:
    """Wait until the group has begun to acknowledge, and return its start offset."""
    while True:
        try:
            for name, offset in (await broker.share_group_starts()).get(GROUP, {}).items():
                if name.topic == topic and offset > 0:
                    return offset
        except BrokerUnavailable:
            pass  # The coordinator still loads.
        await asyncio.sleep(0.1)
