"""Plan the next round of a topic's export, from the archive's current manifests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from tieringd.errors import ObjectNotFound, TieringError
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.spark.jobs.export.plan import (
    ALLOW_GAPS,
    LostOffsets,
    Portion,
    losses,
    portions_of,
    require_reached,
)

if TYPE_CHECKING:
    # An ordinary import would load prometheus_client and xxhash into processes that do not need them.
    from tieringd.spark.bucket import Bucket
    from tieringd.spark.jobs.export.state import ExportRules, ExportState

T = TypeVar("T")

READ_ATTEMPTS_MAX: Final = 5
"""Attempts with a newly loaded manifest, if the spillover manifests that it names are missing."""


@dataclass(frozen=True, slots=True)
class Round:
    """The portions that are written and committed together, and the offsets that the archive lacks."""

    portions: tuple[Portion, ...]
    lost: tuple[LostOffsets, ...] = ()
    passed: Mapping[int, int] = field(default_factory=dict)
    """For partitions that lost everything there was to export: the offset at which their export continues."""


def next_round(
    bucket: Bucket, state: ExportState, ends: Mapping[TopicIdPartition, int], rules: ExportRules
) -> Round:
    """
    Return a round of about `rules.round_bytes` from the rest of all partitions, up to their *ends*.

    Raises:
        TieringError: The archive ends before the exported offsets, or it lacks offsets and the rules do not
            allow that.
    """
    for partition, end in ends.items():
        if end < state.offsets[partition.partition]:
            raise TieringError(
                f"{partition} was exported up to offset {state.offsets[partition.partition] - 1}, but the "
                f"archive ends at {end - 1}: it was cut back to the log of another leader",
                hint="The target has records that are no longer in the log; export to another target",
            )
    left = {one: end for one, end in ends.items() if state.offsets[one.partition] < end}
    rounds = [
        _round_of(
            bucket,
            partition,
            exported_to=state.offsets[partition.partition],
            end=end,
            rules=rules,
            limit_bytes=rules.round_bytes // len(left),
        )
        for partition, end in left.items()
    ]
    lost = tuple(one for found in rounds for one in found.lost)
    _require_none(lost, rules)
    return Round(
        tuple(portion for found in rounds for portion in found.portions),
        lost,
        {number: offset for found in rounds for number, offset in found.passed.items()},
    )


def _require_none(lost: Sequence[LostOffsets], rules: ExportRules) -> None:
    if lost and rules.fails_on_gap:
        raise TieringError(
            f"the archive lacks records that were to be exported: {'; '.join(map(str, lost))}",
            hint=ALLOW_GAPS,
        )


def begun_round(bucket: Bucket, state: ExportState, portions: Sequence[Portion], rules: ExportRules) -> Round:
    """
    Return the round of *portions* that an earlier run began but did not commit; they continue *state*.

    That run did not report the offsets that the archive lacks, so they are determined here.

    Raises:
        TieringError: The archive lacks offsets, and the rules do not allow that.
    """
    by_partition: dict[TopicIdPartition, list[Portion]] = defaultdict(list)
    for one in portions:
        by_partition[one.partition].append(one)
    lost: list[LostOffsets] = []
    for partition, some in by_partition.items():
        begin, end = some[0].from_offset, some[-1].next_offset
        lost += losses(
            partition,
            _with_manifest(bucket, partition, partial(_gaps, bucket, begin, end)),
            exported_to=state.offsets.get(partition.partition, begin),
            from_offset=begin,
            next_offset=end,
        )
    _require_none(lost, rules)
    return Round(tuple(portions), tuple(lost))


def _round_of(
    bucket: Bucket,
    partition: TopicIdPartition,
    *,
    exported_to: int,
    end: int,
    rules: ExportRules,
    limit_bytes: int,
) -> Round:
    """Return a round with the next portions of one partition, of about *limit_bytes*."""

    def cut(manifest: PartitionManifest | None) -> Round:
        return _cut(
            bucket,
            require_reached(manifest, partition, end),
            exported_to=exported_to,
            end=end,
            portion_bytes=rules.portion_bytes,
            limit_bytes=limit_bytes,
        )

    return _with_manifest(bucket, partition, cut)


def _with_manifest(
    bucket: Bucket, partition: TopicIdPartition, see: Callable[[PartitionManifest | None], T]
) -> T:
    """Return *see* of a partition's manifest. Load it again if a spillover manifest is missing."""
    for attempt in range(1, READ_ATTEMPTS_MAX + 1):
        manifest = bucket.run(bucket.manifests.load(partition)).manifest
        try:
            return see(manifest)
        except ObjectNotFound:
            if attempt == READ_ATTEMPTS_MAX:
                raise
    raise AssertionError("the last attempt returns or raises")


def _gaps(
    bucket: Bucket, from_offset: int, next_offset: int, manifest: PartitionManifest | None
) -> list[Gap]:
    """Return the gaps in the manifest and spillover manifests that cover the given offsets."""
    if manifest is None:
        # Reading the portions will report the missing manifest.
        return []
    found: list[Gap] = []
    with closing(bucket.iterate(bucket.spillovers.pieces(manifest, from_offset=from_offset))) as pieces:
        for piece in pieces:
            if piece.start_offset >= next_offset:
                break
            found += piece.gaps
    return found


def _cut(
    bucket: Bucket,
    manifest: PartitionManifest,
    *,
    exported_to: int,
    end: int,
    portion_bytes: int,
    limit_bytes: int,
) -> Round:
    from_offset = min(max(exported_to, manifest.start_offset), end)
    pieces: list[PartitionManifest] = []

    def segments() -> Generator[RemoteSegment]:
        with closing(bucket.iterate(bucket.spillovers.pieces(manifest, from_offset=from_offset))) as found:
            for piece in found:
                pieces.append(piece)
                for row in range(piece.segments.row_at_or_after(from_offset), len(piece.segments)):
                    yield piece.segments[row]

    portions: list[Portion] = []
    left_bytes = limit_bytes
    with closing(segments()) as ascending:
        for portion in portions_of(
            manifest.partition,
            ascending,
            from_offset=from_offset,
            next_offset=end,
            portion_bytes=portion_bytes,
        ):
            portions.append(portion)
            left_bytes -= portion.size_bytes
            if left_bytes <= 0:
                break
    next_offset = portions[-1].next_offset if portions else from_offset
    lost = losses(
        manifest.partition,
        [gap for piece in pieces for gap in piece.gaps],
        exported_to=exported_to,
        from_offset=from_offset,
        next_offset=next_offset,
    )
    passed = {} if portions else {manifest.partition.partition: from_offset}
    return Round(tuple(portions), tuple(lost), passed)
