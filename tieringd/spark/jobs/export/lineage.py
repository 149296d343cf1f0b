"""
Whose log an export has read: which offsets of a target are of a leader that was deposed since.

Pure. An unclean election cuts an archive back, and the manifest keeps a `Replacement` of that for good. A
state pins those that it knows. One that it does not know, below the offsets that it has reached, took the
place of records that were read before. Replacements are compared as a whole: no clock has a say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tieringd.spark.jobs.export.state import ReplacedOffsets

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.manifest_parts import Replacement
    from tieringd.spark.jobs.export.state import ExportState


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
