"""
The bounds of the broker's own logs, as the broker tells them now, and whether a topic is still the same one.

The broker's out-of-range response does not say on which side of its log the offset is, and has no high
watermark. The last scan of the log directories may be older than an election that cut the log off, or than a
topic that was deleted and created again under its name. So the broker is asked before archived records are
served, and what it says is used for a second. Partitions that are asked for at once share a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tieringd.broker.base import Broker
from tieringd.errors import StorageUnavailable, TieringError
from tieringd.model.local_log import LocalLog
from tieringd.model.partition import LogBounds, TopicIdPartition
from tieringd.storage.at_once import cancelled

FRESH_SECONDS: Final = 1.0
"""How long the broker's answer is used."""
_KEPT: Final = 20_000


@dataclass(frozen=True, slots=True)
class _Told:
    at: float
    bounds: LogBounds | TieringError | None


class CurrentBounds:
    """
    Ask the broker beside a gateway. Belongs to one loop; closed once.

    *on_other_topic* is called when a topic is not the one that the last scan saw.
    """

    def __init__(
        self, broker: Broker, *, now: Callable[[], float], on_other_topic: Callable[[], None]
    ) -> None:
        """Keep the arguments. *now* is a monotonic clock in seconds."""
        self._broker = broker
        self._now = now
        self._on_other_topic = on_other_topic
        self._told: dict[TopicIdPartition, _Told] = {}
        self._wanted: dict[TopicIdPartition, LocalLog] = {}
        self._asking: dict[TopicIdPartition, asyncio.Task[None]] = {}
        self._next: asyncio.Task[None] | None = None
        """The task that asks for `_wanted`."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def of(self, partition: TopicIdPartition, local: LocalLog) -> LogBounds | None:
        """
        Return the bounds of a log that the broker leads; None if it only follows.

        The question goes on if the caller is cancelled: the next caller has its answer.

        Raises:
            StorageUnavailable: The topic is another one now, or the broker does not answer.
        """
        told = self._told.get(partition)
        if told is None or self._now() - told.at > FRESH_SECONDS:
            if partition not in self._asking:
                self._ask_for(partition, local)
            await asyncio.wait({self._asking[partition]})
            told = self._told.get(partition)
        if told is None:
            raise StorageUnavailable(f"the broker was not asked for the bounds of {partition}")
        if isinstance(told.bounds, TieringError):
            raise StorageUnavailable(
                f"the broker does not tell the bounds of {partition} now: {told.bounds}"
            ) from told.bounds
        return told.bounds

    async def close(self) -> None:
        """End all questions."""
        await cancelled(tuple(self._tasks))

    def _ask_for(self, partition: TopicIdPartition, local: LocalLog) -> None:
        """Add a partition to the question that begins in the loop's next turn."""
        if self._next is None:
            self._next = asyncio.create_task(self._ask())
            self._tasks.add(self._next)
            self._next.add_done_callback(self._tasks.discard)
        self._wanted[partition] = local
        self._asking[partition] = self._next

    async def _ask(self) -> None:
        wanted, self._wanted, self._next = self._wanted, {}, None
        at = self._now()
        try:
            found = await self._found(wanted)
        except TieringError as error:
            found = dict.fromkeys(wanted, error)
        finally:
            for partition in wanted:
                del self._asking[partition]
        if len(self._told) > _KEPT:
            self._told.clear()
        self._told |= {partition: _Told(at, bounds) for partition, bounds in found.items()}

    async def _found(
        self, wanted: Mapping[TopicIdPartition, LocalLog]
    ) -> dict[TopicIdPartition, LogBounds | TieringError | None]:
        view = await self._broker.replicas([local.partition for local in wanted.values()])
        found: dict[TopicIdPartition, LogBounds | TieringError | None] = {}
        led: dict[TopicIdPartition, LocalLog] = {}
        for partition, local in wanted.items():
            replica = view.replicas.get(partition.topic_partition)
            if (
                replica is None
                or view.topic_ids.get(partition.topic, partition.topic_id) != partition.topic_id
            ):
                found[partition] = StorageUnavailable("the topic is another one now, or is not here any more")
                self._on_other_topic()
            elif replica.is_leader:
                led[partition] = local
            else:
                found[partition] = None
        if led:
            bounds = await self._broker.log_bounds(
                list(led.values()),
                leader_epochs={
                    one.topic_partition: view.replicas[one.topic_partition].leader_epoch for one in led
                },
            )
            found |= {one: bounds[one.topic_partition] for one in led}
        return found
