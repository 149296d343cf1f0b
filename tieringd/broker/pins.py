"""
Pins on disk: hard links of closed segments, in a directory of our own beside the log directory.

    {root}/{topic}-{partition}_{topic_id}/{base}-{next}.log             and its side files
    {root}/{topic}-{partition}_{topic_id}/{base}-{next}-open.log        the same, of an active segment
    {root}/{topic}-{partition}_{topic_id}/leader-epoch-checkpoint       a copy of the log's
    {root}/{topic}-{partition}_{topic_id}/anchor                        a link to its last segment
    {root}/{topic}-{partition}_{topic_id}/{base}-{next}-{inode}.stray   a pin that is set aside

A directory's name that is longer than 255 bytes is cut, and ends with `~` and a hash of the whole.

The two files in the middle describe the log at the last note (`PinDirectory.note`). With them
`policies.pinning` decides whether a pin belongs to the current log. A pin that is set aside is data without
side files, for an operator to inspect, keep or remove.

The broker may append to a pinned active segment, and its log may end elsewhere than the bounds said that were
asked for later. So `{next}` of such a pin is a hint. Where the log does not have the file any more,
`with_true_ends` finds the end in the file. Earlier releases named such pins without `-open`.

The root is on the log directory's filesystem, since a hard link cannot leave it, and outside
the log directory, since Kafka does not start when it finds an unknown directory there. A pin
protects bytes against deletion and compaction. It does not protect them against truncation,
which writes to the same file: a pinned segment is checked like any other.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from tieringd.broker.local_errors import named_errors
from tieringd.broker.log_dir import EPOCH_CHECKPOINT, read_leader_epochs
from tieringd.broker.segment_file import end_by_headers
from tieringd.errors import ConfigError, LocalFileError
from tieringd.formats.checkpoints import encode_epoch_checkpoint
from tieringd.formats.log_names import LogFileKind, encode_file_name
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.segment import EpochStart, LocalSegment
from tieringd.policies.pinning import NO_PINS, Pin, PinnedLog

_NAME_BYTES_MAX: Final = 255
"""The longest name that Linux's file systems take. Topic names are ASCII."""
_DIGEST_LENGTH: Final = 32
_NAME: Final = re.compile(r"(?P<base>\d{20})-(?P<next>\d{20})(?P<open>-open)?(?:\.log|-\d+\.stray)")
_OPEN: Final = "-open"
_STRAY: Final = ".stray"
_ANCHOR: Final = "anchor"
_NEW: Final = ".new"
_TRIAL: Final = ".trial"
_PROPERTIES: Final = "meta.properties"
_HINT: Final = (
    "Run tieringd as the broker's user: a hard link needs ownership of the file, or permission to write it"
)
_SIDE_KINDS: Final = (LogFileKind.OFFSET_INDEX, LogFileKind.TIME_INDEX, LogFileKind.TRANSACTION_INDEX)


@dataclass(frozen=True, slots=True)
class PinDirectory:
    """
    The pins of one log directory. Functions here block; services call them in a thread.

    A partition's pins are found by its name and topic id, in whatever log directory it is.
    """

    root: str

    def found(self, partition: LocalPartition) -> PinnedLog:
        """
        Return the pins of one partition, oldest first, and the note about its log.

        Raises:
            LocalFileError: The directory cannot be read.
        """
        return self.found_in(self._directory(partition))

    def found_in(self, directory: str) -> PinnedLog:
        """
        Return what `found` does, of a directory that `others` returned.

        Raises:
            LocalFileError: The directory cannot be read.
        """
        try:
            with os.scandir(directory) as entries:
                status = {entry.name: found for entry in entries if (found := _status(entry)) is not None}
        except FileNotFoundError:
            return NO_PINS
        except OSError as error:
            raise LocalFileError(f"{directory} cannot be read: {error.strerror}", path=directory) from error
        anchor = status[_ANCHOR].st_ino if _ANCHOR in status else None
        pins = [
            _pin(f"{directory}/{file_name}", status[file_name], name, anchor)
            for file_name in status
            if (name := _NAME.fullmatch(file_name))
        ]
        pins.sort(key=lambda pin: pin.segment.base_offset)
        return PinnedLog(
            tuple(pins), _noted_epochs(directory) if EPOCH_CHECKPOINT in status else None, anchor
        )

    def note(self, log: LocalLog) -> None:
        """
        Note the state of *log*: from now on its pins are known to belong to the log in this state.

        Raises:
            LocalFileError: The note cannot be written, for example on a full disk. The old note is
                removed then.
        """
        last = log.segments[-1]
        directory = self._directory(log.partition)
        anchor, checkpoint = f"{directory}/{_ANCHOR}", f"{directory}/{EPOCH_CHECKPOINT}"
        try:
            os.makedirs(directory, mode=0o750, exist_ok=True)  # noqa: PTH103 - paths are text throughout this layer
            if not os.path.exists(checkpoint) or _noted_epochs(directory) != log.epochs:  # noqa: PTH110 - likewise
                with open(f"{checkpoint}{_NEW}", "wb") as file:  # noqa: PTH123 - likewise
                    file.write(encode_epoch_checkpoint(log.epochs))
                os.replace(f"{checkpoint}{_NEW}", checkpoint)  # noqa: PTH105 - likewise
            if _inode(anchor) != last.inode:
                _unlink(directory, [f"{anchor}{_NEW}"])
                if _link(last, f"{anchor}{_NEW}"):
                    os.replace(f"{anchor}{_NEW}", anchor)  # noqa: PTH105 - likewise
        except OSError as error:
            with suppress(OSError):
                # An older note may be about another log than that of the next pins.
                _unlink(directory, [checkpoint, f"{checkpoint}{_NEW}", anchor])
            raise LocalFileError(
                f"the state of {log.partition.path} cannot be recorded in {directory}: {error.strerror}",
                path=directory,
                hint=_HINT,
            ) from error

    def set_aside(self, partition: LocalPartition, pins: Sequence[Pin]) -> tuple[Pin, ...]:
        """
        Set *pins* aside, so that they no longer count for the log, and return them under their new paths.

        Raises:
            LocalFileError: A pin cannot be renamed.
        """
        directory = self._directory(partition)
        aside: list[Pin] = []
        with named_errors(directory, "be changed"):
            for pin in pins:
                segment = pin.segment
                if segment.path.endswith(_STRAY):
                    aside.append(pin)
                    continue
                stem = segment.path.removesuffix(f".{LogFileKind.LOG.value}")
                path = f"{stem}-{segment.inode}{_STRAY}"
                os.rename(segment.path, path)  # noqa: PTH104 - paths are text throughout this layer
                _unlink(directory, _side_files(directory, [pin]))
                aside.append(replace(pin, segment=replace(segment, path=path)))
            if aside:
                _tidy(directory)
        return tuple(aside)

    def make(self, partition: LocalPartition, segment: LocalSegment, *, is_open: bool = False) -> bool:
        """
        Link a segment's files, and return whether its pin is there.

        If the segment's path is gone, or another file by now, nothing is kept. A pin of another file with the
        same name stays. The path may be that of a pin, whose file gets another name then.

        With *is_open* it is the active segment, and its `next_offset` where it ended lately.

        Raises:
            LocalFileError: A link cannot be made; the message gives the reason.
        """
        assert segment.next_offset is not None, "a pin's name has an end"
        directory = self._directory(partition)
        # Suffixes such as `log` are added from LogFileKind, so the dot stays.
        mark = _OPEN if is_open else ""
        stem = f"{directory}/{segment.base_offset:020d}-{segment.next_offset:020d}{mark}."
        source = segment.path.removesuffix(LogFileKind.LOG.value)
        snapshot = encode_file_name(segment.next_offset, LogFileKind.PRODUCER_SNAPSHOT)
        # The log comes last: its link makes the pin, so every pin has its side files.
        links = [(f"{source}{kind.value}", f"{stem}{kind.value}") for kind in _SIDE_KINDS]
        links.append((f"{os.path.dirname(source)}/{snapshot}", f"{directory}/{snapshot}"))  # noqa: PTH120 - a name
        pin = f"{stem}{LogFileKind.LOG.value}"
        try:
            os.makedirs(directory, mode=0o750, exist_ok=True)  # noqa: PTH103 - paths are text throughout this layer
            found = _inode(pin)
            if found not in (None, segment.inode):
                # A pin of another file has the name, and may be the only copy.
                return False
            if found is None:
                # Side files without a pin are from a process that ended in between, on any lineage.
                _unlink(directory, [new for old, new in links if new != old], is_kept=True)
            for old, new in links:
                with suppress(FileNotFoundError, FileExistsError):
                    os.link(old, new)
            if _link(segment, pin):
                return True
            _unlink(directory, [new for _, new in links])
        except OSError as error:
            raise LocalFileError(
                f"{segment.path} cannot be pinned in {directory}: {error.strerror}",
                path=segment.path,
                hint=_HINT,
            ) from error
        return False

    def has(self, pin: Pin) -> bool:
        """Say whether *pin* is in this directory."""
        return pin.segment.path.startswith(f"{self.root}/")

    def release(self, partition: LocalPartition, pins: Sequence[Pin]) -> None:
        """
        Unlink *pins*, and the directory when it is empty then.

        Raises:
            LocalFileError: A link cannot be removed.
        """
        directory = self._directory(partition)
        with named_errors(directory, "be changed"):
            side_files = _side_files(directory, pins)
            _unlink(directory, [*(pin.segment.path for pin in pins), *side_files])
            _tidy(directory)

    def tidy(self, partition: LocalPartition) -> None:
        """
        Remove the note about a log that has no pin.

        Raises:
            LocalFileError: It cannot be removed.
        """
        directory = self._directory(partition)
        with named_errors(directory, "be changed"):
            _tidy(directory)

    def listed(self) -> frozenset[str]:
        """
        Return the paths in the root: the directories with pins, of whatever partitions.

        Raises:
            LocalFileError: The root cannot be read.
        """
        return frozenset(path for path, _ in self._entries())

    def is_listed(self, listed: frozenset[str], partition: LocalPartition) -> bool:
        """Say whether the pins of *partition* are among *listed*, which the method of that name returned."""
        # Without pins, as is usual, no name is made for each of ten thousand partitions.
        return bool(listed) and self._directory(partition) in listed

    def others(self, partitions: Iterable[LocalPartition]) -> set[str]:
        """
        Return the directories with pins of partitions that are not among *partitions*.

        Raises:
            LocalFileError: The root cannot be read.
        """
        found = {path for path, is_directory in self._entries() if is_directory}
        return found - {self._directory(one) for one in partitions} if found else found

    def _entries(self) -> list[tuple[str, bool]]:
        """Return the paths in the root, and whether each is a directory."""
        try:
            with os.scandir(self.root) as entries:
                return [(entry.path, entry.is_dir()) for entry in entries]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LocalFileError(f"{self.root} cannot be read: {error.strerror}", path=self.root) from error

    def remove(self, path: str) -> None:
        """
        Remove a directory that `others` returned, with the pins in it.

        Raises:
            LocalFileError: It cannot be removed.
        """
        with named_errors(path, "be removed"):
            shutil.rmtree(path)

    def _directory(self, partition: LocalPartition) -> str:
        name = f"{partition.topic_partition}_{partition.topic_id}"
        if len(name) > _NAME_BYTES_MAX:
            # Two topics may begin alike: the hash is of the whole name.
            digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_LENGTH]
            name = f"{name[: _NAME_BYTES_MAX - _DIGEST_LENGTH - 1]}~{digest}"
        return f"{self.root}/{name}"


def with_true_ends(
    log: LocalLog,
    found: PinnedLog,
    end_of: Callable[[LocalSegment], tuple[int, bool]] = end_by_headers,
) -> PinnedLog:
    """
    Return *found* with the ends that pins of active segments have by now, where *log* lacks their files.

    *log* was read after *found*, so a file that it lacks is appended to no more. Only the files that the log
    lacks are read, by *end_of*. Earlier releases pinned active segments without the mark. So a file
    without the mark is read as well, unless another pin or segment begins at the end in its name.

    Where a file is damaged, its end is not known. The pin ends past the damage, so it is not durable before
    the upload has come there and has reported it.

    Raises:
        LocalFileError: A pin cannot be read, or is gone.
    """
    inodes = {segment.inode for segment in log.segments}
    begins = {segment.base_offset for segment in log.segments}
    begins |= {pin.segment.base_offset for pin in found.all_pins if not pin.is_stray}
    ascending = sorted(begins)

    def ended(pin: Pin) -> Pin:
        place = bisect_right(ascending, pin.segment.base_offset)
        successor = ascending[place] if place < len(ascending) else None
        if successor == pin.segment.next_offset and not pin.is_open:
            return pin
        return _ended(pin, end_of, log_start=log.first_offset, successor=successor)

    def all_ended(one: PinnedLog) -> PinnedLog:
        # Two filesystems number their files alike.
        pins = tuple(
            pin if pin.segment.inode in inodes and not one.is_elsewhere else ended(pin) for pin in one.pins
        )
        return replace(one, pins=pins)

    return replace(all_ended(found), elsewhere=tuple(all_ended(one) for one in found.elsewhere))


def _ended(
    pin: Pin,
    end_of: Callable[[LocalSegment], tuple[int, bool]],
    *,
    log_start: int | None,
    successor: int | None,
) -> Pin:
    """Return *pin* with the end of its file; *successor* is where the next pin or segment begins."""
    path = pin.segment.path
    with named_errors(path, "be read"):
        status = os.stat(path)  # noqa: PTH116 - paths are text throughout this layer
    # The file may have grown since it was listed.
    segment = replace(pin.segment, size_bytes=status.st_size, modified_ns=status.st_mtime_ns)
    named_end = _end_in_name(path)
    reached, is_whole = end_of(segment)
    if not is_whole:
        end = max(named_end, reached + 1)
        if pin.is_open and log_start is not None and log_start > segment.base_offset:
            # A pin that reaches into the log would be passed over. Its file ends there at the latest.
            end = min(end, log_start)
    elif pin.is_open or reached == successor:
        end = reached
    else:
        # A cleaner may have removed the last records of a closed segment.
        end = max(named_end, reached)
    return replace(pin, segment=replace(segment, next_offset=end))


def pin_root(log_dir: str, candidates: Sequence[str]) -> str:
    """
    Return the first of *candidates* that exists, or can be made, and that hard links from *log_dir* reach.

    A link of a file of the log directory is made in the candidate and removed again. Device numbers alone
    do not tell: a bind mount has the number of its filesystem, and no link leads from one mount to another.
    An empty log directory has nothing to link, and then the device numbers decide.

    Raises:
        ConfigError: No candidate does; the message has the cause for each. Or the log directory is missing.
    """
    try:
        wanted = os.stat(log_dir).st_dev  # noqa: PTH116 - paths are text throughout this layer
        sample = _sample(log_dir)
    except OSError as error:
        raise ConfigError(
            f"log directory {log_dir} cannot be read: {error.strerror}, so segments there cannot be pinned",
            hint="Start the broker first, or correct broker.log_dirs; then restart tieringd",
        ) from error
    causes = []
    for candidate in candidates:
        cause = _cause_against_links(candidate, wanted, sample)
        if not cause:
            return candidate
        causes.append(f"{candidate}: {cause}")
    raise ConfigError(
        f"no hard link can be made on the filesystem of {log_dir}, so segments there cannot be pinned "
        f"({'; '.join(causes)})",
        hint="Set broker.pin_directory to a directory on that filesystem and in the same mount, outside the "
        "log directory (docs/install_systemd.md, Where pins are), or set pin_segments: false",
    )


def _sample(log_dir: str) -> str | None:
    """
    Return a file of the broker's that can be linked for a trial; None if there is none yet.

    Kafka keeps a file of its own in each log directory, which is better for a trial than a segment.
    """
    properties = f"{log_dir}/{_PROPERTIES}"
    if os.path.isfile(properties):  # noqa: PTH113 - paths are text throughout this layer
        return properties
    with os.scandir(log_dir) as entries:
        directories = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    for directory in directories:
        with suppress(FileNotFoundError), os.scandir(directory) as files:
            for file in files:
                if file.is_file(follow_symlinks=False):
                    return file.path
    return None


def _cause_against_links(candidate: str, device: int, sample: str | None) -> str:
    """Return why no link to *sample* can be in the directory *candidate*; empty if one can."""
    trial = f"{candidate}/{_TRIAL}"
    try:
        os.makedirs(candidate, mode=0o750, exist_ok=True)  # noqa: PTH103 - paths are text throughout this layer
        if os.stat(candidate).st_dev != device:  # noqa: PTH116 - likewise
            return "it is on another filesystem"
        if sample is not None:
            try:
                # A link that a killed process left behind would hold a file for nothing.
                _unlink(candidate, [trial], is_kept=True)
                with suppress(FileExistsError):
                    os.link(sample, trial, follow_symlinks=False)
            finally:
                _unlink(candidate, [trial], is_kept=True)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return (
                "it is in another mount of that filesystem, such as a bind mount, a container's volume, or "
                "the state directory of a systemd unit that is protected by ProtectSystem"
            )
        if error.errno == errno.EPERM:
            return (
                f"{sample} may not be linked by this user (fs.protected_hardlinks); run tieringd as the "
                "broker's user"
            )
        if error.errno == errno.EROFS:
            return "it is read-only for this process; a systemd unit names it in ReadWritePaths"
        return error.strerror or str(error)
    return ""


def _noted_epochs(directory: str) -> tuple[EpochStart, ...] | None:
    try:
        return read_leader_epochs(directory)
    except LocalFileError:
        # After a crash of the machine in the middle of a note, for example: it counts as no note.
        return None


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino  # noqa: PTH116 - paths are text throughout this layer
    except FileNotFoundError:
        return None


def _link(segment: LocalSegment, path: str) -> bool:
    """Link a segment's file. Return whether it is the scanned file: its path may name another one now."""
    with suppress(FileNotFoundError, FileExistsError):
        os.link(segment.path, path)
    if _inode(path) == segment.inode:
        return True
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - paths are text throughout this layer
    return False


def _side_files(directory: str, pins: Sequence[Pin]) -> list[str]:
    """Return what goes with *pins*. A snapshot is of all pins whose names have its offset as the end."""
    paths = [pin.segment.path for pin in pins if not pin.segment.path.endswith(_STRAY)]
    # The end of a segment may have been put right since; its snapshot was linked by the end in the name.
    ends = set(map(_end_in_name, paths))
    with suppress(FileNotFoundError):
        others = {f"{directory}/{name}" for name in os.listdir(directory) if _NAME.fullmatch(name)}  # noqa: PTH208 - paths are text throughout this layer
        ends -= {_end_in_name(one) for one in others.difference(paths) if not one.endswith(_STRAY)}
    stems = [path.removesuffix(LogFileKind.LOG.value) for path in paths]
    return [
        *(f"{stem}{kind.value}" for stem in stems for kind in _SIDE_KINDS),
        *(f"{directory}/{encode_file_name(end, LogFileKind.PRODUCER_SNAPSHOT)}" for end in sorted(ends)),
    ]


def _end_in_name(path: str) -> int:
    name = _NAME.fullmatch(os.path.basename(path))  # noqa: PTH119 - paths are text throughout this layer
    assert name is not None, "every pin was found by its name"
    return int(name["next"])


def _tidy(directory: str) -> None:
    """Remove the note when no pin that is not set aside is left: its link would hold a file for nothing."""
    try:
        with os.scandir(directory) as entries:
            if any(_NAME.fullmatch(entry.name) and not entry.name.endswith(_STRAY) for entry in entries):
                return
    except FileNotFoundError:
        return
    _unlink(directory, [f"{directory}/{_ANCHOR}", f"{directory}/{EPOCH_CHECKPOINT}"])


def _unlink(directory: str, names: Sequence[str], *, is_kept: bool = False) -> None:
    """Unlink the existing ones of *names*, and *directory* when it is empty then, unless *is_kept*."""
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108 - paths are text throughout this layer
    if is_kept:
        return
    with suppress(OSError):
        os.rmdir(directory)  # noqa: PTH106 - likewise; one that is not empty stays


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of a file, or None when it is gone: an operator may remove one."""
    try:
        return entry.stat()
    except FileNotFoundError:
        return None


def _pin(path: str, status: os.stat_result, name: re.Match[str], anchor: int | None) -> Pin:
    segment = LocalSegment(
        base_offset=int(name["base"]),
        next_offset=int(name["next"]),
        size_bytes=status.st_size,
        path=path,
        inode=status.st_ino,
        modified_ns=status.st_mtime_ns,
    )
    names_of_ours = 2 if status.st_ino == anchor else 1
    return Pin(
        segment,
        is_held=status.st_nlink == names_of_ours,
        is_stray=path.endswith(_STRAY),
        is_open=name["open"] is not None,
    )
