"""`tieringd explain`: why each segment of a partition is where it is, and what would move it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from tieringd.cli.daemon_status import waiting
from tieringd.cli.options import (
    ConfigFile,
    Format,
    OutputFormat,
    loaded,
    print_document,
    print_fields,
    print_rows,
    run_async,
)
from tieringd.cli.topic_snapshot import PartitionSnapshot, TopicSnapshot, take_topic_snapshot
from tieringd.clock import wall_clock_ms
from tieringd.config import Config
from tieringd.daemon.assembly import upload_limits
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.manifest import PartitionManifest
from tieringd.policies.explanation import Explanation, TopicFacts, explain, why_idle
from tieringd.policies.segment_merge import MergingTerms, explain_merging

_COLUMNS = (
    "base_offset",
    "last_offset",
    "local_bytes",
    "archived_bytes",
    "place",
    "state",
    "reason",
    "next_step",
    "merging",
)


def explain_partition(
    topic: Annotated[str, typer.Argument(help="The topic's name.")],
    partition: Annotated[int, typer.Argument(help="The partition's number.", min=0)],
    config: ConfigFile,
    output: Format = OutputFormat.TABLE,
) -> None:
    """
    Show for each segment where it is, why, and what would upload, trim or delete it.

    Run this on the host of the broker that leads the partition: only that broker's daemon moves
    segments.
    """
    document = run_async(_explained(loaded(config), topic, partition))
    if output.is_data:
        print_document(document, output)
        return
    segments = document.pop("segments")
    print_fields(list(document.items()))
    typer.echo()
    print_rows(_COLUMNS, segments)


async def _explained(config: Config, topic: str, number: int) -> dict[str, Any]:
    snapshot = await take_topic_snapshot(config, topic, number=number)
    (one,) = snapshot.partitions
    log = one.log or _no_log(one)
    manifest = one.manifest or PartitionManifest.begin(one.partition, start_offset=log.first_offset or 0)
    facts = topic_facts(config, snapshot, one)
    found = explain(log, manifest, one.bounds, facts, now_ms=wall_clock_ms())
    daemon_says = (await waiting(config, topic)).get(number)
    merging = _merging(snapshot, log, manifest, one, idle_because=facts.idle_because)
    return (
        _document(snapshot, manifest, facts, found) | {"daemon_says": daemon_says} | _segments(found, merging)
    )


def topic_facts(config: Config, snapshot: TopicSnapshot, one: PartitionSnapshot) -> TopicFacts:
    """Return the settings and the state of a topic that decide about a partition's segments."""
    topic, limits = snapshot.config, upload_limits(config)
    idle_because = why_idle(
        is_written=topic.remote_write, is_paused=snapshot.is_paused, is_held=one.is_held, is_led=one.is_led
    )
    return TopicFacts(
        local_target=topic.local_target,
        hint_shape=topic.hint_shape,
        total=topic.total,
        delete_delay_ms=topic.retention_pace.delete_delay_ms,
        is_compact_only=topic.is_compact_only,
        reuploads_compacted=topic.reuploads_compacted,
        idle_because=idle_because or one.problem,
        share_group_hold=one.share_group_hold,
        upload_interval_ms=limits.max_interval_ms if limits.cuts_segments else None,
    )


def _no_log(one: PartitionSnapshot) -> LocalLog:
    name = one.partition
    return LocalLog(LocalPartition(name.topic_partition, name.topic_id, path="", log_dir=""), (), ())


def _document(
    snapshot: TopicSnapshot, manifest: PartitionManifest, facts: TopicFacts, found: Explanation
) -> dict[str, Any]:
    target = facts.local_target
    return {
        "topic": snapshot.key.topic,
        "topic_id": snapshot.key.topic_id,
        "partition": manifest.partition.partition,
        "storage_mode": snapshot.config.storage_mode.value,
        "local_target_ms": target.ms.enforced,
        "local_target_ms_source": target.ms.source,
        "local_target_bytes": target.bytes.enforced,
        "local_target_bytes_source": target.bytes.source,
        "total_retention_ms": facts.total.limit_ms,
        "total_retention_bytes": facts.total.limit_bytes,
        "archive_next_offset": manifest.next_offset,
        "published_local_start_offset": manifest.allowed_local_start_offset,
        "trim_offset": found.trim_offset,
        "trim_because": found.trim_because,
        "never_trimmed_because": found.never_trimmed_because or None,
        "expired_offset": found.expired_offset,
        "expired_because": found.expired_because,
        "nothing_goes_by_age_because": snapshot.clock_doubt or None,
    }


def _merging(
    snapshot: TopicSnapshot,
    log: LocalLog,
    manifest: PartitionManifest,
    one: PartitionSnapshot,
    *,
    idle_because: str,
) -> Mapping[int, str]:
    topic = snapshot.config
    terms = MergingTerms(topic.merging.is_enabled, topic.is_compacted, topic.merge_limits, idle_because)
    log_start_offset = one.bounds.log_start_offset if one.bounds else log.first_offset or 0
    return explain_merging(manifest, log, terms, log_start_offset=log_start_offset)


def _segments(found: Explanation, merging: Mapping[int, str]) -> dict[str, Any]:
    return {"segments": [asdict(one) | {"merging": merging.get(one.base_offset)} for one in found.segments]}
