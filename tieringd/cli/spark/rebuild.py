"""`tieringd spark rebuild`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from tieringd.cli.spark.options import Conf, ConfigFile, Format, Master, OutputFormat, ReportFile, Topics
from tieringd.cli.spark.running import run_job
from tieringd.cli.spark.session import optional_parts


def rebuild(
    config: ConfigFile,
    topic: Topics = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the manifests. Without it, nothing is changed.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Rebuild manifests that can be read, too.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every data object completely, and leave out damaged ones.")
    ] = False,
    master: Master = None,
    conf: Conf = None,
    output: Format = OutputFormat.TEXT,
    report: ReportFile = None,
) -> None:
    """
    Rebuild lost or damaged manifests from the objects in the bucket; a dry run without --write.

    Stop the daemons that archive these topics first. Nothing is deleted, and a copy of each damaged
    manifest is kept. Exit 1 when offsets are lost, or a manifest could not be written.
    """
    with optional_parts():
        from tieringd.spark.jobs import rebuild as job  # noqa: PLC0415 - commands that need no Spark begin sooner

    run_job(
        partial(job.rebuild, topics=topic or (), write=write, replace=replace, deep=deep),
        config=config,
        master=master,
        conf=conf,
        output=output,
        report=report,
    )
