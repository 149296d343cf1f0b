"""
`tieringd space`: the use of the broker's disks, and what can be removed when one is full.

`plan` prints what the space manager would remove, phase by phase, and why the rest stays. `ballast` has the
commands of the ballast file.
"""

from __future__ import annotations

from typing import Any

import typer

from tieringd.cli.human import human_size
from tieringd.cli.options import (
    ConfigFile,
    DryRun,
    Format,
    OutputFormat,
    loaded,
    print_document,
    print_fields,
    print_rows,
    run_async,
)
from tieringd.config import Config
from tieringd.config.units import format_size
from tieringd.daemon.disks import ballast_of
from tieringd.daemon.space_preview import plan_space_once
from tieringd.metrics import Metrics
from tieringd.space.ballast import Ballast, BallastStatus
from tieringd.space.space_manager import SpaceReport

space_app = typer.Typer(help="Show the use of disk space, and handle the ballast file.", no_args_is_help=True)
ballast_app = typer.Typer(
    help="Show, create or delete the ballast file, which can be deleted when the disk is full.",
    no_args_is_help=True,
)


def plan(config: ConfigFile, output: Format = OutputFormat.TABLE) -> None:
    """Print what the space manager would let go now, without doing it."""
    documents = [_document(report) for report in run_async(plan_space_once(loaded(config)))]
    if output.is_data:
        print_document(documents, output)
        return
    for document in documents:
        _print(document)


def _document(report: SpaceReport) -> dict[str, Any]:
    space, found = report.space, report.plan
    assert found is not None, "a report that was asked for a plan holds one"
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
        f"{', '.join(document['log_dirs'])}: the logs use {human_size(document['log_used_bytes'])} of "
        f"their area of {human_size(document['log_area_bytes'])}, on a disk of "
        f"{human_size(document['disk_bytes'])}"
    )
    if document["cache_directory"] is not None:
        typer.echo(
            f"{document['cache_directory']}: the cache uses {human_size(document['cache_used_bytes'])} of "
            f"at most {human_size(document['cache_limit_bytes'])}"
        )
    if document["cache_excess_bytes"]:
        typer.echo(
            f"the cache gives up {human_size(document['cache_excess_bytes'])} before any log is trimmed"
        )
    if not document["wanted_bytes"]:
        typer.echo("no log has to be trimmed for space")
    for phase in document["phases"]:
        if phase["removals"]:
            typer.echo(f"\nphase {phase['phase']}: {phase['title']} ({human_size(phase['size_bytes'])})")
            print_rows(list(phase["removals"][0]), phase["removals"])
    if document["short_by_bytes"]:
        typer.echo(
            f"\n{human_size(document['short_by_bytes'])} more are needed, and no other segment may be trimmed"
        )
    if document["kept"]:
        typer.echo("\nwhat stays")
        print_rows(list(document["kept"][0]), document["kept"])


space_app.command()(plan)
space_app.add_typer(ballast_app, name="ballast")


@ballast_app.command()
def show(config: ConfigFile, output: Format = OutputFormat.TABLE) -> None:
    """Show the path of the ballast file and its size."""
    loaded_config = loaded(config)
    status = run_async(_show(loaded_config))
    document = {
        "path": status.path,
        "enabled": loaded_config.tune_ballast_file,
        "size_bytes": status.size_bytes,
        "held_bytes": status.held_bytes,
        "release_when_degraded": loaded_config.ballast_release_when_degraded,
    }
    if output.is_data:
        print_document(document, output)
    else:
        print_fields(list(document.items()))


@ballast_app.command()
def create(config: ConfigFile, dry_run: DryRun = False) -> None:
    """Create the ballast file now, if its disk has room for it."""
    if dry_run:
        found = run_async(_show(loaded(config)))
        typer.echo(
            f"{found.path} holds {format_size(found.held_bytes)}, and would hold "
            f"{format_size(found.size_bytes)} if its disk has room; nothing was changed"
        )
        return
    status = run_async(_create(loaded(config)))
    typer.echo(f"{status.path} holds {format_size(status.held_bytes)}")


@ballast_app.command()
def release(config: ConfigFile, dry_run: DryRun = False) -> None:
    """Delete the ballast file now. A daemon that keeps one creates it again when there is room."""
    if dry_run:
        found = run_async(_show(loaded(config)))
        typer.echo(f"{format_size(found.held_bytes)} would be freed, of {found.path}; nothing was changed")
        return
    freed_bytes = run_async(_release(loaded(config)))
    typer.echo(f"{format_size(freed_bytes)} were freed" if freed_bytes else "there is no ballast file")


async def _show(config: Config) -> BallastStatus:
    return await _ballast(config).show()


async def _create(config: Config) -> BallastStatus:
    return await _ballast(config).create()


async def _release(config: Config) -> int:
    return await _ballast(config).release()


def _ballast(config: Config) -> Ballast:
    return ballast_of(config, Metrics())
