"""Recovery of topics into a fresh broker: the same records at the same offsets, and a log that goes on."""

# Long: each restore needs brokers that stop and start.

from __future__ import annotations

import asyncio
import time
import uuid
from types import SimpleNamespace

import confluent_kafka
import pytest
import yaml
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as ClientPartition

from tests.builders import batch
from tests.e2e.archives import archived_manifest, archived_manifests, read_log
from tests.e2e.sample_topics import ISOLATIONS, SAMPLE_TOPICS, SEGMENTS, consumed, offset_for_time
from tests.fakes.log_writer import TOPIC_ID, LogWriter
from tests.support.cluster import cluster_admin, restart_broker, start_broker
from tests.support.daemon import (
    directory_config,
    kafka_config,
    run_command,
    run_json,
    running_daemon,
    write_config,
)
from tests.support.s3_bucket import S3Bucket
from tieringd.formats.checkpoints import encode_partition_metadata
from tieringd.formats.record_batch import ABORT_MARKER, COMMIT_MARKER, encode_marker

_VALUES = [bytes([number]) * 100_000 for number in range(45)]


async def recovered(fresh, config, *topics, options=()):
    """Create *topics* on the fresh broker, restore them while it is stopped, start it; return the report."""
    for topic in topics:
        await fresh.create_topic(topic, configs=SEGMENTS)
    await fresh.broker.stop()
    pattern = "|".join(topic.replace(".", r"\.") for topic in topics)
    report = run_json(
        *("recover", "directory", str(fresh.log_dir()), "--topics", pattern, "--config", str(config)),
        *options,
    )
    await fresh.launch()
    return report


async def test_every_kind_of_topic_comes_back_record_by_record(kafka, fresh, samples, sample_objects):
    """All codecs, transactions, headers and times, in both isolation levels, and new records after them."""
    report = await recovered(fresh, samples.config, *SAMPLE_TOPICS)
    assert {row["topic"] for row in report} == set(SAMPLE_TOPICS)
    for topic in SAMPLE_TOPICS:
        end = archived_manifest(sample_objects, topic).next_offset
        await fresh.produce(topic, [b"after the recovery"])
        for isolation in ISOLATIONS:
            wanted = [one for one in await consumed(kafka, topic, isolation) if one.offset < end]
            found = await consumed(fresh, topic, isolation)
            assert [one for one in found if one.offset < end] == wanted
            assert [one.value for one in found if one.offset >= end] == [b"after the recovery"]
    assert any(row["ended_transactions"] for row in report)


async def test_newest_part_comes_back_with_its_offsets(kafka, fresh, write_kafka_config, objects, topic):
    """The log begins where the restored part does; a broker that restarts again reads the same."""
    config = write_kafka_config(topics={topic: {"remote.storage.enable": True}})
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES, max_batch_size=200_000)
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    manifest = archived_manifest(objects, topic)
    newest = list(manifest.segments)[-2:]

    (row,) = await recovered(
        fresh, config, topic, options=("--last-bytes", str(sum(one.size_bytes for one in newest)))
    )

    assert (row["start_offset"], row["next_offset"]) == (newest[0].base_offset, manifest.next_offset)
    assert (row["segments"], row["left_segments"]) == (2, len(manifest.segments) - 2)
    wanted = [
        one
        for one in await consumed(kafka, topic, "read_uncommitted")
        if newest[0].base_offset <= one.offset < manifest.next_offset
    ]
    await fresh.produce(topic, [b"one more"])
    assert (await consumed(fresh, topic, "read_uncommitted"))[:-1] == wanted
    await fresh.restart()
    assert (await consumed(fresh, topic, "read_uncommitted"))[:-1] == wanted


async def test_deleted_records_do_not_come_back(kafka, fresh, write_kafka_config, objects, topic):
    """The records that a user deleted inside a segment are restored with it, and no broker serves them."""
    config = write_kafka_config(topics={topic: {"remote.storage.enable": True}})
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES, max_batch_size=200_000)
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    before = archived_manifest(objects, topic).segments[1].base_offset + 1
    deleted = run_command(
        *("topic", "delete-records", topic, "--before", str(before), "--config", str(config))
    )
    assert deleted.returncode == 0, deleted.stderr

    (row,) = await recovered(fresh, config, topic)

    assert row["start_offset"] == before
    manifest = archived_manifest(objects, topic)
    assert manifest.segments[0].base_offset == before - 1
    for _ in range(2):
        found = await consumed(fresh, topic, "read_uncommitted")
        assert [one.offset for one in found] == list(range(before, manifest.next_offset))
        await fresh.restart()


async def test_restore_refuses_what_it_could_damage(kafka, fresh, samples):
    """A running broker, a topic that is not there, and one that holds records, each with the way out."""
    topic = SAMPLE_TOPICS[0]

    def told(*options):
        done = run_command(
            *("recover", "directory", str(fresh.log_dir()), "--topics", topic.replace(".", r"\.")),
            *("--config", str(samples.config), *options),
        )
        assert done.returncode in {1, 2}
        return done.stderr.decode()

    assert "a broker is running on" in told()
    await fresh.broker.stop()
    assert "create the topic with as many partitions" in told()
    await fresh.launch()
    await fresh.create_topic(topic, configs=SEGMENTS)
    await fresh.produce(topic, [b"mine"])
    await fresh.broker.stop()
    assert "holds records: a partition is restored only into an empty one" in told()
    await fresh.launch()
    assert [one.value for one in await consumed(fresh, topic, "read_uncommitted")] == [b"mine"]


OLD_EPOCH = 37


@pytest.fixture
def aged(tmp_path, topic):
    """Give the archive of a topic that had 37 leaders before, and what it holds."""
    writer = LogWriter(tmp_path / "old", topic)
    writer.begin_epoch(OLD_EPOCH)
    for number in range(40):
        writer.append(*(b"%d-%d" % (number, each) for each in range(5)))
        if number % 10 == 9:
            writer.roll()
    config = write_config(
        tmp_path / "old.yaml", directory_config([tmp_path / "old"], tmp_path / "bucket", tmp_path / "state")
    )
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    return SimpleNamespace(config=config, topic=topic, values=list(writer.values().values()))


async def test_librdkafka_consumer_goes_on_after_the_next_leader(fresh, aged):
    """The consumer's position from before the restart is neither a truncated log to it, nor stale."""
    await recovered(fresh, aged.config, aged.topic)

    def opened(offset):
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": fresh.bootstrap,
                "group.id": "of-librdkafka",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "topic.metadata.refresh.interval.ms": 200,
            }
        )
        consumer.assign([confluent_kafka.TopicPartition(aged.topic, 0, offset)])
        return consumer

    first = opened(0)
    try:
        read = await asyncio.to_thread(values_in, first, 60)
        await asyncio.to_thread(first.commit, asynchronous=False)
        await fresh.restart()
        await fresh.produce(aged.topic, [b"new"])
        read += await asyncio.to_thread(values_in, first, len(aged.values) + 1 - 60)
    finally:
        first.close()
    assert read == [*aged.values, b"new"]
    second = opened(confluent_kafka.OFFSET_STORED)
    try:
        assert await asyncio.to_thread(values_in, second, len(read) - 60) == read[60:]
    finally:
        second.close()


async def test_aiokafka_consumer_goes_on_after_the_next_leader(fresh, aged):
    """Likewise, with a group that it is a member of."""
    await recovered(fresh, aged.config, aged.topic)
    partition = ClientPartition(aged.topic, 0)
    settings = {
        "bootstrap_servers": fresh.bootstrap,
        "group_id": "of-aiokafka",
        "enable_auto_commit": False,
        "max_poll_records": 60,
        # A broker restarts on a slow machine, and the member must stay one.
        "session_timeout_ms": 60_000,
    }
    read = []
    first = AIOKafkaConsumer(aged.topic, auto_offset_reset="earliest", **settings)
    await first.start()
    try:
        read += [one.value for one in (await first.getmany(timeout_ms=120_000))[partition]]
        await first.commit()
        await fresh.restart()
        await fresh.produce(aged.topic, [b"new"])
        while len(read) < 120:
            batches = await first.getmany(timeout_ms=1_000)
            read += [one.value for one in batches.get(partition, ())]
        await first.commit()
    finally:
        await first.stop()
    async with AIOKafkaConsumer(aged.topic, auto_offset_reset="none", **settings) as second:
        while len(read) <= len(aged.values):
            batches = await second.getmany(timeout_ms=1_000)
            read += [one.value for one in batches.get(partition, ())]
    assert read == [*aged.values, b"new"]


# Long: a broker starts twice, and the consumer is a JVM.
async def test_java_consumer_goes_on_after_the_next_leader(fresh, aged):
    """
    A running Java consumer reads on after the next election: its position has an epoch that is known.

    A position under an unknown epoch would be reset.
    """
    await recovered(fresh, aged.config, aged.topic)
    process = await asyncio.create_subprocess_exec(
        *fresh.broker.command(
            "org.apache.kafka.tools.consumer.ConsoleConsumer",
            *("--bootstrap-server", fresh.bootstrap, "--topic", aged.topic, "--group", "of-java"),
            *("--consumer-property", "auto.offset.reset=earliest"),
        ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    known, read = {*aged.values, b"new"}, []
    try:
        async with asyncio.timeout(240):
            while len(read) < len(aged.values):
                line = (await process.stdout.readline()).rstrip()
                read += [line] if line in known else []
            # It commits each five seconds, and a member that lost its coordinator goes on where it committed.
            partition, committed_offset = ClientPartition(aged.topic, 0), -1
            async with fresh.admin() as admin:
                while committed_offset < len(read):
                    await asyncio.sleep(0.1)
                    committed = await admin.list_consumer_group_offsets("of-java")
                    committed_offset = committed[partition].offset if partition in committed else -1
        await fresh.restart()
        await fresh.produce(aged.topic, [b"new"])
        async with asyncio.timeout(240):
            while read[-1] != b"new":
                line = (await process.stdout.readline()).rstrip()
                assert process.returncode is None
                read += [line] if line in known else []
    finally:
        process.kill()
        # To the end of its output: after `wait` alone the pipe may still be open when the loop is closed.
        await process.communicate()
    assert read == [*aged.values, b"new"]


@pytest.fixture
def copied(samples, sample_objects, seaweedfs, tmp_path):
    """Give the sample archive as a copy, to which a test may add: its configuration."""
    prefix = f"e2e/{uuid.uuid4().hex}"
    with S3Bucket(seaweedfs.endpoint_url, bucket="e2e", prefix=prefix) as objects:
        for key in sample_objects.keys():  # noqa: SIM118 a method, not a mapping's
            objects.write(key, sample_objects.read(key))
    config = yaml.safe_load(samples.config.read_text()) | {"cloud_storage_prefix": prefix}
    return write_config(tmp_path / "copied.yaml", config)


# Long: a broker stops and starts around a restore, and daemons beside it.
async def test_shallow_restore_leaves_the_history_in_the_archive(kafka, behind, seaweedfs, copied, tmp_path):
    """Clients of the gateway and `tieringd read` see one log, from the old archive on to the new tail."""
    cluster = behind.cluster
    for topic in SAMPLE_TOPICS:
        await cluster.create_topic(topic, configs=SEGMENTS)
    await cluster.broker.stop()
    pattern = "|".join(topic.replace(".", r"\.") for topic in SAMPLE_TOPICS)
    options = ("--topics", pattern, "--config", str(copied), "--shallow")
    for _ in range(2):
        report = run_json("recover", "directory", str(cluster.log_dir()), *options)
    ends = {row["topic"]: row["next_offset"] for row in report}
    assert all(end > 100 for end in ends.values())
    assert {row["segments"] for row in report} == {0}
    await cluster.launch()
    prefix = yaml.safe_load(copied.read_text())["cloud_storage_prefix"]
    config = kafka_config(
        cluster,
        seaweedfs,
        tmp_path / "state-behind",
        bucket="e2e",
        prefix=prefix,
        topics={topic: {"remote.storage.enable": True} for topic in SAMPLE_TOPICS},
        gateway=gateway_section(behind),
    )
    config_file = write_config(tmp_path / "behind.yaml", config)
    with running_daemon(config_file) as daemon:
        daemon.until_rounds(2)
        through = SimpleNamespace(bootstrap=behind.bootstrap)
        for topic in SAMPLE_TOPICS:
            await cluster.produce(topic, _VALUES, max_batch_size=200_000)
            for isolation in ISOLATIONS:
                wanted = [one for one in await consumed(kafka, topic, isolation) if one.offset < ends[topic]]
                new = await consumed(cluster, topic, isolation)
                assert new[0].offset == ends[topic]
                assert await consumed(through, topic, isolation) == wanted + new
                assert read_log(config_file, topic, "--isolation", isolation) == wanted + new
            first = wanted[0]
            assert await offset_for_time(through, topic, first.timestamp_ms) == first.offset
            half = wanted[len(wanted) // 2]
            begun = read_log(config_file, topic, "--timestamp", str(half.timestamp_ms), "--count", "1")
            assert begun[0].timestamp_ms >= half.timestamp_ms
        daemon.until(
            lambda: all((daemon.next_offset(topic) or 0) > ends[topic] for topic in SAMPLE_TOPICS),
            "the new records are archived as well",
        )
        assert not daemon.events("gap recorded in the archive")
        with S3Bucket(seaweedfs.endpoint_url, bucket="e2e", prefix=prefix) as objects:
            firsts = {
                topic: min(
                    manifest.segments[0].base_offset
                    for manifest in archived_manifests(objects, topic).values()
                    if manifest.next_offset > ends[topic]
                )
                for topic in SAMPLE_TOPICS
            }
        assert firsts == ends, "the new archive begins with the first new record"
        for number in range(2):
            topic = SAMPLE_TOPICS[number]
            assert {one["topic"] for one in daemon.status()["partitions"]} >= {topic}
            whole = await consumed(through, topic, "read_committed")
            assert whole[0].offset == 0
            assert [one.value for one in whole[-len(_VALUES) :]] == _VALUES


# Long: brokers restart, and leaders change between reads.
async def test_position_in_the_history_outlives_the_next_leader(behind, aged, tmp_path):
    """Old records come under an epoch that the new cluster knows, though 37 leaders came before it."""
    cluster = behind.cluster
    await cluster.create_topic(aged.topic, configs=SEGMENTS)
    await cluster.broker.stop()
    options = ("--topics", aged.topic.replace(".", r"\."), "--config", str(aged.config), "--shallow")
    (row,) = run_json("recover", "directory", str(cluster.log_dir()), *options)
    assert row["start_offset"] == len(aged.values)
    await cluster.launch()
    config = yaml.safe_load(aged.config.read_text()) | {
        "broker": {
            "kind": "kafka",
            "log_dirs": [str(cluster.log_dir())],
            "bootstrap": [cluster.broker.bootstrap],
        },
        "gateway": gateway_section(behind),
        "state_directory": str(tmp_path / "state-behind"),
        "storage_min_free_bytes": 0,
    }
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": behind.bootstrap,
            "group.id": "in-history",
            "auto.offset.reset": "error",
            "queued.min.messages": 1,
            "fetch.message.max.bytes": 500,
        }
    )
    with running_daemon(write_config(tmp_path / "behind.yaml", config)) as daemon:
        daemon.until_rounds(2)
        try:
            consumer.assign([confluent_kafka.TopicPartition(aged.topic, 0, 0)])
            read = await asyncio.to_thread(consume_checked, consumer, 10)
            await cluster.restart()
            await cluster.produce(aged.topic, [b"new"])
            read += await asyncio.to_thread(consume_checked, consumer, len(aged.values) + 1 - 10)
        finally:
            consumer.close()
    assert [one.value() for one in read] == [*aged.values, b"new"]
    assert {one.leader_epoch() for one in read[:-1]} == {0}


def consume_checked(consumer, count):
    """Return so many messages; whatever error comes in between is a failure."""
    found = []
    while len(found) < count:
        for one in consumer.consume(count - len(found), 5):
            assert one.error() is None, one.error()
            found.append(one)
    return found


def values_in(consumer, count):
    return [one.value() for one in consume_checked(consumer, count)]


def gateway_section(behind):
    return {
        "enabled": True,
        "host": "127.0.0.1",
        "port": behind.port,
        "broker": f"127.0.0.1:{behind.cluster.broker.listener_ports['TIERED']}",
    }


class OldLog:
    """A topic's log of another cluster, to which producers with these ids have written."""

    def __init__(self, directory, topic, ids):
        self.directory = directory
        self.committed, self.aborted = [], []
        # Kafka forgets a producer that wrote long ago by itself.
        self._now_ms = time.time_ns() // 1_000_000
        self._batches, self._next_offset = [], 0
        *ended, to_commit, to_abort = sorted(ids)
        for producer_id in ended:
            (self._classic, self._fencing, self._commit, self._abort)[producer_id % 4](producer_id)
        # Two transactions have their markers behind what is archived.
        self.committed.append(self._append(to_commit, is_transactional=True))
        self.aborted.append(self._append(to_abort, is_transactional=True))
        closed = b"".join(self._batches)
        self.next_offset = self._next_offset
        self._batches.clear()
        self._mark(to_commit, COMMIT_MARKER, 0)
        self._mark(to_abort, ABORT_MARKER, 1)
        place = directory / f"{topic}-0"
        place.mkdir(parents=True)
        (place / "partition.metadata").write_bytes(encode_partition_metadata(TOPIC_ID))
        (place / f"{0:020d}.log").write_bytes(closed)
        (place / f"{self.next_offset:020d}.log").write_bytes(b"".join(self._batches))

    def _append(self, producer_id, **fields):
        value = b"old-%d" % producer_id
        stamps = {"timestamp_ms": self._now_ms, "producer_id": producer_id, "base_sequence": 0}
        self._batches.append(batch(self._next_offset, [value], **{"producer_epoch": 0} | stamps | fields))
        self._next_offset += 1
        return value

    def _mark(self, producer_id, marker, epoch):
        stamps = {"producer_id": producer_id, "producer_epoch": epoch, "timestamp_ms": self._now_ms}
        self._batches.append(encode_marker(self._next_offset, marker=marker, **stamps))
        self._next_offset += 1

    def _classic(self, producer_id):
        self.committed.append(self._append(producer_id))

    def _fencing(self, producer_id):
        self.committed.append(self._append(producer_id, producer_epoch=7))

    def _commit(self, producer_id):
        self.committed.append(self._append(producer_id, is_transactional=True))
        self._mark(producer_id, COMMIT_MARKER, 0)

    def _abort(self, producer_id):
        self.aborted.append(self._append(producer_id, is_transactional=True))
        # Since Kafka 4 a transaction's end raises its producer's epoch.
        self._mark(producer_id, ABORT_MARKER, 1)


async def ids_to_come(kafka):
    """Return the producer ids that a cluster gives out next."""
    given = []
    for node in kafka.brokers:
        producer = AIOKafkaProducer(bootstrap_servers=node.bootstrap, enable_idempotence=True)
        await producer.start()
        given.append(producer._txn_manager.producer_id)
        await producer.stop()
    # A broker takes a block of a thousand when it starts, and when it has given out its last one. On a busy
    # machine it asks for one more than once: it may give none of the first, how often has no bound, or keep
    # the next one in reserve, which then lies below blocks of other brokers.
    block = 1_000
    last = max(given) // block + 60
    begins = [*given, *range(0, last * block, block)]
    return {begin + number for begin in begins for number in range(40)}


class NewProducers:
    """Producers of the new cluster, each with an id that it has not given out before."""

    def __init__(self, kafka, topic):
        self._kafka, self._topic = kafka, topic
        self.ids, self.committed, self.aborted, self.offsets = [], [], [], {}

    async def write(self):
        """Write a record by a producer of each kind; the last one is outside of a transaction."""
        for is_aborted in (False, True):
            await self._write(is_aborted=is_aborted, transactional_id=uuid.uuid4().hex)
        await self._kafka.until_stable(self._topic)
        await self._write(enable_idempotence=True)

    async def _write(self, *, is_aborted=False, **settings):
        value = b"new-%d" % len(self.ids)
        async with self._kafka.producer(**settings) as producer:
            if "transactional_id" in settings:
                await producer.begin_transaction()
            told = await producer.send_and_wait(self._topic, value, partition=0)
            self.ids.append(producer._txn_manager.producer_id)
            if "transactional_id" in settings:
                await (producer.abort_transaction() if is_aborted else producer.commit_transaction())
        (self.aborted if is_aborted else self.committed).append(value)
        self.offsets[value] = told.offset


# Long: brokers are killed, and replicas move three times.
async def test_new_producers_with_the_ids_of_old_ones_lose_nothing_on_any_replica(brokers, tmp_path, topic):
    """
    The new cluster gives out ids anew: a first batch is no repetition of one of an old producer's.

    Neither on the restored replica, nor on one that copied the restored records, as it came before the new
    ones or with them; nor after a crash of either.
    """
    ids = await ids_to_come(brokers)
    old = OldLog(tmp_path / "old", topic, ids)
    config = write_config(
        tmp_path / "old.yaml", directory_config([tmp_path / "old"], tmp_path / "bucket", tmp_path / "state")
    )
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    await brokers.create_topic(topic, replicas=[[1]], configs=SEGMENTS)
    await brokers.broker.stop()
    options = ("--topics", topic.replace(".", r"\."), "--config", str(config))
    (row,) = run_json("recover", "directory", str(brokers.log_dir()), *options)
    assert (row["ended_transactions"], row["next_offset"]) == (2, old.next_offset + 2)
    await start_broker(brokers, brokers.broker)
    new = NewProducers(brokers, topic)

    async def holds_all():
        for isolation in ISOLATIONS:
            seen = {one.value: one.offset for one in await consumed(brokers, topic, isolation)}
            hidden = [] if isolation == "read_uncommitted" else [*old.aborted, *new.aborted]
            wanted = {*old.committed, *old.aborted, *new.committed, *new.aborted}.difference(hidden)
            assert seen.keys() == wanted
            assert all(seen[value] == offset for value, offset in new.offsets.items() if value in wanted)

    async with cluster_admin(brokers) as admin:
        await admin.until_led_by(topic, 1)
        await new.write()
        await restart_broker(brokers, 1, kill=True)
        await admin.until_led_by(topic, 1)
        await admin.reassign(topic, [1, 2])
        await admin.until_in_sync(topic)
        await new.write()
        await holds_all()
        await admin.move_leader(topic, 2)
        await new.write()
        await admin.reassign(topic, [2, 3])
        await admin.move_leader(topic, 3)
        await new.write()
        await holds_all()
        await admin.reassign(topic, [3])
        await restart_broker(brokers, 3, kill=True)
        await admin.until_led_by(topic, 3)
        await new.write()
        await holds_all()
    assert sorted(set(new.ids) - ids) == [], f"the cluster gave out {new.ids}"
