"""
The export of one topic, in rounds: plan, write, compare, commit, until the archive's end is reached.

A round is committed as a whole, and a killed run loses the round that it was in. The end is fixed when the
run begins, so that a topic that goes on growing does not keep it.

The state pins the replacements that the archive had before a round was read. They are compared with those
that it has when all is written. Where an unclean election came in between, a round of which nothing is seen
yet is done anew. A round whose files are seen already is committed, and the offsets are noted in the state
and named in the report.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from tieringd.clock import wall_clock_ms
from tieringd.errors import TieringError
from tieringd.spark.jobs.export.plan import require_reached, without
from tieringd.spark.jobs.export.round_planning import begun_round, next_round
from tieringd.spark.jobs.export.state import continued, holding_every_partition, pinned, replaced_since
from tieringd.spark.jobs.export.work import Work
from tieringd.storage.at_once import at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from tieringd.archive.catalog import ArchivedTopic
    from tieringd.model.manifest import PartitionManifest
    from tieringd.spark.bucket import Bucket
    from tieringd.spark.jobs.export.plan import Lost, Portion
    from tieringd.spark.jobs.export.round_planning import Round
    from tieringd.spark.jobs.export.state import ExportRules, ExportState, ReplacedOffsets
    from tieringd.spark.jobs.export.topic_target import TopicTarget, Written
    from tieringd.spark.jobs.export.work import Runner

LOST_ROUNDS_MAX: Final = 10
"""So often another run may be faster, or a leader be deposed while a round is read."""
LOADS_AT_ONCE: Final = 16
"""Manifests that are read again before a commit."""


@dataclass
class TopicOutcome:
    """What a run has done for one topic."""

    topic: str
    place: str = ""
    """Empty where the archive could not be looked at."""
    begun_at: dict[int, int] = field(default_factory=dict)
    """Where each partition's export stood, where it had begun."""
    reached: dict[int, int] = field(default_factory=dict)
    written: list[Written] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    replaced: list[ReplacedOffsets] = field(default_factory=list)
    """Where the target may have a deposed leader's records, whichever run has found that."""
    commits: int = 0
    faults: list[str] = field(default_factory=list)
    error: TieringError | None = None
    """What kept the run from the archive's end; what was committed before that counts."""

    def miss(self, lost: Iterable[Lost]) -> None:
        """
        Note what the archive lacked of a round that counts; each offset once.

        A round of nothing is planned again each time, and a gap may expire while its round is written.
        """
        for one in lost:
            self.lost += without(one, self.lost)

    def see(self, state: ExportState, noted_before: int, archived: Collection[int]) -> None:
        """
        Take in where the export stands; of what it notes as replaced, *noted_before* were told before.

        A partition that was exported, and that is not among those *archived*, is a fault.
        """
        self.reached.update(state.offsets)
        self.replaced = list(state.replaced)
        self.name(state.replaced[noted_before:])
        for number, offset in state.offsets.items():
            fault = (
                f"{self.topic}-{number} was exported up to offset {offset - 1}, and the archive has no "
                "manifest of it any more: nothing is exported of it. `tieringd archive scrub` shows what is "
                "left"
            )
            if offset and number not in archived and fault not in self.faults:
                self.faults.append(fault)

    def count(self, round_: Round, written: Sequence[Written]) -> None:
        """Take in a round that was committed."""
        self.commits += 1
        self.written += written
        self.miss(round_.lost)
        self.miss(lost for one in written for lost in one.lost)

    def name(self, replaced: Iterable[ReplacedOffsets]) -> None:
        """Tell of offsets that were replaced after they had been read; each of them once."""
        for one in replaced:
            fault = (
                f"{self.topic}-{one.partition} {one} were replaced by another leader's records after they "
                "had been exported: the target may have those of the deposed leader"
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
    Export what of a topic is in the archive and not yet in *target*; an error is part of the outcome.

    It is a `ConfigError` where the target holds something else, a `RetryableError` where a store is away or
    Spark gave up, and any other where the archive lacks what was to be exported or cannot be read, and where
    others kept exporting the same.
    """
    outcome = TopicOutcome(archived.topic.key.topic, target.place)
    try:
        _export_rounds(archived, target, rules, outcome, archive=archive, run=run, clock=clock)
    except TieringError as error:
        outcome.error = error
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
    Export a topic, and note in *outcome* what is done as soon as it counts.

    Raises:
        TieringError: See `export_topic`.
    """
    key = archived.topic.key
    ends = {one.partition: one.next_offset for one in archived.partitions}
    known = {one.partition.partition: one for one in archived.partitions}
    lost_rounds = 0
    is_first = True
    while lost_rounds < LOST_ROUNDS_MAX:
        standing = target.standing()
        found = continued(
            standing.state, key, isolation=rules.isolation, recreated=rules.recreated, place=target.place
        )
        if is_first:
            outcome.begun_at.update(found.offsets)
            is_first = False
        # What was begun of an earlier incarnation of the topic is left as it is.
        is_begun = standing.state is not None and standing.state.topic == key
        pending = standing.pending if is_begun else ()
        state = _looked_over(found, archived.topic.partition_count, known, pending, is_begun=is_begun)
        outcome.see(state, len(found.replaced), known)
        if pending:
            round_ = begun_round(archive(), state, pending, rules)
        else:
            round_ = next_round(archive(), state, ends, rules)
        state = replace(state, offsets={**state.offsets, **round_.passed})
        if not round_.portions and state == found:
            outcome.miss(round_.lost)
            return
        begun = target.begin(standing, state, round_.portions)
        if begun is None:
            lost_rounds += 1
            continue
        written: list[Written] = []
        if round_.portions:
            written = run(
                Work(archive, target.opener(), rules.isolation, rules.fails_on_gap), round_.portions
            )
        fresh = _read_again(archive(), round_.portions)
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
        f"{lost_rounds} rounds of the export of topic {key.topic} to {target.place} were written in vain: "
        "other runs export it as well and were faster, or its leaders were deposed meanwhile",
        hint="Run one export of a topic to a target at a time, and see that its leaders stay",
    )


def _looked_over(
    found: ExportState,
    partition_count: int,
    known: Mapping[int, PartitionManifest],
    pending: Sequence[Portion],
    *,
    is_begun: bool,
) -> ExportState:
    """Return the state with every partition, and with what was replaced since it was pinned."""
    if is_begun:
        starts = {one.partition.partition: one.from_offset for one in reversed(pending)}
    else:
        starts = {number: manifest.start_offset for number, manifest in known.items()}
    state = holding_every_partition(found, partition_count, starts)
    return pinned(state, known.values(), replaced_since(state, known.values(), state.reached(pending)))


def _read_again(bucket: Bucket, portions: Sequence[Portion]) -> list[PartitionManifest]:
    """
    Return the manifests of the partitions of *portions*, as they are now.

    Raises:
        TieringError: The archive of one ends before its portions do, or is gone.
    """
    ends = {one.partition: one.next_offset for one in portions}
    loaded = bucket.run(at_once(list(ends), bucket.manifests.load, count=LOADS_AT_ONCE))
    return [
        require_reached(one.manifest, partition, end)
        for (partition, end), one in zip(ends.items(), loaded, strict=True)
    ]
