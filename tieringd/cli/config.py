"""`tieringd config`: check and show a configuration before it is used; print its schema and reference."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tieringd.cli.options import Format, OutputFormat, loaded, print_document, print_json
from tieringd.config import Config
from tieringd.config.effective import Setting, effective_settings
from tieringd.config.load import load_with_origins
from tieringd.config.reference import json_schema, render
from tieringd.config.yaml_source import dotted

config_app = typer.Typer(help="Check and explain a configuration file.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(help="The configuration file.", envvar="TIERINGD_CONFIG")]
ArchiveOnly = Annotated[
    bool,
    typer.Option(
        "--archive-only", help="The file is for `tieringd gateway --archive-only`: no broker is needed."
    ),
]
_COLUMNS = 79


@config_app.callback()
def _group() -> None:
    """Check and explain a configuration file."""


@config_app.command()
def check(file: File, archive_only: ArchiveOnly = False) -> None:
    """Report every fault at once, with its line; exit 0 when there is none."""
    _remark(loaded(file, needs_broker=not archive_only))
    typer.echo(f"{file}: ok")


@config_app.command()
def show(file: File, output: Format = OutputFormat.TABLE, archive_only: ArchiveOnly = False) -> None:
    """Print every property in effect and where its value came from; secrets are masked."""
    found = load_with_origins(file, environ=os.environ, needs_broker=not archive_only)
    settings = list(effective_settings(found))
    if output.is_data:
        print_document({dotted(one.place): _document(one) for one in settings}, output)
    else:
        _print_settings(settings)
    _remark(found.config)


@config_app.command()
def schema() -> None:
    """Print a JSON schema of the file, for editors."""
    print_json(json_schema())


@config_app.command()
def docs() -> None:
    """Print the reference page of all properties, in Markdown."""
    typer.echo(render(), nl=False)


def _remark(config: Config) -> None:
    for warning in config.warnings:
        typer.echo(f"warning: {warning}", err=True)
    for note in config.notes:
        typer.echo(f"note: {note}", err=True)


def _document(one: Setting) -> dict[str, Any]:
    document: dict[str, Any] = {"value": one.value, "origin": one.source}
    if one.line is not None:
        document["line"] = one.line
    if one.variables:
        document["variables"] = list(one.variables)
    if one.inferred_from:
        document["inferred_from"] = list(one.inferred_from)
    return document


def _print_settings(settings: Sequence[Setting]) -> None:
    """Print a line for each setting; the origin goes to a line of its own where both do not fit a screen."""
    names = max(len(dotted(one.place)) for one in settings)
    values = min(max(len(one.shown) for one in settings), _COLUMNS - names - len("  " + "  default"))
    for one in settings:
        name = f"{dotted(one.place):<{names}}"
        line = f"{name}  {one.shown:<{values}}  {one.origin}"
        if len(line) > _COLUMNS:
            typer.echo(f"{name}  {one.shown}")
            line = f"{one.origin:>{min(_COLUMNS, names + 2 + len(one.origin))}}"
        typer.echo(line)
