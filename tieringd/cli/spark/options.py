"""Options that the commands of all jobs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tieringd.cli.options import amount
from tieringd.config.units import DURATION, SIZE


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
        help="The Spark master. Default: local[*], this machine. Under spark-submit, set spark-submit's own "
        "--master instead.",
        show_default=False,
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option(help="A property of Spark, as key=value. May be given several times.", show_default=False),
]
ReportFile = Annotated[
    Path | None,
    typer.Option("--report", help="Also write the report to this file, as JSON.", show_default=False),
]
Topics = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        "-t",
        help="The former way to choose topics: a name or a pattern; may be given several times.",
        show_default=False,
    ),
]
NamedTopics = Annotated[
    list[str], typer.Argument(metavar="TOPICS", help="Names of topics, or patterns such as 'orders-*'.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Read the same data, report what would change, and change nothing.")
]
NoBroker = Annotated[
    bool,
    typer.Option(
        "--no-broker",
        help="No broker has these topics any more: merge segments after the last trim as well. Not needed "
        "for a topic that was deleted in its cluster.",
    ),
]
DeleteAfter = Annotated[
    int | None,
    typer.Option(
        parser=duration,
        metavar="DURATION",
        help="Delete replaced objects that are at least this old, of this run or an earlier one; 0 deletes "
        "them at once, also under active readers. Without it, the daemon that archives the topic "
        "deletes them after its delay.",
        show_default=False,
    ),
]
