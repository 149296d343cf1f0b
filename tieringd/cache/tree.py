"""
A directory tree that nothing leads out of.

Every name is followed part by part from the root, and none of the parts may be a symbolic link: a
link that somebody put there is an error of that name, never a way to a file elsewhere. The root
itself may be one, as an operator chose it. Everything here blocks and raises `OSError`.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_MODE, _DIRECTORY_MODE = 0o640, 0o750
_CREATE_ATTEMPTS = 8


class Tree:
    """Files below *root*, by names with slashes; safe for threads, as it has no state."""

    def __init__(self, root: str) -> None:
        self.root = root

    def open(self, name: str) -> int:
        """Open a file for reading; anything but an ordinary file is an error."""
        *above, last = name.split("/")
        with self._directory(above) as directory:
            # Nobody waits here for the other end of a pipe.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(last, flags, dir_fd=directory)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError(2, "it is no ordinary file", name)
        return fd

    def create(self, name: str) -> int:
        """Create a file for reading and writing that must not exist, and the directories that it takes."""
        *above, last = name.split("/")
        with self._directory(above, create=True) as directory:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(last, flags, _FILE_MODE, dir_fd=directory)

    def rename(self, name: str, new_name: str) -> None:
        """Give a file another name in the tree; an ordinary file of that name is replaced, nothing else."""
        *above, last = name.split("/")
        *new_above, new_last = new_name.split("/")
        with self._directory(above) as source, self._directory(new_above, create=True) as target:
            with suppress(FileNotFoundError):
                found = os.stat(new_last, dir_fd=target, follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode):
                    raise FileExistsError(17, "something else is there", new_name)
            os.rename(last, new_last, src_dir_fd=source, dst_dir_fd=target)

    def unlink(self, name: str) -> None:
        """Delete an ordinary file, and the directories above it that are empty then."""
        parts = name.split("/")
        with self._directory(parts[:-1]) as directory:
            found = os.stat(parts[-1], dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(2, "it is no ordinary file", name)
            os.unlink(parts[-1], dir_fd=directory)
        with suppress(OSError):  # The first one that is not empty, or gone.
            for depth in range(len(parts) - 1, 0, -1):
                with self._directory(parts[: depth - 1]) as directory:
                    os.rmdir(parts[depth - 1], dir_fd=directory)

    def free_bytes(self) -> int:
        """Return how much of its filesystem may still be written."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    @contextmanager
    def _directory(self, parts: list[str], *, create: bool = False) -> Iterator[int]:
        """Open the directory that *parts* lead to."""
        fd = os.open(self.root, _DIRECTORY)
        try:
            for part in parts:
                below = _below(fd, part, create=create)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)


def _below(fd: int, part: str, *, create: bool) -> int:
    for attempt in range(_CREATE_ATTEMPTS):
        try:
            return os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        except FileNotFoundError:
            # Between the making and the opening, another process may find it empty and remove it.
            if not create or attempt == _CREATE_ATTEMPTS - 1:
                raise
            with suppress(FileExistsError):
                os.mkdir(part, _DIRECTORY_MODE, dir_fd=fd)
    raise AssertionError("the last attempt returns or raises")
