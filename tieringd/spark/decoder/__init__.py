"""
The decoder of Spark's executors: stored record batches to Arrow.

A task uses `SegmentDecoder`; `arrow_schema` gives the schema of its record batches.
"""

from tieringd.spark.decoder.schema import COLUMNS, arrow_schema
from tieringd.spark.decoder.segment_batches import Selection
from tieringd.spark.decoder.segment_decoder import CorruptBatch, SegmentDecoder

__all__ = ["COLUMNS", "CorruptBatch", "SegmentDecoder", "Selection", "arrow_schema"]
