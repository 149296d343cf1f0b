"""Find the segments that hold a range of offsets, in the live manifest and in the spilled ones if needed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tieringd.errors import ObjectNotFound
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import TopicPartition
from tieringd.spark.source.data_loss import Loss, OnLoss
from tieringd.spark.source.offset_finder import readable_range
from tieringd.spark.source.planning import Stretch
from tieringd.storage.at_once import at_once

if TYPE_CHECKING:
    # An ordinary import would load prometheus_client into processes that do not need it.
    from tieringd.spark.bucket import Bucket

RANGES_AT_ONCE: Final = 16
UNTOLD: Final = "the manifest has neither a segment nor a gap for these offsets"
_TRIES: Final = 3
"""Tries with a newly loaded live manifest: a missing spillover manifest means that the live one changed."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets to read of a partition, from *from_offset* up to *next_offset*, exclusive."""

    partition: TopicPartition
    manifest: PartitionManifest | None
    """None if nothing of the partition is archived."""
    from_offset: int
    next_offset: int


def find_stretches(bucket: Bucket, ranges: Sequence[OffsetRange], *, rule: OnLoss) -> list[Stretch]:
    """
    Return the segments of all *ranges*, in their order.

    Raises:
        DataLossError: Part of a range is not in the archive, and *rule* does not allow that.
        ObjectNotFound: A spillover manifest is missing, and remains missing with a new live manifest.
    """

    async def find(one: OffsetRange) -> tuple[list[Stretch], list[Loss]]:
        return await _found(bucket, one, rule)

    stretches: list[Stretch] = []
    for parts, losses in bucket.run(at_once(ranges, find, count=RANGES_AT_ONCE)):
        for loss in losses:
            rule.meet(loss)
        stretches += parts
    return stretches


async def _found(bucket: Bucket, one: OffsetRange, rule: OnLoss) -> tuple[list[Stretch], list[Loss]]:
    manifest = one.manifest
    for tries_left in reversed(range(_TRIES)):
        from_offset, next_offset = readable_range(
            one.partition, manifest, one.from_offset, one.next_offset, rule=rule
        )
        if manifest is None or from_offset >= next_offset:
            return [], []
        try:
            stretches, gaps = await _listed(bucket, manifest, from_offset, next_offset)
        except ObjectNotFound:
            if not tries_left:
                raise
            manifest = (await bucket.manifests.load(manifest.partition)).manifest
        else:
            holes = holes_between(stretches, from_offset, next_offset)
            return stretches, losses_in(one.partition, holes, gaps) if holes else []
    raise AssertionError("the last try returns or raises")


async def _listed(
    bucket: Bucket, manifest: PartitionManifest, from_offset: int, next_offset: int
) -> tuple[list[Stretch], list[Gap]]:
    stretches: list[Stretch] = []
    gaps: list[Gap] = []
    async with aclosing(bucket.spillovers.pieces(manifest, from_offset=from_offset)) as pieces:
        async for piece in pieces:
            if piece.start_offset >= next_offset:
                break
            whole = Stretch(
                manifest.partition,
                piece.segments,
                max(piece.live_base, from_offset),
                min(piece.next_offset, next_offset),
            )
            stretch = whole.part(whole.from_offset, whole.next_offset)
            if stretch.segments:
                stretches.append(stretch)
            gaps += [
                gap for gap in piece.gaps if gap.base_offset < next_offset and gap.next_offset > from_offset
            ]
    return stretches, gaps


def holes_between(stretches: Sequence[Stretch], from_offset: int, next_offset: int) -> list[tuple[int, int]]:
    """Return the ranges of offsets, ends exclusive, that no segment of *stretches*, which ascend, has."""
    holes: list[tuple[int, int]] = []
    for stretch in stretches:
        columns = (stretch.segments.column(name) for name in ("base_offset", "last_offset"))
        for base_offset, last_offset in zip(*columns, strict=True):
            if base_offset > from_offset:
                holes.append((from_offset, base_offset))
            from_offset = last_offset + 1
    if from_offset < next_offset:
        holes.append((from_offset, next_offset))
    return holes


def losses_in(partition: TopicPartition, holes: Sequence[tuple[int, int]], gaps: Sequence[Gap]) -> list[Loss]:
    """
    Return the losses that fill *holes*: recorded gaps, and offsets that no manifest mentions.

    *gaps* are in ascending order.
    """
    losses: list[Loss] = []
    for begin, end in holes:
        at = begin
        for gap in gaps:
            if gap.next_offset <= at or gap.base_offset >= end:
                continue
            if gap.base_offset > at:
                losses.append(Loss(partition, at, gap.base_offset - 1, UNTOLD))
            losses.append(Loss.of_gap(partition, gap, from_offset=at, next_offset=end))
            at = min(gap.next_offset, end)
        if at < end:
            losses.append(Loss(partition, at, end - 1, UNTOLD))
    return losses
