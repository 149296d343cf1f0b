"""
Keys as paths: the file that a key names, and the files of a tree in the order of their keys.

A key is used unchanged as a path below a directory, so a tree copied to or from a bucket needs no
renaming. So `a` and `a/b` cannot both be objects of a file store. There is one exception: file systems take
names of 255 bytes, and a topic manifest's key has a part of up to 272. A longer part becomes two directories,
`{its first 254 bytes}~/~{the rest}`, which a walk puts together again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice

WORK_DIRECTORY = ".tieringd-tmp"
"""Directly below the root: temporary files and lock files. No key leads here."""
ROOT_MARKER = ".tieringd-root"
"""Directly below the root: the file with the archive's id (`storage.file_root`). It is no object."""

_NAME_BYTES_MAX = 255
"""The longest name that Linux's file systems take."""
_CONTINUED = b"~"
"""Ends the name of a directory, of the longest length, that a part of a key goes on in; begins the rest."""

_OWN_ENTRIES = frozenset({os.fsencode(f"{WORK_DIRECTORY}/"), os.fsencode(ROOT_MARKER)})


def name_of(key: str, *, base: str = "") -> str:
    """
    Return the path of the file that *key* names, relative to the root; *base* is the store's prefix.

    Raises:
        ValueError: The key does not name one file below the prefix.
    """
    _refuse_odd_parts(key, key.split("/"))
    path = os.fsdecode(_path_of(key.encode()))
    return f"{base}/{path}" if base else path


def _path_of(key: bytes) -> bytes:
    """Return the path of a key, or of a directory of keys. Only long parts make it another text."""
    if len(key) <= _NAME_BYTES_MAX:
        return key
    return b"/".join(each for part in key.split(b"/") for each in _names_of(part))


def _names_of(part: bytes) -> Iterator[bytes]:
    while len(part) > _NAME_BYTES_MAX:
        yield part[: _NAME_BYTES_MAX - 1] + _CONTINUED
        part = _CONTINUED + part[_NAME_BYTES_MAX - 1 :]
    yield part


def _is_continued(name: bytes) -> bool:
    """Say whether a directory's name is the beginning of a longer part, and not a part itself."""
    return len(name) == _NAME_BYTES_MAX and name.endswith(_CONTINUED)


class TreeWalk:
    """
    The keys that begin with *prefix* and come after *start_after*, in UTF-8 byte order, taken in portions.

    *base* is the store's prefix below the root. Directories that can hold no such key are not read, and each
    directory is read once. One thread at a time takes.
    """

    def __init__(self, base: str, prefix: str, start_after: str | None) -> None:
        """
        Begin before the first key.

        Raises:
            ValueError: The prefix leads outside *base*.
        """
        directory = prefix[: prefix.rfind("/") + 1]
        if directory:
            _refuse_odd_parts(prefix, directory.removesuffix("/").split("/"))
        self._top = f"{base}/".encode() if base else b""
        self._prefix = prefix.encode()
        self._start_after = (start_after or "").encode()
        self._keys = self._below(directory.encode())
        self._root = -1
        self._next: tuple[str, os.stat_result] | None = None
        """The entry that showed that there is a further portion."""

    def take(self, root: int, limit: int) -> tuple[list[tuple[str, os.stat_result]], bool]:
        """
        Return up to *limit* further keys with the status of their files, and whether there are more.

        *root* is a descriptor of the root.
        """
        self._root = root
        found = [] if self._next is None else [self._next]
        found += islice(self._existing(), limit + 1 - len(found))
        self._next = found.pop() if len(found) > limit else None
        return found, self._next is not None

    def _existing(self) -> Iterator[tuple[str, os.stat_result]]:
        for key in self._keys:
            try:
                yield (
                    key.decode(),
                    os.stat(self._top + _path_of(key), dir_fd=self._root, follow_symlinks=False),
                )
            except (FileNotFoundError, UnicodeDecodeError):
                continue  # Deleted since its directory was read, or not written by us.

    def _below(self, directory: bytes) -> Iterator[bytes]:
        prefix, start_after = self._prefix, self._start_after
        for key in _sorted_entries(self._root, self._top, directory):
            if key.endswith(b"/"):
                is_inside = key.startswith(prefix) or prefix.startswith(key)
                if is_inside and (key > start_after or start_after.startswith(key)):
                    yield from self._below(key)
            elif key.startswith(prefix) and key > start_after:
                yield key


def _sorted_entries(root: int, top: bytes, directory: bytes) -> list[bytes]:
    """Return a directory's files and directories; a trailing slash sorts a directory as its keys sort."""
    found = _entries(root, top + _path_of(directory), directory)
    return sorted(each for each in found if each not in _OWN_ENTRIES)


def _entries(root: int, path: bytes, above: bytes) -> list[bytes]:
    """Return what is in the directory at *path*, each entry after *above*, in no order."""
    found: list[bytes] = []
    try:
        fd = os.open(path or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    except (FileNotFoundError, NotADirectoryError):
        return found
    is_rest = _is_continued(path.removesuffix(b"/").rpartition(b"/")[2])
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                # Python returns names as text when it reads a directory through a descriptor.
                name = os.fsencode(entry.name)
                if is_rest and not name.startswith(_CONTINUED):
                    continue  # Not written by us.
                key = above + name.removeprefix(_CONTINUED) if is_rest else above + name
                if entry.is_dir(follow_symlinks=False):
                    if _is_continued(name):
                        found += _entries(root, path + name + b"/", key.removesuffix(_CONTINUED))
                    else:
                        found.append(key + b"/")
                elif entry.is_file(follow_symlinks=False):
                    found.append(key)
    finally:
        os.close(fd)
    return found


def _refuse_odd_parts(key: str, parts: list[str]) -> None:
    is_own = parts[0] in {WORK_DIRECTORY, ROOT_MARKER}
    # The last of a part's names is whole, so it must not look like one that goes on.
    is_odd = any(part in {"", ".", ".."} or _is_continued([*_names_of(part.encode())][-1]) for part in parts)
    if is_odd or "\0" in key or is_own:
        raise ValueError(f"{key!r} cannot be a name in a file store")
