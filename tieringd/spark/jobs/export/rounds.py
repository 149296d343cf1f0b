"""
The export of one topic in rounds: plan, write, compare, commit, until the archive's end is reached.

A round is committed as a whole, and a killed run loses only its current round. The end is fixed when the run
begins, so that the run ends even if the topic keeps growing.

The state records the archive's replacements (`Replacement`) before a round is read. After the round was
written they are compared with the current ones. If an unclean election happened in between, a round that is
not visible yet is repeated. A round whose files are visible already is committed, and the replaced offsets
are noted in the state and in the report.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from tieringd.archive.catalog import ArchivedTopic
from tieringd.clock import wall_clock_ms
from tieringd.errors import TieringError
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.spark.jobs.export.plan import LostOffsets, Portion, require_reached, without
from tieringd.spark.jobs.export.round_planning import Round, begun_round, next_round
from tieringd.spark.jobs.export.state import (
    ExportRules,
    ExportState,
    ReplacedOffsets,
    continued,
    holding_every_partition,
    pinned,
    replaced_since,
)
from tieringd.spark.jobs.export.topic_target import TopicTarget, WrittenFiles
from tieringd.spark.jobs.export.work import Runner, Work
from tieringd.storage.at_once import at_once

if TYPE_CHECKING:
    # An ordinary import would load prometheus_client into processes that do not need it.
    from tieringd.spark.bucket import Bucket

LOST_ROUNDS_MAX: Final = 10
"""Rounds that a run may lose, because another run is faster or a leader is deposed meanwhile."""
LOADS_AT_ONCE: Final = 16
"""Manifests that are loaded at once, when they are read again before a commit."""


@dataclass
class TopicOutcome:
    """The outcome of a run for one topic."""

    topic: str
    place: str = ""
    """The place of the export, for people; empty if the archive could not be read."""
    begun_at: dict[int, int] = field(default_factory=dict)
    """The first offset, by partition, that was not exported before the run; only of begun exports."""
    reached: dict[int, int] = field(default_factory=dict)
    written: list[WrittenFiles] = field(default_factory=list)
    lost: list[LostOffsets] = field(default_factory=list)
    replaced: list[ReplacedOffsets] = field(default_factory=list)
    """
    Offsets of which the target may have a deposed leader's records, found by this run or an earlier one.
    """
    without_manifest: tuple[int, ...] = ()
    """The partitions of which nothing was exported, and that have no manifest: it may be lost."""
    commits: int = 0
    faults: list[str] = field(default_factory=list)
    error: TieringError | None = None
    """The error that stopped the run before the archive's end. Earlier commits are valid."""

    def miss(self, lost: Iterable[LostOffsets]) -> None:
        """
        Note the offsets that the archive lacked in a committed round, each offset once.

        The same loss may come several times: a round without portions is planned again each time, and a gap
        may expire while its round is written.
        """
        for one in lost:
            self.lost += without(one, self.lost)

    def see(self, state: ExportState, noted_before: int, archived: Collection[int]) -> None:
        """
        Note the state of the export. The first *noted_before* of its replaced offsets are known already.

        An exported partition that is not in *archived* is a fault. Any other may be new.
        """
        self.without_manifest = tuple(
            number for number, offset in state.offsets.items() if not offset and number not in archived
        )
        self.reached.update(state.offsets)
        self.replaced = list(state.replaced)
        self.name(state.replaced[noted_before:])
        for number, offset in state.offsets.items():
            fault = (
                f"{self.topic}-{number} was exported up to offset {offset - 1}, but the archive no longer "
                "has its manifest: nothing more of it is exported. `tieringd archive scrub` shows what is "
                "left"
            )
            if offset and number not in archived and fault not in self.faults:
                self.faults.append(fault)

    def tell_moved(self, place: str) -> None:
        """Add a fault if the topic's archive continues at *place*; empty if it is here."""
        if place:
            self.faults.append(
                f"topic {self.topic}: its archive was moved to {place}, and all that is in this bucket is "
                "exported. Export the rest to the same target with a configuration of that bucket"
            )

    def count(self, round_: Round, written: Sequence[WrittenFiles]) -> None:
        """Note a round that was committed."""
        self.commits += 1
        self.written += written
        self.miss(round_.lost)
        self.miss(lost for one in written for lost in one.lost)

    def name(self, replaced: Iterable[ReplacedOffsets]) -> None:
        """Add a fault for each range of offsets that was replaced after it was read, each once."""
        for one in replaced:
            fault = (
                f"{self.topic}-{one.partition} {one} were replaced by another leader's records after the "
                "export: the target may have the records of the deposed leader"
            )
            if fault not in self.faults:
                self.faults.append(fault)


def export_topic(
    archived: ArchivedTopic,
    target: TopicTarget,
    rules: ExportRules,
    *,
    archive: Callable[[], Bucket],
    run: Runner,
    clock: Callable[[], int] = wall_clock_ms,
) -> TopicOutcome:
    """
    Export the records of a topic that are in the archive and not yet in *target*.

    An error is part of the outcome, and is not raised. It is a `ConfigError` if the target holds other data,
    and a `RetryableError` if a store does not answer or Spark gave up. It is another `TieringError` if the
    archive lacks records to export or cannot be read, or if other runs kept exporting the same topic.
    """
    outcome = TopicOutcome(archived.topic.key.topic, target.place)
    try:
        _export_rounds(archived, target, rules, outcome, archive=archive, run=run, clock=clock)
    except TieringError as error:
        outcome.error = error
    else:
        outcome.tell_moved(archived.topic.moved_to)
    return outcome


def _export_rounds(
    archived: ArchivedTopic,
    target: TopicTarget,
    rules: ExportRules,
    outcome: TopicOutcome,
    *,
    archive: Callable[[], Bucket],
    run: Runner,
    clock: Callable[[], int],
) -> None:
    """
    Export a topic, and note each round in *outcome* as soon as it is committed.

    Raises:
        TieringError: See `export_topic`.
    """
    key = archived.topic.key
    ends = {one.partition: one.next_offset for one in archived.partitions}
    known = {one.partition.partition: one for one in archived.partitions}
    lost_rounds = 0
    is_first = True
    while lost_rounds < LOST_ROUNDS_MAX:
        checkpoint = target.checkpoint()
        found = continued(
            checkpoint.state, key, isolation=rules.isolation, recreated=rules.recreated, place=target.place
        )
        if is_first:
            outcome.begun_at.update(found.offsets)
            is_first = False
        # Pending portions of an earlier incarnation of the topic are left as they are.
        is_begun = checkpoint.state is not None and checkpoint.state.topic == key
        pending = checkpoint.pending if is_begun else ()
        state = _brought_up_to_date(found, archived.topic.partition_count, known, pending, is_begun=is_begun)
        outcome.see(state, len(found.replaced), known)
        may_be_cut = bool(pending) and not rules.fails_on_gap
        if pending:
            round_ = begun_round(archive(), state, pending, rules)
        else:
            round_ = next_round(archive(), state, _ends_to_reach(ends, found, rules), rules)
        state = replace(state, offsets={**state.offsets, **round_.passed})
        if not round_.portions and state == found:
            outcome.miss(round_.lost)
            return
        begun = target.begin(checkpoint, state, round_.portions)
        if begun is None:
            lost_rounds += 1
            continue
        written: list[WrittenFiles] = []
        if round_.portions:
            written = run(
                Work(archive, target.opener(), rules.isolation, rules.fails_on_gap, may_be_cut),
                round_.portions,
            )
        fresh = _read_again(archive(), round_.portions, may_be_cut=may_be_cut)
        known.update({one.partition.partition: one for one in fresh})
        replaced = replaced_since(state, fresh, state.reached(round_.portions))
        if replaced and target.hides_uncommitted:
            lost_rounds += 1
            continue
        advanced = pinned(state, fresh, replaced).advanced(
            round_.portions, run_id=uuid.uuid4().hex, now_ms=clock()
        )
        if target.commit(begun, advanced, written):
            outcome.see(advanced, len(state.replaced), known)
            outcome.count(round_, written)
        else:
            lost_rounds += 1
    raise TieringError(
        f"{lost_rounds} rounds of the export of topic {key.topic} to {target.place} had to be discarded: "
        "other runs exported it at the same time, or its leaders were deposed during the rounds",
        hint="Run one export of a topic to a target at a time, and check that its leaders are stable",
    )


def _brought_up_to_date(
    found: ExportState,
    partition_count: int,
    known: Mapping[int, PartitionManifest],
    pending: Sequence[Portion],
    *,
    is_begun: bool,
) -> ExportState:
    """Return the state with an offset for every partition, and with offsets that were replaced since."""
    if is_begun:
        starts = {one.partition.partition: one.from_offset for one in reversed(pending)}
    else:
        starts = {number: manifest.start_offset for number, manifest in known.items()}
    state = holding_every_partition(found, partition_count, starts)
    return pinned(state, known.values(), replaced_since(state, known.values(), state.reached(pending)))


def _ends_to_reach(
    ends: Mapping[TopicIdPartition, int], found: ExportState, rules: ExportRules
) -> dict[TopicIdPartition, int]:
    """
    Return *ends*, with the offset that is reached for a partition that was cut back to before it.

    That holds only if gaps are allowed, and the stored state *found* names the offsets up to there as
    replaced: an earlier commit has given them up. Any other such partition is an error of `next_round`.
    """
    if rules.fails_on_gap:
        return dict(ends)
    reached = found.offsets
    given_up = {
        one.partition: reached[one.partition]
        for one in found.replaced
        if one.next_offset >= reached[one.partition]
    }
    return {one: max(end, given_up.get(one.partition, 0)) for one, end in ends.items()}


def _read_again(bucket: Bucket, portions: Sequence[Portion], *, may_be_cut: bool) -> list[PartitionManifest]:
    """
    Return the current manifests of the partitions of *portions*.

    Raises:
        TieringError: The archive of a partition is gone, or ends before its portions and *may_be_cut* is
            false.
    """
    ends = {one.partition: one.next_offset for one in portions}
    loaded = bucket.run(at_once(list(ends), bucket.manifests.load, count=LOADS_AT_ONCE))
    return [
        require_reached(one.manifest, partition, 0 if may_be_cut else end)
        for (partition, end), one in zip(ends.items(), loaded, strict=True)
    ]
