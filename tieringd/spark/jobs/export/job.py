"""The export of topics, and its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from tieringd.config import Config
from tieringd.errors import ConfigError, RetryableError, TieringError
from tieringd.formats.object_keys import TopicKey
from tieringd.spark.bucket import bucket_of
from tieringd.spark.jobs.export.rounds import TopicOutcome, export_topic
from tieringd.spark.jobs.export.state import ExportRules
from tieringd.spark.jobs.export.topic_target import TopicTarget
from tieringd.spark.jobs.export.work import on_spark
from tieringd.spark.jobs.job_progress import Progress, silent
from tieringd.spark.jobs.report import Report, Table, Value
from tieringd.spark.jobs.topic_choice import is_chosen_by, matches, require_matched

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


AWAY_AFTER: Final = 3
"""A run ends after this many topics in a row that failed because a store or Spark was unavailable."""
WITHOUT_MANIFEST: Final = "partitions without a manifest: each is new, or its manifest is lost"
"""The title of the table of the partitions that no run has exported, and that have no manifest."""
_COLUMNS: Final = ("topic", "partition", "from_offset", "next_offset", "records", "files", "file_bytes")
_LOST_COLUMNS: Final = ("topic", "partition", "from_offset", "next_offset", "reason")
_REPLACED_COLUMNS: Final = ("topic", "partition", "from_offset", "next_offset", "leader_epoch")
_WITHOUT_MANIFEST_COLUMNS: Final = ("topic", "partition")
_PASSED_OVER_COLUMNS: Final = ("topic", "cluster", "topic_id")


class Target(Protocol):
    """A place for the exports of several topics."""

    def opened(self, archive: Config, /) -> AbstractContextManager[Callable[[str], TopicTarget]]:
        """Yield a function from a topic's name to its place in the target, usable in the context."""


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
    Export the records of *topics* that are in the archive and not yet in *target*, exactly once by offset.

    *topics* are names, or patterns with `*`, `?` and `[]`. Of several topics of one name the one that was
    created last is exported, and the report lists the others. A second run continues where the first one
    ended or was killed.

    A topic that cannot be exported is a fault of the report, and the other topics are exported nevertheless.
    If nothing of any topic was exported, the first error is raised instead.

    Raises:
        ConfigError: The target cannot be used this way, or holds other data.
        ObjectNotFound: The archive has no such topic.
        TieringError: The archive lacks records to export, or cannot be read.
    """
    if not topics:
        raise ConfigError("topics: name at least one topic to export")
    archive = partial(bucket_of, config)
    bucket = archive()
    readable = bucket.run(bucket.catalog.readable_incarnations(is_chosen_by(topics)))
    # Of several topics of one name, in one cluster or several, the one that was created last comes last here.
    by_age = sorted(readable, key=lambda one: one.created_at_ms)
    known = {one.key.topic: one.key for one in by_age}
    passed_over = [one.key for one in readable if one.key != known[one.key.topic]]
    require_matched(topics, known)
    names = list(dict.fromkeys(name for one in topics for name in sorted(known) if matches(name, [one])))
    with target.opened(config) as place_of:

        def export_one(name: str) -> TopicOutcome:
            try:
                archived = bucket.run(bucket.catalog.topic(name, cluster=known[name].cluster))
            except TieringError as error:
                return TopicOutcome(name, error=error)
            return export_topic(
                archived,
                place_of(name),
                rules or ExportRules(),
                archive=archive,
                run=on_spark(spark, f"export {name}", progress),
            )

        outcomes = export_each(names, export_one)
    return report_of(outcomes, left=names[len(outcomes) :], passed_over=passed_over)


def export_each(names: Sequence[str], export_one: Callable[[str], TopicOutcome]) -> list[TopicOutcome]:
    """
    Export topics one after another, and return their outcomes. Stops early as `AWAY_AFTER` says.

    Raises:
        TieringError: The error of the first topic, if nothing of any topic was exported.
    """
    outcomes: list[TopicOutcome] = []
    in_a_row = 0
    for name in names:
        outcomes.append(export_one(name))
        in_a_row = in_a_row + 1 if isinstance(outcomes[-1].error, RetryableError) else 0
        if in_a_row == AWAY_AFTER:
            break
    errors = [one.error for one in outcomes if one.error is not None and not one.commits]
    if errors and len(errors) == len(outcomes):
        raise errors[0]
    return outcomes


def report_of(
    outcomes: Sequence[TopicOutcome], *, left: Sequence[str] = (), passed_over: Sequence[TopicKey] = ()
) -> Report:
    """
    Return the report of an export.

    The topics in *left* were not tried, which is a fault. Those in *passed_over* have the name of a later
    one, which was exported in their place.
    """
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
        "replaced_offsets": sum(
            one.next_offset - one.from_offset for outcome in outcomes for one in outcome.replaced
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
    replaced = tuple(
        (outcome.topic, one.partition, one.from_offset, one.next_offset, one.leader_epoch)
        for outcome in outcomes
        for one in outcome.replaced
    )
    if replaced:
        tables.append(Table("replaced offsets", _REPLACED_COLUMNS, replaced))
    without_manifest = tuple((one.topic, number) for one in outcomes for number in one.without_manifest)
    if without_manifest:
        tables.append(Table(WITHOUT_MANIFEST, _WITHOUT_MANIFEST_COLUMNS, without_manifest))
    if passed_over:
        rows = tuple((key.topic, key.cluster, key.topic_id) for key in passed_over)
        tables.append(Table("earlier topics of the same name, not exported", _PASSED_OVER_COLUMNS, rows))
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    faults += [
        f"topic {one.topic} was not exported completely: {one.error}"
        for one in outcomes
        if one.error is not None
    ]
    if left:
        faults.append(
            f"the export stopped, so these topics were not processed: {', '.join(left)}. Export again"
        )
    return Report("export", figures, tuple(tables), tuple(faults))


def _rows(outcome: TopicOutcome) -> Iterator[tuple[Value, ...]]:
    for number, reached in sorted(outcome.reached.items()):
        written = [one for one in outcome.written if one.portion.partition.partition == number]
        begun_at = outcome.begun_at.get(number)
        if begun_at is None:
            begun_at = min((one.portion.from_offset for one in written), default=reached)
        yield (
            outcome.topic,
            number,
            begun_at,
            reached,
            sum(one.records for one in written),
            sum(len(one.files) for one in written),
            sum(one.size_bytes for one in written),
        )
