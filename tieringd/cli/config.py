"""`tieringd config`: look at a configuration before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tieringd.cli.options import loaded

config_app = typer.Typer(help="Check a configuration file.", no_args_is_help=True)


@config_app.callback()
def _group() -> None:
    """Check a configuration file."""


@config_app.command()
def check(file: Annotated[Path, typer.Argument(help="The configuration file.")]) -> None:
    """Report every fault at once, with its line; exit 0 when there is none."""
    config = loaded(file)
    for warning in config.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"{file}: ok")
