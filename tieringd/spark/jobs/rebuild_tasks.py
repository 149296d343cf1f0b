"""What executors do for a rebuild: they read what is stored, and make lost indexes again."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tieringd.archive.object_joiner import ObjectJoiner
from tieringd.archive.rebuild.stored_segments import LostIndexes, stored_segment
from tieringd.archive.scrub.data_scan import DataIndexer
from tieringd.spark.bucket import bucket_of
from tieringd.storage.at_once import at_once

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tieringd.archive.rebuild.object_listing import ListedSegment
    from tieringd.archive.rebuild.stored_segments import Unusable
    from tieringd.config import Config
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment
    from tieringd.policies.manifest_rebuild import StoredSegment

SEGMENTS_AT_ONCE: Final = 8
"""Most of a task's time goes by in requests for small indexes."""
TASK_SEGMENTS: Final = 256
TASK_BYTES: Final = 1 << 30
"""Of data that has to be read whole."""
INDEXES_OF_A_TASK: Final = 16
INDEX_TASKS: Final = 32
"""Of one partition at the most: each takes the manifest along."""


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Stored segments of one partition that are to be found out about."""

    partition: TopicIdPartition
    segments: tuple[ListedSegment, ...]


@dataclass(frozen=True, slots=True)
class IndexTask:
    """Segments whose indexes are missing, and the manifest of the whole archive that they are in."""

    manifest: PartitionManifest
    segments: tuple[RemoteSegment, ...]


def plan_read_tasks(
    listed: Mapping[TopicIdPartition, Sequence[ListedSegment]], *, deep: bool
) -> tuple[ReadTask, ...]:
    """Deal out what is listed; tasks that read much data come first."""
    tasks: list[tuple[int, ReadTask]] = []
    for partition, segments in listed.items():
        some: list[ListedSegment] = []
        size_bytes = 0
        for one in segments:
            some.append(one)
            size_bytes += one.size_bytes if deep or one.index_size_bytes is None else 0
            if len(some) >= TASK_SEGMENTS or size_bytes >= TASK_BYTES:
                tasks.append((size_bytes, ReadTask(partition, tuple(some))))
                some, size_bytes = [], 0
        if some:
            tasks.append((size_bytes, ReadTask(partition, tuple(some))))
    return tuple(task for _, task in sorted(tasks, key=lambda one: one[0], reverse=True))


def plan_index_tasks(lost: Iterable[tuple[PartitionManifest, Sequence[RemoteSegment]]]) -> list[IndexTask]:
    """Deal out segments without an index, with the manifests that they are in."""
    tasks = []
    for manifest, segments in lost:
        count = max(INDEXES_OF_A_TASK, -(-len(segments) // INDEX_TASKS))
        tasks += [
            IndexTask(manifest, tuple(segments[begin : begin + count]))
            for begin in range(0, len(segments), count)
        ]
    return tasks


def read_segments(
    config: Config, task: ReadTask, *, deep: bool
) -> tuple[TopicIdPartition, list[StoredSegment | Unusable]]:
    """Find out about the segments of *task*; runs on an executor."""
    bucket = bucket_of(config)

    async def read(one: ListedSegment) -> StoredSegment | Unusable:
        return await stored_segment(bucket.store, one, deep=deep)

    return task.partition, bucket.run(at_once(task.segments, read, count=SEGMENTS_AT_ONCE))


def remake_indexes(
    config: Config, task: IndexTask, *, write: bool
) -> tuple[TopicIdPartition, list[tuple[RemoteSegment, RemoteSegment | None]]]:
    """Make the indexes of *task* again; runs on an executor. See `LostIndexes.remade`."""
    bucket = bucket_of(config)
    indexes = LostIndexes(
        bucket.store,
        DataIndexer(bucket.store, bucket.reader, bucket.spillovers),
        ObjectJoiner(bucket.store, work_directory=Path(tempfile.gettempdir())),
    )

    async def remake() -> list[tuple[RemoteSegment, RemoteSegment | None]]:
        return [(one, await indexes.remade(task.manifest, one, write=write)) for one in task.segments]

    return task.manifest.partition, bucket.run(remake())
