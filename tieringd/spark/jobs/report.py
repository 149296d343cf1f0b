"""The report of a job: figures, tables, and faults for an operator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = int | float | str | None


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a report."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    is_detail: bool = False
    """Whether the table is for programs only; the text report leaves it out."""


@dataclass(frozen=True, slots=True)
class Report:
    """
    The outcome of a job.

    Figures have their unit in their name. `faults` are problems that the job found, or work that it left
    undone. With faults the command exits with 1.
    """

    job: str
    figures: Mapping[str, Value]
    tables: tuple[Table, ...] = ()
    faults: tuple[str, ...] = field(default=())

    def as_json(self) -> str:
        """Return the whole report as a JSON document; each table is a list of objects."""
        tables = {
            table.title: [dict(zip(table.columns, row, strict=True)) for row in table.rows]
            for table in self.tables
        }
        document = {
            "job": self.job,
            "figures": dict(self.figures),
            "tables": tables,
            "faults": list(self.faults),
        }
        return json.dumps(document, indent=2)

    def as_text(self) -> str:
        """Return the report as text for people."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        width = max((len(name) for name in self.figures), default=0)
        for name, value in self.figures.items():
            yield f"{name.ljust(width)}  {_text(value)}"
        for table in self.tables:
            if not table.rows or table.is_detail:
                continue
            yield ""
            yield table.title
            yield from _aligned([table.columns, *([_text(value) for value in row] for row in table.rows)])
        if self.faults:
            yield ""
            yield from (f"fault: {fault}" for fault in self.faults)


def _text(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        # A rate of a few thousandths must not print as 0.000.
        return f"{value:.3f}" if abs(value) >= 1 or not value else f"{value:.3g}"
    return str(value)


def _aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    lines = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
