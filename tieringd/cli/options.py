"""Options and helpers that several commands share."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, TypeVar

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tieringd.config import Config, load_config
from tieringd.config.units import Quantity, parse_quantity
from tieringd.errors import ObjectNotFound, TieringError
from tieringd.formats.object_keys import TopicKey

T = TypeVar("T")
_SECONDS_BETWEEN = 2.0


class OutputFormat(StrEnum):
    """How a command prints data."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    TEXT = "text"
    """The former name of TABLE."""

    @property
    def is_data(self) -> bool:
        """Return whether programs are to read the output."""
        return self in {OutputFormat.JSON, OutputFormat.YAML}


NO_MANIFEST = (
    "it has no manifest, so nothing of it can be read. If it is lost, `tieringd spark rebuild` makes "
    "a new one from the objects. If the partition is new, its leader's daemon stores the first one"
)
"""The fault of a partition that its topic counts, and that has no manifest."""
ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", help="The configuration file.", envvar="TIERINGD_CONFIG")
]
AdminHost = Annotated[
    str | None,
    typer.Option(
        "--admin-host",
        help="Where the admin page listens, in place of admin.host; for containers.",
        envvar="TIERINGD_ADMIN_HOST",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the same, say what would change, and change nothing.")
]
FromCluster = Annotated[
    str | None,
    typer.Option("--from-cluster", help="The archived cluster, if the bucket has topics of several."),
]
TopicPatterns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TOPICS]...",
        help="Names of topics, or patterns such as 'orders-*'; without any, all topics.",
        show_default=False,
    ),
]
Format = Annotated[
    OutputFormat,
    typer.Option("--format", "-f", help="Print a table, JSON or YAML; text is the former name of table."),
]


def amount(quantity: Quantity) -> Callable[[str], int]:
    """Return a parser for a size or duration option. It gives bytes or milliseconds, never negative."""

    def parse(text: str) -> int:
        try:
            value = parse_quantity(text, quantity)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if value < 0:
            raise typer.BadParameter(f"{text} is negative")
        return value

    return parse


def is_chosen(name: str, patterns: Sequence[str] | None) -> bool:
    """Return whether a topic's name matches one of *patterns*; without any, each name does."""
    return not patterns or any(fnmatchcase(name, one) for one in patterns)


def names_noted(
    on_fault: Callable[[TopicKey, TieringError], None], names: set[str]
) -> Callable[[TopicKey, TieringError], None]:
    """Return an *on_fault* for unreadable topics that also adds the name of each one to *names*."""

    def note(key: TopicKey, error: TieringError) -> None:
        names.add(key.topic)
        on_fault(key, error)

    return note


def require_matched(patterns: Sequence[str] | None, names: Collection[str]) -> None:
    """
    Check that each of *patterns* matches one of *names*. One that matches none is most likely mistyped.

    Raises:
        ObjectNotFound: Some match none; the message has them.
    """
    missing = [one for one in patterns or () if not any(is_chosen(name, [one]) for name in names)]
    if missing:
        raise ObjectNotFound(
            f"the bucket holds no topic named {', '.join(missing)}",
            hint="`tieringd archive topics` lists what it holds",
        )


def moment(text: str) -> int:
    """
    Return an option's time in milliseconds since the epoch: ISO 8601, or that number itself.

    A time without a zone is in UTC, as all times that commands print.

    Raises:
        typer.BadParameter: It is neither.
    """
    if re.fullmatch(r"-?\d{9,}|-?\d{1,3}|0", text):
        return int(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"{text} is no time; write 2026-01-31T12:00:00Z, or milliseconds since the epoch"
        ) from error
    return round((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)


def loaded(path: Path, *, needs_broker: bool = True) -> Config:
    """Return the configuration in *path*; ${NAME} is replaced from the environment."""
    return load_config(path, environ=os.environ, needs_broker=needs_broker)


def with_admin_host(config: Config, host: str | None) -> Config:
    """Return *config* with *host* as the address of its admin page; None or an empty text changes nothing."""
    if not host:
        return config
    return config.model_copy(update={"admin": config.admin.model_copy(update={"host": host})})


@contextmanager
def unreadable_topics_reported() -> Iterator[Callable[[TopicKey, TieringError], None]]:
    """
    Yield what to call for an archived topic that cannot be read.

    Each one is reported on standard error, and the command goes on with the others. It then ends with exit
    code 1.
    """
    left_out: set[TopicKey] = set()

    def report(key: TopicKey, error: TieringError) -> None:
        if key not in left_out:
            typer.echo(f"topic {key.topic} of cluster {key.cluster} is left out: {error}", err=True)
        left_out.add(key)

    yield report
    if left_out:
        typer.echo(
            f"{len(left_out)} topics are left out. `tieringd archive scrub --fix` mends what it can; "
            "`tieringd spark rebuild` makes manifests anew from the objects",
            err=True,
        )
        raise typer.Exit(1)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run *work* on a loop of its own; the standard loop reads from stores faster than uvloop."""
    return asyncio.run(work)


def show_progress(text: str) -> None:
    """Print a line of progress on standard error, if a person watches: if that is a terminal."""
    if sys.stderr.isatty():
        typer.echo(text, err=True)


async def counted(
    items: AsyncIterator[T],
    noun: str,
    *,
    show: Callable[[str], None] = show_progress,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[T]:
    """
    Pass *items* on, and show every two seconds how many there were.

    Args:
        items: What a command reads from the bucket, which may take minutes.
        noun: What the items are, in the plural.
        show: Takes a line of text.
        clock: Seconds that never go back.
    """
    shown_at, count = clock(), 0
    async for one in items:
        count += 1
        if clock() - shown_at >= _SECONDS_BETWEEN:
            shown_at = clock()
            show(f"{count} {noun} read")
        yield one


def print_json(document: object) -> None:
    """Print *document* as JSON on standard output."""
    typer.echo(json.dumps(document, indent=2))


def print_document(document: object, output: OutputFormat) -> None:
    """Print *document* on standard output as YAML where *output* says so, else as JSON."""
    if output is OutputFormat.YAML:
        # Through JSON: YAML has tags of its own for tuples and enumerations, which no reader expects.
        plain = json.loads(json.dumps(document))
        typer.echo(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), nl=False)
    else:
        print_json(document)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """
    Print *rows* under *columns*, numbers flush right. Nothing is ever cut to a width.

    Where a terminal is too narrow for the table, each row is a block of lines: a name and its value. Piped
    output is always a table.
    """
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    console = Console()
    if console.is_terminal and _table_width(columns, cells) > console.width:
        _print_blocks(columns, cells, console.width)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, column in enumerate(columns):
        is_number = all(isinstance(row[position], int) for row in rows) and bool(rows)
        table.add_column(Text(column), justify="right" if is_number else "left", no_wrap=True)
    for row in cells:
        # Text, since a string with brackets would be markup.
        table.add_row(*(Text(cell) for cell in row))
    console = console if console.is_terminal else Console(width=10_000)
    console.print(table, soft_wrap=True)


def _table_width(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    widths = [max([len(column), *(len(row[at]) for row in cells)]) for at, column in enumerate(columns)]
    return sum(widths) + 2 * (len(widths) - 1)


def _print_blocks(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> None:
    names = max(len(column) for column in columns)
    indent = " " * (names + 2)
    for number, row in enumerate(cells):
        if number:
            typer.echo()
        for column, cell in zip(columns, row, strict=True):
            # A long word, such as a key, stays whole so that it can be copied.
            lines = wrap(cell, max(20, width - len(indent)), break_long_words=False, break_on_hyphens=False)
            typer.echo(f"{column:<{names}}  {lines[0] if lines else ''}".rstrip())
            for line in lines[1:]:
                typer.echo(f"{indent}{line}")


def print_rows(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Print the values of *rows* under the names in *columns*."""
    print_table(columns, [[row[column] for column in columns] for row in rows])


def print_listing(columns: Sequence[str], rows: Sequence[Mapping[str, object]], output: OutputFormat) -> None:
    """Print *rows* as data, or their *columns* as a table."""
    if output.is_data:
        print_document(rows, output)
    else:
        print_rows(columns, rows)


def print_fields(fields: Sequence[tuple[str, object]]) -> None:
    """Print names and values in two columns; None prints as `-`."""
    width = max((len(name) for name, _ in fields), default=0)
    for name, value in fields:
        typer.echo(f"{name:<{width}}  {'-' if value is None else value}")
