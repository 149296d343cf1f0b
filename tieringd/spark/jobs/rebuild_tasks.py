"""The tasks of a rebuild on executors: read stored segments, and make lost indexes again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tieringd.archive.object_joiner import ObjectJoiner
from tieringd.archive.rebuild.object_listing import ListedSegment
from tieringd.archive.rebuild.stored_segments import LostIndexes, Unusable, stored_segment
from tieringd.archive.scrub.data_scan import DataIndexer
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.policies.manifest_rebuild import StoredSegment
from tieringd.spark.bucket import bucket_of
from tieringd.storage.at_once import at_once

if TYPE_CHECKING:
    # An ordinary import would load pydantic and PyYAML into processes that do not need them.
    from tieringd.config import Config

SEGMENTS_AT_ONCE: Final = 8
"""Segments that a task reads at once: most of its time is spent waiting for small indexes."""
TASK_SEGMENTS: Final = 256
TASK_BYTES: Final = 1 << 30
"""Data in a task that has to be read completely."""
INDEXES_OF_A_TASK: Final = 16
INDEX_TASKS: Final = 32
"""Most tasks of one partition, since each task has the manifest with it."""


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Listed segments of one partition that a task reads."""

    partition: TopicIdPartition
    segments: tuple[ListedSegment, ...]


@dataclass(frozen=True, slots=True)
class IndexTask:
    """Segments without an index, and the rebuilt manifest of their whole partition."""

    manifest: PartitionManifest
    segments: tuple[RemoteSegment, ...]


def plan_read_tasks(
    listed: Mapping[TopicIdPartition, Sequence[ListedSegment]], *, deep: bool
) -> tuple[ReadTask, ...]:
    """Divide the listed segments into tasks. Tasks that read the most data come first."""
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
    """Divide the segments without an index into tasks, each with the segments' manifest."""
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
    """Return the stored and the unusable segments of *task*. Runs on an executor."""
    bucket = bucket_of(config)

    async def read(one: ListedSegment) -> StoredSegment | Unusable:
        return await stored_segment(bucket.store, one, deep=deep)

    return task.partition, bucket.run(at_once(task.segments, read, count=SEGMENTS_AT_ONCE))


def remake_indexes(
    config: Config, task: IndexTask, *, write: bool
) -> tuple[TopicIdPartition, list[tuple[RemoteSegment, RemoteSegment | None]]]:
    """Make the indexes of *task* again. Runs on an executor; see `LostIndexes.remade`."""
    bucket = bucket_of(config)
    indexes = LostIndexes(
        bucket.store,
        DataIndexer(bucket.store, bucket.reader, bucket.spillovers),
        ObjectJoiner(bucket.store, work_directory=Path(tempfile.gettempdir())),
    )

    async def remake() -> list[tuple[RemoteSegment, RemoteSegment | None]]:
        return [(one, await indexes.remade(task.manifest, one, write=write)) for one in task.segments]

    return task.manifest.partition, bucket.run(remake())
