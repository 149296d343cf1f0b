"""The export of topics, and its report."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from tieringd.errors import ConfigError, ObjectNotFound, RetryableError
from tieringd.spark.bucket import bucket_of
from tieringd.spark.jobs.export.rounds import export_topic
from tieringd.spark.jobs.export.rules import ExportRules
from tieringd.spark.jobs.export.work import on_spark
from tieringd.spark.jobs.progress import silent
from tieringd.spark.jobs.report import Report, Table
from tieringd.spark.jobs.topic_choice import is_chosen_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from pyspark.sql import SparkSession

    from tieringd.archive.catalog import ArchivedTopic
    from tieringd.config import Config
    from tieringd.spark.bucket import Bucket
    from tieringd.spark.jobs.export.rounds import TopicOutcome
    from tieringd.spark.jobs.export.topic_target import TopicTarget
    from tieringd.spark.jobs.progress import Progress
    from tieringd.spark.jobs.report import Value


_IS_PATTERN: Final = re.compile(r"[*?\[]")
"""No topic has such a name."""
_COLUMNS: Final = ("topic", "partition", "from_offset", "next_offset", "records", "files", "file_bytes")
_LOST_COLUMNS: Final = ("topic", "partition", "from_offset", "next_offset", "reason")


class Target(Protocol):
    """A place for the exports of several topics."""

    def opened(self, archive: Config, /) -> AbstractContextManager[Callable[[str], TopicTarget]]:
        """Give what returns the place of a topic, as long as the context lasts."""


def export(
    spark: SparkSession,
    config: Config,
    *,
    topics: Sequence[str],
    target: Target,
    rules: ExportRules | None = None,
    progress: Progress = silent,
) -> Report:
    """
    Export what of *topics* is in the archive and not yet in *target*; exactly once, by offset.

    They are names, or patterns with `*`, `?` and `[]`. Of several incarnations it is the latest. Called again
    it goes on from there, whether the run before came to its end or was killed.

    A topic that cannot be exported is a fault of the report, and does not keep the others from it.

    Raises:
        ConfigError: The target cannot be used this way, or holds something else.
        ObjectNotFound: The archive has no such topic.
        TieringError: The archive lacks what was to be exported, or cannot be read. As a `ConfigError` of
            one topic it is raised only where nothing of any topic was exported.
    """
    if not topics:
        raise ConfigError("topics: name at least one topic to export")
    archive = partial(bucket_of, config)
    bucket = archive()
    names = dict.fromkeys(name for one in topics for name in _names(bucket, one))
    found = [bucket.run(bucket.catalog.topic(name)) for name in names]
    with target.opened(config) as place_of:

        def export_one(archived: ArchivedTopic) -> TopicOutcome:
            name = archived.topic.key.topic
            return export_topic(
                archived,
                place_of(name),
                rules or ExportRules(),
                archive=archive,
                run=on_spark(spark, f"export {name}", progress),
            )

        outcomes = export_each(found, export_one)
    return report_of(outcomes, left=[one.topic.key.topic for one in found[len(outcomes) :]])


def export_each(
    topics: Iterable[ArchivedTopic], export_one: Callable[[ArchivedTopic], TopicOutcome]
) -> list[TopicOutcome]:
    """
    Return what came of topics, in turn, until all are exported or nothing goes on, as with a store away.

    Raises:
        TieringError: What stopped the first one, where nothing was exported of any.
    """
    outcomes: list[TopicOutcome] = []
    for one in topics:
        outcomes.append(export_one(one))
        if isinstance(outcomes[-1].error, RetryableError):
            break
    errors = [one.error for one in outcomes if one.error is not None and not one.commits]
    if errors and len(errors) == len(outcomes):
        raise errors[0]
    return outcomes


def _names(bucket: Bucket, name: str) -> list[str]:
    """
    Return the topics that are meant by a name or a pattern.

    Raises:
        ObjectNotFound: It is a pattern that no name has.
    """
    if not _IS_PATTERN.search(name):
        return [name]
    found = bucket.run(bucket.catalog.readable(is_chosen_by([name])))
    if not found:
        raise ObjectNotFound(
            f"the bucket holds no topic named {name}", hint="`tieringd archive topics` lists what it holds"
        )
    return sorted({one.key.topic for one in found})


def report_of(outcomes: Sequence[TopicOutcome], *, left: Sequence[str] = ()) -> Report:
    """Return what there is to say of an export; the topics that are *left* were not looked at."""
    written = [one for outcome in outcomes for one in outcome.written]
    figures: dict[str, Value] = {
        "topics": len(outcomes),
        "partitions": sum(len(outcome.reached) for outcome in outcomes),
        "records": sum(one.records for one in written),
        "files": sum(len(one.files) for one in written),
        "file_bytes": sum(one.size_bytes for one in written),
        "commits": sum(outcome.commits for outcome in outcomes),
        "lost_offsets": sum(
            one.next_offset - one.from_offset for outcome in outcomes for one in outcome.lost
        ),
        "clipped_times": sum(one.clipped_times for one in written),
    }
    tables = [Table("partitions", _COLUMNS, tuple(row for one in outcomes for row in _rows(one)))]
    lost = tuple(
        (one.partition.topic, one.partition.partition, one.from_offset, one.next_offset, one.reason)
        for outcome in outcomes
        for one in outcome.lost
    )
    if lost:
        tables.append(Table("lost offsets", _LOST_COLUMNS, lost))
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    faults += [
        f"topic {one.topic.topic} was not exported to its end: {one.error}"
        for one in outcomes
        if one.error is not None
    ]
    if left:
        faults.append(f"after that these topics were not looked at: {', '.join(left)}. Export again")
    return Report("export", figures, tuple(tables), tuple(faults))


def _rows(outcome: TopicOutcome) -> Iterator[tuple[Value, ...]]:
    for number, reached in sorted(outcome.reached.items()):
        written = [one for one in outcome.written if one.portion.partition.partition == number]
        begun_at = outcome.begun_at.get(number)
        if begun_at is None:
            begun_at = min((one.portion.from_offset for one in written), default=reached)
        yield (
            outcome.topic.topic,
            number,
            begun_at,
            reached,
            sum(one.records for one in written),
            sum(len(one.files) for one in written),
            sum(one.size_bytes for one in written),
        )
