"""
Keep the good part of an archive's tail where only the archive has it, after an unclean election.

The tail has to give way to the leader's log from the divergence on. Where the leader's log no longer has
the good offsets before it, cutting whole segments would lose them. So the segment that holds the
divergence is split there, and segments whose index tells a wrong outcome of a transaction get a new index.
The outcome comes from the markers in the leader's log.

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
from tieringd.archiving.partition_logger import LeadershipLogger
from tieringd.archiving.remote_log import RemoteLog
from tieringd.broker.layout import Layout, TransactionEnds, transaction_ends
from tieringd.errors import ChecksumRejected, CorruptDataError, LocalFileError, ObjectNotFound, TieringError
from tieringd.model.corrections import reindexed
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import Leadership
from tieringd.model.segment import CrossingTransaction, RemoteSegment
from tieringd.policies.lineage import (
    Lineage,
    LineagePlan,
    OperatorReason,
    knows_divergence,
    remembers_transactions_at,
    voided_transactions,
)

_RETRY_MS = 10 * 60_000
"""How long a case for an operator rests. A scrub may have repaired a damaged segment by then."""


class OperatorNeededError(TieringError):
    """Nothing in the archive or in the leader's log tells what is right."""

    def __init__(self, message: str, *, reason: OperatorReason) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class OperatorWait:
    """A case that only an operator can decide."""

    reason: OperatorReason
    since_ms: int
    """When the case was found, in ms since the epoch."""
    base_offset: int
    last_offset: int
    """The good offsets that are only in the archive are *base_offset* to *last_offset*."""


class GoodPart(LeadershipLogger):
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
        self.operator_wait: OperatorWait | None = None
        """The case that only an operator can decide; None without one."""
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
        assert replacement.only_archived is not None, "there is a part to keep"
        self.needs_another_scan = False
        good = replacement.only_archived
        divergence = replacement.divergence_offset
        why = f"{plan.reason}; offsets {good.base_offset} to {good.last_offset} exist only in the archive"
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
        if self.operator_wait is not None and self._now_ms() < self._retry_at_ms:
            return self._waits_because
        return ""

    async def keep(
        self, manifest: PartitionManifest, plan: LineagePlan, seen: Observation, *, cut_offset: int
    ) -> tuple[PartitionManifest | None, str]:
        """
        Store what stays of the tail; return the manifest that names it and ends at *cut_offset*.

        *cut_offset* is the divergence, or a segment's end before it from which on the leader's log has all.
        Returns None, and why, where an operator has to decide.

        Raises:
            RetryableError: The log cannot be read now, or the store does not answer.
        """
        try:
            kept = await self._kept(manifest, plan, seen, cut_offset)
        except OperatorNeededError as error:
            return None, self._ask_operator(plan, error.reason, error)
        except (ObjectNotFound, ChecksumRejected, CorruptDataError) as error:
            return None, self._ask_operator(plan, OperatorReason.SEGMENT_UNREADABLE, error)
        return kept, ""

    def _ask_operator(self, plan: LineagePlan, reason: OperatorReason, error: TieringError) -> str:
        self._waits_because = f"{plan.reason}; an operator has to decide: {error}"
        self._retry_at_ms = self._now_ms() + _RETRY_MS
        replacement, known = plan.replacement, self.operator_wait
        assert replacement is not None, "there is a part to keep"
        assert replacement.only_archived is not None, "there is a part to keep"
        if known is None or known.reason is not reason:
            self._log.error("the partition waits for an operator", reason=reason.value, error=str(error))
        good = replacement.only_archived
        since_ms = self._now_ms() if known is None else known.since_ms
        self.operator_wait = OperatorWait(reason, since_ms, good.base_offset, good.last_offset)
        return self._waits_because

    async def _kept(
        self, manifest: PartitionManifest, plan: LineagePlan, seen: Observation, cut_offset: int
    ) -> PartitionManifest:
        replacement, now_ms = plan.replacement, self._now_ms()
        assert replacement is not None, "there is a part to keep"
        divergence = replacement.divergence_offset
        if not knows_divergence(manifest, seen.log):
            raise OperatorNeededError(
                f"the leader's history of epochs begins at offset {divergence}, under an epoch that the "
                "archive does not have, so nothing tells whether the records before it are the same",
                reason=OperatorReason.DIVERGENCE_UNKNOWN,
            )
        manifest = manifest.undone(cut_offset, now_ms=now_ms)
        cut_offset = next(
            (gap.base_offset for gap in manifest.gaps if gap.base_offset < cut_offset < gap.next_offset),
            cut_offset,
        )
        voided = voided_transactions(manifest, seen.log, divergence)
        base_offset = min([plan.resume_offset, *(one.first_offset for one in voided)])
        manifest = await self._spillovers.with_history(manifest, from_offset=base_offset)
        if not remembers_transactions_at(manifest, divergence):
            raise OperatorNeededError(
                f"the log parts from the archive at offset {divergence}, and so far back the manifest does "
                "not list which transactions were open",
                reason=OperatorReason.TRANSACTIONS_FORGOTTEN,
            )
        ends = _Ends(self._layout, seen, divergence)
        await ends.await_also({one.producer_id: one.first_offset for one in voided})
        head: RemoteSegment | None = None
        renewed: list[tuple[RemoteSegment, RemoteSegment]] = []
        # The newest first: its batches show the transactions that are open at the divergence.
        for segment in reversed(manifest.segments.overlapping(base_offset, cut_offset)):
            if cut_offset <= max(segment.base_offset, manifest.start_offset):
                continue
            is_last = segment.next_offset >= divergence
            stored = await self._remote_log.store_part(
                PartRequest(
                    self._leadership.partition,
                    segment,
                    cut_offset,
                    self._leadership.leader_epoch,
                    ends.of_last if is_last else partial(ends.of, segment),
                )
            )
            if segment.next_offset > cut_offset:
                head = stored
            elif stored != segment:
                renewed.append((segment, stored))
        for segment, stored in renewed:
            manifest = reindexed(manifest, segment, stored, now_ms=now_ms)
        manifest = replace(manifest, crossing=tuple(one for one in manifest.crossing if one not in voided))
        if plan.lineage is Lineage.DIVERGES:
            if head is None and not manifest.segments.row_at_or_after(cut_offset):
                # A live part has a segment.
                manifest = await self._spillovers.with_history(manifest, from_offset=manifest.live_offset - 1)
            manifest = manifest.cut_back(
                cut_offset,
                leader_epoch=self._leadership.leader_epoch,
                now_ms=now_ms,
                same_to=divergence,
                head=head,
            )
        begun = (one for one in ends.crossing if one.first_offset < manifest.next_offset)
        return manifest.appended((), crossing=begun)


class _Ends:
    """How the transactions that are open at the divergence end in the leader's log. Used for one attempt."""

    def __init__(self, layout: Layout, seen: Observation, divergence: int) -> None:
        self._layout = layout
        self._seen = seen
        self._divergence = divergence
        self._first_offsets: dict[int, int] = {}
        self._found = TransactionEnds()

    @property
    def crossing(self) -> tuple[CrossingTransaction, ...]:
        """Return the transactions with their new markers."""
        return self._found.ended

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
        return {
            one.producer_id: one.marker_offset if one.producer_id in self._found.aborted else None
            for one in self._found.ended
            # A later transaction of the same producer does not tell how this one ended.
            if one.producer_id in open_transactions and one.first_offset < next_offset
        }

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
        if self._found.lost:
            producer_id, first_offset = min(self._found.lost.items())
            raise OperatorNeededError(
                f"the transaction of producer {producer_id} that began at offset {first_offset} ended in "
                f"offsets from {self._divergence} on that the log no longer has, so nothing tells whether it "
                "was committed",
                reason=OperatorReason.OUTCOME_LOST,
            )
        if self._found.awaited:
            raise LocalFileError(
                f"the transaction that is open at offset {self._divergence} has no marker in the log's files",
                path=log.partition.path,
            )
