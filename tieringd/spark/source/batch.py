"""Read an archive as a batch: the driver plans once, and tasks read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from tieringd.spark.source.offset_finder import OffsetFinder, require_order
from tieringd.spark.source.segment_spans import OffsetRange
from tieringd.spark.source.subscribed_topics import SubscriptionTopics
from tieringd.spark.worker_process import without_collections

if TYPE_CHECKING:
    import pyarrow as pa

    # An ordinary import would load numba and pyarrow into processes that do not need them.
    from tieringd.spark.source.read_request import Request


class BatchReader(DataSourceReader):
    """
    Reads the offsets between two positions.

    The reader leaves filters to Spark. Spark keeps one plan for all uses of a table, so that rows filtered
    out for one use would be missing in the next.
    """

    def __init__(self, request: Request) -> None:
        """Make a reader of *request*. Nothing is read before `partitions`."""
        self._request = request

    def partitions(self) -> list[InputPartition]:
        """
        Return the tasks, planned from the current manifests.

        Raises:
            ConfigError: The options do not fit the archive.
            DataLossError: Requested records are missing, and `failOnDataLoss` is set.
            ObjectNotFound: A topic is not in the bucket.
        """
        with without_collections():
            return self._planned()

    def _planned(self) -> list[InputPartition]:
        request, bucket = self._request, self._request.bucket()
        options = request.options
        archived = SubscriptionTopics(bucket, options.subscription).existing()
        finder = OffsetFinder(bucket, archived)
        starts = finder.starts(options.start, on_no_match=options.on_no_match)
        ends = finder.ends(options.end)
        require_order(options.start, options.end, starts, ends)
        ranges = [
            OffsetRange(
                partition, archived.manifests.get(partition), starts.get(partition, 0), ends.get(partition, 0)
            )
            for partition in sorted(starts.keys() | ends.keys())
        ]
        return request.tasks(ranges, loss=request.loss)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of a task. Runs on an executor; see `Request.read`."""
        return self._request.read(partition)
