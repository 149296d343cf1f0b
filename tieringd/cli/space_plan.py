"""`tieringd space plan`: what would be let go for space, phase by phase, and why the rest stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from tieringd.cli.options import ConfigFile, Format, OutputFormat, loaded, print_json, print_table, run_async
from tieringd.config.units import format_size
from tieringd.daemon.space_look import plan_space_once

if TYPE_CHECKING:
    from tieringd.space.space_manager import SpaceReport


def plan(config: ConfigFile, output: Format = OutputFormat.TEXT) -> None:
    """Print what the space manager would let go now, without doing it."""
    documents = [_document(report) for report in run_async(plan_space_once(loaded(config)))]
    if output is OutputFormat.JSON:
        print_json(documents)
        return
    for document in documents:
        _print(document)


def _document(report: SpaceReport) -> dict[str, Any]:
    space, found = report.space, report.plan
    assert found is not None, "a plan that somebody asked for is always made"
    return {
        "log_dirs": list(space.log_dirs),
        "disk_bytes": space.total_bytes,
        "reserved_bytes": space.areas.reserved_bytes,
        "log_area_bytes": space.areas.log_bytes,
        "log_used_bytes": space.log_used_bytes,
        "cache_directory": space.cache_dir,
        "cache_area_bytes": space.areas.cache_bytes,
        "cache_limit_bytes": space.cache_limit_bytes,
        "cache_used_bytes": space.cache_used_bytes,
        "cache_excess_bytes": space.cache_excess_bytes,
        "leaving_bytes": found.leaving_bytes,
        "excess_bytes": found.excess_bytes,
        "wanted_bytes": found.wanted_bytes,
        "removed_bytes": found.removed_bytes,
        "short_by_bytes": found.short_by_bytes,
        "phases": [
            {
                "phase": phase.phase.value,
                "title": phase.phase.title,
                "size_bytes": phase.size_bytes,
                "removals": [
                    {
                        "topic": removal.topic_partition.topic,
                        "partition": removal.topic_partition.partition,
                        "before_offset": removal.next_offset,
                        "segments": removal.segment_count,
                        "size_bytes": removal.size_bytes,
                    }
                    for removal in phase.removals
                ],
            }
            for phase in found.phases
        ],
        "kept": [
            {
                "topic": kept.topic_partition.topic,
                "partition": kept.topic_partition.partition,
                "size_bytes": kept.size_bytes,
                "because": kept.because,
            }
            for kept in found.kept
        ],
    }


def _print(document: dict[str, Any]) -> None:
    typer.echo(
        f"{', '.join(document['log_dirs'])}: the logs take {format_size(document['log_used_bytes'])}, "
        f"and {format_size(document['log_area_bytes'])} of the disk's {format_size(document['disk_bytes'])} "
        "are theirs"
    )
    if document["cache_directory"] is not None:
        typer.echo(
            f"{document['cache_directory']}: the cache takes {format_size(document['cache_used_bytes'])}, "
            f"and may hold {format_size(document['cache_limit_bytes'])} now"
        )
    if document["cache_excess_bytes"]:
        typer.echo(f"the cache gives up {format_size(document['cache_excess_bytes'])} before any log")
    if not document["wanted_bytes"]:
        typer.echo("nothing has to go for space")
    for phase in document["phases"]:
        if phase["removals"]:
            typer.echo(f"\nphase {phase['phase']}: {phase['title']} ({format_size(phase['size_bytes'])})")
            columns = list(phase["removals"][0])
            print_table(columns, [[row[column] for column in columns] for row in phase["removals"]])
    if document["short_by_bytes"]:
        typer.echo(f"\n{format_size(document['short_by_bytes'])} more would have to go, and nothing more may")
    if document["kept"]:
        typer.echo("\nwhat stays")
        columns = list(document["kept"][0])
        print_table(columns, [[row[column] for column in columns] for row in document["kept"]])
