"""
`tieringd spark`: jobs on the archive that run on Spark, here or on a cluster.

Each job is a function of `tieringd.spark.jobs` and a command in a module of its own here. A command takes
the options of `cli.spark.options` and hands the function to `run_job`.
"""

from tieringd.cli.spark.app import spark_app

__all__ = ["spark_app"]
