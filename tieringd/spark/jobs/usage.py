"""
Usage: the contents of the archive and their estimated cost, by topic and day.

The job reads manifests only, including spilled ones. It reads and lists no other object. Deleted segments are
in no manifest, and are not counted. Segments that are to be deleted are counted separately.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from tieringd.archive.scrub.survey import ScrubbedTopics
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.prices import Prices
from tieringd.policies.scrub import Finding
from tieringd.spark.bucket import bucket_of
from tieringd.spark.jobs.job_progress import Progress, silent, watched
from tieringd.spark.jobs.prices import list_prices
from tieringd.spark.jobs.report import Report, Table, Value
from tieringd.spark.jobs.tasks import failures_in_words
from tieringd.spark.jobs.topic_choice import is_chosen_by, require_matched
from tieringd.spark.jobs.usage_rows import SCHEMA, DayOf, count_partitions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    # An ordinary import would load pydantic into processes that do not need it.
    from tieringd.config import Config

TASKS_PER_CORE = 8
_SUMS = ("segments", "held_bytes", "retired_segments", "retired_bytes", "index_bytes", "write_requests")


def usage(
    spark: SparkSession,
    config: Config,
    *,
    topics: Sequence[str] = (),
    day_of: DayOf = "upload",
    days: int | None = None,
    prices: Prices | None = None,
    progress: Progress = silent,
) -> Report:
    """
    Count the archive by topic and UTC day. With *days*, the report shows only that many of the last days.

    Costs are estimates from *prices*, or from the store's list prices if it is None. A partition whose
    manifests cannot be read is a fault of the report.

    Raises:
        ObjectNotFound: One of *topics* matches nothing.
        StorageUnavailable: The store does not answer.
        TaskFailed: An executor failed.
    """
    begun = time.monotonic()
    damaged: list[Finding] = []
    frame, partitions = _frame(spark, config, topics=topics, day_of=day_of, damaged=damaged)
    with watched(spark, "usage", progress), failures_in_words(), _persisted(frame):
        rows = by_topic_and_day(frame).collect()
        faults = [row.fault for row in frame.where("fault is not null").orderBy("fault").collect()]
    since = None if days is None else datetime.now(UTC).date() - timedelta(days=days - 1)
    return usage_report(
        rows,
        [*(str(one) for one in damaged), *faults],
        prices=prices or list_prices(config),
        partitions=partitions,
        since=since,
        seconds=time.monotonic() - begun,
    )


def usage_frame(
    spark: SparkSession, config: Config, *, topics: Sequence[str] = (), day_of: DayOf = "upload"
) -> DataFrame:
    """
    Return a DataFrame of `SCHEMA`, with a row of counts for each partition and day.

    The manifests are read when the frame is used, each time again.

    Raises:
        ObjectNotFound: One of *topics* matches nothing.
        StorageUnavailable: The store does not answer.
    """
    return _frame(spark, config, topics=topics, day_of=day_of, damaged=[])[0]


def by_topic_and_day(frame: DataFrame) -> DataFrame:
    """Sum up a frame of `SCHEMA` by topic and day, and add the total `stored_bytes` after each day."""
    from pyspark.sql import Window  # noqa: PLC0415 - an optional part
    from pyspark.sql import functions as sql  # noqa: PLC0415 - an optional part

    sums = [sql.sum(name).alias(name) for name in _SUMS]
    daily = frame.where("fault is null").groupBy("topic", "day").agg(*sums)
    until = Window.partitionBy("topic").orderBy("day").rowsBetween(Window.unboundedPreceding, 0)
    stored = sql.sum(sql.expr("held_bytes + retired_bytes + index_bytes")).over(until)
    return daily.withColumn("stored_bytes", stored).orderBy("topic", "day")


def _frame(
    spark: SparkSession, config: Config, *, topics: Sequence[str], day_of: DayOf, damaged: list[Finding]
) -> tuple[DataFrame, int]:
    """Return the frame and its number of partitions. Damaged topic manifests are added to *damaged*."""
    bucket = bucket_of(config)
    known = ScrubbedTopics(bucket.store, bucket.manifests, is_wanted=is_chosen_by(topics))

    async def listed() -> list[TopicIdPartition]:
        return [one async for one in known.partitions(damaged)]

    partitions = bucket.run(listed())
    # With findings, a topic that seems missing may be one whose manifest is damaged.
    if not damaged:
        require_matched(topics, {one.topic for one in partitions})
    context = spark.sparkContext
    tasks = max(1, min(len(partitions), TASKS_PER_CORE * context.defaultParallelism))
    counted = context.parallelize(partitions, tasks).mapPartitions(partial(count_partitions, config, day_of))
    return spark.createDataFrame(counted, SCHEMA), len(partitions)


@contextmanager
def _persisted(frame: DataFrame) -> Iterator[None]:
    frame.persist()
    try:
        yield
    finally:
        frame.unpersist()


def usage_report(
    rows: Iterable[Row],
    faults: Sequence[str],
    *,
    prices: Prices | None,
    partitions: int,
    since: date | None,
    seconds: float,
) -> Report:
    """
    Return the report of the *rows* of `by_topic_and_day`.

    Days before *since* are in the totals, but have no rows of their own.
    """
    totals: defaultdict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(_SUMS, 0))
    lines = []
    for row in rows:
        for name in _SUMS:
            totals[row.topic][name] += getattr(row, name)
        if since is None or row.day >= since:
            lines.append(
                (
                    row.topic,
                    row.day.isoformat(),
                    row.segments + row.retired_segments,
                    row.held_bytes + row.retired_bytes,
                    row.retired_bytes,
                    row.stored_bytes,
                    row.write_requests,
                    prices.write_cost(row.write_requests) if prices else None,
                    prices.storage_cost(row.stored_bytes) if prices else None,
                )
            )
    columns = ("topic", "day", "segments", "added_bytes", "retired_bytes", "stored_bytes", "write_requests")
    by_topic = Table(
        "topics",
        ("topic", *_SUMS, "write_cost", "storage_cost_month"),
        tuple((topic, *sums.values(), *_costs(sums, prices)) for topic, sums in sorted(totals.items())),
    )
    whole = {name: sum(sums[name] for sums in totals.values()) for name in _SUMS}
    write_cost, storage_cost = _costs(whole, prices)
    figures: dict[str, Value] = {
        "topics": len(totals),
        "partitions": partitions,
        **whole,
        "objects": 2 * (whole["segments"] + whole["retired_segments"]),
        "prices": prices.label if prices else None,
        "currency": prices.currency if prices else None,
        "write_cost": write_cost,
        "storage_cost_month": storage_cost,
        "seconds": seconds,
    }
    by_day = Table("days", (*columns, "write_cost", "storage_cost_month"), tuple(lines))
    return Report("usage", figures, (by_topic, by_day), tuple(faults))


def _costs(sums: dict[str, int], prices: Prices | None) -> tuple[float | None, float | None]:
    """Return the cost of the writing requests, and the cost of storing everything for a month."""
    if prices is None:
        return None, None
    stored_bytes = sums["held_bytes"] + sums["retired_bytes"] + sums["index_bytes"]
    return prices.write_cost(sums["write_requests"]), prices.storage_cost(stored_bytes)
