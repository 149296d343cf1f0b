"""
Keys as paths: the file that a key names, and the files of a tree in the order of their keys.

A key is used unchanged as a path below a directory, so a tree copied to or from a bucket needs no
renaming. So `a` and `a/b` cannot both be objects of a file store.

`copied` and `crc32c_of_file` copy the bytes of objects and compute their checksums in small pieces, in a
thread. They take descriptors, and know neither keys nor paths.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from itertools import chain

from crc32c import crc32c as crc32c_of

from tieringd.errors import StorageUnavailable
from tieringd.storage.base import Body, FileSlice, truncated, unreadable

_CHUNK_BYTES = 1 << 20

WORK_DIRECTORY = ".tieringd-tmp"
"""Directly below the root: temporary files and lock files. No key leads here."""
ROOT_MARKER = ".tieringd-root"
"""Directly below the root: the file with the archive's id (`storage.file_root`). It is no object."""

_OWN_ENTRIES = frozenset({os.fsencode(f"{WORK_DIRECTORY}/"), os.fsencode(ROOT_MARKER)})


def copied(bodies: Iterable[Body], out: int, stop: threading.Event) -> int:
    """
    Write *bodies* to *out*, one after the other, and return the CRC32C of the bytes written.

    A kernel copy would save nothing: the bytes must be read once more for the checksum.

    Raises:
        StorageUnavailable: *stop* was set: the put was cancelled.
        LocalFileError: A slice ends early, or cannot be read.
    """
    checksum = 0
    for chunk in chain.from_iterable(map(_chunks, bodies)):
        if stop.is_set():
            raise StorageUnavailable("the put was cancelled")
        checksum = crc32c_of(chunk, checksum)
        left = chunk
        while left:
            left = left[os.write(out, left) :]
    return checksum


def _chunks(body: Body) -> Iterator[memoryview]:
    """Yield the body in pieces. Each piece is valid until the next one is requested."""
    if not isinstance(body, FileSlice):
        view = memoryview(body)
        yield from (view[start : start + _CHUNK_BYTES] for start in range(0, len(view), _CHUNK_BYTES))
        return
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, body.size_bytes)))
    position, end = body.position, body.position + body.size_bytes
    while position < end:
        try:
            size = os.preadv(body.fd, [buffer[: end - position]], position)
        except OSError as error:
            raise unreadable(body.fd, error) from error
        if size == 0:
            raise truncated(body, position)
        yield buffer[:size]
        position += size


def crc32c_of_file(fd: int) -> int:
    """Return the CRC32C of an open file, read through one small buffer."""
    checksum, position = 0, 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while size := os.preadv(fd, [buffer], position):
        checksum = crc32c_of(buffer[:size], checksum)
        position += size
    return checksum


def name_of(key: str, *, base: str = "") -> str:
    """
    Return the path of the file that *key* names, relative to the root; *base* is the store's prefix.

    Raises:
        ValueError: The key does not name one file below the prefix.
    """
    _refuse_odd_parts(key, key.split("/"))
    return f"{base}/{key}" if base else key


def walk(root: int, base: str, prefix: str, start_after: str | None) -> Iterator[tuple[str, os.stat_result]]:
    """
    Yield the keys that begin with *prefix* and come after *start_after*, in UTF-8 byte order.

    Each key comes with the status of its file. *root* is a descriptor of the root, and *base* the
    store's prefix below it. Directories that can hold no such key are not read.

    Raises:
        ValueError: The prefix leads outside *base*.
    """
    directory = prefix[: prefix.rfind("/") + 1]
    if directory:
        _refuse_odd_parts(prefix, directory.removesuffix("/").split("/"))
    top = f"{base}/".encode() if base else b""
    for key in _walk(root, top, directory.encode(), prefix.encode(), (start_after or "").encode()):
        try:
            yield key.decode(), os.stat(top + key, dir_fd=root, follow_symlinks=False)
        except (FileNotFoundError, UnicodeDecodeError):
            continue  # Deleted since its directory was read, or not written by us.


def _walk(root: int, top: bytes, directory: bytes, prefix: bytes, start_after: bytes) -> Iterator[bytes]:
    for key in _sorted_entries(root, top, directory):
        if key.endswith(b"/"):
            is_inside = key.startswith(prefix) or prefix.startswith(key)
            if is_inside and (key > start_after or start_after.startswith(key)):
                yield from _walk(root, top, key, prefix, start_after)
        elif key.startswith(prefix) and key > start_after:
            yield key


def _sorted_entries(root: int, top: bytes, directory: bytes) -> list[bytes]:
    """Return a directory's files and directories; a trailing slash sorts a directory as its keys sort."""
    found = []
    try:
        fd = os.open(top + directory or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                # Python returns names as text when it reads a directory through a descriptor.
                key = directory + os.fsencode(entry.name)
                if entry.is_dir(follow_symlinks=False):
                    found.append(key + b"/")
                elif entry.is_file(follow_symlinks=False):
                    found.append(key)
    finally:
        os.close(fd)
    return sorted(each for each in found if each not in _OWN_ENTRIES)


def _refuse_odd_parts(key: str, parts: list[str]) -> None:
    is_own = parts[0] in {WORK_DIRECTORY, ROOT_MARKER}
    if any(part in {"", ".", ".."} for part in parts) or "\0" in key or is_own:
        raise ValueError(f"{key!r} cannot be a name in a file store")
