"""
The contents of a Redpanda data directory: partitions first, then the segments of one.

The result has the same model as that of `broker.log_dir`, with these differences underneath:

- Offsets in file names are raw (see `model.offset_translation`); those in the result are Kafka's.
  A segment without Kafka offsets, for example one with only the record of an election, is left out.
- The topic id is made from the directory's revision. The leader epochs are the terms in the file
  names, from the first remaining segment on.
- The directory does not name its owner: `cluster_id` and `node_id` are None.

The delta of each segment's base comes from one of these sources:

1. The log begins at raw offset 0, where the delta is 0.
2. A known translation of any place in the log, as the archive stores them. If every base is known, no
   file is opened.
3. The headers between a known base and this one. They are walked once, and their counts are kept until
   the file changes.

A log that was trimmed, or that was recovered from object storage, has only the second. Redpanda
keeps the delta in its own key-value store and in raft snapshots; neither is read here.

Read only. Functions here block; services call them in a thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import TypeAlias

from tieringd.broker.local_errors import ChangedError, named_errors, unchanged
from tieringd.broker.log_dir import LogDirScan
from tieringd.broker.redpanda_segment_file import RawSegment, translation_of, uncounted_offsets
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.formats.log_names import is_topic_name
from tieringd.formats.redpanda_names import (
    CLIENTS_NAMESPACE,
    KNOWN_VERSION,
    RawFileKind,
    is_set_aside,
    parse_partition_directory,
    parse_raw_file_name,
    topic_id_of,
)
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.offset_translation import LOG_BEGINNING, OffsetTranslation
from tieringd.model.partition import TopicPartition
from tieringd.model.segment import EpochStart, LocalSegment

_Count: TypeAlias = tuple[tuple[int, int, int], int | None]
"""A file's identity, and the raw offset up to which its offsets were counted; None for its end."""


class UnknownTranslationError(LocalFileError):
    """The Kafka offsets of the log are unknown. The caller must ask the broker for some of its batches."""


@dataclass(frozen=True, slots=True)
class RawLog:
    """The segments of one partition's directory, ascending by raw offset, the active one last."""

    partition: LocalPartition
    segments: tuple[RawSegment, ...]


def scan_redpanda_dirs(paths: Sequence[str]) -> LogDirScan:
    """
    Find the partitions of clients' topics in the data directories *paths*.

    A partition that was deleted or moved away, and came back, may have several directories for a while:
    the highest revision is the partition, the others are left alone.
    """
    found: dict[TopicPartition, tuple[int, LocalPartition]] = {}
    left_alone: list[str] = []
    problems: list[LocalFileError] = []
    topic_of_problem: dict[str, str] = {}
    for data_dir in paths:
        try:
            for name in _directories(data_dir):
                if name != CLIENTS_NAMESPACE:
                    left_alone.append(f"{data_dir}/{name}")
                    continue
                for revision, partition in _partitions(data_dir, left_alone, problems, topic_of_problem):
                    known = found.get(partition.topic_partition)
                    newest = (revision, partition)
                    if known is not None:
                        older, newest = sorted((known, newest), key=lambda each: each[0])
                        left_alone.append(older[1].path)
                    found[partition.topic_partition] = newest
        except LocalFileError as error:
            problems.append(error)
    return LogDirScan(
        partitions=tuple(partition for _, partition in found.values()),
        cluster_id=None,
        node_id=None,
        left_alone=tuple(left_alone),
        problems=tuple(problems),
        topic_of_problem=topic_of_problem,
    )


def read_raw_log(partition: LocalPartition) -> RawLog:
    """
    Return the segments of *partition*'s directory, as they were at one moment.

    Raises:
        LocalFileError: The directory vanished or is changing, a file in it cannot be read, or Redpanda
            has set a segment aside; *path* names the file.
    """
    return unchanged(partial(_read_unchanged, partition))


def last_raw_offset(segment: LocalSegment) -> int:
    """
    Return the last raw offset of the closed *segment*: the one before the next file's base.

    Raises:
        LocalFileError: The directory cannot be read, or no segment follows this one any more.
    """
    directory, _, _ = segment.path.rpartition("/")
    base = translation_of(segment).raw_offset
    with named_errors(directory), os.scandir(directory) as entries:
        names = [parse_raw_file_name(entry.name) for entry in entries]
    later = [
        name.raw_base_offset
        for name in names
        if name is not None and name.kind is RawFileKind.LOG and name.raw_base_offset > base
    ]
    if not later:
        raise LocalFileError(f"{segment.path} was closed, but no segment follows it", path=segment.path)
    return min(later) - 1


class RedpandaLogs:
    """
    Reads logs with Kafka offsets, and remembers its counts for each file.

    One instance per data directory, and one caller at a time for each partition. The counts are a cache:
    a count is dropped when its file changes, and made again after a restart.
    """

    def __init__(self) -> None:
        self._counted: dict[str, dict[_Count, int]] = {}

    def read_local_log(self, partition: LocalPartition, known: Iterable[OffsetTranslation] = ()) -> LocalLog:
        """
        Return the segments of *partition* with Kafka offsets.

        *known* are translations of places in this log, or before it, in any order.

        Raises:
            UnknownTranslationError: The log does not begin at raw offset 0, and *known* has no place in
                it.
            CorruptDataError: A header is damaged, or two translations contradict each other.
            LocalFileError: As for `read_raw_log`, or a closed segment is not whole yet.
        """
        return self.translated(read_raw_log(partition), known)

    def translated(self, raw: RawLog, known: Iterable[OffsetTranslation] = ()) -> LocalLog:
        """See `read_local_log`, for a log that was listed before."""
        identities = {segment.identity for segment in raw.segments}
        counted = self._counted.get(raw.partition.path, {})
        counted = {key: count for key, count in counted.items() if key[0] in identities}
        self._counted[raw.partition.path] = counted
        bases = _Bases(raw, counted)
        bases.note({LOG_BEGINNING, *known})
        bases.fill()
        return _with_kafka_offsets(raw, bases.deltas)

    def forget_others(self, paths: Container[str]) -> None:
        """Drop the counts of partitions that are not at *paths*: they have left this host."""
        for gone in [path for path in list(self._counted) if path not in paths]:
            self._counted.pop(gone, None)


class _Bases:
    """Computes the deltas at the bases of one log's segments."""

    def __init__(self, raw: RawLog, counted: dict[_Count, int]) -> None:
        self._raw = raw
        self._counted = counted
        self.deltas: dict[int, int] = {}

    def note(self, known: Iterable[OffsetTranslation]) -> None:
        """Set the delta at the base of each segment that contains a known place."""
        for place in sorted(known):
            holding = [each for each in self._raw.segments if each.raw_base_offset <= place.raw_offset]
            if not holding:
                continue
            segment = holding[-1]
            delta = place.delta
            if place.raw_offset > segment.raw_base_offset:
                if segment.raw_base_offset in self.deltas:
                    # Walking to a place in the middle reads every batch header before it.
                    continue
                delta -= self._uncounted(segment, place.raw_offset)
            if self.deltas.setdefault(segment.raw_base_offset, delta) != delta:
                raise self._contradiction(segment, self.deltas[segment.raw_base_offset], delta)
        if self._raw.segments and not self.deltas:
            path, first = self._raw.partition.path, self._raw.segments[0].raw_base_offset
            raise UnknownTranslationError(
                f"{path} begins at Redpanda's own offset {first}, and the Kafka offset of that is unknown",
                path=path,
            )

    def fill(self) -> None:
        """
        Count from the known bases to all others, and check that they agree.

        Raises:
            CorruptDataError: They disagree. Offsets in the archive would be wrong for good.
        """
        pairs = tuple(pairwise(self._raw.segments))
        for segment, following in pairs:
            if segment.raw_base_offset in self.deltas and following.raw_base_offset not in self.deltas:
                self.deltas[following.raw_base_offset] = self._after(segment)
        for segment, following in reversed(pairs):
            if segment.raw_base_offset not in self.deltas:
                delta = self.deltas[following.raw_base_offset] - self._uncounted(segment)
                self.deltas[segment.raw_base_offset] = delta
        for segment, following in pairs:
            delta, next_delta = (
                self.deltas[segment.raw_base_offset],
                self.deltas[following.raw_base_offset],
            )
            span = following.raw_base_offset - segment.raw_base_offset
            is_counted = (segment.identity, None) in self._counted
            if not 0 <= next_delta - delta <= span or (is_counted and self._after(segment) != next_delta):
                raise self._contradiction(following, self._after(segment), next_delta)
        for segment in self._raw.segments:
            delta = self.deltas[segment.raw_base_offset]
            if not 0 <= delta <= segment.raw_base_offset:
                raise self._contradiction(segment, 0, delta)

    def _after(self, segment: RawSegment) -> int:
        return self.deltas[segment.raw_base_offset] + self._uncounted(segment)

    def _uncounted(self, segment: RawSegment, before: int | None = None) -> int:
        key = (segment.identity, before)
        if key not in self._counted:
            self._counted[key] = uncounted_offsets(segment, before=before)
        return self._counted[key]

    def _contradiction(self, segment: RawSegment, delta: int, other: int) -> CorruptDataError:
        return CorruptDataError(
            f"raw offset {segment.raw_base_offset} cannot be translated: one source has {delta} offsets "
            f"before it that are not Kafka's, and another has {other}",
            source=segment.path,
        )


def _with_kafka_offsets(raw: RawLog, deltas: Mapping[int, int]) -> LocalLog:
    bases = [each.raw_base_offset - deltas[each.raw_base_offset] for each in raw.segments]
    segments: list[LocalSegment] = []
    epochs: list[EpochStart] = []
    for segment, base_offset, next_offset in zip(raw.segments, bases, [*bases[1:], None], strict=False):
        if segment.leader_epoch > (epochs[-1][0] if epochs else -1):
            if epochs and epochs[-1][1] == base_offset:
                # The previous leader was elected and wrote nothing.
                epochs.pop()
            epochs.append((segment.leader_epoch, base_offset))
        if next_offset != base_offset:
            segments.append(
                LocalSegment(
                    base_offset=base_offset,
                    next_offset=next_offset,
                    size_bytes=segment.size_bytes,
                    path=segment.path,
                    inode=segment.inode,
                    modified_ns=segment.modified_ns,
                )
            )
    return LocalLog(raw.partition, tuple(segments), tuple(epochs))


def _read_unchanged(partition: LocalPartition) -> RawLog:
    """List the segments of one directory, and check that all of them existed at the same time."""
    path = partition.path
    found: list[tuple[int, int, str, os.stat_result]] = []
    with named_errors(path):
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with named_errors(path), os.scandir(directory) as entries:
            before = os.fstat(directory).st_mtime_ns
            for entry in entries:
                file_path = f"{path}/{entry.name}"
                if is_set_aside(entry.name):
                    raise LocalFileError(
                        f"{file_path} was set aside by Redpanda: a part of the log is missing",
                        path=file_path,
                        hint="Restore the partition from another replica, or delete it from this broker",
                    )
                name = parse_raw_file_name(entry.name)
                if name is None or name.kind is not RawFileKind.LOG:
                    continue
                if name.version != KNOWN_VERSION:
                    raise LocalFileError(
                        f"{file_path} is a segment of version {name.version}, which is not supported",
                        path=file_path,
                        hint="Update tieringd: a newer Redpanda may have written the log",
                    )
                found.append((name.raw_base_offset, name.leader_epoch, file_path, _status(entry, file_path)))
            if os.fstat(directory).st_mtime_ns != before:
                raise ChangedError(f"{path} changed while it was read", path=path)
    finally:
        os.close(directory)
    return RawLog(partition, _chained(sorted(found, key=itemgetter(0, 1))))


def _chained(found: Sequence[tuple[int, int, str, os.stat_result]]) -> tuple[RawSegment, ...]:
    """Return the segments of files that ascend by raw offset; each ends where the next begins."""
    nexts = [*(raw_base_offset for raw_base_offset, _, _, _ in found[1:]), None]
    return tuple(
        RawSegment(
            raw_base_offset=raw_base_offset,
            next_raw_offset=next_raw_offset,
            leader_epoch=leader_epoch,
            size_bytes=status.st_size,
            path=file_path,
            inode=status.st_ino,
            modified_ns=status.st_mtime_ns,
        )
        for (raw_base_offset, leader_epoch, file_path, status), next_raw_offset in zip(
            found, nexts, strict=False
        )
    )


def _status(entry: os.DirEntry[str], file_path: str) -> os.stat_result:
    try:
        status = entry.stat()
    except FileNotFoundError as error:
        raise ChangedError(f"{file_path} vanished while its directory was read", path=file_path) from error
    if not stat.S_ISREG(status.st_mode):
        raise LocalFileError(f"{file_path} is not a regular file", path=file_path)
    return status


def _partitions(
    data_dir: str, left_alone: list[str], problems: list[LocalFileError], topic_of_problem: dict[str, str]
) -> Iterator[tuple[int, LocalPartition]]:
    """Yield each partition's directory with its revision."""
    namespace = f"{data_dir}/{CLIENTS_NAMESPACE}"
    for topic in _directories(namespace):
        if not is_topic_name(topic):
            left_alone.append(f"{namespace}/{topic}")
            continue
        try:
            names = _directories(f"{namespace}/{topic}")
        except LocalFileError as error:
            problems.append(error)
            topic_of_problem[error.path] = topic
            continue
        for name in names:
            path = f"{namespace}/{topic}/{name}"
            parsed = parse_partition_directory(name)
            if parsed is None:
                left_alone.append(path)
                continue
            number, revision = parsed
            partition = TopicPartition(topic, number)
            yield revision, LocalPartition(partition, topic_id_of(revision), path, data_dir)


def _directories(path: str) -> list[str]:
    with named_errors(path), os.scandir(path) as entries:
        return [entry.name for entry in entries if entry.is_dir()]
