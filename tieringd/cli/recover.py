"""`tieringd recover`: topics of the archive, brought back into a cluster."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tieringd.broker.restored_log import RestoredLog, require_stopped
from tieringd.cli.human import human_size
from tieringd.cli.options import ConfigFile, Format, OutputFormat, loaded, print_json, print_table, run_async
from tieringd.config.units import DURATION, SIZE, parse_quantity
from tieringd.daemon.assembly import opened_archive
from tieringd.errors import ConfigError, CorruptDataError, ObjectNotFound
from tieringd.metrics import Metrics
from tieringd.policies.restore import RestoreLimits, plan_restore
from tieringd.services.restorer import Restorer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.config import Config
    from tieringd.config.units import Quantity
    from tieringd.daemon.assembly import Archive
    from tieringd.formats.object_keys import TopicKey
    from tieringd.model.manifest import PartitionManifest
    from tieringd.services.catalog import ArchivedTopic
    from tieringd.services.restorer import RestoredPartition

recover_app = typer.Typer(
    help="Bring topics back from the bucket: into the log directory of a broker that is stopped.",
    no_args_is_help=True,
)

_LISTED = (
    "cluster",
    "topic",
    "topic_id",
    "partitions",
    "segments",
    "size_bytes",
    "gap_offsets",
    "first_record",
    "last_record",
)
_REPORTED = (
    "topic",
    "partition",
    "start_offset",
    "next_offset",
    "segments",
    "found_segments",
    "size_bytes",
    "records",
    "ended_transactions",
    "gap_offsets",
    "left_segments",
)


class Validation(StrEnum):
    """What is looked at before anything is restored. Redpanda's names."""

    CHECK_MANIFEST_EXISTENCE = "check_manifest_existence"
    CHECK_MANIFEST_AND_SEGMENT_METADATA = "check_manifest_and_segment_metadata"
    NO_CHECK = "no_check"


def _amount(quantity: Quantity) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            return parse_quantity(text, quantity)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parse


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{text!r} is no regular expression: {error}") from error
    return text


Topics = Annotated[
    str,
    typer.Option("--topics", "-t", help="A regular expression that a whole name matches.", callback=_pattern),
]
FromCluster = Annotated[
    str | None, typer.Option("--from-cluster", help="Of this cluster only, where the bucket has several.")
]
TopicId = Annotated[str | None, typer.Option("--topic-id", help="Of this incarnation of a topic only.")]
LastBytes = Annotated[
    int | None,
    typer.Option("--last-bytes", help="Of each partition the newest so much: 10GiB.", parser=_amount(SIZE)),
]
LastMs = Annotated[
    int | None,
    typer.Option(
        "--last-ms", help="Of each partition the newest so long, such as 7d.", parser=_amount(DURATION)
    ),
]


@recover_app.command(name="list")
def list_topics(
    config: ConfigFile,
    topics: Topics = ".*",
    from_cluster: FromCluster = None,
    output: Format = OutputFormat.TEXT,
) -> None:
    """List what can be brought back: topics of all clusters, sizes, and the times they reach over."""
    rows = run_async(_listed(loaded(config), _Wanted(topics, from_cluster)))
    if output is OutputFormat.JSON:
        print_json(rows)
    else:
        print_table(_LISTED, [[row[column] for column in _LISTED] for row in rows])


@recover_app.command()
def directory(
    log_dir: Annotated[Path, typer.Argument(help="The broker's log directory.", file_okay=False)],
    topics: Topics,
    config: ConfigFile,
    from_cluster: FromCluster = None,
    topic_id: TopicId = None,
    last_bytes: LastBytes = None,
    last_ms: LastMs = None,
    staging: Annotated[
        Path | None,
        typer.Option(help="Build here; on the log directory's filesystem. Default: hidden beside it."),
    ] = None,
    validate: Annotated[
        Validation, typer.Option(help="What is looked at first.")
    ] = Validation.CHECK_MANIFEST_EXISTENCE,
    output: Format = OutputFormat.TEXT,
) -> None:
    """
    Restore topics with their offsets into the log directory of a stopped broker.

    Create the topics on the new broker first, with one replica and as many partitions, and stop it. What
    an interrupted attempt has left is used by the next one.
    """
    require_stopped(log_dir)
    restored = run_async(
        _restored(
            loaded(config),
            _Wanted(topics, from_cluster, topic_id),
            log_dir=log_dir,
            staging=staging or log_dir.parent / f".{log_dir.name}.tieringd-restore",
            limits=RestoreLimits(last_bytes, last_ms),
            validate=validate,
        )
    )
    rows = [_row(one) for one in restored]
    if output is OutputFormat.JSON:
        print_json(rows)
    else:
        print_table(_REPORTED, [[row[column] for column in _REPORTED] for row in rows])


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which of the archived topics are meant."""

    pattern: str
    cluster: str | None = None
    topic_id: str | None = None

    def includes(self, key: TopicKey) -> bool:
        return (
            re.fullmatch(self.pattern, key.topic) is not None
            and self.cluster in {None, key.cluster}
            and self.topic_id in {None, key.topic_id}
        )


async def _listed(config: Config, wanted: _Wanted) -> list[dict[str, Any]]:
    async with opened_archive(config, Metrics()) as archive:
        return [_listing(one) for one in await _matching(archive, wanted)]


async def _matching(archive: Archive, wanted: _Wanted) -> list[ArchivedTopic]:
    """Return the archived topics whose names match, with their partitions, by cluster and name."""
    return [
        await archive.catalog.with_partitions(topic)
        async for topic in archive.catalog.topics()
        if wanted.includes(topic.key)
    ]


def _listing(found: ArchivedTopic) -> dict[str, Any]:
    segments = [segment for one in found.partitions for segment in one.segments]
    times = [segment.max_timestamp_ms for segment in segments if segment.max_timestamp_ms >= 0]
    starts = [segment.base_timestamp_ms for segment in segments if segment.base_timestamp_ms >= 0]
    return {
        "cluster": found.topic.key.cluster,
        "topic": found.topic.key.topic,
        "topic_id": found.topic.key.topic_id,
        "partitions": found.topic.partition_count,
        "segments": len(segments),
        "size_bytes": sum(segment.size_bytes for segment in segments),
        "gap_offsets": sum(gap.next_offset - gap.base_offset for one in found.partitions for gap in one.gaps),
        "first_record": _time(min(starts, default=None)),
        "last_record": _time(max(times, default=None)),
    }


def _time(timestamp_ms: int | None) -> str:
    if timestamp_ms is None:
        return "-"
    try:
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)


async def _restored(
    config: Config,
    wanted: _Wanted,
    *,
    log_dir: Path,
    staging: Path,
    limits: RestoreLimits,
    validate: Validation,
) -> list[RestoredPartition]:
    async with opened_archive(config, Metrics()) as archive:
        found = await _matching(archive, wanted)
        _require_names_once(found, wanted.pattern)
        await _validate(archive, found, validate)
        total = sum(plan_restore(one, limits).size_bytes for topic in found for one in topic.partitions)
        progress = _Progress(total)
        restorer = Restorer(archive.remote_log, archive.reader)
        restored = []
        for topic in found:
            for manifest in topic.partitions:
                plan = plan_restore(manifest, limits)
                target = RestoredLog(log_dir, staging, manifest.partition.topic_partition)
                restored.append(await restorer.restore(manifest, plan, target, on_bytes=progress.note))
        await asyncio.to_thread(_remove_empty, staging)
        return restored


def _require_names_once(found: list[ArchivedTopic], pattern: str) -> None:
    """See that there is something, and that no name stands for two topics."""
    if not found:
        raise ObjectNotFound(
            f"no archived topic matches {pattern!r}", hint="`tieringd recover list` says what there is"
        )
    names = [one.topic.key.topic for one in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"the bucket holds more than one topic named {', '.join(twice)}",
            hint="Choose one with --from-cluster, or with --topic-id where it was created again",
        )


async def _validate(archive: Archive, found: list[ArchivedTopic], validate: Validation) -> None:
    if validate is Validation.NO_CHECK:
        return
    faults = [
        f"{one.topic.key.topic}: {one.topic.partition_count - len(one.partitions)} of "
        f"{one.topic.partition_count} partitions have no manifest"
        for one in found
        if len(one.partitions) < one.topic.partition_count
    ]
    if validate is Validation.CHECK_MANIFEST_AND_SEGMENT_METADATA:
        for topic in found:
            for manifest in topic.partitions:
                faults.extend(await _faults(archive, manifest))
    if faults:
        raise CorruptDataError(
            f"the archive is not whole: {'; '.join(faults)}",
            hint=f"Restore what there is with --validate {Validation.NO_CHECK.value}",
        )


async def _faults(archive: Archive, manifest: PartitionManifest) -> list[str]:
    report = await archive.verifier.verify(manifest, deep=False)
    return [f"{manifest.partition.topic_partition}: {fault}" for fault in report.faults]


def _remove_empty(staging: Path) -> None:
    """Remove the directory that was built in, unless something is left in it."""
    if staging.is_dir() and not any(staging.iterdir()):
        staging.rmdir()


def _row(one: RestoredPartition) -> dict[str, Any]:
    fields = asdict(one)
    partition = fields.pop("partition")
    return {"topic": partition["topic"], "partition": partition["partition"], **fields}


class _Progress:
    """Says on standard error how much has been restored, at each tenth."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._said = 0

    def note(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        tenths = 10 * self._done_bytes // max(1, self._total_bytes)
        if tenths > self._said:
            self._said = tenths
            done, total = human_size(self._done_bytes), human_size(self._total_bytes)
            typer.echo(f"{done} of {total} restored", err=True)
