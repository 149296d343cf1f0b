"""
A member of a consumer group, as a process.

`python -m tests.support.group_member LIBRARY BOOTSTRAP GROUP TOPIC` prints a line of JSON for each
assignment, for each record, and for each acknowledged commit, with the time of a clock that all processes
share. It reads a few records, and the rest after SIGUSR1: else a member that starts late could find
nothing left. It ends on SIGTERM, after a last commit.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from contextlib import suppress

import confluent_kafka
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError

_COMMIT_EACH = 5
_READ_AT_FIRST = 10
"""How many records a member reads at least before SIGUSR1."""
_SETTINGS = {
    "librdkafka": {"session.timeout.ms": 10_000, "heartbeat.interval.ms": 1000},
    "librdkafka-newer": {"group.protocol": "consumer"},
}
"""Of librdkafka; the second are those of a member of the newer group protocol."""
_is_ending = False
_is_held = True
"""Whether the member stops after its first records."""


class _Holding:
    """Stops a consumer after its first records, until SIGUSR1. Asked before each poll."""

    def __init__(self, pause, resume):
        self._pause = pause
        self._resume = resume

    def apply(self, read, assigned):
        """
        Pause or resume what is *assigned*, by the number of records *read*.

        A partition that comes is not paused, or still paused from when the member had it before: librdkafka
        keeps that. So this is done again and again. What is as it should be stays as it is.
        """
        if _is_held and read >= _READ_AT_FIRST:
            self._pause(assigned)
        else:
            self._resume(assigned)


def tell(kind, **values):
    """Print a line."""
    sys.stdout.write(json.dumps({"kind": kind, "at": time.monotonic(), **values}) + "\n")
    sys.stdout.flush()


def _end(*_):
    global _is_ending  # noqa: PLW0603 a signal has no other way
    _is_ending = True


def _go_on(*_):
    global _is_held  # noqa: PLW0603 a signal has no other way
    _is_held = False


def run_librdkafka(bootstrap, group, topic, settings):
    """Consume with librdkafka, and commit synchronously."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "topic.metadata.refresh.interval.ms": 2000,
            **settings,
        }
    )
    unsaved = {}

    def assigned(_, partitions):
        tell("assigned", partitions=[one.partition for one in partitions])

    def lost(_, partitions):
        commit()
        for one in partitions:
            unsaved.pop(one.partition, None)
        tell("revoked", partitions=[one.partition for one in partitions])

    def commit():
        if not unsaved:
            return
        offsets = [confluent_kafka.TopicPartition(topic, number, at) for number, at in unsaved.items()]
        try:
            done = consumer.commit(offsets=offsets, asynchronous=False)
        except confluent_kafka.KafkaException as error:
            tell("refused", error=str(error))
            return
        kept = {one.partition: one.offset for one in done if one.error is None}
        tell("committed", offsets=kept)
        unsaved.clear()

    consumer.subscribe([topic], on_assign=assigned, on_revoke=lost)
    read, holding = 0, _Holding(consumer.pause, consumer.resume)
    while not _is_ending:
        holding.apply(read, consumer.assignment())
        message = consumer.poll(0.2)
        if message is None or message.error() is not None:
            commit()
            continue
        tell("read", partition=message.partition(), offset=message.offset())
        unsaved[message.partition()] = message.offset() + 1
        read += 1
        if read % _COMMIT_EACH == 0:
            commit()
        # Records take some time, so that the test can act while they are read.
        time.sleep(0.03)
    commit()
    consumer.close()


class _Listener(ConsumerRebalanceListener):
    """Commits what was read before partitions go, and tells which come."""

    def __init__(self, commit):
        self._commit = commit

    async def on_partitions_revoked(self, revoked):
        """Commit."""
        await self._commit()
        tell("revoked", partitions=[one.partition for one in revoked])

    async def on_partitions_assigned(self, assigned):
        """Tell."""
        tell("assigned", partitions=[one.partition for one in assigned])


async def run_aiokafka(bootstrap, group, topic):
    """Consume with aiokafka."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        session_timeout_ms=10_000,
        heartbeat_interval_ms=1000,
        metadata_max_age_ms=2000,
        request_timeout_ms=5000,
    )
    unsaved = {}

    async def commit():
        if not unsaved:
            return
        offsets = dict(unsaved)
        try:
            await consumer.commit(offsets)
        except (CommitFailedError, IllegalStateError, KafkaError) as error:
            tell("refused", error=str(error))
        else:
            tell("committed", offsets={one.partition: at for one, at in offsets.items()})
        unsaved.clear()

    consumer.subscribe([topic], listener=_Listener(commit))
    await consumer.start()
    read, holding = 0, _Holding(lambda some: consumer.pause(*some), lambda some: consumer.resume(*some))
    while not _is_ending:
        holding.apply(read, consumer.assignment())
        found = await consumer.getmany(timeout_ms=200, max_records=_COMMIT_EACH)
        for partition, records in found.items():
            for one in records:
                tell("read", partition=partition.partition, offset=one.offset)
                unsaved[partition] = one.offset + 1
                read += 1
        await commit()
        await asyncio.sleep(0.05)
    await commit()
    with suppress(KafkaError):
        await consumer.stop()


def main():
    """Consume until the process is told to end."""
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGUSR1, _go_on)
    library, bootstrap, group, topic = sys.argv[1:]
    if library == "aiokafka":
        asyncio.run(run_aiokafka(bootstrap, group, topic))
    else:
        run_librdkafka(bootstrap, group, topic, _SETTINGS[library])


if __name__ == "__main__":
    main()
