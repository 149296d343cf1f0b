"""What a swarm did, as a table; and the part of docs/reliability.md that a run writes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.swarm.schedule import Step

_BEGIN, _END = "<!-- swarm: begin -->", "<!-- swarm: end -->"


@dataclass
class Report:
    """The faults and the outcome of one run."""

    seed: int
    hours: float = 0.0
    proven: Counter[str] = field(default_factory=Counter)
    without_effect: Counter[str] = field(default_factory=Counter)
    last_proof: dict[str, str] = field(default_factory=dict)
    slowest_seconds: dict[str, float] = field(default_factory=dict)
    """The longest time from the end of a fault until each partition was archived on, by kind."""
    records: int = 0
    broken: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)

    def add(self, step: Step, proof: str, recovered_seconds: float) -> None:
        """Note a fault. It counts only with a proof."""
        if not proof:
            self.without_effect[step.kind] += 1
            return
        self.proven[step.kind] += 1
        self.last_proof[step.kind] = proof
        slowest = self.slowest_seconds.get(step.kind, 0.0)
        self.slowest_seconds[step.kind] = max(slowest, recovered_seconds)

    def markdown(self) -> str:
        """Return the run as a paragraph and a table."""
        faults, kinds = self.proven.total(), len(self.proven)
        rows = [
            f"| {kind} | {count} | {self.last_proof[kind]} | {self.slowest_seconds[kind]:.0f} s |"
            for kind, count in sorted(self.proven.items())
        ]
        idle = self.without_effect.total()
        summary = (
            f"The last run, with seed {self.seed}: {faults} faults of {kinds} kinds in {self.hours:.2f} "
            f"hours ({idle} more had no effect, and do not count), {self.records} acknowledged records, "
            f"{len(self.broken)} promises broken."
        )
        return "\n".join(
            [
                summary,
                "",
                "| Fault | Times | Proof of the last one | Slowest recovery |",
                "|---|---|---|---|",
                *rows,
            ]
        )

    def write_into(self, page: Path) -> None:
        """Replace what is between the page's two markers."""
        before, _, rest = page.read_text().partition(_BEGIN)
        _, found, after = rest.partition(_END)
        if not found:
            raise ValueError(f"{page} has no markers {_BEGIN} and {_END}")
        page.write_text(f"{before}{_BEGIN}\n{self.markdown()}\n{_END}{after}")
