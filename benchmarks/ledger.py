"""
The figures that are kept, and what a new measurement says about them. Pure but for the file.

`benchmarks/ledger.json` holds one entry for each figure: its value, what it was measured with, and
how far a quick run may be away from it by chance. `benchmarks.figures` measures and compares.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

LEDGER: Final = Path(__file__).parent / "ledger.json"


class Against(StrEnum):
    """What a new value is compared with."""

    LEDGER = "ledger"
    """The recorded value: for ratios to a peer in the same run, and for what is counted."""
    BASE = "base"
    """The previous commit, measured in turns with this one: for seconds, CPU and memory."""
    NOTHING = "nothing"
    """It is only shown: a ratio of the same run stands for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One entry of the ledger."""

    benchmark: str
    """The module below `benchmarks` that measures it."""
    name: str
    """Name of the figure in the benchmark's `--json` file."""
    value: float
    unit: str
    higher_is_better: bool
    noise_share: float
    """Share of the value up to which a change is no loss and no gain."""
    against: Against
    bound: float | None = None
    """What was asked of it; None where nothing was."""
    is_in_quick_run: bool = True
    """False where only the whole benchmark gives it."""
    commit: str
    """The commit that was measured; for values from docs/performance.md, the one that wrote them there."""
    machine: str
    command: str
    note: str = ""

    def worse_by(self, value: float, reference: float) -> float:
        """Return how much worse *value* is than *reference*, as a share; negative where it is better."""
        change = reference - value if self.higher_is_better else value - reference
        scale = abs(reference) or abs(self.value)
        return change / scale if scale else 0.0

    def is_lost(self, value: float, reference: float) -> bool:
        """Say whether *value* is worse than *reference* by more than noise."""
        return self.worse_by(value, reference) > self.noise_share

    def breaks_bound(self, value: float) -> bool:
        """Say whether *value* is worse than what was asked."""
        return self.bound is not None and self.worse_by(value, self.bound) > 0


class Verdict(StrEnum):
    """What a comparison found."""

    SAME = "same"
    GAIN = "gain"
    LOSS = "LOSS"
    MISSING = "MISSING"
    """The run did not give a figure that the ledger names."""
    NEW = "new"
    """The previous commit does not measure it."""
    SHOWN = "shown"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure before and after."""

    figure: Figure
    before: float | None
    after: float | None
    verdict: Verdict
    reason: str = ""

    @property
    def has_failed(self) -> bool:
        """Say whether the change may not pass."""
        return self.verdict in {Verdict.LOSS, Verdict.MISSING}


def compare(figure: Figure, *, base: float | None, after: float | None) -> Comparison:
    """
    Compare one figure.

    Args:
        figure: What the ledger says.
        base: The previous commit's value from the same run, where there is one.
        after: This commit's value; None where the run did not give it.
    """
    before = base if figure.against is Against.BASE else figure.value
    if after is None or isnan(after):
        return Comparison(figure, before, None, Verdict.MISSING, "the benchmark no longer gives it")
    broken = f"asked was {figure.bound:g}" if figure.breaks_bound(after) else ""
    if before is None or figure.against is Against.NOTHING:
        verdict = Verdict.SHOWN if figure.against is Against.NOTHING else Verdict.NEW
        return Comparison(figure, before, after, verdict, broken)
    if figure.is_lost(after, before):
        if (
            figure.against is Against.LEDGER
            and base is not None
            and _was_lost(figure, base=base, after=after)
        ):
            reason = f"the previous commit gives {base:.4g} now: this run differs, or it slipped earlier"
            return Comparison(figure, before, after, Verdict.SAME, reason)
        return Comparison(figure, before, after, Verdict.LOSS, broken)
    if figure.against is Against.BASE:
        if crossed := _line_crossed(figure, before=before, after=after):
            return Comparison(figure, before, after, Verdict.LOSS, crossed)
        if figure.is_lost(after, figure.value):
            broken = f"{figure.value:g} at {figure.commit}: this machine is slower now, or it slipped earlier"
    is_gain = figure.worse_by(after, before) < -figure.noise_share
    return Comparison(figure, before, after, Verdict.GAIN if is_gain else Verdict.SAME, broken)


def _was_lost(figure: Figure, *, base: float, after: float) -> bool:
    """Say whether *base* of the same run is as far from the ledger, so that this change lost nothing."""
    return figure.is_lost(base, figure.value) and not figure.is_lost(after, base)


def _line_crossed(figure: Figure, *, before: float, after: float) -> str:
    """
    Return the line that *before* kept and *after* does not; empty where there is none.

    Losses within noise add up over commits: the one that crosses a line fails.
    """
    if figure.breaks_bound(after) and not figure.breaks_bound(before):
        return f"asked was {figure.bound:g}, and it was kept before"
    if figure.is_lost(after, figure.value) and not figure.is_lost(before, figure.value):
        return f"slipped little by little from {figure.value:g} at {figure.commit}"
    return ""


def compare_all(
    ledger: Iterable[Figure],
    *,
    base: Mapping[str, Mapping[str, float]],
    after: Mapping[str, Mapping[str, float]],
    is_quick: bool,
) -> list[Comparison]:
    """
    Compare the figures of the benchmarks that ran, in the ledger's order.

    Args:
        ledger: All figures.
        base: By benchmark and name, the previous commit's values of the same run.
        after: Likewise, this commit's values; a benchmark that is not in it did not run.
        is_quick: Whether the benchmarks ran with `--quick`.
    """
    return [
        compare(
            figure,
            base=base.get(figure.benchmark, {}).get(figure.name),
            after=after[figure.benchmark].get(figure.name),
        )
        for figure in ledger
        if figure.benchmark in after and (figure.is_in_quick_run or not is_quick)
    ]


def needs_base(ledger: Iterable[Figure], benchmark: str) -> bool:
    """Say whether a benchmark has a figure that only the previous commit in the same run can judge."""
    return any(one.benchmark == benchmark and one.against is Against.BASE for one in ledger)


def values_of(document: Mapping[str, Any]) -> dict[str, float]:
    """
    Return the values in a benchmark's `--json` document, by name.

    The figures of one alternative are `alternative: field`. The part in front of a single figure
    (`stalls: loop_stall_ms`) is left out.
    """
    values: dict[str, float] = {}
    for name, value in document["figures"].items():
        if isinstance(value, dict):
            values |= {f"{name}: {field}": number for field, number in value.items()}
        else:
            values[name.rpartition(": ")[2]] = value
    return values | document["ratios"]


def recorded(
    ledger: Sequence[Figure],
    after: Mapping[str, Mapping[str, float]],
    *,
    commit: str,
    machines: Mapping[str, str],
    commands: Mapping[str, str],
) -> list[Figure]:
    """Return the ledger with the values of *after*; the last three name what they were measured with."""
    return [
        replace(
            figure,
            value=float(f"{after[figure.benchmark][figure.name]:.4g}"),
            commit=commit,
            machine=machines[figure.benchmark],
            command=commands[figure.benchmark],
            note="",
        )
        if figure.name in after.get(figure.benchmark, {})
        else figure
        for figure in ledger
    ]


def table(comparisons: Collection[Comparison]) -> list[str]:
    """Return the lines that show figures before and after side by side."""
    heads = ("figure", "before", "after", "better by", "noise", "unit", "")
    rows = [heads, *(_row(one) for one in comparisons)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return [
        "  ".join(
            cell.ljust(width) if column in {0, 5, 6} else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _row(one: Comparison) -> tuple[str, ...]:
    figure = one.figure
    better = ""
    if one.before is not None and one.after is not None:
        better = f"{-100 * figure.worse_by(one.after, one.before):+.1f} %"
    return (
        f"{figure.benchmark}: {figure.name}",
        _number(one.before),
        _number(one.after),
        better,
        f"{100 * figure.noise_share:.0f} %",
        figure.unit,
        one.verdict + (f" ({one.reason})" if one.reason else ""),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def load_ledger(path: Path = LEDGER) -> list[Figure]:
    """Return the figures of the ledger."""
    entries = json.loads(path.read_text())["figures"]
    return [Figure(**entry | {"against": Against(entry["against"])}) for entry in entries]


def write_ledger(ledger: Iterable[Figure], path: Path = LEDGER) -> None:
    """Write the ledger; what a figure has by default is left out."""
    defaults = {one.name: one.default for one in fields(Figure)}
    entries = [
        {name: value for name, value in asdict(figure).items() if value != defaults[name]}
        for figure in ledger
    ]
    path.write_text(json.dumps({"figures": entries}, indent=1) + "\n")
