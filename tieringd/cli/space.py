"""`tieringd space`: the disks beside the broker, and what can be given up when one is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tieringd.cli.options import ConfigFile, Format, OutputFormat, loaded, print_fields, print_json, run_async
from tieringd.cli.space_plan import plan
from tieringd.config.units import format_size
from tieringd.daemon.disks import ballast_of
from tieringd.metrics import Metrics

if TYPE_CHECKING:
    from tieringd.config import Config
    from tieringd.space.ballast import Ballast, BallastStatus

space_app = typer.Typer(help="Disk space: what takes it, and the ballast file.", no_args_is_help=True)
ballast_app = typer.Typer(help="The file that can be deleted when the disk is full.", no_args_is_help=True)
space_app.command()(plan)
space_app.add_typer(ballast_app, name="ballast")


@ballast_app.command()
def show(config: ConfigFile, output: Format = OutputFormat.TEXT) -> None:
    """Show where the ballast file is or would be, and how much of it there is."""
    loaded_config = loaded(config)
    status = run_async(_show(loaded_config))
    document = {
        "path": status.path,
        "enabled": loaded_config.tune_ballast_file,
        "size_bytes": status.size_bytes,
        "held_bytes": status.held_bytes,
        "release_when_degraded": loaded_config.ballast_release_when_degraded,
    }
    if output is OutputFormat.JSON:
        print_json(document)
    else:
        print_fields(list(document.items()))


@ballast_app.command()
def create(config: ConfigFile) -> None:
    """Make the ballast file now, if its disk has room for it."""
    status = run_async(_create(loaded(config)))
    typer.echo(f"{status.path} holds {format_size(status.held_bytes)}")


@ballast_app.command()
def release(config: ConfigFile) -> None:
    """Delete the ballast file now. A daemon that keeps one makes it again when there is room."""
    freed_bytes = run_async(_release(loaded(config)))
    typer.echo(f"{format_size(freed_bytes)} are free again" if freed_bytes else "there is no ballast file")


async def _show(config: Config) -> BallastStatus:
    return await _ballast(config).show()


async def _create(config: Config) -> BallastStatus:
    return await _ballast(config).create()


async def _release(config: Config) -> int:
    return await _ballast(config).release()


def _ballast(config: Config) -> Ballast:
    return ballast_of(config, Metrics())
