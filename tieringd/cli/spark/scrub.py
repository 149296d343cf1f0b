"""`tieringd spark scrub`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from tieringd.cli.spark.options import Conf, ConfigFile, Format, Master, OutputFormat, ReportFile, Topics
from tieringd.cli.spark.running import run_job
from tieringd.cli.spark.session import optional_parts


def scrub(
    config: ConfigFile,
    topic: Topics = None,
    orphans: Annotated[
        bool, typer.Option(help="List the whole bucket, and report the objects that no manifest names.")
    ] = True,
    master: Master = None,
    conf: Conf = None,
    output: Format = OutputFormat.TEXT,
    report: ReportFile = None,
) -> None:
    """
    Read every object of the archive and compare it with the manifests; exit 1 when anything is wrong.

    Checks every batch's checksum, every offset, every index and every manifest. Nothing is changed:
    `tieringd archive scrub --fix` repairs faults, and `tieringd spark rebuild` rebuilds lost manifests.
    """
    with optional_parts():
        from tieringd.spark.jobs import scrub as job  # noqa: PLC0415 - commands that need no Spark begin sooner

    run_job(
        partial(job.scrub, topics=topic or (), with_orphans=orphans),
        config=config,
        master=master,
        conf=conf,
        output=output,
        report=report,
    )
