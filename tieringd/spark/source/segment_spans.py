"""Which segments hold a range of offsets, as the manifests tell: the live one, and spilled ones on demand."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tieringd.errors import ObjectNotFound
from tieringd.spark.source.data_loss import Loss
from tieringd.spark.source.offsets import readable_range
from tieringd.spark.source.planning import Span
from tieringd.storage.at_once import at_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.manifest_parts import Gap
    from tieringd.model.partition import TopicPartition
    from tieringd.spark.bucket import Bucket
    from tieringd.spark.source.data_loss import LossRule

RANGES_AT_ONCE: Final = 16
_TRIES: Final = 3
"""A spillover manifest that has gone means that the live one is another by now."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """What is to be read of a partition: from *from_offset* up to *next_offset*, exclusive."""

    partition: TopicPartition
    manifest: PartitionManifest | None
    """None where nothing of the partition is archived."""
    from_offset: int
    next_offset: int


def find_spans(bucket: Bucket, ranges: Sequence[OffsetRange], *, rule: LossRule) -> list[Span]:
    """
    Return the spans of all *ranges*, in their order.

    Raises:
        DataLossError: Part of a range is not in the archive, and that is not all right.
    """

    async def find(one: OffsetRange) -> tuple[list[Span], list[Gap]]:
        return await _found(bucket, one, rule)

    spans: list[Span] = []
    found = bucket.run(at_once(ranges, find, count=RANGES_AT_ONCE))
    for one, (parts, gaps) in zip(ranges, found, strict=True):
        for gap in gaps:
            rule.meet(
                Loss.of_gap(one.partition, gap, from_offset=one.from_offset, next_offset=one.next_offset)
            )
        spans += parts
    return spans


async def _found(bucket: Bucket, one: OffsetRange, rule: LossRule) -> tuple[list[Span], list[Gap]]:
    manifest = one.manifest
    for tries_left in reversed(range(_TRIES)):
        from_offset, next_offset = readable_range(
            one.partition, manifest, one.from_offset, one.next_offset, rule=rule
        )
        if manifest is None or from_offset >= next_offset:
            return [], []
        try:
            return await _listed(bucket, manifest, from_offset, next_offset)
        except ObjectNotFound:
            if not tries_left:
                raise
            manifest = (await bucket.manifests.load(manifest.partition)).manifest
    raise AssertionError("the last try returns or raises")


async def _listed(
    bucket: Bucket, manifest: PartitionManifest, from_offset: int, next_offset: int
) -> tuple[list[Span], list[Gap]]:
    spans: list[Span] = []
    gaps: list[Gap] = []
    async with aclosing(bucket.spillovers.pieces(manifest, from_offset=from_offset)) as pieces:
        async for piece in pieces:
            if piece.start_offset >= next_offset:
                break
            spans += [
                Span(
                    manifest.partition,
                    segment,
                    max(segment.base_offset, from_offset),
                    min(segment.next_offset, next_offset),
                )
                for segment in piece.segments.overlapping(from_offset, next_offset)
            ]
            gaps += [
                gap for gap in piece.gaps if gap.base_offset < next_offset and gap.next_offset > from_offset
            ]
    return spans, gaps
