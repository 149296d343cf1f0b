"""
Reading an archive as a stream: what was archived since the last batch, as far as limits let it.

Spark keeps one reader in a process of its own for the life of a query, and copies that were never used on
executors. What the reader knows of the bucket is at most as old as `refreshInterval`: Spark asks many times a
second, and each look is a request for every partition.

`StreamOffsets` is how far a streaming query is, as a checkpoint has it: the JSON of Spark's own Kafka
source, and a bit more.

    {"orders": {"0": 23, "1": 42},               the next offset of each partition
     "@topicIds": {"orders": "W1xNUlUlTfigw_K-dvdxsA"},
     "@begins": {"orders": {"1": 0}},            where a batch began that did not go on from the one before
     "@isInitial": true}                         before the first batch

A topic's name has no @ in it. The id tells a topic that was deleted and created again from its old self. A
batch that is done again after a crash has to be the same one: where it began is known from the end of the
batch before, and for new partitions, and in the first batch for all, from its own end.

`batch_end` decides what the next batch takes. It is pure. Partitions and topics that were not there before
begin at their earliest offset. What a limit lets through is shared among partitions by what waits in them,
as in Spark's own Kafka source.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from tieringd.errors import CorruptDataError
from tieringd.model.partition import TopicPartition
from tieringd.spark.source.data_loss import Loss
from tieringd.spark.source.offsets import OffsetFinder
from tieringd.spark.source.positions import AtOffsets
from tieringd.spark.source.segment_spans import OffsetRange
from tieringd.spark.source.topics import Topics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.streaming.datasource import ReadLimit

    from tieringd.spark.source.data_loss import LossRule
    from tieringd.spark.source.request import Request
    from tieringd.spark.source.topics import Archived


_TOPIC_IDS: Final = "@topicIds"
_BEGINS: Final = "@begins"
_IS_INITIAL: Final = "@isInitial"
_MARK: Final = "@"


@dataclass(frozen=True, slots=True)
class StreamOffsets:
    """The end of one batch, and so the beginning of the next."""

    offsets: Mapping[TopicPartition, int]
    """The next offset of each partition."""
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    begins: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Where this batch began in partitions that the one before did not have; in all if there was none."""
    is_initial: bool = False
    """Whether no batch has ended here: it is where the first one begins."""

    def to_json(self) -> dict[str, Any]:
        """Return it as Spark keeps it."""
        document: dict[str, Any] = by_topic(self.offsets)
        document[_TOPIC_IDS] = dict(sorted(self.topic_ids.items()))
        if self.begins:
            document[_BEGINS] = by_topic(self.begins)
        if self.is_initial:
            document[_IS_INITIAL] = True
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StreamOffsets:
        """
        Return what Spark kept.

        Raises:
            CorruptDataError: It is not of this data source.
        """
        try:
            return cls(
                _flat({topic: one for topic, one in document.items() if not topic.startswith(_MARK)}),
                dict(document[_TOPIC_IDS]),
                _flat(document.get(_BEGINS, {})),
                bool(document.get(_IS_INITIAL, False)),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(
                f"the checkpoint's offset is not of the data source tieringd: {error!r}",
                hint="A checkpoint of another source cannot be gone on from; use a new checkpoint location",
            ) from error


def by_topic(offsets: Mapping[TopicPartition, int]) -> dict[str, Any]:
    """Return offsets by topic and then by partition, as Spark's Kafka source writes them."""
    document: dict[str, dict[str, int]] = {}
    for partition in sorted(offsets):
        document.setdefault(partition.topic, {})[str(partition.partition)] = offsets[partition]
    return dict(document)


def _flat(document: Mapping[str, Mapping[str, int]]) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, int(number)): int(offset)
        for topic, partitions in document.items()
        for number, offset in partitions.items()
    }


def goes_on_from(start: StreamOffsets, archived: Archived, *, rule: LossRule) -> StreamOffsets:
    """
    Return where a batch begins after *start*, given what is archived now: `begins` has what is new.

    Raises:
        DataLossError: Something that the query was reading has gone, and that is not all right.
    """
    ids = archived.topic_ids
    offsets = dict(start.offsets)
    begins = dict(start.offsets) if start.is_initial else {}
    recreated = {
        topic for topic, topic_id in start.topic_ids.items() if topic in ids and ids[topic] != topic_id
    }
    for partition, offset in start.offsets.items():
        manifest = archived.manifests.get(partition)
        reason = ""
        if partition.topic in recreated:
            reason = "the topic was deleted and created again; what the old one had after this was not read"
            offsets.pop(partition)
        elif partition not in archived.partitions:
            reason = "the bucket has nothing of this partition any more"
        elif manifest is not None and manifest.next_offset < offset:
            reason = f"the archive was cut back and ends at offset {manifest.next_offset} now"
            offsets[partition] = manifest.next_offset
        if reason:
            rule.meet(Loss(partition, offset, offset, reason))
    for partition, manifest in archived.manifests.items():
        if partition not in offsets:
            offsets[partition] = begins[partition] = manifest.start_offset
    kept_ids = {topic: topic_id for topic, topic_id in start.topic_ids.items() if topic not in ids}
    return replace(start, offsets=offsets, topic_ids=kept_ids | ids, begins=begins)


def ends_of(
    begin: StreamOffsets, archived: Archived, *, until: Mapping[TopicPartition, int] | None
) -> dict[TopicPartition, int]:
    """
    Return where each partition ends that has something to read after *begin*.

    With *until* nothing is read past these offsets, nor of partitions that are not among them.
    """
    ends: dict[TopicPartition, int] = {}
    for partition, manifest in archived.manifests.items():
        end = manifest.next_offset
        if until is not None:
            end = min(end, until.get(partition, 0))
        if end > begin.offsets[partition]:
            ends[partition] = end
    return ends


def waiting_offsets(
    begin: StreamOffsets, ends: Mapping[TopicPartition, int], archived: Archived
) -> dict[TopicPartition, int]:
    """Return how many offsets each partition has to read; what has expired is none of them."""
    return {
        partition: max(0, end - max(begin.offsets[partition], archived.manifests[partition].start_offset))
        for partition, end in ends.items()
    }


def limited(
    ends: Mapping[TopicPartition, int], waiting: Mapping[TopicPartition, int], max_offsets: int
) -> dict[TopicPartition, int]:
    """
    Return *ends* brought forward, so that about *max_offsets* are read.

    Every partition where something waits gets one offset at the least.
    """
    total = sum(waiting.values())
    if total <= max_offsets:
        return dict(ends)
    found: dict[TopicPartition, int] = {}
    for partition, end in ends.items():
        share = max_offsets * waiting[partition] / total
        taken = min(waiting[partition], ceil(share) if share < 1 else floor(share))
        found[partition] = end - waiting[partition] + taken
    return found


def batch_end(begin: StreamOffsets, ends: Mapping[TopicPartition, int]) -> StreamOffsets:
    """Return the end of a batch that reads from *begin* to *ends*; new partitions without records wait."""
    offsets = {
        partition: ends.get(partition, offset)
        for partition, offset in begin.offsets.items()
        if partition in ends or partition not in begin.begins or begin.is_initial
    }
    begins = {partition: offset for partition, offset in begin.begins.items() if partition in offsets}
    topics = {partition.topic for partition in offsets}
    ids = {topic: topic_id for topic, topic_id in begin.topic_ids.items() if topic in topics}
    return StreamOffsets(offsets, ids, begins)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a subscription as it is archived. Belongs to one query."""

    def __init__(self, request: Request) -> None:
        """Take what is asked for; nothing is looked at before Spark asks for an offset."""
        self._request = request
        self._topics: Topics | None = None
        self._archived: Archived | None = None
        self._looked_at_ms = 0
        self._until: dict[TopicPartition, int] | None = None
        self._loss = request.loss
        self._batch_at_ms: int | None = None
        """When there was something to read last; None before the first time."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 Spark's name
        """
        Return where a new query begins.

        Raises:
            ConfigError: The options do not fit the archive.
            ObjectNotFound: A topic is not in the bucket.
        """
        request = self._request
        options = request.options
        archived = self._keep(self._looker().existing())
        starts = OffsetFinder(request.bucket(), archived).starts(
            options.start, on_no_match=options.on_no_match
        )
        given = options.start.offsets if isinstance(options.start, AtOffsets) else {}
        # What is not archived yet begins at its earliest offset once it is, if no other was given.
        known = {
            partition: offset
            for partition, offset in starts.items()
            if partition in archived.manifests or given.get(partition, -1) >= 0
        }
        return StreamOffsets(known, archived.topic_ids, is_initial=True).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 Spark's name
        """Return what `maxOffsetsPerTrigger` and `minOffsetsPerTrigger` say."""
        limits = self._request.options.limits
        if limits.max_offsets is not None:
            return ReadMaxRows(limits.max_offsets)
        return ReadAllAvailable() if limits.min_offsets is None else ReadMinRows(limits.min_offsets)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 Spark's name
        """
        Return where the next batch ends; *start* itself where there is nothing to read now.

        Raises:
            DataLossError: What the query was reading has gone, and that is not all right.
        """
        archived = self._look()
        before = StreamOffsets.from_json(start)
        begin = goes_on_from(before, archived, rule=self._loss)
        ends = ends_of(begin, archived, until=self._until)
        waiting = waiting_offsets(begin, ends, archived)
        if not ends and all(
            begin.offsets.get(partition) == offset for partition, offset in before.offsets.items()
        ):
            return start
        if self._waits_for_more(sum(waiting.values()), limit):
            return start
        if isinstance(limit, ReadMaxRows):
            ends = limited(ends, waiting, limit.max_rows)
        return batch_end(begin, ends).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 Spark's name
        """Return the end of the archive as it was last seen, for the query's progress."""
        if self._archived is None:
            return None
        return by_topic({name: manifest.next_offset for name, manifest in self._archived.manifests.items()})

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 Spark's name
        """Take note of the end of the archive: this query goes no further."""
        archived = self._keep(self._looker().current())
        self._until = {name: manifest.next_offset for name, manifest in archived.manifests.items()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """
        Return the tasks of one batch.

        Raises:
            DataLossError: Part of it is not in the archive any more, and that is not all right.
        """
        begin, last = StreamOffsets.from_json(start), StreamOffsets.from_json(end)
        archived = self._look()
        ranges: list[OffsetRange] = []
        for partition, next_offset in last.offsets.items():
            from_offset = last.begins.get(partition, begin.offsets.get(partition, next_offset))
            manifest = archived.manifests.get(partition)
            if from_offset >= next_offset:
                continue
            if manifest and manifest.partition.topic_id != last.topic_ids.get(partition.topic):
                reason = "the topic was deleted and created again before this batch was read"
                self._loss.meet(Loss(partition, from_offset, next_offset - 1, reason))
                continue
            ranges.append(OffsetRange(partition, manifest, from_offset, next_offset))
        return self._request.tasks(ranges, loss=self._loss)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of a task, on an executor; see `Request.read`."""
        return self._request.read(partition)

    def _waits_for_more(self, offsets: int, limit: ReadLimit) -> bool:
        """Say whether so little waits that it is left for later."""
        limits = self._request.options.limits
        now_ms = _now_ms()
        is_late = self._batch_at_ms is None or now_ms - self._batch_at_ms >= limits.max_delay_ms
        least = 0 if isinstance(limit, ReadAllAvailable) or self._until is not None else limits.min_offsets
        if not is_late and offsets < (least or 0):
            return True
        self._batch_at_ms = now_ms
        return False

    def _look(self) -> Archived:
        """Return what is archived, as it was not long ago."""
        if (
            self._archived is not None
            and _now_ms() - self._looked_at_ms < self._request.options.limits.refresh_ms
        ):
            return self._archived
        return self._keep(self._looker().current())

    def _looker(self) -> Topics:
        if self._topics is None:
            self._topics = Topics(self._request.bucket(), self._request.options.subscription)
        return self._topics

    def _keep(self, archived: Archived) -> Archived:
        self._archived, self._looked_at_ms = archived, _now_ms()
        return archived


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
