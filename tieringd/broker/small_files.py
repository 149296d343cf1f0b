"""
Small files that are looked at in every round and hardly ever change.

A file is read again when its identity (inode, size, modification time) is another one. That is
as good as reading it, with one exception that is seen to: a file that was changed just before it
was read may change again without a later time, so it is not remembered until it is older.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_T = TypeVar("_T")

SETTLED_NS: Final = 2_000_000_000
"""What was modified this long ago shows any later change by another time, on every filesystem in use."""


def is_settled(modified_ns: int, *, now_ns: int) -> bool:
    """Say whether a change from *now_ns* on would show in the modification time."""
    return now_ns - modified_ns >= SETTLED_NS


class SmallFiles(Generic[_T]):
    """
    The file called *name* in many directories, parsed.

    Used by one thread at a time. It holds a value for each directory until `keep_only`.
    """

    def __init__(self, name: str, read: Callable[[str], _T]) -> None:
        """Take the file's name, and how to read it given its directory."""
        self._name = name
        self._read = read
        self._known: dict[str, tuple[str, int, int, int, _T]] = {}
        """For each directory the file's path, inode, size and modification time, and its value."""

    def read(self, directory: str) -> _T:
        """Return what the file in *directory* holds now. Raises what reading it raises."""
        known = self._known.get(directory)
        if known is not None:
            path, inode, size_bytes, modified_ns, value = known
            # Ten thousand times in a round: this says the same as `_identity`, in less time.
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
        # Looked at before it is read: were it replaced in between, the next look would see that.
        identity = self._identity(directory)
        now_ns = time.time_ns()
        value = self._read(directory)
        if identity is not None and is_settled(identity[2], now_ns=now_ns):
            self._known[directory] = (f"{directory}/{self._name}", *identity, value)
        return value

    def keep_only(self, directories: Collection[str]) -> None:
        """Forget the files of all other directories."""
        if len(self._known) > len(directories):
            kept = set(directories)
            self._known = {path: known for path, known in self._known.items() if path in kept}

    def _identity(self, directory: str) -> tuple[int, int, int] | None:
        try:
            status = os.stat(f"{directory}/{self._name}")  # noqa: PTH116 - paths are text throughout this layer
        except OSError:
            # Reading it says what is wrong, if anything is.
            return None
        return (status.st_ino, status.st_size, status.st_mtime_ns)
