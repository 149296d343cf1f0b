"""
The contents of the log directories: partitions first, then the segments of one.

This module only reads, and reads no more than names, sizes and two small files per partition. A broker
works in these directories meanwhile: a file that vanishes or changes during a read is reported or read
again, and never treated as a fact. Functions here block; services call them in a thread.

`LogDirRescan` scans log directories repeatedly, at a cost that depends on the changes. A broker has ten
thousand directories, and in any one round nearly all are unchanged. A name in a directory cannot come or
go without a change of the directory's modification time. While that time is unchanged, only the sizes of
the last listing's names are read, and no directory is listed and no file opened. The status of every
segment is read, because a log is appended to and truncated in place. The leader epochs are not read
separately: a broker never writes to its `leader-epoch-checkpoint` but replaces the file, and that
changes the directory's time. An edit of the checkpoint in place, with no broker running, is seen when
the directory changes next or tieringd restarts. A rescan returns the same results as a scan, and
directories in doubt are scanned anew.

Where the kernel reports changes (`ChangeReports`, from `broker.watch`), nothing is read while nothing is
reported: neither the directory's time, while no name has changed, nor a segment's status, while nothing was
written. Not every filesystem reports: one that another kernel serves may not. So everything is read in every
`LOOK_EVERY`-th scan all the same, and one change that was not reported ends the trust in reports.

`SmallFiles` reads small files that hardly ever change. A file is read again when its identity (inode,
size, modification time) has changed. That is as reliable as reading it, with one exception: a file that
changed just before it was read may change again without a later time, so it is not remembered until it
is older.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from operator import is_, itemgetter
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

import structlog

from tieringd.broker.local_errors import ChangedError, named_errors, unchanged
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.formats.checkpoints import (
    parse_epoch_checkpoint,
    parse_meta_properties,
    parse_partition_metadata,
)
from tieringd.formats.log_names import DirectoryKind, LogFileKind, parse_directory_name, parse_file_name
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.partition import NO_TOPIC_ID, TopicPartition
from tieringd.model.segment import EpochStart, LocalSegment

log = structlog.get_logger()

_T = TypeVar("_T")

LOOK_EVERY: Final = 5
"""A directory and its segments are looked at in one of this many scans, also while no change is reported."""
SETTLED_NS: Final = 2_000_000_000
"""Files older than this show any later change by another time, on every filesystem in use."""

_MAX_SMALL_FILE_BYTES: Final = 1 << 20
EPOCH_CHECKPOINT: Final = "leader-epoch-checkpoint"
PARTITION_METADATA: Final = "partition.metadata"

Identity: TypeAlias = tuple[str | None, int | None]
"""The cluster id and node id of a log directory's owner."""
_NOBODY: Final[Identity] = (None, None)


def is_settled(modified_ns: int, *, now_ns: int) -> bool:
    """Return whether a change from *now_ns* on would show in the modification time."""
    return now_ns - modified_ns >= SETTLED_NS


class SmallFiles(Generic[_T]):
    """
    The parsed files called *name* in many directories.

    Used by one thread at a time. It holds a value for each directory until `keep_only`.
    """

    def __init__(self, name: str, read: Callable[[str], _T]) -> None:
        """Keep *name*, and *read*, which parses the file in a directory."""
        self._name = name
        self._read = read
        self._known: dict[str, tuple[str, int, int, int, _T]] = {}
        """The file's path, inode, size and modification time, and its value, for each directory."""

    def read(self, directory: str) -> _T:
        """Return the current value of the file in *directory*. Raises what reading it raises."""
        known = self._known.get(directory)
        if known is not None:
            path, inode, size_bytes, modified_ns, value = known
            # This runs ten thousand times per round: it does the same as `_identity`, in less time.
            try:
                status = os.stat(path)  # noqa: PTH116 - paths are text throughout this layer
            except OSError:
                status = None
            if (
                status is not None
                and status.st_mtime_ns == modified_ns
                and status.st_ino == inode
                and status.st_size == size_bytes
            ):
                return value
            del self._known[directory]
        # The identity comes before the read: a replacement in between shows at the next call.
        identity = self._identity(directory)
        now_ns = time.time_ns()
        value = self._read(directory)
        if identity is not None and is_settled(identity[2], now_ns=now_ns):
            self._known[directory] = (f"{directory}/{self._name}", *identity, value)
        return value

    def forget(self, directory: str) -> None:
        """Drop the value of *directory*: the next read opens the file."""
        self._known.pop(directory, None)

    def keep_only(self, directories: Collection[str]) -> None:
        """Drop the values of all other directories."""
        if len(self._known) > len(directories):
            kept = set(directories)
            self._known = {path: known for path, known in self._known.items() if path in kept}

    def _identity(self, directory: str) -> tuple[int, int, int] | None:
        try:
            status = os.stat(f"{directory}/{self._name}")  # noqa: PTH116 - paths are text throughout this layer
        except OSError:
            # Reading the file raises the error, if there is one.
            return None
        return (status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class ReportedChanges:
    """The kernel's reports on some directories, from the answer before to this one."""

    watched: frozenset[str] = frozenset()
    """
    The directories whose changes of names are reported, from before this answer on. The same object while
    they are the same.
    """
    renamed: frozenset[str] = frozenset()
    """Those of them in which a name may have come, gone or been replaced since the answer before."""
    unreported_writes: frozenset[str] = frozenset()
    """
    Those of them in which files may be written to without a report. A directory with a write since the answer
    before is one of them.
    """


class ChangeReports(Protocol):
    """Says what changed in directories, so that a scan need not look at all of them."""

    def since_last(self, *, unwritten: Collection[str]) -> ReportedChanges:
        """
        Return what changed since the last call.

        In the directories *unwritten* nothing was written lately. The first write to one of them may be
        reported from now on.
        """


class NoReports:
    """The reports of a program that watches no directory."""

    def since_last(self, *, unwritten: Collection[str]) -> ReportedChanges:
        """Return that no directory is watched."""
        del unwritten
        return ReportedChanges()


@dataclass(frozen=True, slots=True)
class ListedLogDir:
    """The listing of one log directory in which all partitions could be read."""

    names: frozenset[str]
    """All names in it."""
    partitions: Mapping[str, LocalPartition]
    """By their paths, in the order of the listing."""
    left_alone: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LogDirScan:
    """One scan of all log directories of a broker."""

    partitions: tuple[LocalPartition, ...]
    cluster_id: str | None
    """The cluster's id from `meta.properties`; None when no log directory has one."""
    node_id: int | None
    left_alone: tuple[str, ...]
    """Directories that this daemon must not read as partitions: deleted, moving, stray, or not Kafka's."""
    problems: tuple[LocalFileError, ...]
    """Faults of the scan. A partition that is missing because of one must not count as gone."""
    topic_of_problem: Mapping[str, str] = field(default_factory=dict)
    """The topic of each problem of one topic, by the path of the problem. The others concern all topics."""


def scan_log_dirs(
    paths: Sequence[str],
    *,
    topic_id_of: Callable[[str], str] | None = None,
    known: Mapping[str, LocalPartition] = MappingProxyType({}),
    checked: AbstractSet[str] = frozenset(),
    listed: dict[str, ListedLogDir] | None = None,
) -> LogDirScan:
    """
    Find the partitions in the log directories *paths*.

    *topic_id_of* replaces `read_topic_id`, for a caller that caches topic ids. *known* are partitions of
    an earlier scan by their paths; an unchanged partition is returned as the same object. *checked* are the
    paths of those that are known to be unchanged: their topic ids are not looked up. *listed* has the log
    directories of an earlier scan by their paths, and is brought up to date: one with the same names has the
    same partitions, if their topic ids are the same. Names that no directory of a broker has do not count: a
    broker replaces its checkpoints every few seconds.

    A directory that cannot be read is a problem of its own; the others are scanned. A partition that is in
    two log directories is a problem and not a partition: the broker is moving it.
    """
    topic_id_of = topic_id_of or read_topic_id
    found: list[LocalPartition] = []
    identities: list[Identity] = []
    left_alone: list[str] = []
    problems: list[LocalFileError] = []
    topic_of_problem: dict[str, str] = {}
    listed = {} if listed is None else listed
    for log_dir in paths:
        here = listed.pop(log_dir, None)
        try:
            with named_errors(log_dir):
                identities.append(_identity(log_dir))
                if here is not None and _is_same(here, names_in(log_dir), topic_id_of, checked):
                    is_certain = True
                else:
                    here, is_certain = _listing_of(
                        log_dir, topic_id_of, known, checked, faults=(problems, topic_of_problem)
                    )
        except LocalFileError as error:
            problems.append(error)
            continue
        found.extend(here.partitions.values())
        left_alone.extend(here.left_alone)
        if is_certain:
            listed[log_dir] = here
    # In one directory no name comes twice.
    partitions = tuple(found) if len(paths) == 1 else _in_one_place(found, problems, topic_of_problem)
    cluster_id, node_id = _agreed(paths, identities, problems)
    return LogDirScan(
        partitions=partitions,
        cluster_id=cluster_id,
        node_id=node_id,
        left_alone=tuple(left_alone),
        problems=tuple(problems),
        topic_of_problem=topic_of_problem,
    )


def names_in(log_dir: str) -> frozenset[str]:
    """Return the names in a log directory. Raises OSError: It cannot be listed."""
    return frozenset(os.listdir(log_dir))  # noqa: PTH208 - paths are text throughout this layer


def have_same_directories(names: AbstractSet[str], others: AbstractSet[str]) -> bool:
    """Return whether the names in a log directory differ by none that a broker gives to a directory."""
    return names == others or all(parse_directory_name(each) is None for each in names ^ others)


def _is_same(
    here: ListedLogDir,
    names: AbstractSet[str],
    topic_id_of: Callable[[str], str],
    checked: AbstractSet[str],
) -> bool:
    """Return whether a log directory with *names* has the partitions of *here*; see `scan_log_dirs`."""
    if not have_same_directories(here.names, names):
        return False
    try:
        asked = here.partitions.keys() - checked
        return all(topic_id_of(path) == here.partitions[path].topic_id for path in asked)
    except LocalFileError:
        # Another listing reports it.
        return False


def _listing_of(
    log_dir: str,
    topic_id_of: Callable[[str], str],
    known: Mapping[str, LocalPartition],
    checked: AbstractSet[str],
    *,
    faults: tuple[list[LocalFileError], dict[str, str]],
) -> tuple[ListedLogDir, bool]:
    """
    List one log directory; see `scan_log_dirs`. Adds to *faults*: the problems, and their topics.

    Returns also whether the same names mean the same partitions later: no partition's directory had a
    problem, and no file has the name of a partition, which a directory could take without another name.
    """
    problems, topic_of_problem = faults
    names: list[str] = []
    directories: list[str] = []
    is_certain = True
    with os.scandir(log_dir) as entries:
        for entry in entries:
            names.append(entry.name)
            if entry.is_dir():
                directories.append(entry.name)
            elif partition_name(entry.name) is not None:
                is_certain = False
    found: dict[str, LocalPartition] = {}
    left_alone: list[str] = []
    for name in directories:
        path = f"{log_dir}/{name}"
        before = known.get(path)
        if before is not None and path in checked:
            found[before.path] = before
            continue
        topic_partition = partition_name(name) if before is None else before.topic_partition
        if topic_partition is None:
            left_alone.append(path)
            continue
        try:
            topic_id = topic_id_of(path)
        except LocalFileError as error:
            problems.append(error)
            topic_of_problem[error.path] = topic_partition.topic
            is_certain = False
            continue
        if before is None or before.topic_id != topic_id:
            before = LocalPartition(topic_partition, topic_id, path, log_dir)
        found[before.path] = before
    return ListedLogDir(frozenset(names), found, tuple(left_alone)), is_certain


def cluster_of(log_dirs: Sequence[str]) -> str | None:
    """Return the cluster that the log directories' own files name; None where they name none, or several."""
    identities: list[Identity] = []
    for log_dir in log_dirs:
        with suppress(LocalFileError):
            identities.append(_identity(log_dir))
    return _agreed(log_dirs, identities, [])[0]


def partition_name(directory_name: str) -> TopicPartition | None:
    """Return the partition of a directory name; None for a directory that this daemon must not read."""
    parsed = parse_directory_name(directory_name)
    return parsed.topic_partition if parsed and parsed.kind is DirectoryKind.PARTITION else None


def read_local_log(partition: LocalPartition) -> LocalLog:
    """
    Return the segments of *partition*'s directory, as they were at one moment.

    Raises:
        LocalFileError: The directory vanished, a file in it cannot be read, or the broker is changing
            it; *path* names the file. The next read may succeed.
    """
    return unchanged(partial(_read_unchanged, partition))


def read_leader_epochs(partition_path: str, *, directory: int | None = None) -> tuple[EpochStart, ...]:
    """
    Return the leader epoch history of a partition's directory; empty when it has none.

    *directory* is a descriptor of the directory, for a caller that has one.

    Raises:
        LocalFileError: The checkpoint cannot be read or parsed.
    """
    file_path = f"{partition_path}/{EPOCH_CHECKPOINT}"
    data = _small_file(file_path, directory)
    return () if data is None else _shared(_parsed(file_path, data, parse_epoch_checkpoint))


@lru_cache(maxsize=1024)
def _shared(history: tuple[EpochStart, ...]) -> tuple[EpochStart, ...]:
    """Return the first such history: of ten thousand partitions many have the same, and share one object."""
    return history


def read_topic_id(path: str) -> str:
    """
    Return the topic id of a partition's directory; NO_TOPIC_ID while it has no such file.

    Raises:
        LocalFileError: The file cannot be read or parsed, or the directory vanished.
    """
    file_path = f"{path}/{PARTITION_METADATA}"
    data = _small_file(file_path)
    if data is None:
        if not os.path.isdir(path):  # noqa: PTH112  (ten thousand Path objects are slower than the scan)
            raise LocalFileError(f"{path} vanished while its log directory was read", path=path)
        return NO_TOPIC_ID
    return _parsed(file_path, data, parse_partition_metadata)


def _read_unchanged(partition: LocalPartition) -> LocalLog:
    """
    List the `.log` files of one directory, and check that all of them existed at the same time.

    The end of a segment is the base of the next. If a segment were renamed away between the reading of
    two names, the one before it would seem to cover the hole. So the directory's own modification time
    must not change meanwhile. While the broker swaps compacted segments in (`.swap` files exist), old
    and new ones exist side by side and no listing is right.
    """
    path = partition.path
    found: list[tuple[int, str, os.stat_result]] = []
    with named_errors(path), _opened_directory(path) as directory:
        before = os.fstat(directory).st_mtime_ns
        with os.scandir(directory) as entries:
            for entry in entries:
                file_name = parse_file_name(entry.name)
                if file_name is not None and file_name.kind is LogFileKind.LOG:
                    file_path = f"{path}/{entry.name}"
                    found.append((file_name.base_offset, file_path, _regular(entry, file_path)))
                elif entry.name.endswith(".swap"):
                    file_path = f"{path}/{entry.name}"
                    message = f"{file_path} shows that the broker is replacing segments"
                    raise ChangedError(message, path=file_path)
        epochs = read_leader_epochs(path, directory=directory)
        if os.fstat(directory).st_mtime_ns != before:
            raise ChangedError(f"{path} changed while it was read", path=path)
    found.sort(key=itemgetter(0))
    return LocalLog(partition, _chained(found), epochs)


def _chained(found: Sequence[tuple[int, str, os.stat_result]]) -> tuple[LocalSegment, ...]:
    """Return the segments of files that ascend by base offset; each ends where the next begins."""
    nexts = [*(base_offset for base_offset, _, _ in found[1:]), None]
    return tuple(
        LocalSegment(
            base_offset=base_offset,
            next_offset=next_offset,
            size_bytes=status.st_size,
            path=file_path,
            inode=status.st_ino,
            modified_ns=status.st_mtime_ns,
        )
        for (base_offset, file_path, status), next_offset in zip(found, nexts, strict=False)
    )


def _regular(entry: os.DirEntry[str], file_path: str) -> os.stat_result:
    try:
        status = entry.stat()
    except FileNotFoundError as error:
        raise ChangedError(f"{file_path} vanished while its directory was read", path=file_path) from error
    except OSError as error:
        raise _unreadable(file_path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise LocalFileError(f"{file_path} is not a regular file", path=file_path)
    return status


def _identity(log_dir: str) -> Identity:
    file_path = f"{log_dir}/meta.properties"
    data = _small_file(file_path)
    if data is None:
        return _NOBODY
    properties = _parsed(file_path, data, parse_meta_properties)
    return properties.cluster_id, properties.node_id


def _agreed(paths: Sequence[str], identities: Sequence[Identity], problems: list[LocalFileError]) -> Identity:
    """Return the owner of the log directories. Two different owners are a problem, and give no owner."""
    known = {each for each in identities if each != _NOBODY}
    if len(known) > 1:
        message = f"the log directories {', '.join(paths)} belong to different brokers or clusters"
        problems.append(LocalFileError(message, path=paths[0], hint="Compare their meta.properties"))
        return _NOBODY
    return known.pop() if known else _NOBODY


def _in_one_place(
    found: Sequence[LocalPartition], problems: list[LocalFileError], topic_of_problem: dict[str, str]
) -> tuple[LocalPartition, ...]:
    """Return the partitions of *found* that are in one log directory. The others are problems."""
    if len({one.topic_partition for one in found}) == len(found):
        return tuple(found)
    places: dict[TopicPartition, list[LocalPartition]] = {}
    for one in found:
        places.setdefault(one.topic_partition, []).append(one)
    for name, same in places.items():
        if len(same) > 1:
            several = ", ".join(each.path for each in same)
            message = f"{name} is in several log directories: {several}"
            problems.append(LocalFileError(message, path=same[0].path))
            topic_of_problem[same[0].path] = name.topic
    return tuple(same[0] for same in places.values() if len(same) == 1)


def _parsed(file_path: str, data: bytes, parse: Callable[[bytes], _T]) -> _T:
    try:
        return parse(data)
    except CorruptDataError as error:
        # The broker replaces these files whole, but after a crash one may be empty.
        raise LocalFileError(f"{file_path} cannot be parsed: {error.message}", path=file_path) from error


def _small_file(file_path: str, directory: int | None = None) -> bytes | None:
    """Return a file's bytes, or None when there is none; *directory* is a descriptor of its directory."""
    name = file_path if directory is None else file_path.rpartition("/")[2]
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(file_path, error) from error
    try:
        return os.read(descriptor, _MAX_SMALL_FILE_BYTES)
    except OSError as error:
        raise _unreadable(file_path, error) from error
    finally:
        os.close(descriptor)


@contextmanager
def _opened_directory(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _unreadable(path: str, error: OSError) -> LocalFileError:
    return LocalFileError(f"{path} cannot be read: {error.strerror or error}", path=path)


@dataclass(frozen=True, slots=True)
class _Listed:
    """A partition's directory at its last listing."""

    log: LocalLog
    inode: int
    """The directory's inode before the listing."""
    modified_ns: int
    """The directory's modification time before the listing."""


class LogDirRescan:
    """
    The log directories of one daemon. Any one thread calls `scan`, and then `read` for its partitions.

    An unchanged log is returned as the same object, so a caller may compare by identity.
    """

    def __init__(self) -> None:
        self._topic_ids = SmallFiles(PARTITION_METADATA, read_topic_id)
        self._partitions: tuple[LocalPartition, ...] = ()
        """The partitions of the last scan."""
        self._by_path: dict[str, LocalPartition] = {}
        """The same by their paths."""
        self._log_dirs: dict[str, ListedLogDir] = {}
        """The log directories at the last scan."""
        self._looks: tuple[set[str], ...] = tuple(set() for _ in range(LOOK_EVERY))
        """The paths of the partitions by the scans that look at them, which are numbered from 0 on."""
        self._listed: dict[str, _Listed] = {}
        self._read_since_scan: set[str] = set()
        """
        The listed directories that were read since the last scan, or that `still` counts as read. The next
        one does not look up their topic ids, because `read` notices every directory in which a file was made,
        replaced or removed, or the kernel reports it.
        """
        self._scans = 0
        self._reported = ReportedChanges()
        self._held: set[str] = set()
        """
        The watched directories whose names were found to be those of the listing while they were watched, and
        that no change was reported of since.
        """
        self._still: set[str] = set()
        """
        Those of them whose segments were looked at while writes to them were reported, and that no write was
        reported of since.
        """
        self._changed: set[str] = set()
        """The directories with a reported change of a name, or a new listing, since `held` was asked last."""
        self._replaced: set[str] = set()
        """The directories that took the place of a watched one: the reports may be of the earlier one."""
        self._unwritten: set[str] = set()
        """The directories whose writes are not reported, and whose segments the last look found unchanged."""
        self._noted_at_ns = 0
        """When changes were noted last, by this host's clock."""
        self._trusts_reports = True

    def scan(self, paths: Sequence[str]) -> LogDirScan:
        """
        See `log_dir.scan_log_dirs`.

        The tuple of partitions is the same object as the last scan's while all partitions are the same.
        """
        self._scans += 1
        scan = scan_log_dirs(
            paths,
            topic_id_of=self._topic_ids.read,
            known=self._by_path,
            checked=self._read_since_scan,
            listed=self._log_dirs,
        )
        before, after = self._partitions, scan.partitions
        if len(before) == len(after) and all(map(is_, before, after)):
            scan = replace(scan, partitions=before)
        else:
            self._partitions = after
            self._by_path = {partition.path: partition for partition in after}
            self._topic_ids.keep_only(self._by_path)
            for path in self._listed.keys() - self._by_path.keys():
                del self._listed[path]
            self._replaced &= self._by_path.keys()
            self._held &= self._by_path.keys()
            self._still &= self._by_path.keys()
            self._looks = tuple(set() for _ in range(LOOK_EVERY))
            for path in self._by_path:
                self._looks[hash(path) % LOOK_EVERY].add(path)
        self._read_since_scan = set()
        return scan

    def note_changes(self, reports: ChangeReports) -> None:
        """Ask *reports* what changed until now. The reads that follow rely on the answer."""
        if not self._trusts_reports:
            return
        unwritten, self._unwritten = self._unwritten, set()
        self._noted_at_ns = time.time_ns()
        reported = reports.since_last(unwritten=unwritten)
        if reported.watched is not self._reported.watched:
            self._held &= reported.watched
            self._still &= reported.watched
        self._reported = reported
        self._held -= reported.renamed
        self._changed |= reported.renamed
        self._still -= reported.renamed
        # A directory that is watched anew counts as changed.
        self._replaced -= reported.renamed
        self._still -= reported.unreported_writes

    def held(self) -> AbstractSet[str]:
        """
        Return the directories in which no name has changed since the last call.

        By the reports that this scan relies on, and by the looks of the scans before it; a scan asks once,
        before it reads.
        """
        # A change that came after the last answer may have been looked at since, and the name holds again.
        changed, self._changed = self._changed, set()
        return self._held - changed

    def still(self, asked: AbstractSet[str]) -> AbstractSet[str]:
        """
        Return those of the directories *asked* whose logs are as `read` returned them last.

        Nothing was reported of them, and this scan looks at none of them. They count as read.
        """
        still = (self._still - self._looks[self._scans % LOOK_EVERY]) & asked
        self._read_since_scan |= still
        return still

    def read(self, partition: LocalPartition) -> LocalLog:
        """
        See `log_dir.read_local_log`.

        Raises:
            LocalFileError: As there; or the directory is of another topic than the scan found. The next
                scan finds the new one.
        """
        path = partition.path
        listed = self._listed.get(path)
        if listed is not None:
            log = self._read_again(partition, listed)
            if log is not None:
                if log is not listed.log:
                    self._listed[path] = replace(listed, log=log)
                self._read_since_scan.add(path)
                return log
            del self._listed[path]
            self._read_since_scan.discard(path)
        was_held = path in self._held
        self._held.discard(path)
        self._changed.add(path)
        self._still.discard(path)
        # Read before the listing: a change between the two makes the next call list again.
        now_ns, directory = time.time_ns(), _directory(path)
        log = read_local_log(partition)
        if listed is not None:
            self._compare(path, listed, log, directory, was_held=was_held)
        found = self._by_path.get(path)
        if found is None:
            # The broker is moving it. Only of what the scan found is it known which topic it is of.
            return log
        if self._topic_ids.read(path) != found.topic_id:
            raise LocalFileError(f"{path} is of another topic than when the scan began", path=path)
        if directory is not None and is_settled(directory[1], now_ns=now_ns):
            self._listed[path] = _Listed(log, *directory)
            self._read_since_scan.add(path)
            # While the listing holds, nothing asks for the id; what changes the listing may have changed it.
            self._topic_ids.forget(path)
        return log

    def _read_again(self, partition: LocalPartition, listed: _Listed) -> LocalLog | None:
        """Return the current log with the names of *listed*; None when it must be listed again."""
        path = partition.path
        looks_at_all = hash(path) % LOOK_EVERY == self._scans % LOOK_EVERY
        if path in self._still and not looks_at_all:
            return _of(partition, listed.log)
        log = _again(listed, partition, looks_at_directory=looks_at_all or path not in self._held)
        if log is not None:
            is_unwritten = log.segments is listed.log.segments
            if path in self._still and not is_unwritten:
                times = {one.modified_ns for one in log.segments} - {
                    one.modified_ns for one in listed.log.segments
                }
                self._check_reports(path, times)
            self._note_look(path, is_unwritten=is_unwritten)
        return log

    def _note_look(self, path: str, *, is_unwritten: bool) -> None:
        """Note that the names were those of the listing, and whether the segments were as before."""
        reported = self._reported
        if path in reported.watched and path not in self._replaced:
            self._held.add(path)
            if path not in reported.unreported_writes:
                self._still.add(path)
            elif is_unwritten:
                self._unwritten.add(path)

    def _compare(
        self,
        path: str,
        before: _Listed,
        log: LocalLog,
        directory: tuple[int, int] | None,
        *,
        was_held: bool,
    ) -> None:
        """Compare a directory with its last listing, and check whether a difference was reported."""
        if directory is None or directory[0] != before.inode:
            if path in self._reported.watched:
                self._replaced.add(path)
        elif was_held and (log.epochs, _names(log)) != (before.log.epochs, _names(before.log)):
            self._check_reports(path, {directory[1]})

    def _check_reports(self, path: str, times_ns: Collection[int]) -> None:
        """Stop relying on reports where something changed at *times_ns*, and none said so by now."""
        if any(is_settled(each, now_ns=self._noted_at_ns) for each in times_ns):
            self._trusts_reports = False
            self._reported = ReportedChanges()
            self._held, self._still, self._replaced, self._unwritten = set(), set(), set(), set()
            log.warning(
                "a change in a watched directory was not reported; every round looks at all files now",
                path=path,
                hint="The filesystem of the log directory does not report all changes. A closed segment may "
                "be noticed only by the next round",
            )


def _names(log: LocalLog) -> list[tuple[str, int]]:
    return [(segment.path, segment.inode) for segment in log.segments]


def _again(listed: _Listed, partition: LocalPartition, *, looks_at_directory: bool) -> LocalLog | None:
    """
    Return the current log, with the names of the last listing; None when it must be listed again.

    The directory's time says whether the names hold. Without *looks_at_directory* it is read only if a
    segment has changed. This runs ten thousand times per round, and nearly always nothing has changed, so it
    makes nothing then.
    """
    log = listed.log
    changed: list[tuple[int, os.stat_result]] | None = None
    try:
        for segment in log.segments:
            status = os.stat(segment.path)  # noqa: PTH116 - paths are text throughout this layer
            if (
                status.st_mtime_ns != segment.modified_ns
                or status.st_size != segment.size_bytes
                or status.st_ino != segment.inode
            ):
                changed = changed or []
                changed.append((segment.base_offset, status))
        if looks_at_directory or changed is not None:
            # Read last: a name that came, went or moved during the reads above shows here.
            status = os.stat(partition.path)  # noqa: PTH116 - likewise
            if status.st_mtime_ns != listed.modified_ns or status.st_ino != listed.inode:
                return None
    except OSError:
        # A file or the directory is gone. Listing the directory raises the error, if there still is one.
        return None
    return _of(partition, log) if changed is None else _with_statuses(log, partition, dict(changed))


def _of(partition: LocalPartition, log: LocalLog) -> LocalLog:
    """Return *log* as that of *partition*: a caller may know another id of the topic than the files have."""
    if log.partition is partition or log.partition == partition:
        return log
    return LocalLog(partition, log.segments, log.epochs)


def _with_statuses(
    log: LocalLog, partition: LocalPartition, statuses: Mapping[int, os.stat_result]
) -> LocalLog:
    """Return *log* with other statuses of its files, by base offset."""
    segments = (
        replace(segment, inode=status.st_ino, size_bytes=status.st_size, modified_ns=status.st_mtime_ns)
        if (status := statuses.get(segment.base_offset)) is not None
        else segment
        for segment in log.segments
    )
    return LocalLog(partition, tuple(segments), log.epochs)


def _directory(path: str) -> tuple[int, int] | None:
    """Return the inode and the modification time of a directory; None when it cannot be read."""
    try:
        status = os.stat(path)  # noqa: PTH116 - paths are text throughout this layer
    except OSError:
        # Listing the directory raises the error.
        return None
    return (status.st_ino, status.st_mtime_ns)
