"""
Pins on disk: hard links of closed segments, in a directory of our own beside the log directory.

    {root}/{topic}-{partition}_{topic_id}/{base}-{next}.log     and its side files

The root is on the log directory's filesystem, since a hard link cannot leave it, and outside
the log directory, since Kafka does not start when it finds a directory there that it does not
know. A pin holds bytes against deletion and compaction. It does not hold them against
truncation, which writes to the same file: a pinned segment is checked like any other.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tieringd.errors import ConfigError, LocalFileError
from tieringd.formats.log_names import FileKind, encode_file_name
from tieringd.model.segment import LocalSegment
from tieringd.policies.pinning import Pin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.model.local_log import LocalPartition

_NAME: Final = re.compile(r"(?P<base>\d{20})-(?P<next>\d{20})\.log")
_SIDE_KINDS: Final = (FileKind.OFFSET_INDEX, FileKind.TIME_INDEX, FileKind.TRANSACTION_INDEX)


@dataclass(frozen=True, slots=True)
class PinDirectory:
    """The pins of one log directory. Functions here block; services call them in a thread."""

    root: str

    def pins(self, partition: LocalPartition) -> tuple[Pin, ...]:
        """
        Return the pins of one partition, oldest first.

        Raises:
            LocalFileError: The directory cannot be read.
        """
        directory = self._directory(partition)
        try:
            with os.scandir(directory) as entries:
                found = [
                    _pin(entry, int(name["base"]), int(name["next"]))
                    for entry in entries
                    if (name := _NAME.fullmatch(entry.name))
                ]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise LocalFileError(f"{directory} cannot be read: {error.strerror}", path=directory) from error
        return tuple(sorted(found, key=lambda pin: pin.segment.base_offset))

    def make(self, partition: LocalPartition, segment: LocalSegment) -> None:
        """
        Link a closed segment's files; of a segment that went meanwhile nothing is kept.

        Raises:
            LocalFileError: A link cannot be made; the message says why.
        """
        assert segment.next_offset is not None, "only closed segments are pinned"
        directory = self._directory(partition)
        # Without its last letters, as FileKind names them: the dot stays.
        stem = f"{directory}/{segment.base_offset:020d}-{segment.next_offset:020d}."
        source = segment.path.removesuffix(FileKind.LOG.value)
        snapshot = encode_file_name(segment.next_offset, FileKind.PRODUCER_SNAPSHOT)
        # The log comes last: a pin is known by it, and then the rest is there.
        links = [(f"{source}{kind.value}", f"{stem}{kind.value}") for kind in _SIDE_KINDS]
        links.append((f"{os.path.dirname(source)}/{snapshot}", f"{directory}/{snapshot}"))  # noqa: PTH120 - a name
        links.append((segment.path, f"{stem}{FileKind.LOG.value}"))
        try:
            os.makedirs(directory, mode=0o750, exist_ok=True)  # noqa: PTH103 - paths are text throughout this layer
            for old, new in links:
                with suppress(FileNotFoundError, FileExistsError):
                    os.link(old, new)
            if not os.path.exists(links[-1][1]):  # noqa: PTH110 - likewise
                _unlink(directory, [new for _, new in links])
        except OSError as error:
            raise LocalFileError(
                f"{segment.path} cannot be pinned in {directory}: {error.strerror}",
                path=segment.path,
                hint="Run tieringd as the broker's user: only who owns a file, or may write it, may link it",
            ) from error

    def release(self, partition: LocalPartition, pins: Sequence[Pin]) -> None:
        """
        Unlink *pins*, and the directory when it is empty then.

        Raises:
            LocalFileError: A link cannot be removed.
        """
        directory = self._directory(partition)
        try:
            for pin in pins:
                stem = pin.segment.path.removesuffix(FileKind.LOG.value)
                assert pin.segment.next_offset is not None, "only closed segments are pinned"
                snapshot = encode_file_name(pin.segment.next_offset, FileKind.PRODUCER_SNAPSHOT)
                names = [
                    pin.segment.path,
                    *(f"{stem}{kind.value}" for kind in _SIDE_KINDS),
                    f"{directory}/{snapshot}",
                ]
                _unlink(directory, names)
        except OSError as error:
            raise LocalFileError(
                f"{directory} cannot be changed: {error.strerror}", path=directory
            ) from error

    def others(self, partitions: Sequence[LocalPartition]) -> set[str]:
        """
        Return the directories with pins of partitions that are not among *partitions*.

        Raises:
            LocalFileError: The root cannot be read.
        """
        known = {self._directory(one) for one in partitions}
        try:
            with os.scandir(self.root) as entries:
                return {entry.path for entry in entries if entry.is_dir() and entry.path not in known}
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise LocalFileError(f"{self.root} cannot be read: {error.strerror}", path=self.root) from error

    def remove(self, path: str) -> None:
        """
        Remove a directory that `others` returned, with the pins in it.

        Raises:
            LocalFileError: It cannot be removed.
        """
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise LocalFileError(f"{path} cannot be removed: {error.strerror}", path=path) from error

    def _directory(self, partition: LocalPartition) -> str:
        return f"{self.root}/{partition.topic_partition}_{partition.topic_id}"


def pin_root(log_dir: str, candidates: Sequence[str]) -> str:
    """
    Return the first of *candidates* that is, or can be made, on the filesystem of *log_dir*.

    Raises:
        ConfigError: None is: hard links cannot reach there. Or the log directory is not there.
    """
    try:
        wanted = os.stat(log_dir).st_dev  # noqa: PTH116 - paths are text throughout this layer
    except OSError as error:
        raise ConfigError(
            f"log directory {log_dir} cannot be read: {error.strerror}, so segments there cannot be pinned",
            hint="Start the broker first, or correct broker.log_dirs; then restart tieringd",
        ) from error
    for candidate in candidates:
        with suppress(OSError):
            os.makedirs(candidate, mode=0o750, exist_ok=True)  # noqa: PTH103 - likewise
            if os.stat(candidate).st_dev == wanted:  # noqa: PTH116 - likewise
                return candidate
    raise ConfigError(
        f"none of {', '.join(candidates)} is a directory on the filesystem of {log_dir}, so segments there "
        f"cannot be pinned",
        hint="Set broker.pin_directory to a directory on that filesystem, outside the log directory, "
        "or pin_segments: false",
    )


def _unlink(directory: str, names: Sequence[str]) -> None:
    """Unlink those of *names* that are there, and *directory* when it is empty then."""
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108 - paths are text throughout this layer
    with suppress(OSError):
        os.rmdir(directory)  # noqa: PTH106 - likewise; one that is not empty stays


def _pin(entry: os.DirEntry[str], base_offset: int, next_offset: int) -> Pin:
    status = entry.stat()
    segment = LocalSegment(
        base_offset=base_offset,
        next_offset=next_offset,
        size_bytes=status.st_size,
        path=entry.path,
        inode=status.st_ino,
        modified_ns=status.st_mtime_ns,
    )
    return Pin(segment, is_held=status.st_nlink == 1)
