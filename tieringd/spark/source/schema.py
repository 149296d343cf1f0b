"""The schema of the data source: some or all of the columns of Spark's own Kafka source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tieringd.spark.source.option_values import fault

_TYPES: Final[dict[str, DataType]] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
}


def schema_of(columns: Sequence[str]) -> StructType:
    """Return the schema of *columns*, in their order."""
    return StructType([StructField(name, _TYPES[name]) for name in columns])


def columns_of(schema: StructType) -> tuple[str, ...]:
    """
    Return the columns of a schema. A user's schema may leave out columns, and have another order.

    Raises:
        ConfigError: A column is not one of the data source's, or has another type.
    """
    for field in schema.fields:
        wanted = _TYPES.get(field.name)
        if wanted is None:
            raise fault("schema", f"there is no column {field.name!r}; the columns are {', '.join(_TYPES)}")
        if field != StructField(field.name, wanted):
            raise fault("schema", f"column {field.name} must be a nullable {wanted.simpleString()}")
    return tuple(schema.fieldNames())
