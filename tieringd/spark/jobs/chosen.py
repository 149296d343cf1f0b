"""Choose the partitions of named topics for a job, and divide their segments into shares for tasks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tieringd.archive.manifest_store import StoredManifest
from tieringd.archive.retired_objects import GoneSince
from tieringd.archive.segment_rewriter import SegmentRewriter
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment_table import SegmentTable
from tieringd.model.topic_lifecycle import Lifecycle
from tieringd.policies.topic_lifecycle import BEYOND_RETURN
from tieringd.spark.jobs.report import Table
from tieringd.spark.jobs.topic_choice import matches, unmatched
from tieringd.storage.at_once import at_once

if TYPE_CHECKING:
    # An ordinary import would load prometheus_client and xxhash into processes that do not need them.
    from tieringd.formats.topic_manifest import TopicManifest
    from tieringd.spark.bucket import Bucket

LEFT_OUT_COLUMNS: Final = ("topic", "partition", "topic_id", "reason")
LOADS_AT_ONCE: Final = 64
"""Manifests that are loaded at once. A store answers each in some tens of milliseconds."""
TASK_BYTES: Final = 64 << 20
"""The least that one task reads. A smaller task costs more to start than to run."""
ROUND_BYTES: Final = 1 << 40
"""The data that is read between two rounds of swaps. A job that dies loses about this much work at most."""
LEFT_MEANWHILE: Final = (
    "the partition was moved or deleted while the job processed others, and was not processed"
)


def rewriter_of(bucket: Bucket, *, writer_id: str) -> SegmentRewriter:
    """Return a rewriter of segments, for a task: it works in the executor's temporary directory."""
    directory = Path(tempfile.gettempdir())
    return SegmentRewriter(bucket.store, bucket.reader, writer_id=writer_id, work_directory=directory)


class _LeftOut(Enum):
    """Why a partition is left out, and is no fault."""

    NO_MANIFEST = "it has no manifest: it is new, or it is lost, and `tieringd spark rebuild` makes it again"
    CLOSED = "its archive is closed: it was moved, and continues in another bucket"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The topics and partitions that a job works on."""

    topics: tuple[TopicManifest, ...]
    partitions: tuple[PartitionManifest, ...]
    """Manifests with their spilled segments."""
    faults: tuple[str, ...]
    """The partitions that cannot be read, with the reason, as messages."""
    without_log: frozenset[TopicIdPartition] = frozenset()
    """The partitions of topics that are deleted in their cluster."""
    gone_since: Mapping[TopicIdPartition, GoneSince] = field(default_factory=dict)
    """The times of each partition's retired segments, as its manifest gave them when it was chosen."""
    left_out: tuple[tuple[TopicIdPartition, str], ...] = ()
    """The partitions of the topics that are not in `partitions` and are no fault, with the reason."""

    def tables(self) -> tuple[Table, ...]:
        """Return a table of the partitions that are left out, for the report; none without any."""
        rows = tuple((one.topic, one.partition, one.topic_id, reason) for one, reason in self.left_out)
        return (Table("partitions left out", LEFT_OUT_COLUMNS, rows),) if rows else ()

    def with_log(self, *, has_broker: bool) -> frozenset[TopicIdPartition]:
        """Return the partitions of which a broker may have a log; none if *has_broker* is false."""
        held = {one.partition for one in self.partitions} if has_broker else set()
        return frozenset(held - self.without_log)


@dataclass(frozen=True, slots=True)
class SegmentShare:
    """Neighbouring segments of one partition, for one task."""

    partition: TopicIdPartition
    first_row: int
    """The row of the first segment in the table that was divided."""
    segments: SegmentTable


async def chosen_partitions(bucket: Bucket, topics: Sequence[str]) -> Chosen:
    """
    Return all archived partitions of *topics*, which are names or patterns with `*`, `?` and `[]`.

    Every archive with a matching name is chosen: those of each cluster in the bucket, and those of topics
    that were deleted and created again. Purged archives are left out. So are archives that are closed
    because they moved, and partitions without a manifest, which `Chosen.left_out` names.

    Raises:
        ObjectNotFound: The bucket holds no topic of one of these names.
    """
    known = bucket.catalog.topics(lambda key: matches(key.topic, topics))
    found = [topic async for topic in known if topic.lifecycle not in BEYOND_RETURN]
    missing = unmatched(topics, {topic.key.topic for topic in found})
    if missing:
        raise ObjectNotFound(
            f"the bucket holds no topic named {missing[0]}",
            hint="`tieringd archive topics` lists what it holds",
        )
    partitions: list[PartitionManifest] = []
    without_log: set[TopicIdPartition] = set()
    gone_since: dict[TopicIdPartition, GoneSince] = {}
    faults: list[str] = []
    for topic in found:
        if topic.lifecycle is not Lifecycle.LIVE:
            without_log.update(topic.partitions())
    named = [partition for topic in found for partition in topic.partitions()]
    left_out: list[tuple[TopicIdPartition, str]] = []
    for partition, one in zip(named, await _all_whole(bucket, named, gone_since), strict=True):
        if isinstance(one, str):
            faults.append(one)
        elif isinstance(one, _LeftOut):
            left_out.append((partition, one.value))
        else:
            partitions.append(one)
    return Chosen(
        tuple(found),
        tuple(partitions),
        tuple(faults),
        frozenset(without_log),
        gone_since,
        tuple(left_out),
    )


async def loaded_again(
    bucket: Bucket, partitions: Iterable[PartitionManifest], faults: list[str]
) -> list[PartitionManifest]:
    """
    Return the current manifests of *partitions*, which may have been chosen hours ago.

    For a partition that cannot be read any more, or is no longer in this bucket, a message is appended to
    *faults*.
    """
    named = [one.partition for one in partitions]
    found: list[PartitionManifest] = []
    for partition, one in zip(named, await _all_whole(bucket, named), strict=True):
        if isinstance(one, str):
            faults.append(one)
        elif isinstance(one, _LeftOut):
            faults.append(f"{partition}: {LEFT_MEANWHILE}")
        else:
            found.append(one)
    return found


async def _all_whole(
    bucket: Bucket,
    partitions: Sequence[TopicIdPartition],
    gone_since: dict[TopicIdPartition, GoneSince] | None = None,
) -> list[PartitionManifest | str | _LeftOut]:
    """
    Return what `_whole` returns for each partition, or a fault of one that cannot be read.

    *gone_since* gets what each manifest shows of its retired segments.
    """

    async def whole(partition: TopicIdPartition) -> PartitionManifest | str | _LeftOut:
        try:
            stored = await bucket.manifests.load(partition)
            manifest = await _whole(bucket, stored)
        except (CorruptDataError, ObjectNotFound) as error:
            return f"{partition}: {error}"
        if not isinstance(manifest, _LeftOut) and gone_since is not None:
            gone_since[partition] = GoneSince()
            gone_since[partition].note(stored)
        return manifest

    return await at_once(partitions, whole, count=LOADS_AT_ONCE)


async def _whole(bucket: Bucket, stored: StoredManifest) -> PartitionManifest | _LeftOut:
    """
    Return a manifest with its spilled segments, or why the partition is left out.

    Raises:
        CorruptDataError: A spillover manifest is damaged.
        ObjectNotFound: A spillover manifest is missing.
    """
    manifest = stored.manifest
    if manifest is None:
        return _LeftOut.NO_MANIFEST
    if manifest.is_closed:
        return _LeftOut.CLOSED
    return await bucket.spillovers.with_history(manifest)


def shares(partition: TopicIdPartition, segments: SegmentTable) -> Iterator[SegmentShare]:
    """Yield the *segments* of a partition in shares. Each share but the last has at least `TASK_BYTES`."""
    first, size_bytes, last = 0, 0, len(segments) - 1
    for row, segment_bytes in enumerate(segments.column("size_bytes")):
        size_bytes += segment_bytes
        if size_bytes >= TASK_BYTES or row == last:
            yield SegmentShare(partition, first, segments.between(first, row + 1))
            first, size_bytes = row + 1, 0


def rounds(
    bucket: Bucket,
    partitions: Sequence[PartitionManifest],
    faults: list[str],
    *,
    round_bytes: int = ROUND_BYTES,
) -> Iterator[list[PartitionManifest]]:
    """
    Yield *partitions* in rounds of about *round_bytes*.

    After the first round, manifests are loaded again when their round begins, as a daemon may have merged or
    deleted segments meanwhile. For a partition that cannot be read then a message is appended to *faults*.
    """
    for number, some in enumerate(in_rounds(partitions, round_bytes)):
        yield bucket.run(loaded_again(bucket, some, faults)) if number else some


def in_rounds(partitions: Sequence[PartitionManifest], round_bytes: int) -> Iterator[list[PartitionManifest]]:
    """Yield the *partitions* with segments in lists of about *round_bytes* of data."""
    some: list[PartitionManifest] = []
    size_bytes = 0
    for one in partitions:
        if one.segments:
            some.append(one)
            # `total_bytes` sums over all segments of the partition, so it is computed only once.
            size_bytes += one.segments.total_bytes
        if size_bytes >= round_bytes:
            yield some
            some, size_bytes = [], 0
    if some:
        yield some
