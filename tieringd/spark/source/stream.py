"""
Reading an archive as a stream: what was archived since the last batch, as far as limits let it.

Spark keeps one reader in a process of its own for the life of a query, and copies that were never used on
executors. What the reader knows of the bucket is at most as old as `refreshInterval`: Spark asks many times a
second, and each look is a request for every partition.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from tieringd.spark.source.data_loss import Loss
from tieringd.spark.source.offsets import OffsetFinder
from tieringd.spark.source.positions import AtOffsets
from tieringd.spark.source.segment_spans import OffsetRange
from tieringd.spark.source.stream_batches import batch_end, ends_of, goes_on_from, limited, waiting_offsets
from tieringd.spark.source.stream_offsets import StreamOffsets, by_topic
from tieringd.spark.source.topics import Topics

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.streaming.datasource import ReadLimit

    from tieringd.model.partition import TopicPartition
    from tieringd.spark.source.request import Request
    from tieringd.spark.source.topics import Archived


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
