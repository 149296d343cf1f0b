"""
A case that only an operator can decide, as the status page, the metrics and `archive resolve` show it.

`NewLogCase` is the case of a leader's log that has nothing in common with the archive: that of a disk which
was lost or is not mounted, or of a replica which never had a record and became the leader. Kafka goes on with
such a log, and every replica follows it. The archive may then have the only copy of all that was written, so
its segments stay until an operator gives up those that the new log contradicts: all of them, unless that log
begins later than the archive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tieringd.archiving.partition_logger import LeadershipLogger
from tieringd.model.manifest import PartitionManifest
from tieringd.model.operator_decision import OperatorDecision
from tieringd.model.partition import Leadership
from tieringd.policies.lineage import LineagePlan, OperatorReason


@dataclass(frozen=True, slots=True)
class OperatorWait:
    """A case that only an operator can decide."""

    reason: OperatorReason
    since_ms: int
    """Time at which the case was found, in ms since the epoch."""
    base_offset: int
    last_offset: int
    """The offsets *base_offset* to *last_offset* are only in the archive, and are good or may be."""
    divergence_offset: int = field(default=-1, compare=False)
    """The offset where the leader's log parts from the archive, as far as is known."""
    transactions: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """The producer and the first offset of each transaction whose outcome is lost."""
    message: str = field(default="", compare=False)
    refused: str = field(default="", compare=False)
    """Why the last decision was refused; empty where none was."""


class OperatorCase(LeadershipLogger):
    """A fault that an operator may have to decide. A lineage keeper owns it, and uses it within its step."""

    operator_wait: OperatorWait | None = None
    """The case that only an operator can decide; None without one."""

    def note_refusal(self, why: str) -> None:
        """Show with the case why the last decision was refused."""
        if self.operator_wait is not None and self.operator_wait.refused != why:
            self.operator_wait = replace(self.operator_wait, refused=why)


class NewLogCase(OperatorCase):
    """The case of one partition's log that began anew. Owned by its lineage keeper, used within its step."""

    def __init__(self, leadership: Leadership, *, now_ms: Callable[[], int]) -> None:
        self._leadership = leadership
        self._now_ms = now_ms
        self.needs_another_scan = False
        """Whether the next observation may confirm what the last one showed."""
        self._scan_number: int | None = None

    def ask(self, manifest: PartitionManifest, plan: LineagePlan, *, scan_number: int) -> str:
        """
        Ask for a decision once two observations show the case; return why nothing may be appended yet.

        *manifest* has all segments that *plan* would replace, or all of them would go.
        """
        if self._scan_number is None:
            # There is no case until a second observation has shown it.
            self._scan_number = scan_number
        replacement, known = plan.replacement, self.operator_wait
        assert replacement is not None, "the plan replaces segments"
        first, last = max(replacement.base_offset, manifest.start_offset), manifest.next_offset - 1
        why = f"{plan.reason}; offsets {first} to {last} of the archive would go"
        if self.operator_wait is None and scan_number == self._scan_number:
            self.needs_another_scan = True
            return f"{why}, and another scan has to show the same before an operator is asked"
        self.needs_another_scan = False
        message = (
            f"the leader's log began anew at offset {replacement.divergence_offset}, under an epoch that the "
            "archive does not have, as after a lost disk, or one that is not mounted"
        )
        self.operator_wait = OperatorWait(
            OperatorReason.LOG_BEGAN_ANEW,
            self._now_ms() if known is None else known.since_ms,
            first,
            last,
            divergence_offset=replacement.divergence_offset,
            message=message,
            refused=known.refused if known else "",
        )
        if known is None:
            self._log.error(
                "the partition waits for an operator",
                reason=OperatorReason.LOG_BEGAN_ANEW.value,
                error=message,
            )
        return f"{why}; an operator has to decide: {message}"

    def why_unfit(self, decision: OperatorDecision) -> str:
        """Return why *decision* does not settle the case; empty where it does."""
        wait = self.operator_wait
        assert wait is not None, "a decision is read where an operator was asked"
        if decision.keep or decision.is_aborted or decision.give_up != (wait.base_offset, wait.last_offset):
            return (
                "a log that began anew continues no part of what it contradicts: the only decision is to "
                f"give up all of that, offsets {wait.base_offset} to {wait.last_offset}"
            )
        return ""
