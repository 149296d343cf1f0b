"""
The desk: takes operators' decisions for one partition, and records what became of each.

The archiver asks at the desk only while its partition waits for an operator, and until the records of a
decision that it has carried out are complete. A decision counts for the version of the manifest that it
names. One that was made for an earlier version is refused, and so is one that does not fit. Both are
reported in the log, in the record of the decision and in a metric.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from tieringd.archive.decision_store import OperatorDecisions
from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.archiving.partition_logger import LeadershipLogger
from tieringd.metrics import Metrics
from tieringd.model.manifest import PartitionManifest
from tieringd.model.operator_decision import (
    DecisionOutcome,
    DecisionState,
    ManifestVersion,
    OperatorDecision,
    shows,
)
from tieringd.model.partition import Leadership
from tieringd.model.segment import CrossingTransaction

LOOK_BACK_MS = 7 * 86_400_000
"""How old a decision may be that `LeftDecisions` looks for."""
SETTLED_AFTER_MS = 600_000
"""How long a process that carries a decision out has for the records of it."""


class OperatorDesk(LeadershipLogger):
    """The desk of one partition. Owned by its lineage keeper, used within its step."""

    def __init__(
        self,
        leadership: Leadership,
        decisions: OperatorDecisions,
        *,
        is_current: Callable[[], Awaitable[bool]],
        metrics: Metrics,
        now_ms: Callable[[], int],
    ) -> None:
        """
        Take the collaborators.

        *is_current* says whether the bucket still has the version of the manifest that is acted on. It raises
        StorageUnavailable where the store does not tell: a decision is refused only for what is known.
        """
        self._leadership = leadership
        self._decisions = decisions
        self._is_current = is_current
        self._metrics = metrics
        self._now_ms = now_ms
        self._reported: frozenset[str] = frozenset()
        self.refused = ""
        """Why the last decision was refused; empty if no decision was refused."""

    async def pending(self, manifest: PartitionManifest) -> OperatorDecision | None:
        """
        Return the newest decision that was made for this version of *manifest*, and end all others.

        Raises:
            StorageUnavailable: The store does not answer. What was not ended is ended by the next call.
        """
        found, faults = await self._decisions.of(self._leadership.partition)
        for error in faults:
            if str(error) not in self._reported:
                self._log.error("an operator's decision cannot be read", error=str(error))
        self._reported = frozenset(str(error) for error in faults)
        version = ManifestVersion.of(manifest)
        fitting = [one for one in found if one.made_for == version]
        for one in fitting[:-1]:
            await self.refuse(one, "the operator has made another decision since")
        for one in found:
            is_earlier = one.made_for.commit_number < version.commit_number
            # A decision for a later version may be right: this process may have an old manifest.
            if one.made_for != version and (is_earlier or await self._is_current()):
                await self._end_earlier(one, manifest)
        return fitting[-1] if fitting else None

    async def begin(
        self, decision: OperatorDecision, *, at_ms: int, voided: Sequence[CrossingTransaction] = ()
    ) -> None:
        """
        Record that the commit of *decision* is next; *at_ms* is the time that the manifest will have for it.

        Raises:
            StorageUnavailable: It may be recorded, or not. Nothing may be committed.
        """
        await self._note(decision, DecisionState.COMMITTING, at_ms=at_ms, voided=tuple(voided))

    async def finish(self, decision: OperatorDecision, manifest: PartitionManifest, *, at_ms: int) -> None:
        """
        Record that *decision* was carried out, and delete it.

        Raises:
            StorageUnavailable: `pending` ends it later.
        """
        self.refused = ""
        detail = f"the archive went on at offset {manifest.next_offset}"
        await self._note(decision, DecisionState.CARRIED_OUT, at_ms=at_ms, detail=detail)
        await self._decisions.remove(decision)
        self._count(DecisionState.CARRIED_OUT)
        self._log.warning(
            "an operator's decision was carried out",
            decision_id=decision.decision_id,
            decided_by=decision.decided_by,
            next_offset=manifest.next_offset,
        )

    async def refuse(self, decision: OperatorDecision, why: str) -> None:
        """
        Record why *decision* is not carried out, and delete it.

        Raises:
            StorageUnavailable: It may still be there, and is judged again.
        """
        self.refused = f"the decision of {decision.decided_by} was refused: {why}"
        await self._note(decision, DecisionState.REFUSED, at_ms=self._now_ms(), detail=why)
        await self._decisions.remove(decision)
        self._count(DecisionState.REFUSED)
        self._log.error(
            "an operator's decision was refused",
            decision_id=decision.decision_id,
            decided_by=decision.decided_by,
            reason=why,
        )

    async def _end_earlier(self, decision: OperatorDecision, manifest: PartitionManifest) -> None:
        """End a decision for another version: it was carried out before a crash, or is refused."""
        noted = await self._decisions.outcome_of(decision)
        if noted is not None and noted.state is DecisionState.REFUSED:
            await self._decisions.remove(decision)
        elif noted is not None and (noted.state is DecisionState.CARRIED_OUT or shows(manifest, noted)):
            await self.finish(decision, manifest, at_ms=noted.at_ms)
        else:
            await self.refuse(
                decision,
                f"it was made for another version of the manifest ({decision.made_for}); the manifest has "
                f"{ManifestVersion.of(manifest)} now. Look at the case again before you decide",
            )

    async def _note(
        self,
        decision: OperatorDecision,
        state: DecisionState,
        *,
        at_ms: int,
        detail: str = "",
        voided: tuple[CrossingTransaction, ...] = (),
    ) -> None:
        outcome = DecisionOutcome(
            state, at_ms, self._leadership.leader_epoch, self._decisions.writer_id, detail, voided
        )
        await self._decisions.note(decision, outcome)

    def _count(self, state: DecisionState) -> None:
        self._metrics.operator_decisions.labels(self._leadership.partition.topic, state.value).inc()


class LeftDecisions:
    """
    Ends the decisions whose records are not complete because a process ended after the commit.

    An archiver looks for one only where its manifest shows that a tail was replaced lately. A commit that
    cuts nothing off does not show there, so all recent decisions in the bucket are looked at now and then.
    """

    def __init__(self, manifests: ManifestStore, *, metrics: Metrics, now_ms: Callable[[], int]) -> None:
        self._manifests = manifests
        self._metrics = metrics
        self._now_ms = now_ms

    async def end(self, led: Collection[Leadership]) -> None:
        """
        End those decisions for partitions in *led* that were made for an earlier version of the manifest.

        A decision for the present version is the archiver's to carry out.

        Raises:
            StorageUnavailable: What was not ended is ended by the next call.
            CorruptDataError: A manifest is damaged.
        """
        decisions, now_ms = self._manifests.decisions, self._now_ms()
        leaderships = {one.partition: one for one in led}
        for decision in await decisions.open_since(now_ms - LOOK_BACK_MS):
            leadership = leaderships.get(decision.partition)
            noted = await decisions.outcome_of(decision) if leadership else None
            last_ms = max(decision.decided_at_ms, noted.at_ms if noted else 0)
            if leadership is None or now_ms - last_ms < SETTLED_AFTER_MS:
                continue
            stored = await self._manifests.load(decision.partition)
            if stored.manifest is None:
                continue
            desk = OperatorDesk(
                leadership,
                decisions,
                is_current=partial(self._is_current, stored),
                metrics=self._metrics,
                now_ms=self._now_ms,
            )
            # It returns a decision for the present version, which is not for this object to carry out.
            await desk.pending(stored.manifest)

    async def _is_current(self, stored: StoredManifest) -> bool:
        found = await self._manifests.refreshed(stored.existing.partition, stored)
        return found.version == stored.version
