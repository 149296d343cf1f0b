"""
The data source `tieringd` for Spark to find: it looks into each installed package named pyspark_*.

Everything is in `tieringd.spark.source`; nothing is to be imported from here.
"""

from tieringd.spark.source.data_source import TieringdDataSource as DefaultSource

__all__ = ["DefaultSource"]
