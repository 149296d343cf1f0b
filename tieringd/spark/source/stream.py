"""
Read an archive as a stream: each batch has what was archived since the last one, up to the limits.

Spark keeps one reader in a process of its own for the life of a query, and sends unused copies of it to
executors. The reader's manifests are at most `refreshInterval` old: Spark asks many times a second, and each
refresh costs a request for every partition.

`StreamOffsets` is the progress of a streaming query, as a checkpoint stores it: the JSON of Spark's own Kafka
source, with a few more fields.

    {"orders": {"0": 23, "1": 42},               the next offset of each partition
     "@topicIds": {"orders": "W1xNUlUlTfigw_K-dvdxsA"},
     "@begins": {"orders": {"1": 0}},            begins of partitions that the batch before did not have
     "@awaits": {"orders": {"1": 42}},           starts that the archive has not reached yet
     "@replacements": {"orders": {"0": [[7, 19, 3]]}},   what unclean elections had replaced by then
     "@isInitial": true}                         before the first batch

A topic's name cannot contain @. The topic id distinguishes a topic that was created again from the deleted
one. A batch that is repeated after a crash must have the same records. Its begin is the end of the batch
before; for new partitions, and in the first batch for all partitions, the begin is stored with its own end.

An unclean election cuts an archive back, and the new leader's records take the place of some that were read.
The archive may be as long as before when the stream looks again, so the stream knows which replacements each
manifest had: first and last offset, and the new leader's epoch. Their number would not do, as a manifest that
was rebuilt may begin again without any.

`batch_end` computes the end of the next batch. It is pure. New partitions and topics begin at their
earliest offset. A query may begin ahead of the archive, such as where a query of Kafka's source ended: the
start is marked until the archive reaches it, because an archive that ends before an offset that was read
has been cut back. A limit is divided among the partitions in proportion to their waiting offsets, as in
Spark's own Kafka source.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import TYPE_CHECKING, Any, Final

import structlog
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from tieringd.errors import CorruptDataError
from tieringd.model.partition import TopicPartition
from tieringd.spark.source.data_loss import Loss, LossRule
from tieringd.spark.source.offset_finder import OffsetFinder
from tieringd.spark.source.positions import AtOffsets
from tieringd.spark.source.segment_spans import OffsetRange
from tieringd.spark.source.subscribed_topics import SubscribedPartitions, SubscriptionTopics

if TYPE_CHECKING:
    import pyarrow as pa

    from tieringd.model.manifest import PartitionManifest

    # An ordinary import would load numba and pyarrow into processes that do not need them.
    from tieringd.spark.source.read_request import Request


log = structlog.get_logger(__name__)

_TOPIC_IDS: Final = "@topicIds"
_BEGINS: Final = "@begins"
_AWAITS: Final = "@awaits"
_REPLACEMENTS: Final = "@replacements"
_IS_INITIAL: Final = "@isInitial"
_MARK: Final = "@"


@dataclass(frozen=True, slots=True)
class StreamOffsets:
    """The end of one batch, at which the next one begins."""

    offsets: Mapping[TopicPartition, int]
    """The next offset of each partition."""
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    begins: Mapping[TopicPartition, int] = field(default_factory=dict)
    """This batch's begin in partitions that the batch before did not have; in the first batch, in all."""
    awaited: Mapping[TopicPartition, int] = field(default_factory=dict)
    """The starts of partitions whose archive has not reached them yet. Nothing of these was read."""
    is_initial: bool = False
    """Whether these are the offsets at which the first batch begins, and not the end of a batch."""
    replacements: Mapping[TopicPartition, frozenset[tuple[int, int, int]]] | None = field(
        default=None, compare=False
    )
    """
    The `Replacement.identity` of each replacement in a partition's manifest before these records were read. A
    partition that is left out had none. None in the checkpoint of an earlier release, which noted none.
    """

    def to_json(self) -> dict[str, Any]:
        """Return the offsets as the JSON document that Spark stores."""
        document: dict[str, Any] = by_topic(self.offsets)
        document[_TOPIC_IDS] = dict(sorted(self.topic_ids.items()))
        if self.begins:
            document[_BEGINS] = by_topic(self.begins)
        if self.awaited:
            document[_AWAITS] = by_topic(self.awaited)
        if self.is_initial:
            document[_IS_INITIAL] = True
        if self.replacements is not None:
            document[_REPLACEMENTS] = by_topic({name: sorted(one) for name, one in self.replacements.items()})
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StreamOffsets:
        """
        Return the offsets of a JSON document that Spark stored.

        Raises:
            CorruptDataError: The document is not of this data source.
        """
        try:
            return cls(
                _flat({topic: one for topic, one in document.items() if not topic.startswith(_MARK)}),
                dict(document[_TOPIC_IDS]),
                _flat(document.get(_BEGINS, {})),
                _flat(document.get(_AWAITS, {})),
                bool(document.get(_IS_INITIAL, False)),
                _replacements(document[_REPLACEMENTS]) if _REPLACEMENTS in document else None,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(
                f"the checkpoint's offset is not of the data source tieringd: {error!r}",
                hint="A stream cannot continue from the checkpoint of another source; use a new checkpoint "
                "location",
            ) from error


def by_topic(values: Mapping[TopicPartition, Any]) -> dict[str, Any]:
    """Return values, such as offsets, by topic and then by partition, as Spark's Kafka source writes them."""
    document: dict[str, dict[str, Any]] = {}
    for partition in sorted(values):
        document.setdefault(partition.topic, {})[str(partition.partition)] = values[partition]
    return dict(document)


def _flat(document: Mapping[str, Mapping[str, int]]) -> dict[TopicPartition, int]:
    return {partition: int(offset) for partition, offset in _by_partition(document)}


def _replacements(
    document: Mapping[str, Mapping[str, Any]],
) -> dict[TopicPartition, frozenset[tuple[int, int, int]]]:
    return {
        partition: frozenset((int(base), int(last), int(epoch)) for base, last, epoch in some)
        for partition, some in _by_partition(document)
    }


def _by_partition(document: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[TopicPartition, Any]]:
    for topic, partitions in document.items():
        for number, value in partitions.items():
            yield TopicPartition(topic, int(number)), value


def goes_on_from(start: StreamOffsets, archived: SubscribedPartitions, *, rule: LossRule) -> StreamOffsets:
    """
    Return the offsets at which the batch after *start* begins, given what is archived now.

    `begins` of the result has the partitions that are new in this batch.

    Raises:
        DataLossError: A partition that the query reads was deleted, recreated or cut back, or its manifest
            is lost, and *rule* does not allow that.
    """
    ids = archived.topic_ids
    offsets = dict(start.offsets)
    awaited = starts_ahead(start.awaited, archived)
    begins = dict(start.offsets) if start.is_initial else {}
    recreated = {
        topic for topic, topic_id in start.topic_ids.items() if topic in ids and ids[topic] != topic_id
    }
    for partition, offset in start.offsets.items():
        manifest = archived.manifests.get(partition)
        reason = ""
        if partition.topic in recreated:
            reason = "the topic was deleted and created again; later records of the old topic were not read"
            offsets.pop(partition)
            awaited.pop(partition, None)
        elif gone := "" if partition in awaited else _gone(start, partition, archived):
            reason = gone
        elif manifest is not None and manifest.next_offset < offset and partition not in awaited:
            reason = f"the archive was cut back, and now ends at offset {manifest.next_offset}"
            offsets[partition] = manifest.next_offset
        elif manifest is not None and (loss := _replaced_after(start, partition, manifest)):
            rule.meet(loss)
        if reason:
            rule.meet(Loss(partition, offset, offset, reason))
    # A partition that is not there now keeps what is known of it.
    replacements = dict(start.replacements or {})
    for partition, manifest in archived.manifests.items():
        if partition not in offsets:
            offsets[partition] = begins[partition] = manifest.start_offset
        if manifest.replacements or partition in replacements:
            replacements[partition] = frozenset(one.identity for one in manifest.replacements)
    kept_ids = {topic: topic_id for topic, topic_id in start.topic_ids.items() if topic not in ids}
    return replace(
        start,
        offsets=offsets,
        topic_ids=kept_ids | ids,
        begins=begins,
        awaited=awaited,
        replacements=replacements,
    )


def _gone(start: StreamOffsets, partition: TopicPartition, archived: SubscribedPartitions) -> str:
    """Return why nothing is left of a partition that the query has reached; empty if it is there, or new."""
    if partition not in archived.partitions:
        return "the bucket no longer has this partition"
    # A new partition has no manifest either, but is at offset 0. In the first batch, and in a checkpoint of
    # an earlier release, a later offset may be a start ahead of the archive.
    was_read = start.offsets[partition] > 0 and start.replacements is not None
    if partition in archived.unarchived and was_read:
        return "the bucket has no manifest of this partition any more"
    return ""


def _replaced_after(
    start: StreamOffsets, partition: TopicPartition, manifest: PartitionManifest
) -> Loss | None:
    """Return the offsets before *start* whose records another leader's have replaced since; None if none."""
    if start.replacements is None or start.is_initial or partition in start.awaited:
        return None
    offset = start.offsets[partition]
    known = start.replacements.get(partition, frozenset())
    read = [one for one in manifest.replacements if one.base_offset < offset and one.identity not in known]
    if not read:
        return None
    last_offset = min(offset - 1, max(one.last_offset for one in read))
    reason = (
        "after they were read, an unclean election put other records in their place, of leader epoch "
        f"{read[-1].leader_epoch}, which were not read"
    )
    return Loss(partition, min(one.base_offset for one in read), last_offset, reason)


def starts_ahead(
    starts: Mapping[TopicPartition, int], archived: SubscribedPartitions
) -> dict[TopicPartition, int]:
    """
    Return those of *starts* that the archive has not reached yet.

    A start in a partition that the bucket does not know is such a one, also at offset 0.
    """
    return {
        partition: offset
        for partition, offset in starts.items()
        if partition not in archived.partitions
        or offset > (archived.manifests[partition].next_offset if partition in archived.manifests else 0)
    }


def ends_of(
    begin: StreamOffsets, archived: SubscribedPartitions, *, until: Mapping[TopicPartition, int] | None
) -> dict[TopicPartition, int]:
    """
    Return the archive's end of each partition that has offsets to read after *begin*.

    With *until* the ends are at most those offsets, and partitions that are not in *until* are left out.
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
    begin: StreamOffsets, ends: Mapping[TopicPartition, int], archived: SubscribedPartitions
) -> dict[TopicPartition, int]:
    """Return the number of offsets that each partition has to read, without expired ones."""
    return {
        partition: max(0, end - max(begin.offsets[partition], archived.manifests[partition].start_offset))
        for partition, end in ends.items()
    }


def limited(
    ends: Mapping[TopicPartition, int], waiting: Mapping[TopicPartition, int], max_offsets: int
) -> dict[TopicPartition, int]:
    """
    Return earlier *ends*, so that about *max_offsets* offsets are read.

    Every partition with waiting offsets gets at least one.
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
    """
    Return the end of a batch that reads from *begin* to *ends*.

    A new partition without waiting offsets is left out, but in the first batch.
    """
    offsets = {
        partition: ends.get(partition, offset)
        for partition, offset in begin.offsets.items()
        if partition in ends or partition not in begin.begins or begin.is_initial
    }
    begins = {partition: offset for partition, offset in begin.begins.items() if partition in offsets}
    topics = {partition.topic for partition in offsets}
    ids = {topic: topic_id for topic, topic_id in begin.topic_ids.items() if topic in topics}
    return StreamOffsets(offsets, ids, begins, begin.awaited, replacements=begin.replacements)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the topics of a subscription while they are archived. Belongs to one query."""

    def __init__(self, request: Request) -> None:
        """Make a reader of *request*. Nothing is read before Spark asks for an offset."""
        self._request = request
        self._topics: SubscriptionTopics | None = None
        self._archived: SubscribedPartitions | None = None
        self._read_at_ms = 0
        self._until: dict[TopicPartition, int] | None = None
        self._loss = request.loss
        self._batch_at_ms: int | None = None
        """The monotonic time of the last batch; None before the first one."""
        self._idle: tuple[SubscribedPartitions, dict[str, Any]] | None = None
        """An archive, and a batch's end after which it has nothing to read: Spark asks again and again."""
        self._reported: tuple[SubscribedPartitions, dict[str, Any]] | None = None
        """An archive, and its end as JSON."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 Spark's name
        """
        Return the offsets at which a new query begins.

        Raises:
            ConfigError: The options do not fit the archive.
            ObjectNotFound: A topic is not in the bucket.
        """
        request = self._request
        options = request.options
        archived = self._keep(self._bucket_topics().existing())
        starts = OffsetFinder(request.bucket(), archived).starts(
            options.start, on_no_match=options.on_no_match
        )
        given = options.start.offsets if isinstance(options.start, AtOffsets) else {}
        # A partition without archived data is left out unless it has an explicit offset. Once it is archived,
        # it begins at its earliest offset.
        known = {
            partition: offset
            for partition, offset in starts.items()
            if partition in archived.manifests or given.get(partition, -1) >= 0
        }
        awaited = starts_ahead({name: known[name] for name in known if given.get(name, -1) >= 0}, archived)
        if awaited:
            log.warning("the query begins ahead of the archive, and waits for it", starts=by_topic(awaited))
        return StreamOffsets(known, archived.topic_ids, awaited=awaited, is_initial=True).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 Spark's name
        """Return the limit that `maxOffsetsPerTrigger` and `minOffsetsPerTrigger` set."""
        limits = self._request.options.limits
        if limits.max_offsets is not None:
            return ReadMaxRows(limits.max_offsets)
        return ReadAllAvailable() if limits.min_offsets is None else ReadMinRows(limits.min_offsets)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 Spark's name
        """
        Return the end of the next batch; *start* itself if there is nothing to read now.

        Raises:
            DataLossError: A partition that the query reads was deleted, recreated or cut back, or its
                manifest is lost, and `failOnDataLoss` is set.
        """
        archived = self._recent()
        if self._idle is not None and self._idle[0] is archived and self._idle[1] == start:
            return start
        before = StreamOffsets.from_json(start)
        begin = goes_on_from(before, archived, rule=self._loss)
        ends = ends_of(begin, archived, until=self._until)
        waiting = waiting_offsets(begin, ends, archived)
        if not ends and all(
            begin.offsets.get(partition) == offset for partition, offset in before.offsets.items()
        ):
            self._idle = archived, start
            return start
        if self._waits_for_more(sum(waiting.values()), limit):
            return start
        if isinstance(limit, ReadMaxRows):
            ends = limited(ends, waiting, limit.max_rows)
        return batch_end(begin, ends).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 Spark's name
        """Return the archive's end at the last refresh, for the query's progress; None before the first."""
        archived = self._archived
        if archived is None:
            return None
        if self._reported is None or self._reported[0] is not archived:
            ends = {name: manifest.next_offset for name, manifest in archived.manifests.items()}
            self._reported = archived, by_topic(ends)
        return self._reported[1]

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 Spark's name
        """Note the archive's current end, at which this query will stop."""
        archived = self._keep(self._bucket_topics().current())
        self._until = {name: manifest.next_offset for name, manifest in archived.manifests.items()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """
        Return the tasks of one batch.

        Raises:
            DataLossError: Part of the batch is no longer in the archive, and `failOnDataLoss` is set.
        """
        begin, last = StreamOffsets.from_json(start), StreamOffsets.from_json(end)
        archived = self._recent()
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
        """Yield the records of a task. Runs on an executor; see `Request.read`."""
        return self._request.read(partition)

    def _waits_for_more(self, offsets: int, limit: ReadLimit) -> bool:
        """Return whether to wait for more than *offsets* offsets; otherwise note the batch's time."""
        limits = self._request.options.limits
        now_ms = _now_ms()
        is_late = self._batch_at_ms is None or now_ms - self._batch_at_ms >= limits.max_delay_ms
        least = 0 if isinstance(limit, ReadAllAvailable) or self._until is not None else limits.min_offsets
        if not is_late and offsets < (least or 0):
            return True
        self._batch_at_ms = now_ms
        return False

    def _recent(self) -> SubscribedPartitions:
        """Return what is archived, at most `refreshInterval` old."""
        if (
            self._archived is not None
            and _now_ms() - self._read_at_ms < self._request.options.limits.refresh_ms
        ):
            return self._archived
        return self._keep(self._bucket_topics().current())

    def _bucket_topics(self) -> SubscriptionTopics:
        if self._topics is None:
            self._topics = SubscriptionTopics(self._request.bucket(), self._request.options.subscription)
        return self._topics

    def _keep(self, archived: SubscribedPartitions) -> SubscribedPartitions:
        self._archived, self._read_at_ms = archived, _now_ms()
        return archived


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
