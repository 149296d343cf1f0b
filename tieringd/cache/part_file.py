"""
Part files: where the bytes of a cached file are until it is whole.

All lie in one directory of the cache, so that leftovers are found without a walk. Each is locked by
the process that writes it; the kernel lets go when that process ends, however it ends, and so a
part without a lock is a leftover. A part is never read under any other name than its own.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieringd.cache.tree import Tree

INCOMING = "incoming"
SUFFIX = ".part"


class PartFile:
    """
    A file that is being written, and not yet seen by anybody.

    Whoever has one ends it: with `rename` and `detach`, or with `abandon`, which may be called at any
    time and more than once. All of it blocks and raises `OSError`.
    """

    def __init__(self, tree: Tree, part_name: str, fd: int, name: str, size_bytes: int) -> None:
        self._tree = tree
        self._part_name: str | None = part_name
        self._fd: int | None = fd
        self.name = name
        """Which it gets once it is whole."""
        self.size_bytes = size_bytes

    @classmethod
    def create(cls, tree: Tree, name: str, size_bytes: int) -> PartFile:
        """Make an empty part, and take its whole size from the disk."""
        part_name = f"{INCOMING}/{os.getpid()}-{secrets.token_hex(8)}{SUFFIX}"
        part = cls(tree, part_name, tree.create(part_name), name, size_bytes)
        try:
            fcntl.flock(part.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if size_bytes:
                os.posix_fallocate(part.fd, 0, size_bytes)
        except BaseException:
            part.abandon()
            raise
        return part

    @property
    def fd(self) -> int:
        """Return its descriptor, for reading what was written."""
        assert self._fd is not None, "a part that was ended is used"
        return self._fd

    def write(self, position: int, data: bytes | memoryview) -> None:
        """Write bytes at *position*."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self.fd, view, position)
            view, position = view[written:], position + written

    def rename(self) -> None:
        """Give it its name."""
        assert self._part_name is not None, "a part is renamed once"
        self._tree.rename(self._part_name, self.name)
        self._part_name = None

    def detach(self) -> int:
        """Return the descriptor, which is the caller's from here on, without its lock."""
        fd, self._fd = self.fd, None
        fcntl.flock(fd, fcntl.LOCK_UN)
        return fd

    def abandon(self) -> None:
        """Close it, and remove what has no name yet."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._part_name is not None:
            with suppress(OSError):  # On a disk that takes nothing any more, the next start removes it.
                self._tree.unlink(self._part_name)
            self._part_name = None


def remove_leftovers(tree: Tree) -> int:
    """Remove the parts that nobody writes any more; return how many there were."""
    removed = 0
    try:
        names = os.listdir(f"{tree.root}/{INCOMING}")  # noqa: PTH208 - paths are text in this layer
    except FileNotFoundError:
        return 0
    for name in names:
        if name.endswith(SUFFIX):
            with suppress(OSError):  # In use, not ours to delete, or on a disk that is read-only.
                fd = tree.open(f"{INCOMING}/{name}")
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    tree.unlink(f"{INCOMING}/{name}")
                    removed += 1
                finally:
                    os.close(fd)
    return removed
