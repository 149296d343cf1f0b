"""A live cluster in memory that a recovery writes to: topics, their records, and the recovery marks."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from tieringd.broker.kafka_target import TargetTopic
from tieringd.errors import FencedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

    from tieringd.formats.records import Record
    from tieringd.formats.recovery_mark import RecoveryMark


class FakeTargetCluster:
    """Replaces `TargetCluster`. It may be opened several times."""

    def __init__(self) -> None:
        self.topics: dict[str, TargetTopic] = {}
        self.values: dict[tuple[str, int], list[bytes | None]] = {}
        """The written values by topic and partition."""
        self.commits: dict[tuple[str, int], tuple[int, RecoveryMark]] = {}
        """Each mark with the number of its commit. Brokers expire each mark by its own age."""
        self.commit_count = 0
        self.before_writer: Callable[[str], None] = lambda _name: None
        """Called when a writer is opened, just before earlier writers of that name are fenced."""
        self._owners: dict[str, object] = {}

    async def __aenter__(self) -> Self:
        """Connect."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect."""

    def forget(self, topic: str, partition: int) -> None:
        """Drop a mark, as a broker does with old commits."""
        del self.commits[topic, partition]

    def add(self, name: str, partitions: int, settings: Mapping[str, str]) -> TargetTopic:
        """Create a topic."""
        self.topics[name] = TargetTopic(name, f"id-of-{name}", partitions, dict(settings))
        return self.topics[name]

    async def cluster_id(self) -> str:
        """Return the cluster's id."""
        return "target"

    async def topic(self, name: str) -> TargetTopic | None:
        """Return a topic; None if it does not exist."""
        return self.topics.get(name)

    async def create(
        self,
        name: str,
        *,
        partitions: int,
        replication_factor: int,
        settings: Mapping[str, str],
    ) -> TargetTopic:
        """Create a topic."""
        return self.add(name, partitions, settings)

    async def marks(
        self, group: str, topic: TargetTopic, settled: Collection[int] | None = None
    ) -> dict[int, RecoveryMark]:
        """Return the marks on a topic, or on its partitions *settled*: no transaction stays open here."""
        marks = {number: mark for (name, number), (_, mark) in self.commits.items() if name == topic.name}
        return {number: mark for number, mark in marks.items() if settled is None or number in settled}

    async def end_offsets(self, topic: TargetTopic) -> dict[int, int]:
        """Return the end offset of each partition."""
        return {
            number: len(self.values.get((topic.name, number), ())) for number in range(topic.partition_count)
        }

    @asynccontextmanager
    async def writer(
        self,
        topic: TargetTopic,
        *,
        name: str,
        group: str,
        compression: str | None,
    ) -> AsyncIterator[FakeTargetWriter]:
        """Open a writer, and fence earlier ones of that name."""
        self.before_writer(name)
        owner = object()
        self._owners[name] = owner
        yield FakeTargetWriter(self, topic, lambda: self._owners[name] is owner)

    def commit(self, topic: str, marks: Mapping[int, RecoveryMark]) -> None:
        """Set marks, in one commit."""
        self.commit_count += 1
        for number, mark in marks.items():
            self.commits[topic, number] = (self.commit_count, mark)


class FakeTargetWriter:
    """A writer that writes all records of a call or none."""

    def __init__(self, cluster: FakeTargetCluster, topic: TargetTopic, is_owner: Callable[[], bool]) -> None:
        self._cluster = cluster
        self._topic = topic
        self._is_owner = is_owner

    async def set_marks(self, marks: Mapping[int, RecoveryMark]) -> None:
        """Set marks without records."""
        self._require_owner()
        self._cluster.commit(self._topic.name, marks)

    async def write(self, partition: int, records: Sequence[Record], mark: RecoveryMark) -> RecoveryMark:
        """Append records with their mark."""
        self._require_owner()
        self._cluster.values.setdefault((self._topic.name, partition), []).extend(
            one.value for one in records
        )
        mark = replace(mark, records=mark.records + len(records))
        self._cluster.commit(self._topic.name, {partition: mark})
        return mark

    def _require_owner(self) -> None:
        if not self._is_owner():
            raise FencedError("another recovery of the same partition is running")
