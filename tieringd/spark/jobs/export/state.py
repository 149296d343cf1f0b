"""
The state of an export: the offsets that it has reached, stored in the target with the data or right after it.

A state belongs to one topic in one target, and to one incarnation of the topic.

`ExportRules` are the options of an export that are independent of the target.

`replaced_since` finds the offsets of a target that have records of a leader that was deposed since. It is
pure. An unclean election cuts an archive back, and the manifest keeps a `Replacement` for it permanently.
The state records the replacements that it knows. An unknown replacement below the state's offsets replaced
records that were read before. Replacements are compared by their offsets and the leader's epoch, independent
of any clock: a daemon corrects the time of a replacement where a wrong clock has recorded it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Final, Literal, TypeAlias, get_args

from tieringd.errors import ConfigError, CorruptDataError
from tieringd.formats.object_keys import TopicKey
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Replacement
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
    """The end of the offsets, exclusive."""
    leader_epoch: int
    """The epoch of the leader whose records the archive has there."""

    def __str__(self) -> str:
        return f"offsets {self.from_offset} to {self.next_offset - 1}"


@dataclass(frozen=True, slots=True)
class ExportState:
    """The state of one topic's export to a target."""

    topic: TopicKey
    isolation: Isolation
    offsets: Mapping[int, int] = field(default_factory=dict)
    """The first offset of each partition that is not exported; 0 if nothing ever was."""
    run_id: str = ""
    """The run that made the last commit."""
    committed_at_ms: int = 0
    replacements: Mapping[int, tuple[Replacement, ...]] | None = field(default_factory=dict)
    """
    For each partition the replacements that its manifest had before the exported records were read. None in a
    state of an earlier release, which did not record them.
    """
    replaced: tuple[ReplacedOffsets, ...] = ()
    """Offsets that were replaced after they were read. They are kept permanently."""
    earlier: tuple[TopicKey, ...] = ()
    """The earlier incarnations of the topic that the target has records of, oldest first."""

    def reached(self, portions: Iterable[Portion]) -> dict[int, int]:
        """Return `offsets` after *portions*, which continue this state, are in the target."""
        reached = {one.partition.partition: one.next_offset for one in portions}
        return {
            number: max(self.offsets.get(number, 0), reached.get(number, 0))
            for number in sorted({*self.offsets, *reached})
        }

    def advanced(self, portions: Iterable[Portion], *, run_id: str, now_ms: int) -> ExportState:
        """Return the state after *portions*, which continue this state, are in the target."""
        return replace(self, offsets=self.reached(portions), run_id=run_id, committed_at_ms=now_ms)

    def as_json(self) -> str:
        """Return the state as one line of JSON."""
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
            "earlier": [[one.cluster, one.topic_id] for one in self.earlier],
        }
        return json.dumps(document, separators=(",", ":"))


def parse_state(text: str, *, source: str) -> ExportState:
    """
    Parse a state from JSON. *source* is where *text* was found, for the error.

    Raises:
        CorruptDataError: *text* is not the state of an export.
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
            earlier=tuple(
                TopicKey(str(cluster), str(found["topic"]), str(topic_id))
                for cluster, topic_id in found.get("earlier", ())
            ),
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
    Return the state that an export continues, given the state *found* in the target at *place*.

    Raises:
        ConfigError: The target was begun with another topic or isolation, or with another incarnation of the
            topic and *recreated* is `error`. Or the target has records of this incarnation already, and a
            later one was appended to them.
    """
    begun = ExportState(topic, isolation)
    if found is None:
        return begun
    if found.topic.topic != topic.topic:
        raise ConfigError(
            f"{place} holds an export of topic {found.topic.topic}, not of {topic.topic}",
            hint="Export each topic to its own place",
        )
    if found.isolation != isolation:
        raise ConfigError(
            f"isolation: {place} was begun with {found.isolation}, and cannot continue with {isolation}",
            hint=f"Give {found.isolation}, or export to another target",
        )
    if found.topic == topic:
        return found
    if topic in found.earlier:
        raise ConfigError(
            f"topic {topic.topic} in the archive has the id {topic.topic_id} of cluster {topic.cluster}, of "
            f"which {place} has records already, before those of the id {found.topic.topic_id} of cluster "
            f"{found.topic.cluster}: they would be exported again from the start",
            hint="Export to another target",
        )
    if recreated == "append":
        return replace(begun, earlier=(*found.earlier, found.topic))
    raise ConfigError(
        f"topic {topic.topic} in the archive has the id {topic.topic_id} of cluster {topic.cluster}, but "
        f"{place} has a topic with the id {found.topic.topic_id} of cluster {found.topic.cluster}: the "
        "topic was created again, and its offsets began again",
        hint="Export to another target, or append to this one (`--recreated append`); an offset then names "
        "a record of each topic",
    )


@dataclass(frozen=True, slots=True)
class ExportRules:
    """
    The options of an export that are independent of the target.

    Raises:
        ConfigError: An option has an invalid value.
    """

    isolation: Isolation = "read_committed"
    fails_on_gap: bool = True
    """Whether to stop, before a round is written, if the archive lacks offsets to export."""
    recreated: OnRecreated = "error"
    """What to do if the target holds an earlier incarnation of the topic."""
    portion_bytes: int = PORTION_BYTES
    """Bytes of the archive for one file, about. Files that are partitioned by hour or day are smaller."""
    round_bytes: int = ROUND_BYTES
    """Bytes of the archive for one commit, about."""

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
    Return the offsets below *reached* that were replaced after *state* recorded its replacements.

    Args:
        state: The target's state, with the replacements that were known before its records were read.
        manifests: The partitions' manifests, read after the records.
        reached: For each partition the first offset that was not read.
    """
    return tuple(
        ReplacedOffsets(number, one.base_offset, min(one.last_offset + 1, reached[number]), one.leader_epoch)
        for manifest in manifests
        for number in [manifest.partition.partition]
        for one in manifest.replacements
        if one.base_offset < reached.get(number, 0) and one.identity not in _known(state, manifest)
    )


def pinned(
    state: ExportState, manifests: Iterable[PartitionManifest], replaced: Iterable[ReplacedOffsets] = ()
) -> ExportState:
    """
    Return *state* with the replacements of *manifests* and the offsets in *replaced* added.

    Replacements in *state* stay, as another run may have recorded them from newer manifests.
    """
    pins = dict(state.replacements or {})
    for manifest in manifests:
        number = manifest.partition.partition
        known = {one.identity for one in pins.get(number, ())}
        added = [one for one in manifest.replacements if one.identity not in known]
        if added:
            pins[number] = (*pins.get(number, ()), *added)
    noted = (*state.replaced, *(one for one in replaced if one not in state.replaced))
    return replace(state, replacements=pins, replaced=noted)


def holding_every_partition(
    state: ExportState, partition_count: int, starts: Mapping[int, int]
) -> ExportState:
    """
    Return *state* with an offset for each partition of the topic.

    A partition without one begins at its offset in *starts*. A partition that is not in *starts* has no
    archived record yet, and begins at 0, so that records that expire before their export count as lost.
    """
    numbers = sorted({*range(partition_count), *state.offsets, *starts})
    offsets = {number: state.offsets.get(number, starts.get(number, 0)) for number in numbers}
    return replace(state, offsets=offsets)


def _known(state: ExportState, manifest: PartitionManifest) -> set[tuple[int, int, int]]:
    if state.replacements is None:
        # A state of an earlier release recorded no replacements. Only its time separates older from newer
        # ones.
        known = [one for one in manifest.replacements if one.replaced_at_ms <= state.committed_at_ms]
    else:
        known = list(state.replacements.get(manifest.partition.partition, ()))
    return {one.identity for one in known}
