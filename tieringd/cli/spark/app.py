"""The group of commands. A new job is added to the list here."""

from __future__ import annotations

from pathlib import Path

import typer

from tieringd.cli.spark.compact import compact
from tieringd.cli.spark.erase import erase
from tieringd.cli.spark.export import export
from tieringd.cli.spark.merge import merge
from tieringd.cli.spark.rebuild import rebuild
from tieringd.cli.spark.scrub import scrub
from tieringd.cli.spark.usage import usage

spark_app = typer.Typer(
    help="Run jobs on the archive with Spark, on this machine or on a cluster. Needs only the bucket, and "
    "the package's spark extra.",
    no_args_is_help=True,
)
for _job in (scrub, usage, rebuild, compact, erase, merge, export):
    spark_app.command()(_job)


@spark_app.command()
def submit_file() -> None:
    """
    Print the path of the file that `spark-submit` runs for these commands.

    As in: spark-submit --master yarn "$(tieringd spark submit-file)" scrub --config tieringd.yaml
    """
    typer.echo(Path(__file__).with_name("submitted.py"))
