"""
Keep the good part of an archive's tail after an unclean election.

The tail has to give way to the leader's log from the divergence on. The good offsets before it are durable. A
cut of whole segments would lose them where the leader's log no longer has them, or loses them before they are
copied again. So the segment that holds the divergence is split there, and segments whose index tells a wrong
outcome of a transaction get a new index. The outcome comes from the markers in the leader's log.

Where nothing tells what is right, the leader's log replaces the good part if it has all of it. Else an
operator decides (`model.operator_decision`). The decision says how transactions ended, or that the archive's
records count, or which of them become a gap.

The change is permanent, so it takes two observations with different numbers. The objects are stored
first; one commit then cuts the archive back and names them. A crash before the commit leaves objects that
no manifest names, and the next process stores the same part again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from tieringd.archive.segment_part import PartRequest
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.archiving.observer import Observation
from tieringd.archiving.operator_case import OperatorCase, OperatorWait
from tieringd.archiving.remote_log import RemoteLog
from tieringd.broker.layout import Layout, TransactionEnds, transaction_ends
from tieringd.errors import ChecksumRejected, CorruptDataError, LocalFileError, ObjectNotFound, TieringError
from tieringd.model.corrections import reindexed, with_gap_inside
from tieringd.model.manifest import PartitionManifest
from tieringd.model.operator_decision import OperatorDecision
from tieringd.model.partition import Leadership
from tieringd.model.segment import CrossingTransaction, RemoteSegment
from tieringd.model.tail_cut import cut_back, undone
from tieringd.policies.lineage import (
    Lineage,
    LineagePlan,
    OperatorReason,
    knows_divergence,
    remembers_transactions_at,
    voided_transactions,
)
from tieringd.policies.operator_decision import decided_part, why_unfit

_RETRY_MS = 10 * 60_000
"""How long a case for an operator rests. A scrub may have repaired a damaged segment by then."""


class OperatorNeededError(TieringError):
    """Nothing in the archive or in the leader's log tells what is right."""

    def __init__(
        self, message: str, *, reason: OperatorReason, transactions: Mapping[int, int] | None = None
    ) -> None:
        """*transactions* are those whose outcome is lost: the first offset by producer."""
        super().__init__(message)
        self.reason = reason
        self.transactions = transactions or {}


class UnfitDecisionError(TieringError):
    """An operator's decision does not settle the case."""


@dataclass(frozen=True, slots=True)
class KeptPart:
    """The manifest to commit, and what tells after a crash that it was committed."""

    manifest: PartitionManifest
    at_ms: int
    """The time of all that is new in it."""
    voided: tuple[CrossingTransaction, ...]
    """Transactions that it no longer lists, where nothing is cut off."""


class GoodPart(OperatorCase):
    """Keep the good part of one partition's tail once. Owned by its lineage keeper, used within its step."""

    def __init__(
        self,
        leadership: Leadership,
        *,
        remote_log: RemoteLog,
        layout: Layout,
        spillovers: SpilloverManifests,
        now_ms: Callable[[], int],
    ) -> None:
        self._leadership = leadership
        self._remote_log = remote_log
        self._layout = layout
        self._spillovers = spillovers
        self._now_ms = now_ms
        self.needs_another_scan = False
        """Whether the next observation may confirm what the last one showed."""
        self._seen_first: tuple[LineagePlan, int] | None = None
        """A plan, and the number of the first observation that led to it."""
        self._waits_because = ""
        self._retry_at_ms = 0

    def why_not_yet(self, plan: LineagePlan, seen: Observation) -> str:
        """Return why the part that *plan* would lose cannot be kept yet; empty when it can."""
        replacement = plan.replacement
        assert replacement is not None, "there is a part to keep"
        assert replacement.good is not None, "there is a part to keep"
        self.needs_another_scan = False
        good = replacement.only_archived or replacement.good
        divergence = replacement.divergence_offset
        where = "exist only in the archive" if replacement.only_archived else "are good"
        why = f"{plan.reason}; offsets {good.base_offset} to {good.last_offset} {where}"
        known = self._seen_first
        # The start of the local log may move. What is kept does not depend on it.
        judged = replace(
            plan, replacement=replace(replacement, local_base_offset=None, missing=None, only_archived=None)
        )
        if known is None or known[0] != judged:
            self._seen_first = (judged, seen.scan_number)
            self.operator_wait = None
        if seen.bounds.last_stable_offset < divergence:
            return (
                f"{why} and are kept once the last stable offset of the log, now "
                f"{seen.bounds.last_stable_offset}, has reached {divergence}: until then a transaction with "
                "records there may be open"
            )
        if known is None or known[0] != judged or known[1] == seen.scan_number:
            self.needs_another_scan = True
            return f"{why} and are kept once another scan shows the same"
        return ""

    @property
    def rests_because(self) -> str:
        """Return why the case is not examined again yet without a decision; empty if it is."""
        is_resting = self.operator_wait is not None and self._now_ms() < self._retry_at_ms
        return self._waits_because if is_resting else ""

    async def keep(
        self, manifest: PartitionManifest, plan: LineagePlan, seen: Observation, *, cut_offset: int
    ) -> tuple[KeptPart | None, str]:
        """
        Store what stays of the tail; return the manifest that names it and ends at *cut_offset*.

        *cut_offset* is the divergence, or a segment's end before it from which on the leader's log has all.
        Returns None, and why, where nothing tells what is right. An operator has to decide then, unless the
        leader's log has the whole part.

        Raises:
            RetryableError: The log cannot be read now, or the store does not answer.
        """
        try:
            return await self._kept(manifest, plan, seen, cut_offset, None), ""
        except OperatorNeededError as error:
            failure: TieringError = error
            reason = error.reason
        except (ObjectNotFound, ChecksumRejected, CorruptDataError) as error:
            failure, reason = error, OperatorReason.SEGMENT_UNREADABLE
        assert plan.replacement is not None, "there is a part to keep"
        if plan.replacement.only_archived is None:
            return None, str(failure)
        return None, self._ask_operator(plan, reason, failure)

    async def keep_as_decided(
        self,
        manifest: PartitionManifest,
        plan: LineagePlan,
        seen: Observation,
        decision: OperatorDecision,
        *,
        cut_offset: int,
    ) -> KeptPart:
        """
        Do as `keep` does, and what *decision* says where nothing else tells what is right.

        Raises:
            UnfitDecisionError: The decision does not fit, or leaves something open. Nothing has changed.
            RetryableError: The log cannot be read now, or the store does not answer.
        """
        try:
            return await self._kept(manifest, plan, seen, cut_offset, decision)
        except OperatorNeededError as error:
            self._ask_operator(plan, error.reason, error)
            raise UnfitDecisionError(f"it leaves something open: {error}") from error
        except (ObjectNotFound, ChecksumRejected, CorruptDataError) as error:
            self._ask_operator(plan, OperatorReason.SEGMENT_UNREADABLE, error)
            raise UnfitDecisionError(f"it keeps offsets that cannot be read: {error}") from error

    def _ask_operator(self, plan: LineagePlan, reason: OperatorReason, error: TieringError) -> str:
        self._waits_because = f"{plan.reason}; an operator has to decide: {error}"
        self._retry_at_ms = self._now_ms() + _RETRY_MS
        replacement, known = plan.replacement, self.operator_wait
        assert replacement is not None, "there is a part to keep"
        assert replacement.only_archived is not None, "there is a part to keep"
        if known is None or known.reason is not reason:
            self._log.error("the partition waits for an operator", reason=reason.value, error=str(error))
        good = replacement.only_archived
        lost = error.transactions if isinstance(error, OperatorNeededError) else {}
        self.operator_wait = OperatorWait(
            reason,
            self._now_ms() if known is None else known.since_ms,
            good.base_offset,
            good.last_offset,
            divergence_offset=replacement.divergence_offset,
            transactions=tuple(sorted(lost.items())),
            message=str(error),
            refused=known.refused if known else "",
        )
        return self._waits_because

    async def _kept(
        self,
        manifest: PartitionManifest,
        plan: LineagePlan,
        seen: Observation,
        cut_offset: int,
        decision: OperatorDecision | None,
    ) -> KeptPart:
        replacement, now_ms = plan.replacement, self._now_ms()
        assert replacement is not None, "there is a part to keep"
        good = replacement.only_archived or replacement.good
        assert good is not None, "there is a part to keep"
        is_known = knows_divergence(manifest, seen.log)
        part = decided_part(
            decision,
            good,
            divergence_offset=replacement.divergence_offset,
            cut_offset=cut_offset,
            is_known=is_known,
            now_ms=now_ms,
        )
        divergence = part.divergence_offset
        if not is_known and not part.is_settled:
            raise OperatorNeededError(
                f"the leader's history of epochs begins at offset {divergence}, under an epoch that the "
                "archive does not have, so nothing tells whether the records before it are the same; offsets "
                f"{divergence} to {replacement.last_offset} of the archive give way to the leader's log",
                reason=OperatorReason.DIVERGENCE_UNKNOWN,
            )
        manifest = undone(manifest, part.cut_offset, now_ms=now_ms)
        cut_offset = next(
            (one.base_offset for one in manifest.gaps if one.base_offset < part.cut_offset < one.next_offset),
            part.cut_offset,
        )
        voided = tuple(
            one
            for one in voided_transactions(manifest, seen.log, divergence)
            if one.first_offset < cut_offset
        )
        base_offset = min(plan.resume_offset, part.base_offset, *(one.first_offset for one in voided))
        manifest = await self._spillovers.with_history(manifest, from_offset=base_offset)
        if not part.is_settled and not remembers_transactions_at(manifest, divergence):
            raise OperatorNeededError(
                f"the log parts from the archive at offset {divergence}, and so far back the manifest does "
                "not list which transactions were open",
                reason=OperatorReason.TRANSACTIONS_FORGOTTEN,
            )
        unfit = why_unfit(part, manifest, good, is_known=is_known)
        if unfit:
            raise UnfitDecisionError(unfit)
        if part.inner_gap is not None:
            manifest = with_gap_inside(manifest, part.inner_gap)
        ends = _Ends(self._layout, seen, divergence, decision.is_aborted if decision else {})
        await ends.await_also({one.producer_id: one.first_offset for one in voided})
        head, renewed = await self._stored_parts(manifest, ends, base_offset, cut_offset)
        ends.require_all_told()
        for segment, stored in renewed:
            manifest = reindexed(manifest, segment, stored, now_ms=now_ms)
        manifest = replace(manifest, crossing=tuple(one for one in manifest.crossing if one not in voided))
        is_cut = plan.lineage is Lineage.DIVERGES or part.last_gap is not None
        if is_cut:
            manifest = await self._cut(manifest, cut_offset, head, same_to=divergence, now_ms=now_ms)
        if part.last_gap is not None and manifest.next_offset == part.last_gap.base_offset:
            manifest = manifest.with_gap(part.last_gap)
        begun = (one for one in ends.crossing if one.first_offset < manifest.next_offset)
        manifest = manifest.appended((), crossing=begun)
        return KeptPart(manifest, now_ms, () if is_cut else voided)

    async def _cut(
        self,
        manifest: PartitionManifest,
        cut_offset: int,
        head: RemoteSegment | None,
        *,
        same_to: int,
        now_ms: int,
    ) -> PartitionManifest:
        """Return *manifest* cut back to *cut_offset*, the end of *head* where a segment is split."""
        if head is None and not manifest.segments.row_at_or_after(cut_offset):
            # A live part has a segment.
            manifest = await self._spillovers.with_history(manifest, from_offset=manifest.live_offset - 1)
        return cut_back(
            manifest,
            cut_offset,
            leader_epoch=self._leadership.leader_epoch,
            now_ms=now_ms,
            same_to=same_to,
            head=head,
        )

    async def _stored_parts(
        self, manifest: PartitionManifest, ends: _Ends, base_offset: int, cut_offset: int
    ) -> tuple[RemoteSegment | None, list[tuple[RemoteSegment, RemoteSegment]]]:
        """
        Store what stays of the segments from *base_offset* to *cut_offset* and changes.

        Returns the head of the segment that is split, if one is, and the segments with a new index, each
        after the segment whose place it takes.
        """
        head: RemoteSegment | None = None
        renewed: list[tuple[RemoteSegment, RemoteSegment]] = []
        # The newest first: its batches show the transactions that are open at the divergence.
        for segment in reversed(manifest.segments.overlapping(base_offset, cut_offset)):
            if cut_offset <= max(segment.base_offset, manifest.start_offset):
                continue
            stored = await self._remote_log.store_part(
                PartRequest(
                    self._leadership.partition,
                    segment,
                    cut_offset,
                    self._leadership.leader_epoch,
                    ends.of_last if ends.is_last(segment) else partial(ends.of, segment),
                )
            )
            if segment.next_offset > cut_offset:
                head = stored
            elif stored != segment:
                renewed.append((segment, stored))
        return head, renewed


class _Ends:
    """How the transactions that are open at the divergence end in the leader's log. Used for one attempt."""

    def __init__(
        self, layout: Layout, seen: Observation, divergence: int, is_aborted: Mapping[int, bool]
    ) -> None:
        """*is_aborted* are the outcomes, by producer, that an operator has told."""
        self._is_aborted = is_aborted
        self._layout = layout
        self._seen = seen
        self._divergence = divergence
        self._first_offsets: dict[int, int] = {}
        self._found = TransactionEnds()

    @property
    def crossing(self) -> tuple[CrossingTransaction, ...]:
        """Return the transactions with their new markers."""
        return self._found.ended

    def is_last(self, segment: RemoteSegment) -> bool:
        """Say whether *segment* ends at the divergence, or holds it."""
        return segment.next_offset >= self._divergence

    async def of_last(self, open_transactions: Mapping[int, int]) -> Mapping[int, int | None]:
        """See `EndsOf`; for the segment that ends at the divergence, or holds it."""
        await self.await_also(open_transactions)
        return self._of(open_transactions, math.inf)

    async def of(
        self, segment: RemoteSegment, open_transactions: Mapping[int, int]
    ) -> Mapping[int, int | None]:
        """See `EndsOf`; for another *segment*, whose open transactions may end before the divergence."""
        return self._of(open_transactions, segment.next_offset)

    def _of(self, open_transactions: Mapping[int, int], next_offset: float) -> Mapping[int, int | None]:
        found = {
            one.producer_id: one.marker_offset if one.producer_id in self._found.aborted else None
            for one in self._found.ended
            # A later transaction of the same producer does not tell how this one ended.
            if one.producer_id in open_transactions and one.first_offset < next_offset
        }
        told = {
            # Where the marker was is not known. It was at the divergence or later.
            producer_id: self._divergence if self._is_aborted[producer_id] else None
            for producer_id, first_offset in self._found.lost.items()
            if producer_id in open_transactions and first_offset < next_offset
        }
        return found | told

    def require_all_told(self) -> None:
        """
        Check that each outcome that an operator has told was needed.

        Raises:
            UnfitDecisionError: One was not.
        """
        for producer_id in sorted(self._is_aborted.keys() - self._found.lost.keys()):
            is_found = producer_id in self._first_offsets
            raise UnfitDecisionError(
                f"the leader's log itself tells how the transaction of producer {producer_id} ended"
                if is_found
                else f"no transaction of producer {producer_id} is open at offset {self._divergence}"
            )

    async def await_also(self, first_offsets: Mapping[int, int]) -> None:
        """
        Find the markers of more transactions that are open at the divergence.

        Raises:
            OperatorNeededError: The log does not have all offsets from the divergence to a marker.
            RetryableError: The log cannot be read now, or a marker is not in its files yet.
        """
        if first_offsets.keys() <= self._first_offsets.keys():
            return
        for producer_id, first_offset in first_offsets.items():
            self._first_offsets[producer_id] = min(
                first_offset, self._first_offsets.get(producer_id, first_offset)
            )
        log = self._seen.uploadable
        self._found = await asyncio.to_thread(
            transaction_ends, self._layout, log, self._divergence, self._first_offsets
        )
        lost = {one: first for one, first in self._found.lost.items() if one not in self._is_aborted}
        if lost:
            producer_id, first_offset = min(lost.items())
            raise OperatorNeededError(
                f"the transaction of producer {producer_id} that began at offset {first_offset} ended in "
                f"offsets from {self._divergence} on that the log no longer has, so nothing tells whether it "
                "was committed",
                reason=OperatorReason.OUTCOME_LOST,
                transactions=lost,
            )
        if self._found.awaited:
            raise LocalFileError(
                f"the transaction that is open at offset {self._divergence} has no marker in the log's files",
                path=log.partition.path,
            )
