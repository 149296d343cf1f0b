"""
The data source as Spark finds it by name: `spark.read.format("tieringd")`, and `readStream`.

Spark imports this module whenever it searches for data sources, even if another one is used. So modules that
are slow to import are imported where they are used.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    # An ordinary import would load numba and pyarrow into processes that do not need them.
    from tieringd.spark.source.batch import BatchReader
    from tieringd.spark.source.read_request import Request
    from tieringd.spark.source.stream import StreamReader


class TieringdDataSource(DataSource):
    """Archived topics, with the columns of Spark's own Kafka source."""

    @classmethod
    def name(cls) -> str:
        """Return the name that users write in `format`."""
        return "tieringd"

    def schema(self) -> StructType:
        """
        Return the schema of the columns that the options select.

        Raises:
            ConfigError: The options of the columns or of the topics are wrong, or one has a credential that
                Spark would show. It asks for the schema before there is a plan.
        """
        from tieringd.spark.source.option_values import OptionValues, require_hidden
        from tieringd.spark.source.options import read_columns, read_subscription
        from tieringd.spark.source.schema import schema_of
        from tieringd.spark.worker_process import spare_collections

        values = OptionValues(self.options)
        require_hidden(values)
        read_subscription(values)
        spare_collections()
        return schema_of(read_columns(self.options))

    def reader(self, schema: StructType) -> BatchReader:
        """
        Return a reader for a batch.

        Raises:
            ConfigError: An option is wrong.
        """
        from tieringd.spark.source.batch import BatchReader

        return BatchReader(self._request(schema, is_streaming=False))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 Spark's name
        """
        Return a reader for a stream.

        Raises:
            ConfigError: An option is wrong.
        """
        from tieringd.spark.source.stream import StreamReader

        return StreamReader(self._request(schema, is_streaming=True))

    def _request(self, schema: StructType, *, is_streaming: bool) -> Request:
        from tieringd.spark.source.read_request import read_request

        return read_request(self.options, schema, is_streaming=is_streaming)
