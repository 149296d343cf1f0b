"""`tieringd read` where the archive ends: the broker goes on, to its end or for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE
from itertools import pairwise

import pytest
from aiokafka import TopicPartition as ClientPartition
from aiokafka.admin import RecordsToDelete

from tests.e2e.archives import archived_manifest, printed_record, read_log, read_records
from tests.e2e.sample_topics import ISOLATIONS, SEGMENTS, TRANSACTIONS, consumed
from tests.support.daemon import command, run_command

_ENOUGH_SECONDS = 240
_VALUES = [bytes([number]) * 100_000 for number in range(25)]


@pytest.fixture
def config(write_kafka_config, topic):
    return write_kafka_config(topics={topic: {"remote.storage.enable": True}})


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_read_gives_what_a_consumer_reads_of_transactions(kafka, samples, isolation):
    """The archive's records and behind them the broker's, in both isolation levels."""
    found = read_log(samples.config, TRANSACTIONS, "--isolation", isolation)
    assert found == await consumed(kafka, TRANSACTIONS, isolation)
    assert len(found) > len(read_records(samples.config, TRANSACTIONS, "--isolation", isolation))


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_read_gives_the_whole_log_after_a_trim(kafka, config, topic, isolation):
    """Archive and broker together are what a consumer read before anything was trimmed."""
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES, max_batch_size=200_000)
    before = await consumed(kafka, topic, isolation)
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    async with kafka.admin() as admin:
        await admin.delete_records({ClientPartition(topic, 0): RecordsToDelete(before_offset=10)})
    assert read_log(config, topic, "--isolation", isolation) == before
    assert [one.offset for one in read_log(config, topic, "--offset", "23")] == [23, 24]
    assert read_log(config, topic, "--timestamp", str(before[24].timestamp_ms)) == [
        one for one in before if one.timestamp_ms >= before[24].timestamp_ms
    ]
    assert len(read_log(config, topic, "--count", "12")) == 12


async def test_offsets_between_archive_and_broker_are_told(kafka, config, topic):
    """Records that the broker deleted before they were copied are a reported gap."""
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES, max_batch_size=200_000)
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    async with kafka.admin() as admin:
        await admin.delete_records({ClientPartition(topic, 0): RecordsToDelete(before_offset=24)})
    done = run_command("read", topic, "--partition", "0", "--config", str(config))
    assert done.returncode == 0
    offsets = [printed_record(line).offset for line in done.stdout.splitlines()]
    ends = next(offset for offset, following in pairwise(offsets) if following == 24)
    assert f"gap: offsets {ends + 1} to 23 are not archived" in done.stderr.decode()


async def test_read_without_its_broker_reads_the_archive(kafka, config, topic, objects, tmp_path):
    """The command says that the log goes on elsewhere, and ends well."""
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES, max_batch_size=200_000)
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    text = config.read_text().replace(kafka.bootstrap, "127.0.0.1:1")
    elsewhere = tmp_path / "elsewhere.yaml"
    elsewhere.write_text(text)
    done = run_command("read", topic, "--partition", "0", "--config", str(elsewhere))
    end = archived_manifest(objects, topic).next_offset
    assert len(done.stdout.splitlines()) == end
    assert f"the archive ends at offset {end}, and the broker at 127.0.0.1:1" in done.stderr.decode()
    assert done.returncode == 0


async def test_follow_goes_on_with_what_is_produced(kafka, config, topic):
    """Records come as they are written, until the reader is interrupted."""
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES[:13], max_batch_size=200_000)
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    arguments = command("read", topic, "--partition", "0", "--config", str(config), "--follow")
    environ = os.environ | {"PYTHONFAULTHANDLER": "1"}
    reading = await asyncio.create_subprocess_exec(
        *arguments, stdout=PIPE, stderr=PIPE, limit=1 << 20, env=environ
    )
    first, new = [], []
    try:
        async with asyncio.timeout(_ENOUGH_SECONDS):
            while len(first) < 13:
                first.append(printed_record(await reading.stdout.readline()).offset)
            await kafka.produce(topic, [b"new", b"newer"])
            while len(new) < 2:
                new.append(printed_record(await reading.stdout.readline()))
            reading.send_signal(signal.SIGINT)
            _, told = await reading.communicate()
    except TimeoutError:
        reading.send_signal(signal.SIGABRT)
        _, told = await reading.communicate()
        pytest.fail(f"stopped after {len(first)} and {len(new)} records, at:\n{told.decode()}")
    finally:
        if reading.returncode is None:
            reading.kill()
            await reading.wait()
    assert first == list(range(13))
    assert [(one.offset, one.value) for one in new] == [(13, b"new"), (14, b"newer")]
    assert "Traceback" not in told.decode()
    assert reading.returncode == 130


async def test_topic_that_was_created_again_is_not_the_archive_s_tail(kafka, config, topic, objects):
    """The new topic's offsets begin anew, and would look as if they went on."""
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES[:13], max_batch_size=200_000)
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    await kafka.delete_topic(topic)
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES, max_batch_size=200_000)
    done = run_command("read", topic, "--partition", "0", "--config", str(config))
    assert len(done.stdout.splitlines()) == archived_manifest(objects, topic).next_offset
    assert f"it belongs to an earlier topic {topic}" in done.stderr.decode()
