"""
`tieringd spark`: jobs on the archive that run on Spark, on this machine or on a cluster.

Each job is a function in `tieringd.spark.jobs` and a command in `commands`; `export` has a module of its own.
A command has options from `cli.spark.options`, and returns the function with its arguments to `job_command`.
"""

from tieringd.cli.spark.commands import spark_app

__all__ = ["spark_app"]
