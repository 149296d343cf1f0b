"""`tieringd spark usage`."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tieringd.cli.spark.options import Conf, ConfigFile, Format, Master, OutputFormat, ReportFile, Topics
from tieringd.cli.spark.running import run_job
from tieringd.cli.spark.session import optional_parts


class DayOf(StrEnum):
    """Which of a segment's times decides about its day."""

    UPLOAD = "upload"
    RECORD = "record"


def usage(
    config: ConfigFile,
    topic: Topics = None,
    by: Annotated[
        DayOf, typer.Option(help="Count by the day of the upload, or of each segment's newest record.")
    ] = DayOf.UPLOAD,
    days: Annotated[int | None, typer.Option(help="Show only this many of the last days.", min=1)] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file with storage_gib_month and writes_1000; without it, the store's list prices.",
            show_default=False,
        ),
    ] = None,
    master: Master = None,
    conf: Conf = None,
    output: Format = OutputFormat.TEXT,
    report: ReportFile = None,
) -> None:
    """
    Count bytes, objects and requests by topic and UTC day, with an estimate of what they cost.

    Reads manifests only.
    """
    with optional_parts():
        from tieringd.spark.jobs import usage as job  # noqa: PLC0415 - commands that need no Spark begin sooner
    from tieringd.spark.jobs.prices import read_prices  # noqa: PLC0415 - likewise

    own = None if prices is None else read_prices(prices)
    run_job(
        partial(job.usage, topics=topic or (), day_of=by.value, days=days, prices=own),
        config=config,
        master=master,
        conf=conf,
        output=output,
        report=report,
    )
