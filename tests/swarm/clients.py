"""All clients of a swarm together: who writes, who reads, and what each was promised."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Self

from aiokafka.errors import KafkaError

from tests.support.writers import Writers
from tests.swarm import checker
from tests.swarm.ending import in_thread
from tests.swarm.sharing import SHARED
from tests.swarm.transactions import (
    GROUP,
    CommittedReader,
    TransactionalWriter,
    all_broken_transactions,
    broken_group,
)
from tests.swarm.workload import PARTITIONS, TOPIC, Reader

if TYPE_CHECKING:
    from types import TracebackType

    from tests.swarm.faults import Parts
    from tests.swarm.report import Report

_VALUE_BYTES = 30_000
"""With these a segment is full every two seconds, and a recovery is seen as soon."""


class Clients:
    """All clients of a swarm. They begin in an `async with` block, whose end cancels what still runs."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._writers = Writers(parts.cluster, {TOPIC: PARTITIONS}, value_bytes=_VALUE_BYTES)
        # The share group's topic has a writer of its own: its records are read in another way.
        self._sharing = Writers(parts.cluster, {SHARED: 1})
        self._transactions = TransactionalWriter(parts.cluster)
        self._readers = [
            Reader("the reader through the gateways", parts.gateways, self._writers, reads_archive=True),
            Reader(
                "the reader past the gateways", parts.cluster.bootstrap, self._writers, reads_archive=False
            ),
        ]
        self._group = CommittedReader("the group", parts.gateways, parts.cluster.bootstrap, GROUP)

    async def __aenter__(self) -> Self:
        self._writers.__enter__()
        self._sharing.__enter__()
        self._transacting = asyncio.create_task(self._transactions.run())
        self._reading = [asyncio.create_task(one.run()) for one in (*self._readers, self._group)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in (self._transacting, *self._reading):
            task.cancel()
        # In a thread: the brokers, whose answers the writers wait for, reach each other through this loop.
        await self._stop_writers()

    async def _stop_writers(self) -> None:
        await in_thread(self._writers.stop)
        await in_thread(self._sharing.stop)

    async def stop_writing(self) -> None:
        """Stop the producers, and wait for their last answers."""
        self._transactions.is_stopping = True
        await self._stop_writers()
        await self._transacting

    async def broken(self) -> list[str]:
        """Return each broken promise, after the producers have stopped."""
        cluster, config = self._parts.cluster, self._parts.daemons.config()
        gateways = self._parts.gateways
        return [
            *await self._parts.share_group.until_read(self._sharing.writer(SHARED)),
            *await all_broken_transactions(self._transactions, self._group),
            *await checker.all_broken(self._writers, self._readers, gateways, cluster.bootstrap, config),
        ]

    async def stop_reading(self) -> list[str]:
        """Stop the readers, and return what was wrong with how they ended or where their group is."""
        for task in self._reading:
            task.cancel()
        outcomes = await asyncio.gather(*self._reading, return_exceptions=True)
        ended = [f"a reader ended: {one!r}" for one in outcomes if isinstance(one, Exception)]
        try:
            return [*ended, *await broken_group(self._group)]
        except KafkaError as error:
            return [*ended, f"the group cannot be asked where it is: {error!r}"]

    def tell(self, report: Report) -> None:
        """Add up what was done."""
        report.records = sum(len(one.acknowledged) for one in self._writers.writers)
        report.shared = len(self._sharing.writer(SHARED).acknowledged)
        report.share_consumer_ends = self._parts.share_group.ends
        report.transactions = Counter(one.value for one in self._transactions.outcomes)
        report.commits, report.members = self._group.commits, self._group.members
        report.stalls = Counter(self._group.stalls)
        report.told, report.untold = self._group.told, self._group.untold
