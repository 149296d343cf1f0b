"""
Looking at log directories again and again, at the price of what has changed since.

A broker has ten thousand directories, and in any one round nearly all are as they were. A name
in a directory cannot come or go without the directory's modification time moving; so while that
stands still, the names of the last listing are asked for their sizes and nothing is listed or
opened. Every segment is asked each time: a log is appended to and truncated in place.

The leader epochs are not asked for by themselves: a broker never writes to its `leader-epoch-checkpoint`,
but puts a new file in its place, and that moves the directory's time. Someone who edits the checkpoint in
place, with no broker running, is seen when the directory changes next or tieringd starts anew.

This is `broker.log_dir` with a memory, and gives the same answers. Whatever is not certain is
looked at anew.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tieringd.broker.log_dir import (
    PARTITION_METADATA,
    read_local_log,
    read_topic_id,
    scan_log_dirs,
)
from tieringd.broker.small_files import SmallFiles, is_settled
from tieringd.model.local_log import LocalLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.broker.log_dir import LogDirScan
    from tieringd.model.local_log import LocalPartition
    from tieringd.model.segment import LocalSegment


@dataclass(frozen=True, slots=True)
class _Listed:
    """A partition's directory as it was listed."""

    log: LocalLog
    directory: tuple[int, int]
    """The directory's inode and modification time before it was listed."""


class LogDirRescan:
    """
    The log directories of one daemon. `scan` and then `read` of what it found, in any one thread.

    A log that is as it was at the last look is the same object, so that a caller may tell by that.
    """

    def __init__(self) -> None:
        self._topic_ids = SmallFiles(PARTITION_METADATA, read_topic_id)
        self._partitions: dict[str, LocalPartition] = {}
        self._listed: dict[str, _Listed] = {}

    def scan(self, paths: Sequence[str]) -> LogDirScan:
        """See `log_dir.scan_log_dirs`."""
        scan = scan_log_dirs(paths, topic_id_of=self._topic_ids.read, known=self._partitions)
        found = self._partitions = {partition.path: partition for partition in scan.partitions}
        self._topic_ids.keep_only(found)
        for path in self._listed.keys() - found:
            del self._listed[path]
        return scan

    def read(self, partition: LocalPartition) -> LocalLog:
        """See `log_dir.read_local_log`."""
        path = partition.path
        listed = self._listed.get(path)
        if listed is not None:
            log = self._again(listed, partition)
            if log is not None:
                if log is not listed.log:
                    self._listed[path] = replace(listed, log=log)
                return log
            del self._listed[path]
        # Before the listing: what changes between the two makes the next look list again.
        now_ns, directory = time.time_ns(), _directory(path)
        log = read_local_log(partition)
        if directory is not None and is_settled(directory[1], now_ns=now_ns):
            self._listed[path] = _Listed(log, directory)
        return log

    def _again(self, listed: _Listed, partition: LocalPartition) -> LocalLog | None:
        """Return the log as it is now, given the names it had; None when it has to be listed."""
        log = listed.log
        segments: list[LocalSegment] = []
        is_same = log.partition == partition
        for segment in log.segments:
            current = _current(segment)
            if current is None:
                return None
            is_same = is_same and current is segment
            segments.append(current)
        # Last of all: had a name come, gone or moved while the others were asked, it would show here.
        if _directory(partition.path) != listed.directory:
            return None
        return log if is_same else LocalLog(partition, tuple(segments), log.epochs)


def _current(segment: LocalSegment) -> LocalSegment | None:
    """Return a listed segment with its present size; None when its file is not what was listed."""
    try:
        status = os.stat(segment.path)  # noqa: PTH116 - paths are text throughout this layer
    except OSError:
        return None
    identity = (status.st_ino, status.st_size, status.st_mtime_ns)
    if identity == segment.identity:
        return segment
    if not stat.S_ISREG(status.st_mode):
        return None
    inode, size_bytes, modified_ns = identity
    return replace(segment, inode=inode, size_bytes=size_bytes, modified_ns=modified_ns)


def _directory(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - likewise
    except OSError:
        # Listing it says what is wrong.
        return None
    return (status.st_ino, status.st_mtime_ns)
