"""Errors of the cache's disk in one wording: the file, what was tried, and what an operator can do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tieringd.errors import LocalFileError

_HINTS = {
    errno.ENOSPC: "its disk is full",
    errno.EDQUOT: "its quota is used up",
    errno.EROFS: "its filesystem is mounted read-only",
    errno.EACCES: "let the daemon's user read and write it",
    errno.EPERM: "let the daemon's user read and write it",
    errno.ELOOP: "it is a symbolic link, which is not allowed below cloud_storage_cache_directory",
}


@contextmanager
def translated(path: Path, tried: str) -> Iterator[None]:
    """Raise any `OSError` as `LocalFileError`. *tried* follows the word "cannot" in its message."""
    try:
        yield
    except OSError as error:
        raise located(path, tried, error) from error


def located(path: Path | str, tried: str, error: OSError) -> LocalFileError:
    """Return the error of a file that the system refuses."""
    reason = error.strerror or str(error)
    return LocalFileError(
        f"{path} cannot {tried}: {reason}", path=str(path), hint=_HINTS.get(error.errno or 0)
    )


def reason_of(error: LocalFileError) -> str:
    """Return the system's name of the error, such as `enospc`, as a metric label."""
    cause = error.__cause__
    number = cause.errno if isinstance(cause, OSError) else None
    return errno.errorcode.get(number or 0, "other").lower()


def read_exactly(fd: int, position: int, size_bytes: int) -> bytes:
    """Return *size_bytes* of an open file from *position* on; fewer only at its end."""
    data = os.pread(fd, size_bytes, position)
    if len(data) == size_bytes or not data:
        return data
    parts, at = [data], len(data)
    while at < size_bytes and (more := os.pread(fd, size_bytes - at, position + at)):
        parts.append(more)
        at += len(more)
    return b"".join(parts)
