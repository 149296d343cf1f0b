"""
`tieringd topic describe-storage`: a topic's storage in the sections and fields of `rpk`.

As with `rpk`, last offsets are inclusive. Two of rpk's fields are left out: the number of replicas, and
whether a manifest waits for its upload, since tieringd stores the manifest with each upload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from tieringd.cli.human import human_size
from tieringd.cli.options import (
    ConfigFile,
    Format,
    OutputFormat,
    loaded,
    print_document,
    print_fields,
    print_table,
    run_async,
)
from tieringd.cli.topic_snapshot import PartitionSnapshot, TopicSnapshot, take_topic_snapshot
from tieringd.clock import wall_clock_ms
from tieringd.model.human_units import span
from tieringd.model.manifest import PartitionManifest
from tieringd.policies.total_retention import total_bytes

_MODES = {
    (False, False): "disabled",
    (True, False): "write_only",
    (False, True): "read_only",
    (True, True): "full",
}
_OFFSETS = {
    "PARTITION": "partition",
    "CLOUD-START": "cloud_log_start_offset",
    "CLOUD-LAST": "cloud_log_last_offset",
    "LOCAL-START": "local_log_start_offset",
    "LOCAL-LAST": "local_log_last_offset",
}
_SIZES = {
    "PARTITION": "partition",
    "CLOUD-BYTES": "cloud_log_size_bytes",
    "LOCAL-BYTES": "local_log_size_bytes",
    "TOTAL-BYTES": "total_log_size_bytes",
    "CLOUD-SEGMENTS": "cloud_log_segment_count",
    "LOCAL-SEGMENTS": "local_log_segment_count",
}
_SYNC = {
    "PARTITION": "partition",
    "LAST-SEGMENT-UPLOAD": "ms_since_last_segment_upload",
    "LAST-MANIFEST-UPLOAD": "ms_since_last_manifest_upload",
}


def describe_storage(
    topic: Annotated[str, typer.Argument(help="The topic's name.")],
    config: ConfigFile,
    print_all: Annotated[bool, typer.Option("--print-all", "-a", help="Print all sections.")] = False,
    print_summary: Annotated[
        bool, typer.Option("--print-summary", "-s", help="Print the summary: mode and last upload.")
    ] = False,
    print_offset: Annotated[
        bool, typer.Option("--print-offset", "-o", help="Print the first and last offsets.")
    ] = False,
    print_size: Annotated[
        bool, typer.Option("--print-size", "-z", help="Print the sizes and segment counts.")
    ] = False,
    print_sync: Annotated[
        bool, typer.Option("--print-sync", "-y", help="Print the times of the last uploads.")
    ] = False,
    human_readable: Annotated[
        bool, typer.Option("--human-readable", "-H", help="Print times and sizes in readable units.")
    ] = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """
    Show what this broker and the bucket hold of a topic. Without options: the summary and the sizes.

    Local values are those of the replicas on this host. JSON output always has all sections. Where a replica
    cannot be read, standard error says why, and the exit code is 1.
    """
    snapshot = run_async(take_topic_snapshot(loaded(config), topic))
    rows = [storage_row(one, now_ms=wall_clock_ms()) for one in snapshot.partitions]
    document = {**_summary(snapshot, rows), "partitions": rows}
    if not (print_summary or print_offset or print_size or print_sync):
        print_summary, print_size = True, True
    sections = (
        ("OFFSETS", _OFFSETS, print_offset),
        ("SIZE", _SIZES, print_size),
        ("SYNC", _SYNC, print_sync),
    )
    if output.is_data:
        print_document(document, output)
    else:
        if print_summary or print_all:
            _print_summary(document, is_human=human_readable)
        for title, columns, is_wanted in sections:
            if is_wanted or print_all:
                _print_section(title, columns, rows, is_human=human_readable)
    problems = [f"{topic}-{row['partition']}: {row['problem']}" for row in rows if row["problem"]]
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        raise typer.Exit(1)


def storage_row(one: PartitionSnapshot, *, now_ms: int) -> dict[str, Any]:
    """Return one partition's fields, named as in Redpanda's admin API; None where a value is unknown."""
    log, bounds = one.log, one.bounds
    local_start = bounds.log_start_offset if bounds else log.first_offset if log else None
    local_last = None
    if bounds is not None and bounds.log_end_offset > bounds.log_start_offset:
        local_last = bounds.log_end_offset - 1
    return {
        "partition": one.partition.partition,
        **_cloud_fields(one.manifest, now_ms=now_ms),
        "local_log_start_offset": local_start,
        "local_log_last_offset": local_last,
        "local_log_size_bytes": log.size_bytes if log else None,
        "local_log_segment_count": len(log.segments) if log else None,
        "total_log_size_bytes": _total_bytes(one, local_start or 0),
        "problem": one.problem or None,
    }


def _cloud_fields(manifest: PartitionManifest | None, *, now_ms: int) -> dict[str, Any]:
    rows = manifest.segments if manifest else None
    has_any = manifest is not None and manifest.last_offset is not None
    return {
        "cloud_log_start_offset": manifest.start_offset if manifest and has_any else None,
        "cloud_log_last_offset": manifest.last_offset if manifest else None,
        "cloud_log_size_bytes": manifest.size_bytes if manifest else 0,
        "cloud_log_segment_count": manifest.segment_count if manifest else 0,
        "ms_since_last_segment_upload": now_ms - rows[len(rows) - 1].uploaded_at_ms if rows else None,
        "ms_since_last_manifest_upload": now_ms - manifest.committed_at_ms if manifest else None,
    }


def _total_bytes(one: PartitionSnapshot, local_start: int) -> int:
    """Return the bytes of both tiers. Offsets that are in both count once."""
    if one.manifest is None:
        return one.log.size_bytes if one.log else 0
    if one.log is None:
        return one.manifest.size_bytes
    return total_bytes(one.manifest, one.log, log_start_offset=local_start)


def _summary(snapshot: TopicSnapshot, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    uploads = [
        row[name]
        for row in rows
        for name in ("ms_since_last_segment_upload", "ms_since_last_manifest_upload")
        if row[name] is not None
    ]
    return {
        "topic": snapshot.key.topic,
        "topic_id": snapshot.key.topic_id,
        "cloud_storage_mode": _MODES[snapshot.config.remote_write, snapshot.config.remote_read],
        "ms_since_last_upload": min(uploads, default=None),
    }


def _print_summary(document: dict[str, Any], *, is_human: bool) -> None:
    typer.echo("SUMMARY")
    print_fields(
        [
            ("NAME", document["topic"]),
            ("PARTITIONS", len(document["partitions"])),
            ("CLOUD-STORAGE-MODE", document["cloud_storage_mode"]),
            (
                "LAST-UPLOAD",
                _shown("ms_since_last_upload", document["ms_since_last_upload"], is_human=is_human),
            ),
        ]
    )
    typer.echo()


def _print_section(
    title: str, columns: dict[str, str], rows: Sequence[dict[str, Any]], *, is_human: bool
) -> None:
    typer.echo(title)
    print_table(
        tuple(columns),
        [[_shown(name, row[name], is_human=is_human) for name in columns.values()] for row in rows],
    )
    typer.echo()


def _shown(name: str, value: int | None, *, is_human: bool) -> int | str | None:
    if value is None or not is_human:
        return value
    if name.endswith("_bytes"):
        return human_size(value)
    return f"{span(value)} ago" if name.startswith("ms_since") else value
