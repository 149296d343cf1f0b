"""
Export to Iceberg tables, one for each topic, in the layout of Redpanda's Iceberg topics.

Files belong to the table only from the run's commit on. No snapshot references the files of a killed run.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.io.pyarrow import (
    MetricModeTypes,
    MetricsMode,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionFieldValue, PartitionKey, PartitionSpec
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.locations import load_location_provider
from pyiceberg.types import BinaryType, StructType
from pyiceberg.utils.config import Config as CatalogConfig

from tieringd.errors import ConfigError, StorageUnavailable
from tieringd.spark.jobs.export.iceberg_layout import (
    IcebergPartitioning,
    clipped_count,
    file_schema,
    place_of_hour,
    rows_of,
)
from tieringd.spark.jobs.export.iceberg_table import IcebergTable, without_secrets
from tieringd.spark.jobs.export.plan import Portion
from tieringd.spark.jobs.export.state import ExportState
from tieringd.spark.jobs.export.topic_target import ExportCheckpoint, SinkOpener, StoredFile, WrittenFiles

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyiceberg.io import FileIO
    from pyiceberg.schema import Schema

    # An ordinary import would load PyYAML into processes that do not need it.
    from tieringd.config import Config

COPY_BYTES: Final = 8 << 20
_WHOLE_BOUNDS: Final = MetricsMode(MetricModeTypes.FULL)
_KEY_BOUNDS: Final = MetricsMode(MetricModeTypes.TRUNCATE, 16)
"""Bounds of keys have sixteen bytes, as with Iceberg's own writers."""


@dataclass(frozen=True, slots=True)
class IcebergTarget:
    """
    The tables `{namespace}.{topic}` of a catalogue.

    *catalog* is a name in pyiceberg's own configuration (`.pyiceberg.yaml`, `PYICEBERG_CATALOG__...`).
    *properties* override that configuration, or replace a missing one. *partition_by* applies to new tables;
    an existing table keeps its partitioning.
    """

    catalog: str = "default"
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    namespace: str = "redpanda"
    """Parts are separated by dots."""
    partition_by: IcebergPartitioning = "hour"
    dot_replacement: str | None = None
    """Replaces dots of the topic's name, for engines that do not allow them; None keeps the dots."""

    @contextmanager
    def opened(self, _archive: Config) -> Iterator[Callable[[str], IcebergTopic]]:
        """
        Yield a function from a topic's name to its table. The catalogue is open in the context.

        Raises:
            ConfigError: `partition_by` is invalid, or the catalogue cannot be opened with its configuration.
        """
        if self.partition_by not in get_args(IcebergPartitioning):
            raise ConfigError(
                f"partition_by: Iceberg tables support none, day or hour, not {self.partition_by}"
            )
        try:
            catalog = load_catalog(self.catalog, **self.properties)
        # Each kind of catalogue has its own error classes, and imports a package of its own.
        except Exception as error:
            raise ConfigError(
                f"the Iceberg catalogue {self.catalog} cannot be opened: "
                f"{without_secrets(str(error), self._all_properties())}",
                hint="Give its properties, such as type and uri, or add it to pyiceberg's configuration",
            ) from error
        with catalog:
            yield partial(self._topic, catalog)

    def _all_properties(self) -> Mapping[str, Any]:
        try:
            configured = CatalogConfig().get_catalog_config(self.catalog) or {}
        except ValueError:
            # The configured properties are invalid. Opening the catalogue has failed for that reason.
            configured = {}
        return {**configured, **self.properties}

    def _topic(self, catalog: Catalog, name: str) -> IcebergTopic:
        table = name if self.dot_replacement is None else name.replace(".", self.dot_replacement)
        return IcebergTopic(catalog, (*self.namespace.split("."), table), partition_by=self.partition_by)


class IcebergTopic:
    """The table of one topic, on the driver. See `TopicTarget`."""

    hides_uncommitted = True

    def __init__(
        self, catalog: Catalog, identifier: tuple[str, ...], *, partition_by: IcebergPartitioning
    ) -> None:
        self._table = IcebergTable(catalog, identifier)
        self._partition_by = partition_by
        self._opened: Table | None = None
        self.place = f"table {self._table.name}"

    def checkpoint(self) -> ExportCheckpoint:
        """See `TopicTarget.checkpoint`."""
        self._opened = self._table.opened(self._partition_by)
        return self._table.checkpoint(self._opened)

    def begin(
        self, checkpoint: ExportCheckpoint, _state: ExportState, _portions: tuple[Portion, ...]
    ) -> ExportCheckpoint | None:
        """See `TopicTarget.begin`. Nothing is stored here: a round is not visible before its commit."""
        return checkpoint

    def opener(self) -> SinkOpener:
        """See `TopicTarget.opener`."""
        assert self._opened is not None, "a round begins with the checkpoint"
        return partial(IcebergSink, files_of(self._opened))

    def commit(self, begun: ExportCheckpoint, state: ExportState, written: Sequence[WrittenFiles]) -> bool:
        """See `TopicTarget.commit`."""
        files: list[DataFile] = [file.entry for one in written for file in one.files]
        return self._table.commit(begun.version, state, files)


@dataclass(frozen=True)
class TableFiles:
    """The properties of a table that an executor needs to write its files."""

    io: FileIO
    location: str
    properties: Mapping[str, str]
    schema: Schema
    """The schema of the whole table."""
    spec: PartitionSpec

    @cached_property
    def file_schema(self) -> Schema:
        """Return the schema of our files."""
        return file_schema(self.schema)

    def statistics(self, metadata: pq.FileMetaData) -> dict[str, Any]:
        """
        Return a file's counts and bounds, in the form of a table's metadata.

        pyiceberg computes no bounds for fields inside of a struct. Readers filter by such fields, so their
        bounds are added here.
        """
        properties = dict(self.properties)
        plan = compute_statistics_plan(self.file_schema, properties)
        metadata_type = self.file_schema.find_field("redpanda").field_type
        members = metadata_type.fields if isinstance(metadata_type, StructType) else ()
        for member in members:
            column = f"redpanda.{member.name}"
            asked = {
                TableProperties.DEFAULT_WRITE_METRICS_MODE,
                f"{TableProperties.METRICS_MODE_COLUMN_CONF_PREFIX}.{column}",
            }
            if member.field_id in plan and not asked & properties.keys():
                mode = _KEY_BOUNDS if isinstance(member.field_type, BinaryType) else _WHOLE_BOUNDS
                plan[member.field_id] = replace(plan[member.field_id], mode=mode)
        return data_file_statistics_from_parquet_metadata(
            metadata, plan, parquet_path_to_id_mapping(self.file_schema)
        ).to_serialized_dict()


def files_of(table: Table) -> TableFiles:
    """Return the properties of *table* that executors need."""
    return TableFiles(table.io, table.location(), table.metadata.properties, table.schema(), table.spec())


class IcebergSink:
    """Stores the files of one portion, on an executor. See `Sink`."""

    def __init__(self, table: TableFiles, portion: Portion) -> None:
        self._table = table
        self._portion = portion
        self._place_of = place_of_hour(table.spec)
        self.schema: pa.Schema = schema_to_pyarrow(table.file_schema)
        self.clipped_times = 0

    def place_of(self, hour: int | None) -> int | None:
        """Return the table's partition of an hour; None for no hour, and in an unpartitioned table."""
        return self._place_of(hour)

    def arranged(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch of records as rows of the table."""
        self.clipped_times += clipped_count(batch.column("timestamp"))
        return rows_of(batch, self.schema)

    def store(self, place: int | None, path: Path, metadata: pq.FileMetaData) -> StoredFile:
        """
        Store a file at the table's data location, under a unique name.

        Raises:
            StorageUnavailable: The file cannot be written to the table's storage.
        """
        table, portion = self._table, self._portion
        values = [PartitionFieldValue(one, place) for one in table.spec.fields]
        key = PartitionKey(values, table.spec, table.schema)
        name = f"{portion.partition.partition:05}-{portion.from_offset:020}-{uuid.uuid4()}.parquet"
        locations = load_location_provider(table.location, dict(table.properties))
        location = locations.new_data_location(name, key if values else None)
        size_bytes = path.stat().st_size
        try:
            with path.open("rb") as source, table.io.new_output(location).create() as target:
                shutil.copyfileobj(source, target, COPY_BYTES)
        except OSError as error:
            raise StorageUnavailable(f"{location} cannot be written: {error}") from error
        entry = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=location,
            file_format=FileFormat.PARQUET,
            partition=key.partition,
            file_size_in_bytes=size_bytes,
            sort_order_id=None,
            spec_id=table.spec.spec_id,
            equality_ids=None,
            key_metadata=None,
            **table.statistics(metadata),
        )
        return StoredFile(location, metadata.num_rows, size_bytes, entry)
