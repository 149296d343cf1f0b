"""
A partition's directory in the log directory of a stopped broker, made from an archive.

The directory is built outside of the log directory, where Kafka would not start with it, on the same
filesystem. When it is complete, one rename puts it in the place of the empty log of a topic that was
created for it. Nothing here touches a log that holds a record. A crash at any point leaves the built
files, and the next attempt continues with them. A log that an earlier attempt has put in its place is
compared with what this attempt would build, and nothing of it is written.

Where the first readable offset is inside the first segment, as after a user's DeleteRecords, it is noted
in the broker's `log-start-offset-checkpoint` before the log is in its place: a broker serves nothing before
it. The caller keeps the broker stopped (`broker.stopped_broker`), which would write the file anew.

The batches are the archived ones except for their leader epoch, which is the new cluster's first one,
and for their producer ids, which are ids that no producer of the new cluster has
(`formats.restored_batches`). That holds on every replica that copies them. Bytes from the store are
checked in their stored form.

The restored replica itself has no state of the old producers. Every segment has its indexes, because
Kafka would otherwise read all of it. An empty producer snapshot is written for the end of the log. New
records begin a segment of their own, the only one that is read after a crash.

All functions block.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c

from tieringd.broker.log_dir import read_topic_id
from tieringd.broker.segment_file import position_of, scan_transactions
from tieringd.errors import ConfigError, CorruptDataError, LocalFileError
from tieringd.formats.checkpoints import (
    encode_epoch_checkpoint,
    encode_offset_checkpoint,
    encode_partition_metadata,
    parse_offset_checkpoint,
)
from tieringd.formats.index_files import EMPTY_PRODUCER_SNAPSHOT, aborted_index, whole_indexes
from tieringd.formats.log_names import LogFileKind, encode_file_name, parse_file_name
from tieringd.formats.record_batch import HEADER_BYTES, parse_header
from tieringd.formats.restored_batches import FIRST_LEADER_EPOCH, restored_batch, turn_back
from tieringd.formats.transactions import TransactionTracker
from tieringd.model.partition import TopicPartition
from tieringd.model.segment import AbortedTransaction, EpochStart, LocalSegment, RemoteSegment, SegmentIndex
from tieringd.policies.epoch_history import epoch_at

_BLOCK_BYTES = 1 << 20
_NO_EPOCH = -1
"""The leader epoch of a batch that no leader has stamped."""
_PARTITION_METADATA = "partition.metadata"
_EPOCHS = "leader-epoch-checkpoint"
_RECOVERY_POINTS = "recovery-point-offset-checkpoint"
_LOG_STARTS = "log-start-offset-checkpoint"
_PROBE = ".tieringd-restore-probe"


class RestoredLog:
    """One partition's directory under construction."""

    def __init__(self, log_dir: Path, staging: Path, name: TopicPartition) -> None:
        """Build in *staging*, a directory on the filesystem of *log_dir* and outside of it."""
        self.name = str(name)
        self._partition = name
        self.target = log_dir / self.name
        self._staging = staging.absolute()
        self._directory = staging / self.name
        """Where the log is; in the log directory if an earlier attempt has put it there."""
        self._aside = staging / f"{self.name}.empty"
        self._compared: set[int] = set()
        """The base offsets of the files of a log in its place that are as this attempt would build them."""

    @property
    def topic_id(self) -> str:
        """Return the id that the new cluster gave the topic."""
        return read_topic_id(str(self.target if self.target.is_dir() else self._aside))

    @property
    def _is_placed(self) -> bool:
        return self._directory == self.target

    def begin(self, segments: Sequence[RemoteSegment] = ()) -> None:
        """
        Check that *segments* can be restored, and make the directory to build in.

        Raises:
            ConfigError: As from `check`.
            LocalFileError: A directory cannot be made or read.
        """
        self.check(segments)
        with _translated(self._directory):
            if self._looks_placed(segments):
                self._directory = self.target
            self._compared = set()
            self._directory.mkdir(parents=True, exist_ok=True)

    def check(self, segments: Sequence[RemoteSegment] = ()) -> None:
        """
        Check that the place is free, and that a directory can be moved there. Leaves no files behind.

        A place with files of just the names and sizes of *segments* counts as free: an earlier attempt has
        put them there. `finish` has compared them.

        Raises:
            ConfigError: The log directory has no such partition, or records of it; or *staging* is on
                another file system.
            LocalFileError: A directory cannot be read or written.
        """
        if not self.target.is_dir() and not self._aside.is_dir():
            raise ConfigError(
                f"{self.target} does not exist: the broker has no partition {self.name}",
                hint="Start the broker, create the topic with as many partitions as the archive has, stop "
                "the broker, and run this again",
            )
        with _translated(self.target):
            if not self._looks_placed(segments):
                self._require_free()
        self._require_one_filesystem()

    def leave_empty(self) -> None:
        """
        Check the place as `check` does, and leave its empty log there.

        An earlier release began a directory for such a log, which would keep the staging directory in being.

        Raises:
            ConfigError: As for `check`.
            LocalFileError: A directory cannot be read or written.
        """
        self.check()
        with suppress(OSError):  # It is missing, or has files of another attempt.
            self._directory.rmdir()

    def _require_one_filesystem(self) -> None:
        """
        Move a file from the staging directory (or its nearest existing parent) into the log directory.

        This is the only proof: a rename also fails between two mounts of the same file system.
        """
        log_dir = self.target.parent
        source = next(path for path in (self._staging, *self._staging.parents) if path.is_dir()) / _PROBE
        # A broker ignores a file in its log directory.
        arrived = log_dir / _PROBE
        with _translated(source):
            try:
                source.touch()
                source.rename(arrived)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                raise ConfigError(
                    f"{self._staging} and {log_dir} are on different file systems: a restored partition "
                    "could not be moved to its place",
                    hint="Give --staging a directory on the log directory's file system. If the log "
                    f"directory is a mount point, use {log_dir}/.restore: a successful restore removes "
                    "it, and no Kafka broker starts while it exists",
                ) from error
            finally:
                source.unlink(missing_ok=True)
                arrived.unlink(missing_ok=True)

    def _require_free(self) -> None:
        for path in sorted(self.target.glob("*.log")) if self.target.is_dir() else ():
            # Preallocated files have a size before they have a record; a record is not all zeros.
            if path.stat().st_size and _has_data(path):
                raise _not_free(path)

    def _looks_placed(self, segments: Sequence[RemoteSegment]) -> bool:
        """Say whether the place has the files of *segments*, and after them one that has no record yet."""
        if not segments or not self.target.is_dir():
            return False
        sizes = [(path.name, path.stat().st_size) for path in sorted(self.target.glob("*.log"))]
        wanted = [(encode_file_name(one.base_offset, LogFileKind.LOG), one.size_bytes) for one in segments]
        return sizes[: len(wanted)] == wanted and len(sizes) > len(wanted) and sizes[-1][1] == 0

    def _require_as_built(self, next_offset: int) -> None:
        """Check that a log in its place has all files that were compared, and no other one with a record."""
        found = {path.name: path.stat().st_size for path in sorted(self.target.glob("*.log"))}
        last = encode_file_name(next_offset, LogFileKind.LOG)
        wanted = {encode_file_name(one, LogFileKind.LOG) for one in self._compared} | {last}
        for name in sorted(found.keys() ^ wanted):
            raise _not_free(self.target / name)
        if found[last]:
            raise _not_free(self.target / last)

    def has(self, segment: RemoteSegment, epochs: Sequence[EpochStart]) -> bool:
        """
        Return whether the segment's file exists already, whole and right. The file is read for that.

        Turned back into stored batches, with *epochs* of the stored object, it must have the checksum of
        that object.
        """
        path = self._path(segment.base_offset, LogFileKind.LOG)
        if not path.is_file() or path.stat().st_size != segment.size_bytes:
            return False

        def stored_epoch(offset: int) -> int:
            found = epoch_at(epochs, offset)
            return _NO_EPOCH if found is None else found

        checksum, held = 0, bytearray()
        with _translated(path), path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                held += block
                whole, is_restored = turn_back(held, stored_epoch)
                if not is_restored:
                    return False
                checksum = crc32c(held[:whole], checksum)
                held = held[whole:]
        is_right = not held and checksum == segment.crc32c
        if is_right:
            self._compared.add(segment.base_offset)
        return is_right

    def open_segment(self, base_offset: int) -> SegmentWriter:
        """
        Begin a segment's file.

        Raises:
            ConfigError: The log is in its place already, and its file is another one.
        """
        path = self._path(base_offset, LogFileKind.LOG)
        if self._is_placed:
            raise _not_free(path)
        return SegmentWriter(path)

    def write_indexes(
        self, segment: RemoteSegment, index: SegmentIndex, aborted: Iterable[AbortedTransaction]
    ) -> None:
        """
        Write the broker's side files.

        Those missing in the archive are built, with *aborted* transactions. A log in its place has them.
        """
        if self._is_placed:
            return
        indexes = whole_indexes(segment, index, aborted)
        for kind, data in (
            (LogFileKind.OFFSET_INDEX, indexes.offset_index),
            (LogFileKind.TIME_INDEX, indexes.time_index),
            (LogFileKind.TRANSACTION_INDEX, indexes.transaction_index),
        ):
            self._write_side_file(segment.base_offset, kind, data)

    def open_transactions(self, segments: Iterable[RemoteSegment]) -> tuple[OpenTransaction, ...]:
        """
        Return the transactions without a marker in *segments*, whose files exist.

        Raises:
            CorruptDataError: A header is impossible.
        """
        tracker, files = TransactionTracker(), []
        for segment in segments:
            files.append(self._local(segment))
            scan_transactions(files[-1], tracker)
        return tuple(
            OpenTransaction(producer_id, first_offset, _producer_epoch(files, first_offset))
            for producer_id, first_offset in sorted(tracker.open_transactions.items())
        )

    def write_markers(
        self, base_offset: int, markers: Sequence[bytes], aborted: Sequence[AbortedTransaction]
    ) -> None:
        """
        Write control batches as a segment of their own after all others.

        *aborted* lists what they abort.

        Raises:
            ConfigError: The log is in its place already, and has something else there.
        """
        path, data = self._path(base_offset, LogFileKind.LOG), b"".join(markers)
        if self._is_placed:
            if not path.is_file() or path.read_bytes() != data:
                raise _not_free(path)
            self._compared.add(base_offset)
            return
        # Kafka takes an empty offset index for that of a short segment, and a missing one for damage.
        self._write_side_file(base_offset, LogFileKind.OFFSET_INDEX, b"")
        self._write_side_file(base_offset, LogFileKind.TRANSACTION_INDEX, aborted_index(aborted) or None)
        _write_whole(path, data)

    def _write_side_file(self, base_offset: int, kind: LogFileKind, data: bytes | None) -> None:
        path = self._path(base_offset, kind)
        if data is None:
            path.unlink(missing_ok=True)
        else:
            _write_whole(path, data)

    def _local(self, segment: RemoteSegment) -> LocalSegment:
        path = self._path(segment.base_offset, LogFileKind.LOG)
        with _translated(path):
            found = path.stat()
        return LocalSegment(
            segment.base_offset,
            segment.next_offset,
            found.st_size,
            str(path),
            inode=found.st_ino,
            modified_ns=found.st_mtime_ns,
        )

    def finish_empty(self, start_offset: int) -> None:
        """
        Put a log without a record, which begins at *start_offset*, in the place of the empty one.

        Raises:
            ConfigError: The partition is not empty any more.
            LocalFileError: The disk refuses.
        """
        self._finish({start_offset}, start_offset, start_offset)

    def finish(self, segments: Iterable[RemoteSegment], *, start_offset: int, next_offset: int) -> None:
        """
        Put the directory in the place of the empty one. New records get offsets from *next_offset* on.

        The broker serves nothing before *start_offset*, which may be inside the first of *segments*.

        It keeps the topic id that the broker's cluster assigned. All of it has one leader epoch. A log that
        an earlier attempt has put in its place stays as it is.

        Raises:
            ConfigError: The partition is not empty any more, or is not what an earlier attempt has put there.
            LocalFileError: The disk refuses.
            CorruptDataError: The empty directory's own files cannot be read.
        """
        bounds = [(segment.base_offset, segment.next_offset) for segment in segments]
        is_inside = start_offset > bounds[0][0]
        if self._is_placed:
            with _translated(self.target):
                self._require_as_built(next_offset)
                if is_inside:
                    # A release that did not note it may have put the log there.
                    self._note(_LOG_STARTS, start_offset, is_least=True)
                shutil.rmtree(self._aside, ignore_errors=True)
            return
        known = {base_offset for base_offset, _ in bounds} | {bounds[-1][1], next_offset}
        self._finish(known, bounds[0][0], next_offset, start_offset=start_offset if is_inside else None)

    def _finish(
        self, known: set[int], base_offset: int, next_offset: int, *, start_offset: int | None = None
    ) -> None:
        with _translated(self._directory):
            for path in self._directory.iterdir():
                name = parse_file_name(path.name)
                # An attempt with other limits may have left segments that are not wanted now.
                is_known = name is not None and (
                    name.base_offset in known or name.kind is not LogFileKind.LOG
                )
                if not is_known or (name is not None and name.kind is LogFileKind.PRODUCER_SNAPSHOT):
                    path.unlink()
            # A broker continues at the base offset of its last segment, if that is empty.
            _write_whole(self._path(next_offset, LogFileKind.LOG), b"")
            _write_whole(self._path(next_offset, LogFileKind.OFFSET_INDEX), b"")
            _write_whole(self._path(next_offset, LogFileKind.PRODUCER_SNAPSHOT), EMPTY_PRODUCER_SNAPSHOT)
            _write_whole(self._directory / _PARTITION_METADATA, encode_partition_metadata(self.topic_id))
            _write_whole(
                self._directory / _EPOCHS, encode_epoch_checkpoint([(FIRST_LEADER_EPOCH, base_offset)])
            )
            _sync_directory(self._directory)
            self._require_free()
            self._take_place(next_offset, start_offset)
            shutil.rmtree(self._aside, ignore_errors=True)

    def _take_place(self, next_offset: int, start_offset: int | None) -> None:
        """Rename the directory. If that fails, leave the log directory as it was."""
        log_dir = self.target.parent
        before = {
            path: path.read_bytes() if path.is_file() else None
            for path in (log_dir / _RECOVERY_POINTS, log_dir / _LOG_STARTS)
        }
        try:
            # A broker that crashes then reads only what came after the restore: the rest is on the disk.
            self._note(_RECOVERY_POINTS, next_offset)
            self._note(_LOG_STARTS, start_offset)
            if self.target.is_dir():
                if self._aside.is_dir():
                    shutil.rmtree(self._aside)
                self.target.rename(self._aside)
            self._directory.rename(self.target)
        except (OSError, LocalFileError, CorruptDataError):
            if not self.target.is_dir() and self._aside.is_dir():
                self._aside.rename(self.target)
            for path, data in before.items():
                if data is None:
                    path.unlink(missing_ok=True)
                elif path.read_bytes() != data:
                    _write_whole(path, data)
            raise
        _sync_directory(log_dir)

    def _note(self, name: str, offset: int | None, *, is_least: bool = False) -> None:
        """
        Note the partition's *offset* in a checkpoint of the log directory, or take it out if it is None.

        With *is_least* a higher offset stays. The other partitions' offsets stay in any case.
        """
        path = self.target.parent / name
        try:
            known = parse_offset_checkpoint(path.read_bytes()) if path.is_file() else {}
        except CorruptDataError as error:
            raise CorruptDataError(
                error.message,
                source=str(path),
                hint="A broker starts without this file where it cannot read it: move the file away, and run "
                "this again",
            ) from error
        noted = {one: each for one, each in known.items() if one != self._partition}
        if offset is not None:
            noted[self._partition] = max(offset, known.get(self._partition, 0)) if is_least else offset
        if noted != known:
            _write_whole(path, encode_offset_checkpoint(noted))

    def _path(self, base_offset: int, kind: LogFileKind) -> Path:
        return self._directory / encode_file_name(base_offset, kind)


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction without a marker among the restored segments."""

    producer_id: int
    first_offset: int
    producer_epoch: int


def _producer_epoch(files: Sequence[LocalSegment], first_offset: int) -> int:
    (file,) = (one for one in files if one.base_offset <= first_offset < (one.next_offset or 0))
    with Path(file.path).open("rb") as opened:
        position = position_of(opened.fileno(), file, first_offset)
        opened.seek(position)
        return parse_header(opened.read(HEADER_BYTES)).producer_epoch


class SegmentWriter:
    """A segment's file under construction. It gets its name only when it is complete and right."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f"{path.name}.part")
        self._file = self._part.open("wb")
        self._checksum = 0

    def write(self, batch: memoryview) -> None:
        """
        Append a whole stored batch. The file gets it in its restored form.

        Raises:
            LocalFileError: The disk refuses. `close` removes the unfinished file.
        """
        with _translated(self._part):
            for piece in restored_batch(batch):
                self._file.write(piece)
        self._checksum = crc32c(batch, self._checksum)

    def finish(self, expected: RemoteSegment, *, source: str) -> None:
        """
        Give the file its name.

        Raises:
            CorruptDataError: The size or the checksum of the written batches differs from the manifest's.
        """
        with _translated(self._part):
            self._file.flush()
            os.fsync(self._file.fileno())
            size_bytes = self._file.tell()
        if (size_bytes, self._checksum) != (expected.size_bytes, expected.crc32c):
            raise CorruptDataError(
                f"{size_bytes} bytes with checksum {self._checksum:08x} were read, but the manifest has "
                f"{expected.size_bytes} bytes with {expected.crc32c:08x}",
                source=source,
            )
        with _translated(self._path):
            self._part.rename(self._path)

    def close(self) -> None:
        """Close the file, and remove it unless it is finished."""
        self._file.close()
        self._part.unlink(missing_ok=True)


def _not_free(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} holds records: a partition is restored only into an empty one",
        hint="Restore into another topic, or delete this one and create it again",
    )


def _has_data(path: Path) -> bool:
    with path.open("rb") as file:
        return any(file.read(_BLOCK_BYTES))


def _write_whole(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    with _translated(path):
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _translated:  # noqa: N801 a context manager that reads as a word
    """Turn the disk's errors into ours."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Raise a `LocalFileError` for an operating system's error."""
        if isinstance(error, OSError):
            raise LocalFileError(
                f"{error.filename or self._path}: {error.strerror}", path=str(self._path)
            ) from error
