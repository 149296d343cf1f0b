"""
Let Spark find the data source `tieringd`. Spark looks for one in each installed package named pyspark_*.

The source itself is in `tieringd.spark.source`. User code imports nothing from this package.
"""

from tieringd.spark.source.data_source import TieringdDataSource as DefaultSource

__all__ = ["DefaultSource"]
