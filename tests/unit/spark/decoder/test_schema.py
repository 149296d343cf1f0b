"""The schema of what is decoded: exactly what Spark would make of its own Kafka source's."""

from __future__ import annotations

import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tieringd.errors import ConfigError
from tieringd.spark.decoder import COLUMNS, arrow_schema

KAFKA_SOURCE = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
        StructField(
            "headers",
            ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
        ),
    ]
)
"""What Spark's Kafka source has with `includeHeaders`, written down once more."""


def test_schema_is_what_spark_makes_of_its_own():
    """Types, order, nullability and the names inside of lists are those that Spark expects."""
    expected = to_arrow_schema(KAFKA_SOURCE, timezone="UTC")
    assert arrow_schema(COLUMNS).equals(expected, check_metadata=True)
    headers = arrow_schema(COLUMNS).field("headers").type
    assert headers.value_field == expected.field("headers").type.value_field
    assert headers.value_field.name == "element"


@pytest.mark.parametrize("columns", [("value",), ("timestamp", "offset"), tuple(reversed(COLUMNS))], ids=str)
def test_schema_has_the_selected_columns_in_their_order(columns):
    """The columns come in the order in which they are asked for."""
    chosen = StructType([KAFKA_SOURCE[name] for name in columns])
    assert arrow_schema(columns).equals(to_arrow_schema(chosen, timezone="UTC"), check_metadata=True)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        pytest.param(("value", "vaule"), "no column 'vaule'", id="unknown"),
        pytest.param(("key", "value", "key"), "'key' is selected twice", id="twice"),
        pytest.param((), "no column is selected", id="none"),
    ],
)
def test_wrong_columns_are_refused(columns, words):
    """A column that does not exist, or comes twice, is a fault that names it."""
    with pytest.raises(ConfigError, match=words):
        arrow_schema(columns)
