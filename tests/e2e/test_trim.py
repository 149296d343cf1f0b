"""Trimming a real broker: what is durable goes, what is not stays, and no offset is lost between."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as ClientPartition

from tests.e2e.archives import (
    archived_bytes,
    archived_manifest,
    assert_whole,
    base_of_active,
    closed_segments,
    read_records,
    until_trimmed,
)
from tests.e2e.sample_topics import SEGMENTS, consumed
from tests.support.daemon import run_command, running_daemon

if TYPE_CHECKING:
    from pathlib import Path

_VALUES = [bytes([number]) * 100_000 for number in range(65)]
_TARGET_BYTES = 2 << 20


@pytest.fixture
def config_of(write_kafka_config, topic):
    """Give a function that writes a configuration with a small local target."""
    properties = {"redpanda.remote.write": True, "retention.local.target.bytes": _TARGET_BYTES}
    return partial(write_kafka_config, topics={topic: properties})


@pytest.fixture
def config(config_of):
    """Give that configuration."""
    return config_of()


def directory_of(kafka, topic) -> Path:
    return kafka.log_dir() / f"{topic}-0"


@asynccontextmanager
async def assigned_consumer(kafka, topic):
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, enable_auto_commit=False)
    await consumer.start()
    try:
        consumer.assign([ClientPartition(topic, 0)])
        yield consumer
    finally:
        await consumer.stop()


async def log_start_offset(kafka, topic) -> int:
    async with assigned_consumer(kafka, topic) as consumer:
        (offset,) = (await consumer.beginning_offsets([ClientPartition(topic, 0)])).values()
        return offset


async def test_trim_moves_the_log_start_and_leaves_no_gap(kafka, config, objects, topic):
    """The broker drops archived segments past the local target, and both tiers together hold every offset."""
    await kafka.create_topic(topic, configs=SEGMENTS)
    directory = directory_of(kafka, topic)
    await kafka.produce(topic, _VALUES, max_batch_size=200_000)
    before = await consumed(kafka, topic, "read_uncommitted")
    closed = closed_segments(directory)
    local_bytes = sum(map(len, closed.values()))
    assert len(closed) >= 5

    with running_daemon(config) as daemon:
        until_trimmed(daemon)
        daemon.until_next_offset(topic, base_of_active(directory))
        # The broker deletes the files at its next check.
        told = daemon.events("local log trimmed")[-1]["log_start_offset"]
        daemon.until(lambda: min(closed_segments(directory)) == told, "the broker has deleted the files")
        trimmed_bytes = daemon.metric("tieringd_trimmed_bytes_total", topic=topic)

    start_offset = await log_start_offset(kafka, topic)
    after = await consumed(kafka, topic, "read_uncommitted")
    manifest = archived_manifest(objects, topic)
    archived = read_records(config, topic)
    assert min(closed_segments(directory)) == start_offset > 0
    assert after[0].offset == start_offset
    assert (manifest.start_offset, manifest.gaps, manifest.faults()) == (0, (), ())
    assert manifest.next_offset >= start_offset
    assert sorted(set(archived + after)) == before
    assert archived == before[: manifest.next_offset]
    assert archived_bytes(config, topic) == b"".join(closed.values())
    assert trimmed_bytes == sum(len(data) for base, data in closed.items() if base < start_offset)
    # The local target is kept: one segment less would be below it.
    active_bytes = max(directory.glob("*.log")).stat().st_size
    assert local_bytes + active_bytes - trimmed_bytes >= _TARGET_BYTES
    assert_whole(config)


async def test_nothing_is_trimmed_while_the_store_is_away(kafka, seaweedfs, config_of, objects, topic):
    """A daemon trims nothing while its store is away, however far past the target. It does later."""
    await kafka.create_topic(topic, configs=SEGMENTS)
    directory = directory_of(kafka, topic)
    # An outage is as good as any other once the first request has given up.
    config = config_of(
        cloud_storage_segment_upload_timeout_ms=2000, cloud_storage_manifest_upload_timeout_ms=2000
    )
    with running_daemon(config) as daemon:
        await kafka.produce(topic, _VALUES[:5], max_batch_size=200_000)
        daemon.until(lambda: daemon.partition(topic), "the partition is archived from here")
        seaweedfs.pause()
        try:
            await kafka.produce(topic, _VALUES, max_batch_size=200_000)
            closed = closed_segments(directory)
            daemon.until(
                lambda: "gave up" in (daemon.partition(topic)["fault"] or ""), "an upload has failed"
            )
            daemon.until_rounds(5)
            assert not daemon.events("local log trimmed")
            assert await log_start_offset(kafka, topic) == 0
            assert closed_segments(directory) == closed
        finally:
            seaweedfs.resume()
        daemon.until(lambda: daemon.events("local log trimmed"), "the log is trimmed")
        daemon.until_next_offset(topic, base_of_active(directory))

    assert await log_start_offset(kafka, topic) <= archived_manifest(objects, topic).next_offset
    assert archived_bytes(config, topic) == b"".join(closed.values())


async def test_segment_that_differs_from_its_copy_is_not_trimmed(kafka, config, objects, topic):
    """A local file whose bytes are not those that were stored stays, and so does all that follows it."""
    await kafka.create_topic(topic, configs=SEGMENTS)
    directory = directory_of(kafka, topic)
    await kafka.produce(topic, _VALUES[:15], max_batch_size=200_000)
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    assert await log_start_offset(kafka, topic) == 0
    first = directory / f"{0:020d}.log"
    changed = bytearray(first.read_bytes())
    changed[-10] ^= 1
    first.write_bytes(bytes(changed))
    await kafka.produce(topic, _VALUES, max_batch_size=200_000)

    done = run_command("run", "--once", "--config", str(config))

    told = done.stderr.decode()
    assert "local segment differs from its stored copy; it is not trimmed" in told
    assert str(first) in told
    assert await log_start_offset(kafka, topic) == 0
    assert len(archived_manifest(objects, topic).segments) == len(closed_segments(directory))


async def test_open_transaction_is_neither_uploaded_nor_trimmed(kafka, config, objects, topic):
    """Segments past the last stable offset wait for the transaction's end, and are archived after it."""
    await kafka.create_topic(topic, configs=SEGMENTS)
    directory = directory_of(kafka, topic)
    await kafka.produce(topic, _VALUES[:15], max_batch_size=200_000)
    async with kafka.producer(
        transactional_id=f"{topic}-open", transaction_timeout_ms=300_000, max_batch_size=200_000
    ) as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"open", partition=0)
        await kafka.produce(topic, _VALUES, max_batch_size=200_000)
        with running_daemon(config) as daemon:
            daemon.until(lambda: daemon.next_offset(topic), "the stable part is archived")
            daemon.until_rounds(5)
            assert daemon.next_offset(topic) <= 15
            assert archived_manifest(objects, topic).next_offset <= 15
            assert await log_start_offset(kafka, topic) <= 15
            closed = closed_segments(directory)
            await producer.abort_transaction()
            daemon.until_next_offset(topic, base_of_active(directory))
    stored = archived_bytes(config, topic)
    assert stored.endswith(b"".join(closed.values()))
    assert 15 not in [one.offset for one in read_records(config, topic, "--isolation", "read_committed")]
    assert 15 in [one.offset for one in read_records(config, topic)]
