"""The plan of a batch: what it costs the process of Spark's that makes it."""

from __future__ import annotations

import gc

from tieringd.spark.source.data_source import TieringdDataSource
from tieringd.spark.source.schema import schema_of


def test_a_plan_is_made_without_garbage_collections(archive):
    """Each would visit the segments of all manifests that are loaded so far."""
    archive.filled(segments=40, batches=1)
    reader = TieringdDataSource({"path": archive.url, "subscribe": "orders"}).reader(schema_of(("offset",)))
    begun = []

    def note(phase, _info):
        begun.append(phase == "start")

    before = gc.get_threshold()
    gc.set_threshold(100)
    gc.callbacks.append(note)
    try:
        tasks = reader.partitions()
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
    assert len(tasks) == 1
    # One or two follow as soon as the plan is made; there were 14.
    assert sum(begun) <= 2
