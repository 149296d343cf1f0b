"""
Export to a directory of Parquet files, which any reader may read at any time.

    {target}/topic={topic}/date={YYYY-MM-DD}/[hour={HH}/]part-{partition}-{from}-{next}-{topic id}.parquet
    {target}/_tieringd/{topic}.json

Stores have no rename, so a run's files are visible at once. Still no record is visible twice. A round's
portions are stored in the state before the first of their files is written. A portion has one file in each
directory, with a name that follows from the portion. A run that finds such portions in the state writes their
missing files before it plans new portions. Then a compare-and-swap advances the state. Concurrent runs write
the same files, and one of them commits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from tieringd.config import Config
from tieringd.errors import ConfigError, CorruptDataError
from tieringd.model.partition import TopicIdPartition
from tieringd.spark.bucket import bucket_of
from tieringd.spark.decoder import arrow_schema
from tieringd.spark.jobs.export.places import utc
from tieringd.spark.jobs.export.plan import Portion
from tieringd.spark.jobs.export.state import ExportState, parse_state
from tieringd.spark.jobs.export.target_store import OWN_PREFIX, TargetStore, target_config
from tieringd.spark.jobs.export.topic_target import ExportCheckpoint, SinkOpener, StoredFile, WrittenFiles
from tieringd.spark.jobs.export.work import COLUMNS
from tieringd.storage.store_opening import begin_file_root

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ParquetPartitioning: TypeAlias = Literal["none", "day", "hour"]

STATE_VERSION: Final = 1
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
"""The directory value that readers treat as null."""


@dataclass(frozen=True, slots=True)
class ParquetTarget:
    """
    A directory for Parquet files: `file:///dir`, `s3://bucket/prefix`, `gs://...` or `azure://container/...`.

    *config* says how to reach the directory; None uses the archive's own configuration.
    """

    url: str
    partition_by: ParquetPartitioning = "day"
    config: Config | None = field(default=None, repr=False)

    @contextmanager
    def opened(self, archive: Config) -> Iterator[Callable[[str], ParquetTopic]]:
        """
        Yield a function from a topic's name to its directory.

        Raises:
            ConfigError: `partition_by` is invalid, the target cannot be reached with the configuration, or it
                does not honour conditional writes.
        """
        if self.partition_by not in get_args(ParquetPartitioning):
            raise ConfigError(
                f"partition_by: Parquet files support none, day or hour, not {self.partition_by}"
            )
        config = target_config(self.url, self.config or archive)
        begin_file_root(config)
        opened = partial(open_store, config)
        opened().check(config)
        yield partial(ParquetTopic, opened, url=self.url, partition_by=self.partition_by)


def open_store(config: Config) -> TargetStore:
    """Return the store of *config*, which stays open until the process ends."""
    bucket = bucket_of(config)
    return TargetStore(bucket.store, bucket.run)


class ParquetTopic:
    """The directory of one topic, on the driver. See `TopicTarget`."""

    hides_uncommitted = False

    def __init__(
        self, opened: Callable[[], TargetStore], topic: str, *, url: str, partition_by: ParquetPartitioning
    ) -> None:
        self._opened = opened
        self._store = opened()
        self._partition_by = partition_by
        self._directory = f"topic={topic}"
        self._state_key = f"{OWN_PREFIX}{topic}.json"
        self.place = f"{url.rstrip('/')}/{self._directory}"

    def checkpoint(self) -> ExportCheckpoint:
        """
        See `TopicTarget.checkpoint`.

        Raises:
            ConfigError: There are files without a state, or files with another partitioning than
                `partition_by`.
            CorruptDataError: The state cannot be read.
        """
        found = self._store.read(self._state_key)
        if found is None:
            if self._store.holds_any(f"{self._directory}/"):
                raise ConfigError(
                    f"{self.place} has files, but no state that records how far they were exported",
                    hint=f"Export to an empty place, or restore {self._state_key}",
                )
            return ExportCheckpoint(None)
        data, version = found
        checkpoint, partition_by = _decode(data, version, source=self._state_key)
        if partition_by != self._partition_by:
            raise ConfigError(
                f"partition_by: {self.place} was begun with {partition_by}, and cannot continue with "
                f"{self._partition_by}",
                hint=f"Give {partition_by}, or export to another target",
            )
        return checkpoint

    def begin(
        self, checkpoint: ExportCheckpoint, state: ExportState, portions: tuple[Portion, ...]
    ) -> ExportCheckpoint | None:
        """See `TopicTarget.begin`."""
        if portions == checkpoint.pending:
            return checkpoint
        return self._swapped(checkpoint, state, portions)

    def opener(self) -> SinkOpener:
        """See `TopicTarget.opener`."""
        return partial(ParquetSink, self._opened, self._directory, self._partition_by)

    def commit(self, begun: ExportCheckpoint, state: ExportState, written: Sequence[WrittenFiles]) -> bool:
        """See `TopicTarget.commit`."""
        assert [one.portion for one in written] == list(begun.pending), "a round is committed as a whole"
        return self._swapped(begun, state, ()) is not None

    def _swapped(
        self, checkpoint: ExportCheckpoint, state: ExportState, pending: tuple[Portion, ...]
    ) -> ExportCheckpoint | None:
        data = _encode(state, pending, self._partition_by)
        version = self._store.swap(self._state_key, data, checkpoint.version)
        return None if version is None else ExportCheckpoint(state, pending, version)


class ParquetSink:
    """Stores the files of one portion, on an executor. See `Sink`."""

    def __init__(
        self,
        opened: Callable[[], TargetStore],
        directory: str,
        partition_by: ParquetPartitioning,
        portion: Portion,
    ) -> None:
        self._opened = opened
        self._directory = directory
        self._partition_by = partition_by
        partition = portion.partition
        self._name = (
            f"part-{partition.partition:05}-{portion.from_offset:020}-{portion.next_offset:020}-"
            f"{partition.topic_id}.parquet"
        )
        self.schema: pa.Schema = arrow_schema(COLUMNS)
        self.clipped_times = 0

    def place_of(self, hour: int | None) -> str:
        """Return the directory of an hour, with a slash at its end; None is records without an hour."""
        time = None if hour is None else utc(hour)
        parts = [self._directory]
        if self._partition_by != "none":
            parts.append(f"date={_NULL if time is None else time.date().isoformat()}")
        if self._partition_by == "hour":
            parts.append(f"hour={_NULL if time is None else f'{time.hour:02}'}")
        return "/".join([*parts, ""])

    def arranged(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch unchanged: files have the columns of Spark's Kafka source, without the topic."""
        return batch

    def store(self, place: str, path: Path, metadata: pq.FileMetaData) -> StoredFile:
        """Store a file in its directory, unless the file exists there already."""
        key = place + self._name
        return StoredFile(key, metadata.num_rows, self._opened().store_file(key, path))


def _encode(state: ExportState, pending: tuple[Portion, ...], partition_by: ParquetPartitioning) -> bytes:
    document = {
        "version": STATE_VERSION,
        "partition_by": partition_by,
        "state": json.loads(state.as_json()),
        "pending": [
            [one.partition.partition, one.from_offset, one.next_offset, one.size_bytes] for one in pending
        ],
    }
    return json.dumps(document, indent=1).encode()


def _decode(data: bytes, version: str, *, source: str) -> tuple[ExportCheckpoint, Any]:
    """Return the stored checkpoint of the export, and the partitioning of its files."""
    try:
        document = json.loads(data)
        if document["version"] != STATE_VERSION:
            raise CorruptDataError(
                f"the state of an export has version {document['version']}; this release reads "
                f"{STATE_VERSION}",
                source=source,
            )
        state = parse_state(json.dumps(document["state"]), source=source)
        topic = state.topic
        pending = tuple(
            Portion(TopicIdPartition(topic.cluster, topic.topic, topic.topic_id, number), *map(int, numbers))
            for number, *numbers in document["pending"]
        )
        return ExportCheckpoint(state, pending, version), document["partition_by"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptDataError(f"the state of an export cannot be read: {error!r}", source=source) from error
