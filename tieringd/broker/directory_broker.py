"""
Log directories without a broker: this process leads every partition that it finds.

The files replace a broker's responses: the bounds of a log come from a walk over its batch headers, the
leader epoch from its checkpoint. Trimming unlinks whole closed segments, which must never happen under a
running broker, so it takes the broker's own lock first.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

from tieringd.broker.local_errors import named_errors
from tieringd.broker.log_dir import (
    EPOCH_CHECKPOINT,
    SmallFiles,
    have_same_directories,
    is_settled,
    names_in,
    partition_name,
    read_leader_epochs,
    read_local_log,
    read_topic_id,
    scan_log_dirs,
)
from tieringd.broker.segment_file import scan_transactions
from tieringd.errors import (
    BrokerDenied,
    BrokerUnavailable,
    CorruptDataError,
    LeadershipChanged,
    LocalFileError,
    TieringError,
)
from tieringd.formats.transactions import TransactionTracker
from tieringd.model.disk_state import QuotaEntity
from tieringd.model.local_log import NO_BROKER, LocalLog, LocalPartition, LogDirSizes, ReplicaSize
from tieringd.model.partition import NO_TOPIC_ID, ClusterView, Leadership, LogBounds, Replica, TopicPartition
from tieringd.model.segment import EpochStart, LocalSegment

_PROOF_BYTES: Final = 64
_NO_IDS: Final = frozenset({NO_TOPIC_ID})
_SIDE_SUFFIXES: Final = (".index", ".timeindex", ".txnindex", ".snapshot")


@dataclass(slots=True)
class _LogHeaderWalk:
    """The progress of the walk over the headers of one log, and its results so far."""

    transactions: TransactionTracker
    next_offset: int
    base_offset: int = -1
    """Base offset of the segment that the walk has reached; -1 before the first."""
    inode: int = -1
    position: int = 0
    proof: bytes = b""
    """Bytes of that segment up to *position*. If they differ later, the file is another one."""
    settled: tuple[tuple[LocalSegment, ...], LogBounds] | None = None
    """The segments of the completed walk, and the bounds. None when files could have changed unseen."""


@dataclass(frozen=True, slots=True)
class _SettledBounds:
    """The bounds of many logs, whose files were all as they were when they were last walked."""

    logs: tuple[LocalLog, ...]
    leader_epochs: Mapping[TopicPartition, int]
    bounds: Mapping[TopicPartition, LogBounds | TieringError]


class DirectoryBroker:
    """
    Replaces a broker where none runs.

    The first read of a log walks all of its headers, since a transaction may be open since any of them;
    later reads continue where the last one ended. Reads block, so they run in a thread, one at a time.
    """

    def __init__(self, log_dirs: Sequence[str], *, cluster_id: str | None = None) -> None:
        self._log_dirs = tuple(log_dirs)
        self._cluster_id = cluster_id
        self._walks: dict[TopicPartition, _LogHeaderWalk] = {}
        self._epochs = SmallFiles(EPOCH_CHECKPOINT, _newest_epoch)
        self._scanned: tuple[LocalPartition, ...] = ()
        """The partitions of the last scan."""
        self._told: dict[str, int] = {}
        """The leader epochs of these, by their paths, where they could be read."""
        self._untold: set[str] = set()
        """The paths of those whose leader epoch could not be read."""
        self._view = ClusterView({}, {})
        """The scan's view: the same object is returned again while all epochs are the same."""
        self._bounds: _SettledBounds | None = None
        self._listed: dict[str, tuple[frozenset[str], Mapping[str, Sequence[str]]]] = {}
        """The names in each log directory when the topics' ids were last read, and what they mean."""
        self._lock = threading.Lock()

    async def cluster_id(self) -> str:
        """Return the configured id, or the one in `meta.properties`."""
        if self._cluster_id is not None:
            return self._cluster_id
        scan = await asyncio.to_thread(scan_log_dirs, self._log_dirs)
        if scan.cluster_id is None:
            raise BrokerDenied(
                f"no log directory of {', '.join(self._log_dirs)} names its cluster",
                hint="Set cluster_id to a name of your choice; it becomes part of every object key",
            )
        return scan.cluster_id

    async def topic_ids(self, topics: Collection[str]) -> Mapping[str, frozenset[str]]:
        """Return the ids in the log directories. A topic that is missing there is not proven to be gone."""
        return await asyncio.to_thread(self._topic_ids, frozenset(topics))

    async def replicas(
        self, found: Sequence[LocalPartition], *, held: Collection[str] | None = None
    ) -> ClusterView:
        """Return all partitions of *found* as led. Their leader epoch is 0 if none can be read."""
        if held is None:
            return await asyncio.to_thread(self._view_of, found)
        return await asyncio.to_thread(self._view_of_all, tuple(found), held)

    async def log_bounds(
        self, logs: Sequence[LocalLog], *, leader_epochs: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, LogBounds | TieringError]:
        """Return the bounds of each log, or the error in its files."""
        return await asyncio.to_thread(self._all_bounds, logs, leader_epochs)

    async def log_dir_sizes(self) -> Sequence[LogDirSizes]:
        """Return the contents of the log directories, under the broker id in their `meta.properties`."""
        return await asyncio.to_thread(_log_dir_sizes, self._log_dirs)

    async def topic_configs(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
        """Return no properties for each topic: there is no broker to set any."""
        return {topic: {} for topic in topics}

    async def topic_overrides(self, topic: str) -> Mapping[str, str]:
        """Return no properties: there is no broker to set any."""
        del topic
        return {}

    async def alter_topic(
        self, topic: str, changes: Mapping[str, str | None], *, send_by: float = math.inf
    ) -> None:
        """
        Refuse.

        Raises:
            BrokerDenied: Always: without a broker there are no topic settings.
        """
        del send_by
        raise BrokerDenied(f"{', '.join(changes)} of topic {topic} cannot be set: broker.kind is none")

    async def node_id(self) -> int:
        """
        Refuse.

        Raises:
            BrokerDenied: Always: without a broker there is no broker id.
        """
        raise BrokerDenied("the broker has no id: broker.kind is none")

    async def client_quotas(self) -> Mapping[QuotaEntity, Mapping[str, float]]:
        """
        Refuse.

        Raises:
            BrokerDenied: Always: without a broker there are no clients.
        """
        raise BrokerDenied("client quotas cannot be read: broker.kind is none")

    async def alter_client_quotas(
        self, changes: Mapping[QuotaEntity, Mapping[str, float | None]], *, send_by: float = math.inf
    ) -> None:
        """
        Refuse.

        Raises:
            BrokerDenied: Always: without a broker there are no clients.
        """
        del send_by
        names = "; ".join(str(entity) for entity in changes)
        raise BrokerDenied(f"client quotas of {names} cannot be set: broker.kind is none")

    async def share_group_starts(
        self,
        *,
        known: Collection[str] = (),  # noqa: ARG002 the interface
    ) -> Mapping[str, Mapping[TopicPartition, int]]:
        """Return nothing: there is no broker to coordinate a group."""
        return {}

    async def trim(
        self, leadership: Leadership, log: LocalLog, *, before_offset: int, needs_every_replica: bool = False
    ) -> int:
        """
        Unlink the closed segments of *log* that end at or before *before_offset*.

        Raises:
            LeadershipChanged: The log's newest leader epoch is another one by now; nothing is unlinked.
            BrokerDenied: A broker runs on the log directory, or this user may not delete in it.
            BrokerUnavailable: The files are not those of *log* any more; nothing is unlinked.
            LocalFileError: A file could not be unlinked. Those before it are.
        """
        # Without a broker the directory is the only incarnation of its name, and the only replica.
        del needs_every_replica
        return await asyncio.to_thread(_trim, log, before_offset, leadership.leader_epoch)

    async def close(self) -> None:
        """Discard the results of all walks."""
        self._walks.clear()
        self._bounds = None

    def _topic_ids(self, topics: Collection[str]) -> dict[str, frozenset[str]]:
        """Read one id for each topic: all of its partitions have the same."""
        found: dict[str, frozenset[str]] = {}
        for log_dir in self._log_dirs:
            for topic, paths in self._paths_in(log_dir).items():
                for path in paths if topic in topics else ():
                    # A partition without an id yet leaves the answer to the topic's other partitions.
                    if found.get(topic, _NO_IDS) != _NO_IDS:
                        break
                    # If a partition vanishes meanwhile, another partition of the topic may give the id.
                    with suppress(LocalFileError):
                        found[topic] = frozenset({read_topic_id(path)})
        return found

    def _paths_in(self, log_dir: str) -> Mapping[str, Sequence[str]]:
        """Return the paths of the partitions in a log directory, by topic; empty if it cannot be listed."""
        try:
            names = names_in(log_dir)
        except OSError:
            return {}
        known = self._listed.get(log_dir)
        if known is None or not have_same_directories(known[0], names):
            paths: dict[str, list[str]] = {}
            for name in sorted(names):
                if (parsed := partition_name(name)) is not None:
                    paths.setdefault(parsed.topic, []).append(f"{log_dir}/{name}")
            known = self._listed[log_dir] = (names, paths)
        return known[1]

    def _view_of(self, found: Sequence[LocalPartition]) -> ClusterView:
        """Return the view of some partitions. What is known of the others stays."""
        with self._lock:
            return _led(found, self._read_epochs(each.path for each in found))

    def _view_of_all(self, found: tuple[LocalPartition, ...], held: Collection[str]) -> ClusterView:
        """Return the view of all partitions. What is known of partitions that are gone is dropped."""
        with self._lock:
            told = self._told
            if found is not self._scanned:
                paths = {each.path for each in found}
                told = {path: epoch for path, epoch in told.items() if path in paths}
                self._untold = paths - told.keys()
                self._epochs.keep_only(paths)
            if asked := (told.keys() - held) | self._untold:
                read = self._read_epochs(asked)
                self._untold = asked - read.keys()
                told = {path: epoch for path, epoch in told.items() if path not in self._untold} | read
            if found != self._scanned or told != self._told:
                self._view = _led(found, told)
                for gone in self._walks.keys() - self._view.replicas.keys():
                    del self._walks[gone]
            self._scanned, self._told = found, told
            return self._view

    def _read_epochs(self, paths: Iterable[str]) -> dict[str, int]:
        """Return the leader epoch of each directory of which one can be read."""
        epochs: dict[str, int] = {}
        for path in paths:
            # Where it cannot be read, reading the log itself meets the same fault, and reports it.
            with suppress(LocalFileError):
                epochs[path] = self._epochs.read(path)
        return epochs

    def _all_bounds(
        self, logs: Sequence[LocalLog], leader_epochs: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, LogBounds | TieringError]:
        last, logs = self._bounds, tuple(logs)
        # Both comparisons pass over objects that are the same without a call for each. Equal ones replace
        # those before them, so that the next comparison meets the same objects.
        if last is not None and last.logs == logs and last.leader_epochs == leader_epochs:
            self._bounds = _SettledBounds(logs, leader_epochs, last.bounds)
            return last.bounds
        bounds: dict[TopicPartition, LogBounds | TieringError] = {}
        all_settled = True
        for each in logs:
            name = each.partition.topic_partition
            walk = self._walks.get(name)
            settled = None if walk is None else walk.settled
            if settled is not None and settled[0] == each.segments:
                # The files are as they were when they were last walked, so none is read. The epochs of
                # the log's own listing decide.
                bounds[name] = settled[1]
                if _newest(each.epochs) == leader_epochs[name]:
                    continue
            all_settled = False
            try:
                with self._lock:
                    if name not in bounds:
                        bounds[name] = self._walked_bounds(each)
                    _require_epoch(each, self._epochs.read(each.partition.path), leader_epochs[name])
            except (CorruptDataError, LocalFileError, LeadershipChanged) as error:
                bounds[name] = error
        # A question about a few logs leaves what is kept of all of them.
        if 2 * len(logs) >= len(self._walks):
            self._bounds = _SettledBounds(logs, leader_epochs, bounds) if all_settled else None
        return bounds

    def _walked_bounds(self, local: LocalLog) -> LogBounds:
        name = local.partition.topic_partition
        first_offset = local.first_offset
        if first_offset is None:
            raise LocalFileError(f"{local.partition.path} holds no segment", path=local.partition.path)
        earlier = self._walks.get(name)
        # Kept only when the walk ends well: after a fault the next read begins anew.
        self._walks.pop(name, None)
        now_ns = time.time_ns()
        walk = _begin(local, first_offset) if earlier is None else _go_on(earlier, local, first_offset)
        open_since = walk.transactions.first_unstable_offset
        stable = walk.next_offset if open_since is None else min(open_since, walk.next_offset)
        bounds = LogBounds(first_offset, stable, walk.next_offset)
        modified_ns = max(segment.modified_ns for segment in local.segments)
        walk.settled = (local.segments, bounds) if is_settled(modified_ns, now_ns=now_ns) else None
        self._walks[name] = walk
        return bounds


def _log_dir_sizes(log_dirs: Sequence[str]) -> list[LogDirSizes]:
    found: list[LogDirSizes] = []
    for path in log_dirs:
        scan = scan_log_dirs([path])
        broker = NO_BROKER if scan.node_id is None else scan.node_id
        errors = [str(problem) for problem in scan.problems]
        replicas: list[ReplicaSize] = []
        for each in scan.partitions:
            try:
                replicas.append(ReplicaSize(each.topic_partition, read_local_log(each).size_bytes))
            except LocalFileError as error:
                errors.append(str(error))
        found.append(LogDirSizes(broker, path, tuple(replicas), "; ".join(errors)))
    return found


def _begin(local: LocalLog, first_offset: int) -> _LogHeaderWalk:
    walk = _LogHeaderWalk(TransactionTracker(first_offset), first_offset)
    return _to_the_end(walk, local.segments)


def _go_on(walk: _LogHeaderWalk, local: LocalLog, first_offset: int) -> _LogHeaderWalk:
    """Continue *walk* if its current file is still the same, or begin a new walk."""
    for number, segment in enumerate(local.segments):
        if (segment.base_offset, segment.inode) == (walk.base_offset, walk.inode):
            if _proof(segment, walk.position) != walk.proof:
                break
            return _to_the_end(walk, local.segments[number:])
    return _begin(local, first_offset)


def _to_the_end(walk: _LogHeaderWalk, segments: Sequence[LocalSegment]) -> _LogHeaderWalk:
    """Continue *walk* to the end of the log. The active segment ends at its last whole batch."""
    for segment in segments:
        if segment.base_offset != walk.base_offset:
            walk.base_offset, walk.inode, walk.position = segment.base_offset, segment.inode, 0
            walk.next_offset = max(walk.next_offset, segment.base_offset)
        reached = scan_transactions(
            segment, walk.transactions, position=walk.position, next_offset=walk.next_offset
        )
        walk.position, walk.next_offset = reached.position, reached.next_offset
    walk.proof = _proof(segments[-1], walk.position)
    return walk


def _proof(segment: LocalSegment, position: int) -> bytes:
    """Return the first batch's header, which has its checksum and time, and the bytes before *position*."""
    with ExitStack() as stack:
        descriptor = _open(stack, segment.path, os.O_RDONLY)
        with named_errors(segment.path):
            head = os.pread(descriptor, min(position, _PROOF_BYTES), 0)
            return head + os.pread(descriptor, min(position, _PROOF_BYTES), max(0, position - _PROOF_BYTES))


def _open(stack: ExitStack, path: str, flags: int) -> int:
    """Open *path*, and close it with *stack*."""
    with named_errors(path, "be opened"):
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


def _led(partitions: Sequence[LocalPartition], leader_epochs: Mapping[str, int]) -> ClusterView:
    """
    Return a view in which this process leads each of *partitions*.

    Its epoch is that of its path in *leader_epochs*, or 0.
    """
    roles = {epoch: Replica(epoch, is_leader=True) for epoch in {0, *leader_epochs.values()}}
    led = {each.topic_partition: roles[leader_epochs.get(each.path, 0)] for each in partitions}
    return ClusterView(led, Counter(name.topic for name in led))


def _newest_epoch(path: str) -> int:
    """
    Return the newest leader epoch of a partition's directory; 0 if there is none.

    Raises:
        LocalFileError: The checkpoint cannot be read or parsed.
    """
    return _newest(read_leader_epochs(path))


def _newest(epochs: Sequence[EpochStart]) -> int:
    """Return the newest leader epoch in *epochs*; 0 if there is none."""
    return epochs[-1][0] if epochs else 0


def _require_epoch(local: LocalLog, newest: int, leader_epoch: int) -> None:
    """
    Check that a log, whose newest epoch is *newest*, still has the leader epoch of the earlier read.

    Raises:
        LeadershipChanged: It has another one: a broker has run on these files since.
    """
    if newest != leader_epoch:
        raise LeadershipChanged(f"{local.partition.path} has leader epoch {newest} now, not {leader_epoch}")


def _trim(local: LocalLog, before_offset: int, leader_epoch: int) -> int:
    path = local.partition.path
    doomed = [
        segment
        for segment in local.segments
        if segment.next_offset is not None and segment.next_offset <= before_offset
    ]
    with ExitStack() as stack:
        _hold_broker_lock(stack, local.partition.log_dir)
        log = read_local_log(local.partition)
        _require_epoch(local, _newest(log.epochs), leader_epoch)
        current = log.segments
        seen = [(segment.base_offset, segment.next_offset, segment.identity) for segment in doomed]
        if seen != [(each.base_offset, each.next_offset, each.identity) for each in current[: len(doomed)]]:
            raise BrokerUnavailable(f"the segments of {path} changed since the last scan")
        directory = _open(stack, path, os.O_RDONLY | os.O_DIRECTORY)
        for segment in doomed:
            _unlink_segment(segment, directory)
    return current[len(doomed)].base_offset


def _unlink_segment(segment: LocalSegment, directory: int) -> None:
    """
    Unlink one segment: its side files first, then the `.log`.

    A scan identifies a segment by its `.log`. A crash in between leaves a whole segment without indexes,
    which the next trim unlinks again; the other order would leave side files that no scan finds. The
    directory is made durable after each segment, oldest first. Otherwise a power cut could bring an
    earlier segment back while a later one stays gone, and the earlier segment would seem to cover the hole.
    """
    stem = segment.path.removesuffix(".log")
    for file_path in (*(f"{stem}{suffix}" for suffix in _SIDE_SUFFIXES), segment.path):
        try:
            os.unlink(file_path)  # noqa: PTH108  (Path would only wrap the name again)
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise BrokerDenied(
                f"{file_path} may not be deleted: {error.strerror}",
                hint="Allow the daemon's user to write in the log directories",
            ) from error
        except OSError as error:
            raise LocalFileError(
                f"{file_path} cannot be deleted: {error.strerror}", path=file_path
            ) from error
    os.fsync(directory)


def _hold_broker_lock(stack: ExitStack, log_dir: str) -> None:
    """
    Hold the lock that a Kafka broker holds on its log directory, until *stack* closes.

    A broker whose segment vanishes while it runs takes the whole log directory offline.
    """
    lock_path = f"{log_dir}/.lock"
    if not os.path.exists(lock_path):  # noqa: PTH110  (paths are text throughout this layer)
        return
    lock = _open(stack, lock_path, os.O_RDWR)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise BrokerDenied(
            f"a broker is running on {log_dir}, so tieringd does not delete files there",
            hint="Set broker.kind to kafka; segments are then trimmed through the broker",
        ) from error
