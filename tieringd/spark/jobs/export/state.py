"""
How far an export is: the offsets that it has reached, stored in the target with the data or right after it.

The state belongs to one topic in one target, and to one incarnation of the topic.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from tieringd.errors import ConfigError, CorruptDataError
from tieringd.formats.object_keys import TopicKey
from tieringd.model.manifest_parts import Replacement

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tieringd.spark.jobs.export.plan import Portion

Isolation: TypeAlias = Literal["read_committed", "read_uncommitted"]
OnRecreated: TypeAlias = Literal["error", "append"]

_ISOLATIONS: Final[dict[str, Isolation]] = {name: name for name in get_args(Isolation)}


@dataclass(frozen=True, slots=True)
class ReplacedOffsets:
    """Offsets of which the target may have the records of a deposed leader."""

    partition: int
    from_offset: int
    next_offset: int
    """Exclusive."""
    leader_epoch: int
    """Of the leader whose records the archive has there."""

    def __str__(self) -> str:
        return f"offsets {self.from_offset} to {self.next_offset - 1}"


@dataclass(frozen=True, slots=True)
class ExportState:
    """What of a topic is in a target."""

    topic: TopicKey
    isolation: Isolation
    offsets: Mapping[int, int] = field(default_factory=dict)
    """For each partition of the topic the first offset that is not exported; 0 where nothing ever was."""
    run_id: str = ""
    """Of the run that committed this last."""
    committed_at_ms: int = 0
    replacements: Mapping[int, tuple[Replacement, ...]] | None = field(default_factory=dict)
    """For each partition those that its manifest had before the exported records were read; None where an
    earlier release wrote the state, which did not note them."""
    replaced: tuple[ReplacedOffsets, ...] = ()
    """What was replaced after it was read: noted for good."""

    def reached(self, portions: Iterable[Portion]) -> dict[int, int]:
        """Return `offsets` as they are once *portions*, which go on from it, are in the target."""
        reached = {one.partition.partition: one.next_offset for one in portions}
        return {
            number: max(self.offsets.get(number, 0), reached.get(number, 0))
            for number in sorted({*self.offsets, *reached})
        }

    def advanced(self, portions: Iterable[Portion], *, run_id: str, now_ms: int) -> ExportState:
        """Return the state once *portions*, which go on from it, are in the target."""
        return replace(self, offsets=self.reached(portions), run_id=run_id, committed_at_ms=now_ms)

    def as_json(self) -> str:
        """Return it as one line of JSON."""
        document = {
            "cluster": self.topic.cluster,
            "topic": self.topic.topic,
            "topic_id": self.topic.topic_id,
            "isolation": self.isolation,
            "offsets": {str(number): offset for number, offset in self.offsets.items()},
            "run_id": self.run_id,
            "committed_at_ms": self.committed_at_ms,
            "replacements": {
                str(number): [astuple(one) for one in some]
                for number, some in (self.replacements or {}).items()
            },
            "replaced": [astuple(one) for one in self.replaced],
        }
        return json.dumps(document, separators=(",", ":"))


def parse_state(text: str, *, source: str) -> ExportState:
    """
    Return the state that *text* holds.

    Raises:
        CorruptDataError: It is not the state of an export; *source* says where it was found.
    """
    try:
        found = json.loads(text)
        state = ExportState(
            TopicKey(str(found["cluster"]), str(found["topic"]), str(found["topic_id"])),
            isolation=_ISOLATIONS[found["isolation"]],
            offsets={int(number): int(offset) for number, offset in found["offsets"].items()},
            run_id=str(found["run_id"]),
            committed_at_ms=int(found["committed_at_ms"]),
            replacements=_replacements(found["replacements"]) if "replacements" in found else None,
            replaced=tuple(ReplacedOffsets(*map(int, one)) for one in found.get("replaced", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptDataError(f"the state of an export cannot be read: {error!r}", source=source) from error
    return state


def _replacements(found: Mapping[str, Iterable[Iterable[int]]]) -> dict[int, tuple[Replacement, ...]]:
    return {int(number): tuple(Replacement(*map(int, one)) for one in some) for number, some in found.items()}


def continued(
    found: ExportState | None, topic: TopicKey, *, isolation: Isolation, recreated: OnRecreated, place: str
) -> ExportState:
    """
    Return the state to go on from, given what is in the target at *place*.

    Raises:
        ConfigError: The target was begun otherwise, or with another incarnation of the topic.
    """
    begun = ExportState(topic, isolation)
    if found is None:
        return begun
    if found.topic.topic != topic.topic:
        raise ConfigError(
            f"{place} holds an export of topic {found.topic.topic}, not of {topic.topic}",
            hint="Export each topic to a place of its own",
        )
    if found.isolation != isolation:
        raise ConfigError(
            f"isolation: {place} was begun with {found.isolation}, and cannot go on with {isolation}",
            hint=f"Ask for {found.isolation}, or export to another target",
        )
    if found.topic == topic:
        return found
    if recreated == "append":
        return begun
    raise ConfigError(
        f"topic {topic.topic} in the archive has the id {topic.topic_id} of cluster {topic.cluster}, and "
        f"{place} holds one with the id {found.topic.topic_id} of cluster {found.topic.cluster}: the topic "
        "was created anew, and its offsets began again",
        hint="Export to another target; or append to this one (`--recreated append`), where an offset then "
        "names a record of each",
    )
