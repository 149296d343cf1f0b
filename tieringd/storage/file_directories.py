"""
The directories of a file store: made when a key needs them, and durable before a put returns.

A file survives a crash of the machine only if the name of each directory above it does. A name is flushed
by an fsync of the directory that holds it. A directory that exists is no proof: its maker may be another
put that has not flushed it yet, or a process that was killed before it could. So a put flushes the name of
every directory above its file, except those that this process has flushed already and that it has not made
anew since.

`DurableDirectories` remembers which these are, for the directories that were flushed last. Forgetting one
costs an fsync of a directory that has not changed.
"""

from __future__ import annotations

import os
import threading
from posixpath import dirname

from tieringd.storage.file_root import sync_directory

_REMEMBERED = 16_384
"""How many directories are remembered: more than ten thousand partitions write to by turns, in 3 MiB."""
_INODE_UNKNOWN = 0
_LOCKS = 64
"""Enough that threads that make different directories rarely wait for each other."""


class DurableDirectories:
    """
    Make directories below a root, and flush their names. Several threads may use it.

    Paths are relative to the root. All methods take a descriptor of it, because an operation works through
    the descriptor that it read the root's marker through.
    """

    def __init__(self, *, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        """A directory's lock is held from a change of the directory until its state shows the change."""
        self._order = threading.Lock()
        self._states: dict[str, object] = {}
        """
        The inode of a directory whose name is durable, or an object that stands for one making of it. The
        oldest come first.
        """

    def make(self, root: int, directory: str) -> None:
        """
        Make *directory* and those above it where they are missing. Nothing is flushed yet.

        A concurrent delete may remove one of them again, which is no error.

        Raises:
            FileNotFoundError: The root itself was removed.
            NotADirectoryError: One of the names is a file.
        """
        # From the top: most new keys need several directories, and each call lets other threads run.
        end = directory.find("/")
        while end != -1:
            if not self._make_one(root, directory[:end]):
                return
            end = directory.find("/", end + 1)
        self._make_one(root, directory)

    def _make_one(self, root: int, directory: str) -> bool:
        """Make one directory; return False when the one above it has just been removed."""
        try:
            with self._lock_of(directory):
                os.mkdir(directory, dir_fd=root)
                self._note(directory, object())
        except FileExistsError:
            return True
        except FileNotFoundError:
            if "/" not in directory:
                raise
            return False
        return True

    def flush(self, root: int, directory: str) -> None:
        """
        Make the entries of *directory* durable, and the names of it and of those above it.

        Raises:
            FileNotFoundError: One of them has been removed since.
            OSError: A directory cannot be flushed, so nothing is known of its entries.
        """
        inode = sync_directory(directory or ".", dir_fd=root)
        for each in _with_those_above(directory):
            with self._lock_of(each):
                state = self._states.get(each)
            # Another process may have removed the directory of the file and made it anew. One above it stays
            # while it has others.
            if state == inode or (each != directory and isinstance(state, int)):
                continue
            sync_directory(dirname(each) or ".", dir_fd=root)
            with self._lock_of(each):
                # Not if it was removed and made anew meanwhile.
                if self._states.get(each) is state:
                    self._note(each, inode if each == directory else _INODE_UNKNOWN)

    def remove(self, root: int, directory: str) -> None:
        """
        Remove an empty directory.

        Raises:
            OSError: It is not empty, or cannot be removed.
        """
        with self._lock_of(directory):
            os.rmdir(directory, dir_fd=root)
            with self._order:
                self._states.pop(directory, None)

    def _lock_of(self, directory: str) -> threading.Lock:
        return self._locks[hash(directory) % _LOCKS]

    def _note(self, directory: str, state: object) -> None:
        with self._order:
            self._states.pop(directory, None)
            self._states[directory] = state
            if len(self._states) > self._remembered:
                del self._states[next(iter(self._states))]


def _with_those_above(directory: str) -> list[str]:
    """Return *directory* and all directories above it, without the root."""
    found: list[str] = []
    while directory:
        found.append(directory)
        directory = dirname(directory)
    return found
