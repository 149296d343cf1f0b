"""`tieringd spark merge`."""

from __future__ import annotations

from functools import partial

from tieringd.cli.spark.options import (
    Conf,
    ConfigFile,
    DeleteAfter,
    Format,
    Master,
    NamedTopics,
    NoBroker,
    OutputFormat,
    ReportFile,
)
from tieringd.cli.spark.running import run_job
from tieringd.cli.spark.session import optional_parts


def merge(
    topics: NamedTopics,
    config: ConfigFile,
    no_broker: NoBroker = False,
    delete_after: DeleteAfter = None,
    master: Master = None,
    conf: Conf = None,
    output: Format = OutputFormat.TEXT,
    report: ReportFile = None,
) -> None:
    """
    Make one object of adjacent small segments, in whole archives; the records stay as they are.

    By cloud_storage_segment_size_target and cloud_storage_segment_size_min, as the daemon merges. Of a live
    topic what lies before the last trim. Topics that the configuration knows to be compacted are left alone.
    """
    with optional_parts():
        from tieringd.spark.jobs import merge as job  # noqa: PLC0415 - commands that need no Spark begin sooner

    run_job(
        partial(job.merge, topics=topics, has_broker=not no_broker, delete_after_ms=delete_after),
        config=config,
        master=master,
        conf=conf,
        output=output,
        report=report,
    )
