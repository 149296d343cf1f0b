"""What the kernel reports of a real broker's work in its log directory, and the rescans that rely on it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from aiokafka import TopicPartition as ClientPartition
from aiokafka.admin import RecordsToDelete
from structlog.testing import capture_logs

from tests.support.file_calls import counted_file_calls
from tieringd.broker.log_dir import LogDirRescan, read_local_log
from tieringd.broker.watch import DirectoryWatch

if TYPE_CHECKING:
    from tests.support.kafka import KafkaCluster
    from tieringd.model.local_log import LocalLog

TOPIC = "reported-changes"


class Rescans:
    """The rescans of one topic's only partition, as the daemon makes them."""

    def __init__(self, kafka: KafkaCluster) -> None:
        self._log_dir = str(kafka.log_dir())
        self.path = kafka.log_dir() / f"{TOPIC}-0"
        self.watch = DirectoryWatch([self._log_dir])
        self._rescan = LogDirRescan()
        self.stats = 0
        """How many files and directories the last read looked at."""

    def read(self) -> LocalLog:
        partitions = self._rescan.scan([self._log_dir]).partitions
        (partition,) = (one for one in partitions if one.path == str(self.path))
        self._rescan.note_changes(self.watch)
        with counted_file_calls() as calls:
            log = self._rescan.read(partition)
        self.stats = calls["stat"]
        self.watch.follow((str(self.path),))
        return log

    async def idle(self) -> LocalLog:
        """Read until a read looks at nothing; return the log."""
        deadline = time.monotonic() + 60
        while (log := self.read()) != read_local_log(log.partition) or self.stats:
            assert time.monotonic() < deadline, "the partition is looked at again and again"
            await asyncio.sleep(0.05)
        return log

    async def check_change(self, before: LocalLog) -> None:
        """Wait until the files differ from *before*, and check that the first read sees it."""
        deadline = time.monotonic() + 60
        while read_local_log(before.partition) == before:
            assert time.monotonic() < deadline, "the broker changed nothing"
            await asyncio.sleep(0.02)
        assert self.read() != before


@pytest.fixture
async def rescans(kafka):
    """Give the rescans of a topic with small segments, which nothing has been written to for a while."""
    await kafka.create_topic(TOPIC, configs={"segment.bytes": str(1 << 20)})
    await kafka.produce(TOPIC, [b"first"])
    rescans = Rescans(kafka)
    yield rescans
    rescans.watch.close()
    await kafka.delete_topic(TOPIC)


# Long: a directory's time counts only once it is two seconds old.
async def test_read_that_relies_on_reports_sees_what_a_broker_does(kafka, rescans):
    """An append, a roll and a deletion of records in an idle log are each seen by the first read after it."""
    with capture_logs() as logs:
        before = await rescans.idle()
        await kafka.produce(TOPIC, [b"appended"])
        await rescans.check_change(before)
        before = await rescans.idle()
        last_offset = await kafka.produce(TOPIC, [bytes(600_000)] * 3, max_batch_size=700_000)
        await rescans.check_change(before)
        before = await rescans.idle()
        assert len(before.segments) > 1
        async with kafka.admin() as admin:
            await admin.delete_records({ClientPartition(TOPIC, 0): RecordsToDelete(last_offset)})
        await rescans.check_change(before)
        after = await rescans.idle()
    assert (after.first_offset, logs) == (last_offset, [])
