"""
The bounds of the broker's own logs, as the broker tells them now, and whether a topic is still the same one.

The broker's out-of-range response does not say on which side of its log the offset is, and has no high
watermark. The last scan of the log directories may be older than an election that cut the log off, or than a
topic that was deleted and created again under its name. So the broker is asked before archived records are
served, and what it says is used for a second.

The broker comes first: one question is under way at a time, and whatever is wanted meanwhile shares the next
one. Bounds that are used for longer are asked for again before the second is over, many at once, so that a
client that reads on does not wait for the broker.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tieringd.broker.base import Broker
from tieringd.errors import StorageUnavailable, TieringError
from tieringd.model.local_log import LocalLog
from tieringd.model.partition import LogBounds, TopicIdPartition
from tieringd.storage.at_once import cancelled

FRESH_SECONDS: Final = 1.0
"""How long the broker's answer is used."""
REFRESHED_SECONDS: Final = 0.5
"""An answer that is used at this age is asked for again in the background."""
_TOGETHER_SECONDS: Final = 0.1
"""How long such a question waits for others."""
_KEPT: Final = 20_000


@dataclass(frozen=True, slots=True)
class ToldBounds:
    """The broker's word on a log."""

    asked_at: float
    """When the broker was asked, by the monotonic clock."""
    bounds: LogBounds | None
    """None if the broker only follows."""
    leader_epoch: int
    """The epoch under which the broker leads, or the leader's."""


@dataclass(frozen=True, slots=True)
class _Told:
    at: float
    """Time of the question to the broker, in loop time."""
    answer: ToldBounds | TieringError


@dataclass(eq=False, slots=True)
class _Question:
    """The partitions that the broker is asked for at once."""

    ended: asyncio.Future[None]
    asked_at: float = math.inf
    wanted: dict[TopicIdPartition, LocalLog] = field(default_factory=dict)


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
        self._aging: dict[TopicIdPartition, LocalLog] = {}
        """Used partitions whose answer is old. The next question is for them as well."""
        self._timer: asyncio.TimerHandle | None = None
        self._asking: _Question | None = None
        """The question that is under way."""
        self._next: _Question | None = None
        """The question that is not sent yet."""
        self._task: asyncio.Task[None] | None = None
        """Asks one question after another, while there are some."""
        self._is_closed = False

    async def of(
        self, partition: TopicIdPartition, local: LocalLog, *, since: float = -math.inf
    ) -> LogBounds | None:
        """Return the bounds as `told_of` does, without their time."""
        return (await self.told_of(partition, local, since=since)).bounds

    async def told_of(
        self, partition: TopicIdPartition, local: LocalLog, *, since: float = -math.inf
    ) -> ToldBounds:
        """
        Return the bounds of a log that the broker leads, and the epoch.

        The broker was asked at *since* or later, and in the last second before the call. The question goes on
        if the caller is cancelled: the next caller has its answer.

        Raises:
            StorageUnavailable: The topic is another one now, or the broker does not answer.
        """
        called_at = self._now()
        needed_at = max(since, called_at - FRESH_SECONDS)
        told = self._told.get(partition)
        if told is not None and told.at >= needed_at and called_at - told.at > REFRESHED_SECONDS:
            self._refresh(partition, local)
        while told is None or told.at < needed_at:
            ended = self._ask_for(partition, local, needed_at)
            await asyncio.wait({ended})
            if ended.cancelled():
                raise StorageUnavailable(f"the broker was not asked for {partition}: the gateway is closed")
            ended.result()
            told = self._told.get(partition)
        if isinstance(told.answer, TieringError):
            raise StorageUnavailable(
                f"the broker does not tell the bounds of {partition} now: {told.answer}"
            ) from told.answer
        return told.answer

    async def close(self) -> None:
        """End all questions. The bounds of further partitions are not known."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            await cancelled([self._task])
        if self._next is not None:
            # The task was cancelled before its first turn.
            self._next.ended.cancel()

    def _refresh(self, partition: TopicIdPartition, local: LocalLog) -> None:
        self._aging[partition] = local
        if self._timer is None and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(_TOGETHER_SECONDS, self._ask_aging)

    def _ask_aging(self) -> None:
        self._timer = None
        if self._aging:
            self._question()

    def _ask_for(
        self, partition: TopicIdPartition, local: LocalLog, needed_at: float
    ) -> asyncio.Future[None]:
        """Return what is done when the broker has told the bounds of a partition, of *needed_at* or later."""
        if self._is_closed:
            raise StorageUnavailable(f"the broker is not asked for {partition}: the gateway is closed")
        asking = self._asking
        if asking is not None and partition in asking.wanted and asking.asked_at >= needed_at:
            return asking.ended
        question = self._question()
        question.wanted[partition] = local
        return question.ended

    def _question(self) -> _Question:
        if self._next is None:
            self._next = _Question(asyncio.get_running_loop().create_future())
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return self._next

    async def _run(self) -> None:
        try:
            while self._next is not None:
                question, self._next = self._next, None
                self._asking = question
                try:
                    await self._ask(question)
                except asyncio.CancelledError:
                    question.ended.cancel()
                    raise
                except Exception as error:  # noqa: BLE001 each caller meets the defect
                    question.ended.set_exception(error)
                else:
                    question.ended.set_result(None)
        finally:
            self._task = self._asking = None
            if self._next is not None:
                self._next.ended.cancel()

    async def _ask(self, question: _Question) -> None:
        wanted = question.wanted
        wanted |= self._aging
        self._aging.clear()
        question.asked_at = at = self._now()
        try:
            found = await self._found(wanted, at)
        except TieringError as error:
            found = dict.fromkeys(wanted, error)
        if len(self._told) > _KEPT:
            self._told.clear()
        self._told |= {partition: _Told(at, answer) for partition, answer in found.items()}

    async def _found(
        self, wanted: Mapping[TopicIdPartition, LocalLog], asked_at: float
    ) -> dict[TopicIdPartition, ToldBounds | TieringError]:
        view = await self._broker.replicas([local.partition for local in wanted.values()])
        found: dict[TopicIdPartition, ToldBounds | TieringError] = {}
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
                found[partition] = ToldBounds(asked_at, None, replica.leader_epoch)
        if led:
            epochs = {one.topic_partition: view.replicas[one.topic_partition].leader_epoch for one in led}
            answers = await self._broker.log_bounds(list(led.values()), leader_epochs=epochs)
            for partition in led:
                name = partition.topic_partition
                bounds = answers[name]
                found[partition] = (
                    bounds if isinstance(bounds, TieringError) else ToldBounds(asked_at, bounds, epochs[name])
                )
        return found
