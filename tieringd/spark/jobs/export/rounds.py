"""
The export of one topic, in rounds: plan, write, commit, until the archive's end is reached.

A round is committed as a whole, and a killed run loses the round that it was in. The end is fixed when the
run begins, so that a topic that goes on growing does not keep it.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tieringd.clock import wall_clock_ms
from tieringd.errors import TieringError
from tieringd.spark.jobs.export.plan import without
from tieringd.spark.jobs.export.round_planning import begun_round, next_round, replaced_since
from tieringd.spark.jobs.export.state import continued
from tieringd.spark.jobs.export.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tieringd.archive.catalog import ArchivedTopic
    from tieringd.spark.bucket import Bucket
    from tieringd.spark.jobs.export.plan import Lost
    from tieringd.spark.jobs.export.rules import ExportRules
    from tieringd.spark.jobs.export.topic_target import TopicTarget, Written
    from tieringd.spark.jobs.export.work import Runner

LOST_ROUNDS_MAX: Final = 10
"""So often another run may be faster; each time it has brought the export forward."""


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
    lost_rounds = 0
    is_first = True
    while lost_rounds < LOST_ROUNDS_MAX:
        standing = target.standing()
        state = continued(
            standing.state, key, isolation=rules.isolation, recreated=rules.recreated, place=target.place
        )
        outcome.reached.update(state.offsets)
        if is_first:
            outcome.begun_at.update(state.offsets)
            outcome.faults += replaced_since(archived.partitions, state)
            is_first = False
        # What was begun of an earlier incarnation of the topic is left as it is.
        if standing.pending and standing.state is not None and standing.state.topic == key:
            round_ = begun_round(archive(), state, standing.pending)
        else:
            round_ = next_round(archive(), state, ends, rules)
        if not round_.portions:
            outcome.miss(round_.lost)
            return
        begun = target.begin(standing, state, round_.portions)
        if begun is None:
            lost_rounds += 1
            continue
        written = run(Work(archive, target.opener(), rules.isolation, rules.fails_on_gap), round_.portions)
        advanced = state.advanced(round_.portions, run_id=uuid.uuid4().hex, now_ms=clock())
        if target.commit(begun, advanced, written):
            outcome.commits += 1
            outcome.reached.update(advanced.offsets)
            outcome.written += written
            outcome.miss(round_.lost)
            outcome.miss(lost for one in written for lost in one.lost)
        else:
            lost_rounds += 1
    raise TieringError(
        f"other runs export topic {key.topic} to {target.place} as well, and were faster {lost_rounds} times",
        hint="Run one export of a topic to a target at a time",
    )
