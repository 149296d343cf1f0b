"""
What transactional clients do in a swarm: a producer commits and aborts, and readers see what is committed.

The producer knows of each transaction whether readers have to see it. The group reader goes on where its
group's committed offsets are, through the gateways.
"""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError

from tests.swarm.checker import Progress
from tests.swarm.stalls import place_at_brokers, place_of_client, waits_of, waits_of_client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from aiokafka import AIOKafkaProducer

    from tests.support.kafka import KafkaCluster

TRANSACTIONS = "swarm-transactions"
TRANSACTION_PARTITIONS = 2
GROUP = "swarm-group"
_RECORDS = 3
"""The records of a transaction in each partition."""
_VALUE_BYTES = 30_000
_ABORT_EACH = 4
_PAUSE_SECONDS = 0.5
_COMMITS_OF_A_MEMBER = 20
_STEP_SECONDS = 60
_HANGS_BY_ITSELF = "Fetcher.close"
"""
Where aiokafka hangs without anybody else's fault: tests/unit/test_swarm.py shows it.

Its fetcher swallows a cancellation that comes while it takes back an assignment. So `stop` waits for ever.
"""
_TOLD_WITHIN_SECONDS = 30
_PRODUCER = {"transactional_id": "swarm", "request_timeout_ms": 10_000, "linger_ms": 5}
_CONSUMER = {
    "isolation_level": "read_committed",
    "enable_auto_commit": False,
    "metadata_max_age_ms": 2000,
    "request_timeout_ms": 15_000,
}
_NAMES = [TopicPartition(TRANSACTIONS, number) for number in range(TRANSACTION_PARTITIONS)]


class Outcome(enum.Enum):
    """A transaction's outcome as its producer knows it."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    """Aborted, or left open and then fenced by the next producer."""
    UNKNOWN = "unknown"
    """The commit was asked for, and its answer did not come."""


class Place(NamedTuple):
    """One record of a transaction."""

    transaction: int
    index: int


Seen = dict[int, dict[int, Place]]
"""The record at each offset that was read, by partition."""


def _value(partition: int, place: Place) -> bytes:
    return b"%d:%d:%d:" % (partition, *place) + bytes(_VALUE_BYTES)


@dataclass
class TransactionalWriter:
    """One producer with one transactional id. It is made anew after each error."""

    cluster: KafkaCluster
    outcomes: list[Outcome] = field(default_factory=list)
    """What is known of each transaction, in their order."""
    committed: dict[int, dict[int, Place]] = field(
        default_factory=lambda: {number: {} for number in range(TRANSACTION_PARTITIONS)}
    )
    """The acknowledged records of transactions that are committed, by partition and offset."""
    errors: int = 0
    is_stopping: bool = False

    async def run(self) -> None:
        """Write until `is_stopping`."""
        while not self.is_stopping:
            try:
                async with self.cluster.producer(**_PRODUCER) as producer:
                    while not self.is_stopping:
                        await self._transact(producer)
                        await asyncio.sleep(_PAUSE_SECONDS)
            except (KafkaError, OSError):
                # A broker is away, or the transaction was in the way of one that is.
                self.errors += 1
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _transact(self, producer: AIOKafkaProducer) -> None:
        number = len(self.outcomes)
        await producer.begin_transaction()
        self.outcomes.append(Outcome.ABORTED)
        wanted = [
            (partition, Place(number, index))
            for index in range(_RECORDS)
            for partition in range(TRANSACTION_PARTITIONS)
        ]
        sent = [
            await producer.send(TRANSACTIONS, _value(partition, place), partition=partition)
            for partition, place in wanted
        ]
        answers = await asyncio.gather(*sent)
        if number % _ABORT_EACH == _ABORT_EACH - 1:
            await producer.abort_transaction()
            return
        self.outcomes[number] = Outcome.UNKNOWN
        await producer.commit_transaction()
        self.outcomes[number] = Outcome.COMMITTED
        for (partition, place), answer in zip(wanted, answers, strict=True):
            self.committed[partition][answer.offset] = place


@dataclass
class CommittedReader(ConsumerRebalanceListener):
    """
    A reader of committed records through the gateways: in a group with committed offsets, or from 0 without.

    A member of the group leaves after some commits, and another one goes on.
    """

    name: str
    bootstrap: str
    brokers: str
    """The addresses of the brokers, past the gateways."""
    group: str | None
    """The name of its group; None reads from 0 without one."""
    seen: Seen = field(default_factory=lambda: {number: {} for number in range(TRANSACTION_PARTITIONS)})
    positions: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(TRANSACTION_PARTITIONS), 0))
    """No record below comes again, by partition."""
    acknowledged: dict[int, int | None] = field(
        default_factory=lambda: dict.fromkeys(range(TRANSACTION_PARTITIONS))
    )
    """The committed offset that was acknowledged last, by partition."""
    asked: dict[int, int | None] = field(default_factory=lambda: dict.fromkeys(range(TRANSACTION_PARTITIONS)))
    """The offset whose commit was asked for last. Without its answer, it may be the group's or not."""
    commits: int = 0
    members: int = 0
    errors: int = 0
    untold: int = 0
    """How often a client was told of no committed offset, and asked again."""
    stalls: list[str] = field(default_factory=list)
    """What a member's client did not come back from."""
    told: list[str] = field(default_factory=list)
    """Where each client that hung was, and where the log of the brokers was then."""
    broken: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            try:
                await self._read()
            except (KafkaError, OSError):
                self.errors += 1
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _read(self) -> None:
        settings: dict[str, Any] = dict(_CONSUMER)
        if self.group:
            settings |= {"group_id": self.group, "auto_offset_reset": "earliest", "session_timeout_ms": 6000}
        self._consumer = AIOKafkaConsumer(bootstrap_servers=self.bootstrap, **settings)
        try:
            await self._within("start", self._consumer.start())
            if self.group:
                self._consumer.subscribe([TRANSACTIONS], listener=self)
            else:
                self._consumer.assign(_NAMES)
                for one in _NAMES:
                    self._consumer.seek(one, self.positions[one.partition])
            self.members += 1
            end = self.commits + _COMMITS_OF_A_MEMBER
            while not self.group or self.commits < end:
                found = await self._consumer.getmany(timeout_ms=500)
                for partition, records in found.items():
                    for record in records:
                        self._see(partition.partition, record.offset, record.value)
                if self.group and found:
                    await self._commit(one.partition for one in found)
        finally:
            await self._within("stop", self._consumer.stop())

    async def _within(self, what: str, step: Awaitable[None]) -> None:
        """Give up a member whose client hangs, and note it: the next one goes on."""
        running = asyncio.ensure_future(step)
        try:
            await asyncio.wait([running], timeout=_STEP_SECONDS)
            if running.cancelled():
                # A client that cancels its own tasks may tell it to its caller. That must not end the reader.
                raise KafkaError(f"{what} ended with a cancellation of the client's own")
            if running.done():
                await running
                return
            self.stalls.append(what)
            waits = waits_of(running)
            self.told += [f"{self.name}, {what}: {waits}", *await self.describe()]
            if _HANGS_BY_ITSELF not in waits:
                self._break(f"a member did not come back from its {what} within {_STEP_SECONDS} s")
            raise TimeoutError(f"{what} took {_STEP_SECONDS} s")
        finally:
            running.cancel()

    async def describe(self) -> list[str]:
        """Return where the client and its tasks are, and what the brokers answer past the gateways."""
        return [
            *place_of_client(self._consumer, _NAMES),
            *waits_of_client(self._consumer),
            *await place_at_brokers(self.brokers, self.group, _NAMES),
        ]

    async def _commit(self, partitions: Iterable[int]) -> None:
        wanted = {number: self.positions[number] for number in partitions}
        self.asked |= wanted
        offsets = {TopicPartition(TRANSACTIONS, one): at for one, at in wanted.items()}
        await self._within("commit", self._consumer.commit(offsets))
        self.acknowledged |= wanted
        self.commits += 1

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Do nothing: what was read and is not committed is read again."""

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Compare the group's offsets with those that were committed, and go on there."""
        for one in assigned:
            found = await self._committed(one)
            self.check_committed(one.partition, found)
            self.positions[one.partition] = found or 0
            # The client's own reset may rest on an answer that was no answer.
            self._consumer.seek(one, self.positions[one.partition])

    async def _committed(self, one: TopicPartition) -> int | None:
        """
        Return the group's offset. Where there has to be one, "none" is asked again for a while.

        aiokafka does not read the error of a whole OffsetFetch answer (tests/unit/test_swarm.py shows it). To
        it, a coordinator that still loads the group has no offset.
        """
        deadline = time.monotonic() + _TOLD_WITHIN_SECONDS
        while True:
            found: int | None = await self._consumer.committed(one)
            is_awaited = found is None and self.acknowledged[one.partition] is not None
            if not is_awaited or time.monotonic() > deadline:
                return found
            self.untold += 1
            await asyncio.sleep(_PAUSE_SECONDS)

    def check_committed(self, partition: int, found: int | None) -> None:
        """Compare the group's offset, as a new member finds it, with what was committed."""
        known = {self.acknowledged[partition], self.asked[partition]}
        if found not in known:
            self._break(f"the group is at {found} of {TRANSACTIONS}-{partition}, and committed {known}")
        self.acknowledged[partition] = self.asked[partition] = found

    def _see(self, partition: int, offset: int, value: bytes) -> None:
        if offset < self.positions[partition]:
            self._break(
                f"{TRANSACTIONS}-{partition}: {offset} came where {self.positions[partition]} is next"
            )
        number, transaction, index, _ = value.split(b":", 3)
        place = Place(int(transaction), int(index))
        if value != _value(partition, place) or int(number) != partition:
            self._break(f"{TRANSACTIONS}-{partition}: the record at {offset} is not what was written")
        if self.seen[partition].setdefault(offset, place) != place:
            self._break(f"{TRANSACTIONS}-{partition}: {offset} had another record before")
        self.positions[partition] = offset + 1

    def _break(self, what: str) -> None:
        if f"{self.name}: {what}" not in self.broken:
            self.broken.append(f"{self.name}: {what}")

    def lacks(self, writer: TransactionalWriter) -> list[str]:
        """Return which committed records were not read."""
        return [
            f"{self.name}: {TRANSACTIONS}-{number} has {place} at {offset}, which was not read"
            for number, records in writer.committed.items()
            for offset, place in records.items()
            if self.seen[number].get(offset) != place
        ]


def broken_transactions(outcomes: list[Outcome], seen: Seen) -> list[str]:
    """
    Return what is wrong with the records that a reader of committed records saw.

    A committed transaction is there as a whole, once and in order in each partition; an aborted one is not;
    and one whose outcome is not known is there in all partitions or in none.
    """
    broken = []
    whole = list(range(_RECORDS))
    indexes: dict[tuple[int, int], list[int]] = {}
    for partition, records in seen.items():
        in_order = [records[offset] for offset in sorted(records)]
        if in_order != sorted(set(in_order)):
            broken.append(f"{TRANSACTIONS}-{partition}: records are there twice or out of order")
        for place in in_order:
            indexes.setdefault((place.transaction, partition), []).append(place.index)
    for number, outcome in enumerate(outcomes):
        found = [indexes.get((number, partition), []) for partition in seen]
        fits = {
            Outcome.COMMITTED: all(one == whole for one in found),
            Outcome.ABORTED: not any(found),
            Outcome.UNKNOWN: all(one == whole for one in found) or not any(found),
        }
        if not fits[outcome]:
            broken.append(f"transaction {number} is {outcome.value}, and a reader saw {found} of it")
    return broken


async def all_broken_transactions(writer: TransactionalWriter, group: CommittedReader) -> list[str]:
    """Return each promise to transactional clients that is broken, after the producer has stopped."""
    last = CommittedReader("the last reader of transactions", group.bootstrap, group.brokers, group=None)
    reading = asyncio.create_task(last.run())
    try:
        progress = Progress()
        while lacking := [*group.lacks(writer), *last.lacks(writer)]:
            if not progress.goes_on(len(lacking)):
                break
            await asyncio.sleep(0.2)
        for reader in (group, last):
            if reader.lacks(writer):
                reader.told += [f"{reader.name} is late", *await reader.describe()]
    finally:
        reading.cancel()
        outcome = (await asyncio.gather(reading, return_exceptions=True))[0]
    broken = [] if isinstance(outcome, asyncio.CancelledError) else [f"{last.name} ended: {outcome!r}"]
    for reader in (group, last):
        broken += [
            *reader.broken,
            *reader.lacks(writer)[:3],
            *broken_transactions(writer.outcomes, reader.seen),
        ]
    return broken


async def broken_group(group: CommittedReader) -> list[str]:
    """Return where the brokers' committed offsets are not the reader's, after the reader has stopped."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=group.brokers, group_id=group.group, enable_auto_commit=False
    )
    await consumer.start()
    try:
        consumer.assign(_NAMES)
        found = {one.partition: await consumer.committed(one) for one in _NAMES}
    finally:
        await consumer.stop()
    return [
        f"the group is at {offset} of {TRANSACTIONS}-{number}, and committed {group.acknowledged[number]}"
        for number, offset in found.items()
        if offset not in {group.acknowledged[number], group.asked[number]}
    ]
