"""The columns of Spark's own Kafka source as Arrow types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from tieringd.errors import ConfigError

COLUMNS: Final[tuple[str, ...]] = (
    "key",
    "value",
    "topic",
    "partition",
    "offset",
    "timestamp",
    "timestampType",
    "headers",
)
"""All columns, in the order of Spark's Kafka source with `includeHeaders`."""

HEADER_TYPE: Final = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])

_TYPES: Final[dict[str, pa.DataType]] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestampType": pa.int32(),
    "headers": pa.list_(pa.field("element", HEADER_TYPE)),
}


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """
    Return the Arrow schema of *columns*, in their order; every field is nullable.

    The schema equals the result of `pyspark.sql.pandas.types.to_arrow_schema` for Spark's types, down to the
    names inside of lists. Spark accepts no other schema from a data source.

    Raises:
        ConfigError: A column is unknown or named twice, or *columns* is empty.
    """
    if not columns:
        raise ConfigError("no column is selected", hint=f"The columns are {', '.join(COLUMNS)}")
    for place, name in enumerate(columns):
        if name not in _TYPES:
            raise ConfigError(f"there is no column {name!r}", hint=f"The columns are {', '.join(COLUMNS)}")
        if name in columns[:place]:
            raise ConfigError(f"column {name!r} is selected twice", hint="Name each column once")
    return pa.schema([pa.field(name, _TYPES[name]) for name in columns])
