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
        bool, typer.Option(help="List the whole bucket, and with it the objects that no manifest names.")
    ] = True,
    master: Master = None,
    conf: Conf = None,
    output: Format = OutputFormat.TEXT,
    report: ReportFile = None,
) -> None:
    """
    Read every object of the archive, and compare it with the manifests; exit 1 when anything is wrong.

    Every batch's checksum, every offset, every index, every manifest. Nothing is changed: what is broken is
    mended by `tieringd archive scrub --fix`, and lost manifests are made again by `tieringd spark rebuild`.
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
