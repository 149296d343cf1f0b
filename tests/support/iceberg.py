"""An Iceberg catalogue in a SQLite file, with its tables in a directory."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyiceberg.catalog import load_catalog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table


def catalog_properties(directory: Path) -> dict[str, str]:
    """Return the properties that open the catalogue in *directory*."""
    return {
        "type": "sql",
        "uri": f"sqlite:///{directory}/catalog.db?timeout=60",
        "warehouse": f"file://{directory}",
    }


@contextmanager
def running_catalog(directory: Path) -> Iterator[Catalog]:
    """Make *directory*, and yield the catalogue in it."""
    directory.mkdir(parents=True, exist_ok=True)
    with load_catalog("test", **catalog_properties(directory)) as catalog:
        yield catalog


def rows_of_table(table: Table) -> list[dict[str, Any]]:
    """Return the rows of a table with the names of Spark's Kafka source, sorted by partition and offset."""
    rows = [
        {
            "partition": row["redpanda"]["partition"],
            "offset": row["redpanda"]["offset"],
            "timestamp": row["redpanda"]["timestamp"],
            "timestampType": row["redpanda"]["timestamp_type"],
            "key": row["redpanda"]["key"],
            "headers": row["redpanda"]["headers"],
            "value": row["value"],
        }
        for row in table.scan().to_arrow().to_pylist()
    ]
    return sorted(rows, key=lambda row: (row["partition"], row["offset"]))
