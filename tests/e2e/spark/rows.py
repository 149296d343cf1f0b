"""Rows of the data source as a consumer's records, so that the two can be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.e2e.sample_topics import SeenRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

    from tests.support.seaweedfs import SeaweedFS

TIMESTAMP_TYPES = ("CreateTime", "LogAppendTime")


def s3_options(store: SeaweedFS, *, bucket: str, prefix: str) -> dict[str, str]:
    """Return what a user sets to reach a prefix of a bucket."""
    return {
        "path": f"s3://{bucket}/{prefix}",
        "endpoint": store.endpoint_url,
        "region": store.region,
        "accessKey": store.access_key,
        "secretKey": store.secret_key,
    }


def frame(spark: SparkSession, options: Mapping[str, str], **more: Any) -> DataFrame:
    """Return a table with the headers in it."""
    given = {"includeHeaders": "true"} | dict(options) | {name: str(value) for name, value in more.items()}
    return spark.read.format("tieringd").options(**given).load()


def seen_in(table: DataFrame) -> list[SeenRecord]:
    """Return the records of a table of one partition, by offset."""
    rows = table.selectExpr(
        "offset", "unix_millis(timestamp) AS ms", "timestampType AS type", "key", "value", "headers"
    )
    return sorted(
        SeenRecord(
            row.offset,
            row.ms,
            TIMESTAMP_TYPES[row.type],
            None if row.key is None else bytes(row.key),
            None if row.value is None else bytes(row.value),
            tuple(
                (header.key, None if header.value is None else bytes(header.value))
                for header in row.headers or ()
            ),
        )
        for row in rows.collect()
    )
