"""
Keys as paths: which file a key names, and the files of a tree in the order of their keys.

A key is a path below a directory, as it is; a tree copied to a bucket, or from one, needs no
renaming. So `a` and `a/b` cannot both be objects of a file store.
"""

from __future__ import annotations

import os
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORK_DIRECTORY = ".tieringd-tmp"
"""Directly below the root: files that are being written, and lock files. No key leads here."""


def path_of(base: Path, key: str) -> Path:
    """
    Return the file that *key* names.

    Raises:
        ValueError: The key would not name one file below *base*.
    """
    _refuse_odd_parts(key, key.split("/"))
    return base.joinpath(key)


def walk(base: Path, prefix: str, start_after: str | None) -> Iterator[tuple[str, os.stat_result]]:
    """
    Yield the keys that begin with *prefix* and come after *start_after*, in UTF-8 byte order.

    Directories that can hold no such key are not read.

    Raises:
        ValueError: The prefix leads outside *base*.
    """
    directory = prefix[: prefix.rfind("/") + 1]
    if directory:
        _refuse_odd_parts(prefix, directory.removesuffix("/").split("/"))
    found = _walk(os.fsencode(base), directory.encode(), prefix.encode(), (start_after or "").encode())
    for key, entry in found:
        try:
            yield key.decode(), entry.stat(follow_symlinks=False)
        except (FileNotFoundError, UnicodeDecodeError):
            continue  # Deleted since its directory was read, or nothing that we ever wrote.


def _walk(
    base: bytes, directory: bytes, prefix: bytes, start_after: bytes
) -> Iterator[tuple[bytes, os.DirEntry[bytes]]]:
    for key, entry in _sorted_entries(base, directory):
        if key.endswith(b"/"):
            is_inside = key.startswith(prefix) or prefix.startswith(key)
            if is_inside and (key > start_after or start_after.startswith(key)):
                yield from _walk(base, key, prefix, start_after)
        elif key.startswith(prefix) and key > start_after:
            yield key, entry


def _sorted_entries(base: bytes, directory: bytes) -> list[tuple[bytes, os.DirEntry[bytes]]]:
    """Return a directory's files and directories; with its slash a directory sorts as its keys do."""
    found = []
    try:
        with os.scandir(os.path.join(base, directory)) as entries:  # noqa: PTH118 - paths are bytes here
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    found.append((directory + entry.name + b"/", entry))
                elif entry.is_file(follow_symlinks=False):
                    found.append((directory + entry.name, entry))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((each for each in found if each[0] != WORK_DIRECTORY.encode() + b"/"), key=itemgetter(0))


def _refuse_odd_parts(key: str, parts: list[str]) -> None:
    if any(part in {"", ".", ".."} for part in parts) or "\0" in key or parts[0] == WORK_DIRECTORY:
        raise ValueError(f"{key!r} is not a key that a file store can hold")
