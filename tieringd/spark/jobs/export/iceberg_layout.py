"""
Redpanda's layout of an Iceberg topic in its mode `key_value`: one table for each topic, with raw bytes.

    redpanda  struct<partition int, offset long, timestamp timestamptz,
                     headers list<struct<key string, value binary>>, key binary, timestamp_type int>
    value     binary

By default a table is partitioned by `hour(redpanda.timestamp)`. All fields are optional, as in Redpanda. The
headers of a record without headers are null, not an empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import DayTransform, HourTransform, TimeTransform
from pyiceberg.types import (
    BinaryType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
)

from tieringd.spark.jobs.export.places import FIRST_US, HOUR_US, LAST_US

IcebergPartitioning: TypeAlias = Literal["none", "day", "hour"]

TIMESTAMP: Final = "redpanda.timestamp"
_NEVER_NULL: Final = {
    "redpanda",
    "redpanda.partition",
    "redpanda.offset",
    "redpanda.timestamp_type",
}

SCHEMA: Final = Schema(
    NestedField(
        1,
        "redpanda",
        StructType(
            NestedField(3, "partition", IntegerType()),
            NestedField(4, "offset", LongType()),
            NestedField(5, "timestamp", TimestamptzType()),
            NestedField(
                6,
                "headers",
                ListType(
                    9,
                    StructType(NestedField(10, "key", StringType()), NestedField(11, "value", BinaryType())),
                    element_required=False,
                ),
            ),
            NestedField(7, "key", BinaryType()),
            NestedField(8, "timestamp_type", IntegerType()),
        ),
    ),
    NestedField(2, "value", BinaryType()),
)
"""The field ids are the ones that a catalogue assigns to a new table anyway."""


def partition_spec(partition_by: IcebergPartitioning) -> PartitionSpec:
    """Return the partitioning of a new table. Partition fields have Redpanda's names."""
    if partition_by == "none":
        return PartitionSpec()
    transform: TimeTransform[int] = HourTransform() if partition_by == "hour" else DayTransform()
    source_id = SCHEMA.find_field(TIMESTAMP).field_id
    name = f"{TIMESTAMP}_{partition_by}"
    return PartitionSpec(PartitionField(source_id, PARTITION_FIELD_ID_START, transform, name))


def schema_differences(schema: Schema) -> Iterator[str]:
    """Yield a message for each way in which our rows do not fit into a table's *schema*."""
    ours = _fields_of(SCHEMA)
    theirs = _fields_of(schema)
    for name, field in ours.items():
        found = theirs.get(name)
        if found is None:
            yield f"there is no column {name}"
        elif _kind(found.field_type) != _kind(field.field_type):
            yield f"column {name} is {_kind(found.field_type)}, not {_kind(field.field_type)}"
        elif found.required and name not in _NEVER_NULL:
            yield f"column {name} must not be null, but records without a value have null there"
    for name, found in theirs.items():
        if name not in ours and found.required:
            yield f"column {name} must not be null, but it is not a column of an export"


def spec_difference(schema: Schema, spec: PartitionSpec) -> str | None:
    """Return why our files cannot be partitioned by a table's *spec*; None if they can."""
    if spec.is_unpartitioned():
        return None
    source_id = schema.find_field(TIMESTAMP).field_id
    is_ours = len(spec.fields) == 1 and all(
        field.source_id == source_id and isinstance(field.transform, TimeTransform) for field in spec.fields
    )
    if is_ours:
        return None
    parts = [f"{one.transform}({schema.find_column_name(one.source_id)})" for one in spec.fields]
    return f"it is partitioned by {', '.join(parts)}, not by a time of {TIMESTAMP}"


def file_schema(schema: Schema) -> Schema:
    """Return our columns with the field ids that they have in a table's *schema*."""
    return Schema(*_ours(SCHEMA.as_struct(), schema.as_struct()).fields)


def place_of_hour(spec: PartitionSpec) -> Callable[[int | None], int | None]:
    """
    Return a function from an hour, counted from the epoch, to the partition's value.

    The value is None for records without an hour, and in an unpartitioned table.
    """
    if spec.is_unpartitioned():
        return lambda _: None
    transform = spec.fields[0].transform.transform(TimestamptzType())
    return lambda hour: None if hour is None else transform(hour * HOUR_US)


def rows_of(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch of records as rows of a file with *schema*."""
    columns = {
        "partition": batch.column("partition"),
        "offset": batch.column("offset"),
        "timestamp": clipped(batch.column("timestamp")),
        "headers": batch.column("headers"),
        "key": batch.column("key"),
        "timestamp_type": batch.column("timestampType"),
    }
    names = [field.name for field in schema.field("redpanda").type]
    metadata = pa.StructArray.from_arrays([columns[name] for name in names], names=names)
    rows = pa.RecordBatch.from_arrays([metadata, batch.column("value")], names=["redpanda", "value"])
    return rows.select(schema.names).cast(schema)


def clipped(timestamps: pa.Array) -> pa.Array:
    """Return timestamps clipped to the years 1 to 9999."""
    micros = timestamps.view(pa.int64())
    late = pc.max_element_wise(micros, FIRST_US, skip_nulls=False)
    return pc.min_element_wise(late, LAST_US, skip_nulls=False).view(timestamps.type)


def clipped_count(timestamps: pa.Array) -> int:
    """Return how many timestamps `clipped` changes."""
    return int(pc.sum(pc.not_equal(timestamps, clipped(timestamps))).as_py() or 0)


def _fields_of(schema: Schema) -> dict[str, NestedField]:
    """Return every field of a schema by its full name, including those inside of structs and lists."""
    names = {field_id: schema.find_column_name(field_id) for field_id in schema.field_ids}
    return {name: schema.find_field(field_id) for field_id, name in names.items() if name is not None}


def _kind(type_: IcebergType) -> str:
    """Return a type's name without its inner fields, which are compared separately."""
    match type_:
        case StructType():
            return "struct"
        case ListType():
            return "list"
        case _:
            return str(type_)


def _ours(ours: StructType, theirs: StructType) -> StructType:
    """Return *theirs* with only the fields of *ours*, in the order and with the ids of *theirs*."""
    inner = {field.name: field.field_type for field in ours.fields}
    return StructType(
        *(
            NestedField(
                field.field_id, field.name, _our_type(inner[field.name], field.field_type), field.required
            )
            for field in theirs.fields
            if field.name in inner
        )
    )


def _our_type(ours: IcebergType, theirs: IcebergType) -> IcebergType:
    match ours, theirs:
        case StructType(), StructType():
            return _ours(ours, theirs)
        case ListType(), ListType():
            element = _our_type(ours.element_type, theirs.element_type)
            return ListType(theirs.element_id, element, element_required=theirs.element_required)
        case _:
            return theirs
