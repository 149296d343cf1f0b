"""
How far an export is: the offsets that it has reached, stored in the target with the data or right after it.

The state belongs to one topic in one target, and to one incarnation of the topic.

`ExportRules` say how to export, whatever the target.

`replaced_since` tells which offsets of a target are of a leader that was deposed since. It is pure. An
unclean election cuts an archive back, and the manifest keeps a `Replacement` of that for good. A state pins
those that it knows. An unknown one, below the offsets that the state has reached, took the place of records
that were read before. Replacements are compared as a whole: no clock has a say.
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

    from tieringd.model.manifest import PartitionManifest
    from tieringd.spark.jobs.export.plan import Portion


Isolation: TypeAlias = Literal["read_committed", "read_uncommitted"]
OnRecreated: TypeAlias = Literal["error", "append"]

PORTION_BYTES: Final = 128 << 20
ROUND_BYTES: Final = 16 << 30


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


@dataclass(frozen=True, slots=True)
class ExportRules:
    """
    The options of an export.

    Raises:
        ConfigError: One of them is not possible.
    """

    isolation: Isolation = "read_committed"
    fails_on_gap: bool = True
    """Whether to stop, before anything is written, where the archive lacks what was to be exported."""
    recreated: OnRecreated = "error"
    """What to do where the target holds an earlier incarnation of the topic."""
    portion_bytes: int = PORTION_BYTES
    """About how much of the archive goes into one file; what is by hour or day gets smaller ones."""
    round_bytes: int = ROUND_BYTES
    """About how much of the archive goes into one commit."""

    def __post_init__(self) -> None:
        for name in ("portion_bytes", "round_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, not {getattr(self, name)}")
        for name, known in (("isolation", Isolation), ("recreated", OnRecreated)):
            if getattr(self, name) not in get_args(known):
                raise ConfigError(
                    f"{name}: must be {' or '.join(get_args(known))}, not {getattr(self, name)}"
                )


def replaced_since(
    state: ExportState, manifests: Iterable[PartitionManifest], reached: Mapping[int, int]
) -> tuple[ReplacedOffsets, ...]:
    """
    Return which offsets below *reached* were replaced after *state* was pinned.

    Args:
        state: What is in the target, with the replacements that were known before its records were read.
        manifests: The partitions' manifests, read after the records.
        reached: For each partition the first offset that was not read.
    """
    return tuple(
        ReplacedOffsets(number, one.base_offset, min(one.last_offset + 1, reached[number]), one.leader_epoch)
        for manifest in manifests
        for number in [manifest.partition.partition]
        for one in manifest.replacements
        if one.base_offset < reached.get(number, 0) and one not in _known(state, manifest)
    )


def pinned(
    state: ExportState, manifests: Iterable[PartitionManifest], replaced: Iterable[ReplacedOffsets] = ()
) -> ExportState:
    """
    Return *state* with the replacements that *manifests* have added to it, and *replaced* noted for good.

    Those that it has stay: another run may have pinned them from newer manifests.
    """
    pins = dict(state.replacements or {})
    for manifest in manifests:
        number = manifest.partition.partition
        added = [one for one in manifest.replacements if one not in pins.get(number, ())]
        if added:
            pins[number] = (*pins.get(number, ()), *added)
    noted = (*state.replaced, *(one for one in replaced if one not in state.replaced))
    return replace(state, replacements=pins, replaced=noted)


def holding_every_partition(
    state: ExportState, partition_count: int, starts: Mapping[int, int]
) -> ExportState:
    """
    Return *state* with an offset for each partition of the topic.

    One that has none begins where *starts* says, and at 0 where that says nothing: no record of it was
    archived yet. What expires of it before it is exported is missed.
    """
    numbers = sorted({*range(partition_count), *state.offsets, *starts})
    offsets = {number: state.offsets.get(number, starts.get(number, 0)) for number in numbers}
    return replace(state, offsets=offsets)


def _known(state: ExportState, manifest: PartitionManifest) -> tuple[Replacement, ...]:
    if state.replacements is None:
        # A state of an earlier release pins nothing, and only its time tells what came before it.
        return tuple(one for one in manifest.replacements if one.replaced_at_ms <= state.committed_at_ms)
    return state.replacements.get(manifest.partition.partition, ())
