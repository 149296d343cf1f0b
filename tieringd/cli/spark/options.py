"""Options that the commands of all jobs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tieringd.cli.options import ConfigFile, Format, OutputFormat, amount
from tieringd.config.units import DURATION, SIZE

__all__ = [
    "Conf",
    "ConfigFile",
    "DeleteAfter",
    "DryRun",
    "Format",
    "Master",
    "NamedTopics",
    "NoBroker",
    "OutputFormat",
    "ReportFile",
    "Topics",
    "duration",
    "size",
]


def duration(text: str) -> int:
    """
    Return an option's duration in milliseconds. A number other than 0 needs a unit.

    Without a unit it would count as milliseconds, and an operator who writes 7 for seven days would delete at
    once.

    Raises:
        typer.BadParameter: The text is not a duration with a unit.
    """
    _require_unit(text, example="d")
    return amount(DURATION)(text)


def size(text: str) -> int:
    """
    Return an option's size in bytes. A number other than 0 needs a unit.

    Without a unit it would count as bytes. An operator who writes 128 for 128 MiB files would get one or more
    files for each record.

    Raises:
        typer.BadParameter: The text is not a size with a unit.
    """
    _require_unit(text, example="MiB")
    return amount(SIZE)(text)


def _require_unit(text: str, *, example: str) -> None:
    if text.strip().isdecimal() and int(text):
        raise typer.BadParameter(f"{text} has no unit; write for example {text.strip()}{example}")


Master = Annotated[
    str | None,
    typer.Option(
        help="Where Spark runs: local[*] is this machine, and what holds without this option. "
        "Under spark-submit its own --master holds.",
        show_default=False,
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option(help="A property of Spark's, as key=value. May be given several times.", show_default=False),
]
ReportFile = Annotated[
    Path | None,
    typer.Option("--report", help="Write the report to this file as well, as JSON.", show_default=False),
]
Topics = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        "-t",
        help="Only topics of this name, or pattern such as 'orders-*'. May be given several times.",
        show_default=False,
    ),
]
NamedTopics = Annotated[
    list[str], typer.Argument(metavar="TOPICS", help="Names of topics, or patterns such as 'orders-*'.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Read as much, say what would go, and change nothing.")
]
NoBroker = Annotated[
    bool,
    typer.Option(
        "--no-broker",
        help="No broker has these topics any more: join what lies after the last trim as well. Where a topic "
        "is deleted in its cluster that is done anyway.",
    ),
]
DeleteAfter = Annotated[
    int | None,
    typer.Option(
        parser=duration,
        metavar="DURATION",
        help="Delete what was replaced at least so long ago, by this run or an earlier one; 0 is at once, "
        "also under readers. Without it the daemon that archives the topic deletes it, after its delay.",
        show_default=False,
    ),
]
