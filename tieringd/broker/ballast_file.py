"""
The ballast file: bytes on the log directory's filesystem that can be released when it is full.

The file is on the same filesystem as a log directory, and outside all log directories, since Kafka does
not start when it finds unknown files there. It holds zeros. A file with other content is not ours,
whatever the configuration says, and is neither changed nor deleted.

Functions here block; services call them in a thread.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tieringd.errors import ConfigError, LocalFileError

_NO_ALLOCATION: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_ZEROS: Final = bytes(2**20)
_PROOF_BYTES: Final = 4096
WRITTEN_AT_ONCE_BYTES: Final = 256 * 2**20
"""Bytes that one `grow` writes where space cannot be reserved, so that its caller can stop between calls."""


@dataclass(frozen=True, slots=True)
class BallastFile:
    """One ballast file, which may not exist."""

    path: str
    size_bytes: int
    """The intended size."""

    def held_bytes(self) -> int:
        """
        Return the current size, 0 when there is no file.

        Raises:
            LocalFileError: It cannot be inspected.
            ConfigError: The path holds something else.
        """
        try:
            descriptor = self._open(os.O_RDONLY)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise self._error("looked at", error) from error
        try:
            return self._checked_size(descriptor)
        finally:
            os.close(descriptor)

    def grow(
        self,
        *,
        allocate: Callable[[int, int, int], None] = os.posix_fallocate,
        at_once_bytes: int = WRITTEN_AT_ONCE_BYTES,
    ) -> int:
        """
        Grow or shrink the file towards its size, and return its size now.

        The full size is reached at once if the filesystem can reserve space. Otherwise each call writes
        at most *at_once_bytes*.

        Raises:
            LocalFileError: There is no room, or it cannot be written. The unfinished file is deleted.
            ConfigError: The path holds something else.
        """
        try:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            descriptor = self._open(os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise self._error("made", error) from error
        try:
            held = self._checked_size(descriptor)
            self._resize(descriptor, held, allocate, at_once_bytes)
            os.fsync(descriptor)
            return os.fstat(descriptor).st_size
        except OSError as error:
            Path(self.path).unlink(missing_ok=True)
            raise self._error("made", error) from error
        finally:
            os.close(descriptor)

    def release(self) -> int:
        """
        Delete the file; return how many bytes that frees.

        Raises:
            LocalFileError: It cannot be deleted.
            ConfigError: The path holds something else.
        """
        held = self.held_bytes()
        try:
            Path(self.path).unlink(missing_ok=True)
        except OSError as error:
            raise self._error("deleted", error) from error
        return held

    def _open(self, flags: int) -> int:
        # A symbolic link could lead anywhere, and opening a pipe would block.
        return os.open(self.path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)

    def _checked_size(self, descriptor: int) -> int:
        found = os.fstat(descriptor)
        is_ours = stat.S_ISREG(found.st_mode) and not any(os.pread(descriptor, _PROOF_BYTES, 0))
        if not is_ours:
            raise ConfigError(
                f"{self.path} is not a ballast file: it has other contents",
                hint="Set ballast_file_path to a path where no file exists",
            )
        return found.st_size

    def _resize(
        self, descriptor: int, held: int, allocate: Callable[[int, int, int], None], at_once_bytes: int
    ) -> None:
        if held > self.size_bytes:
            os.ftruncate(descriptor, self.size_bytes)
            return
        try:
            allocate(descriptor, 0, self.size_bytes)
        except OSError as error:
            if error.errno not in _NO_ALLOCATION:
                raise
        else:
            return
        end = min(self.size_bytes, held + at_once_bytes)
        while held < end:
            held += os.pwrite(descriptor, _ZEROS[: end - held], held)

    def _error(self, what: str, error: OSError) -> LocalFileError:
        return LocalFileError(
            f"the ballast file {self.path} cannot be {what}: {error.strerror}",
            path=self.path,
            hint="Free some disk space, or change ballast_file_path or ballast_file_size",
        )


def find_ballast_path(candidates: Sequence[str], log_dirs: Sequence[str]) -> str:
    """
    Return the first of *candidates* that is on a log directory's filesystem and outside all of them.

    While a log directory cannot be inspected, as on a disk that has failed, only a file that exists counts:
    the ballast may be on that disk, and is not made a second time elsewhere.

    Raises:
        ConfigError: No candidate is; the message gives the reason for each.
        LocalFileError: A log directory cannot be inspected, and no candidate exists beside another one.
    """
    devices: set[int] = set()
    problem: LocalFileError | None = None
    for path in log_dirs:
        try:
            devices.add(os.stat(path).st_dev)  # noqa: PTH116 - paths are text throughout this layer
        except OSError as error:
            problem = LocalFileError(f"{path} cannot be inspected: {error.strerror}", path=path)
    reasons: list[str] = []
    for candidate in candidates:
        reason = _fault(candidate, log_dirs, devices)
        if reason is None and (problem is None or os.path.lexists(candidate)):
            return candidate
        reasons.append(f"{candidate} {reason}")
    if problem is not None:
        raise problem
    raise ConfigError(
        f"no place was found for the ballast file: {'; '.join(reasons)}",
        hint="Set ballast_file_path to a path on the filesystem of a log directory, but outside all log "
        "directories",
    )


def _fault(candidate: str, log_dirs: Sequence[str], devices: set[int]) -> str | None:
    """Return what rules a path out for the ballast file, if anything. Its directories may not exist yet."""
    real = Path(os.path.realpath(candidate))
    for log_dir in log_dirs:
        if real.is_relative_to(os.path.realpath(log_dir)):
            return f"is inside the log directory {log_dir}"
    try:
        nearest = next(parent for parent in real.parents if parent.is_dir())
        device = nearest.stat().st_dev
    except OSError as error:
        return f"cannot be inspected: {error.strerror}"
    return None if device in devices else "is on another filesystem than the log directories"
