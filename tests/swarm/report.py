"""What a swarm did, as a table; and the part of docs/reliability.md that a run writes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.swarm.schedule import Step

_COLUMNS = 118
_BEGIN, _END = "<!-- swarm: begin -->", "<!-- swarm: end -->"


@dataclass
class Report:
    """The faults and the outcome of one run."""

    seed: int
    store: str = "s3"
    hours: float = 0.0
    proven: Counter[str] = field(default_factory=Counter)
    without_effect: Counter[str] = field(default_factory=Counter)
    last_proof: dict[str, str] = field(default_factory=dict)
    slowest_seconds: dict[str, float] = field(default_factory=dict)
    """The longest time from the end of a fault until each partition was archived on, by kind."""
    meanwhile_seconds: dict[str, float] = field(default_factory=dict)
    """The longest time until partitions were archived on while a fault lasted, by kind."""
    records: int = 0
    shared: int = 0
    """Acknowledged records that a share group had to get."""
    share_consumer_ends: int = 0
    """How often a share consumer has ended by itself, and was started again."""
    transactions: Counter[str] = field(default_factory=Counter)
    """The number of transactions, by outcome."""
    commits: int = 0
    """Commits of a group's offsets."""
    members: int = 0
    """Members of the group, one after the other: each went on at the committed offsets."""
    stalls: Counter[str] = field(default_factory=Counter)
    """What clients of those members did not come back from, by the step."""
    untold: int = 0
    """How often a member was told of no committed offset, and asked again."""
    told: list[str] = field(default_factory=list)
    """Where those clients were, and where the log of the brokers was."""
    broken: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)

    def add(self, step: Step, proof: str, recovered_seconds: float, meanwhile_seconds: float | None) -> None:
        """Note a fault. It counts only with a proof."""
        if not proof:
            self.without_effect[step.kind] += 1
            return
        self.proven[step.kind] += 1
        self.last_proof[step.kind] = proof
        slowest = self.slowest_seconds.get(step.kind, 0.0)
        self.slowest_seconds[step.kind] = max(slowest, recovered_seconds)
        if meanwhile_seconds is not None:
            slowest = self.meanwhile_seconds.get(step.kind, 0.0)
            self.meanwhile_seconds[step.kind] = max(slowest, meanwhile_seconds)

    def _meanwhile(self, kind: str) -> str:
        seconds = self.meanwhile_seconds.get(kind)
        return "" if seconds is None else f"{seconds:.0f} s"

    def markdown(self) -> str:
        """Return the run as a paragraph and a table."""
        faults, kinds = self.proven.total(), len(self.proven)
        rows = [
            f"| {kind} | {count} | {self.last_proof[kind]} | {self._meanwhile(kind)} "
            f"| {self.slowest_seconds[kind]:.0f} s |"
            for kind, count in sorted(self.proven.items())
        ]
        idle = self.without_effect.total()
        summary = (
            f"The last run, with seed {self.seed} and the store {self.store}: {faults} faults of {kinds} "
            f"kinds in {self.hours:.2f} hours ({idle} more had no effect, and do not count), {self.records} "
            f"acknowledged records, {self.shared} more for a share group (whose consumers ended "
            f"{self.share_consumer_ends} times), transactions {dict(sorted(self.transactions.items()))}, "
            f"{self.commits} commits of a group's offsets by {self.members} members (given up: "
            f"{dict(self.stalls) or 'none'}; asked again for offsets: {self.untold} times), "
            f"{len(self.broken)} promises broken."
        )
        return "\n".join(
            [
                fill(summary, _COLUMNS),
                "",
                "| Fault | Times | Proof of the last one | Archived on meanwhile | Slowest recovery |",
                "|---|---|---|---|---|",
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
