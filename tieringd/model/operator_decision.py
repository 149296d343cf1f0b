"""
An operator's decision about a partition that waits for one, and what became of it.

After an unclean election nothing may tell what is right at an archive's tail (`policies.lineage`). An
operator decides then with `tieringd archive resolve`. A decision counts for one version of the manifest
only: a later version was made by a process that knew something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import CrossingTransaction


@dataclass(frozen=True, slots=True)
class ManifestVersion:
    """Which commit made a version of a partition's manifest. No two versions have the same."""

    leader_epoch: int
    writer_id: str
    commit_number: int

    @classmethod
    def of(cls, manifest: PartitionManifest) -> ManifestVersion:
        """Return the version of *manifest*."""
        return cls(manifest.leader_epoch, manifest.writer_id, manifest.commit_number)

    def __str__(self) -> str:
        return (
            f"commit {self.commit_number} of writer {self.writer_id} under leader epoch {self.leader_epoch}"
        )


@dataclass(frozen=True, slots=True)
class OperatorDecision:
    """What an operator has decided for one partition."""

    partition: TopicIdPartition
    decision_id: str
    """Lower-case hex digits, unique; part of the names of its objects."""
    decided_at_ms: int
    decided_by: str
    made_for: ManifestVersion
    is_aborted: Mapping[int, bool] = field(default_factory=dict)
    """Whether the transaction of each producer, by producer id, was aborted; otherwise it was committed."""
    give_up: tuple[int, int] | None = None
    """
    The first and the last offset that are given up, both inclusive; None where nothing is. A gap takes their
    place, or the leader's log if that began anew.
    """
    keep: bool = False
    """
    The archived records before the divergence are those of the leader's log, and no transaction that the
    manifest has forgotten was open there.
    """


class DecisionState(StrEnum):
    """What has become of a decision."""

    COMMITTING = "committing"
    """All objects are stored, and the commit is next. The manifest tells whether it was made."""
    CARRIED_OUT = "carried_out"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class DecisionOutcome:
    """What a daemon has done about a decision."""

    state: DecisionState
    at_ms: int
    """The manifest has this time where the commit was made."""
    leader_epoch: int
    writer_id: str
    detail: str = ""
    """Why it was refused, or where the archive ended after it."""
    voided: tuple[CrossingTransaction, ...] = ()
    """
    Transactions that the commit takes from the manifest's list, where nothing else may show the commit.
    """


def shows(manifest: PartitionManifest, outcome: DecisionOutcome) -> bool:
    """Say whether *manifest* shows that the commit of *outcome* was made."""
    at_ms = outcome.at_ms
    is_dated = (
        any(
            (one.leader_epoch, one.replaced_at_ms) == (outcome.leader_epoch, at_ms)
            for one in manifest.replacements
        )
        or any(gap.recorded_at_ms == at_ms for gap in manifest.gaps)
        or any(one.retired_at_ms == at_ms for one in manifest.retired)
    )
    return is_dated or (bool(outcome.voided) and not set(outcome.voided) & set(manifest.crossing))
