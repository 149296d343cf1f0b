"""
`tieringd spark`: jobs on the archive that run on Spark, on this machine or on a cluster.

Each job is a function in `tieringd.spark.jobs` and a command in `commands`; `export` has a module of its own.
A command has options from `cli.spark.options`, and passes the function to `run_job`.
"""

from tieringd.cli.spark.commands import spark_app

__all__ = ["spark_app"]
