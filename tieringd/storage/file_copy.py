"""
Copies of the bytes of objects from file to file, with their checksums. Calls block.

Functions here take descriptors, and know neither keys nor paths.

A large object is written past the page cache (`O_DIRECT`) where the file system can. On a broker's host the
page cache is what serves readers, and an object that was just archived is not read again soon. It is also
cheaper: what goes into the page cache has to be flushed from there before the object counts as stored.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from itertools import chain

from crc32c import crc32c as crc32c_of

from tieringd.errors import StorageUnavailable
from tieringd.storage.base import Body, FileSlice, truncated, unreadable

_CHUNK_BYTES = 1 << 20
"""A copy reads, sums up and writes so much at a time: it stays in the processor's cache meanwhile."""
PAST_PAGE_CACHE_BYTES_MIN = 4 << 20
"""Smaller objects are manifests and indexes, which are read again soon."""


def copied(bodies: Sequence[Body], out: int, stop: threading.Event, *, past_page_cache: bool) -> int:
    """
    Write *bodies* to *out*, one after the other, and return the CRC32C of the bytes written.

    A kernel copy would save nothing: the bytes must be read once more for the checksum. With
    *past_page_cache* a large body is written so, as far as the file system of *out* allows it.

    Raises:
        StorageUnavailable: *stop* was set: the put was cancelled.
        LocalFileError: A slice ends early, or cannot be read.
        OSError: *out* cannot be written.
    """
    size_bytes = sum(body.size_bytes if isinstance(body, FileSlice) else len(body) for body in bodies)
    writer = _Writer(out, past_page_cache=past_page_cache and size_bytes >= PAST_PAGE_CACHE_BYTES_MIN)
    checksum = 0
    for chunk in chain.from_iterable(map(_chunks, bodies)):
        if stop.is_set():
            raise StorageUnavailable("the put was cancelled")
        checksum = crc32c_of(chunk, checksum)
        writer.write(chunk)
    return checksum


class _Writer:
    """
    Appends to a file, past the page cache as long as the file system takes what comes.

    It refuses a chunk that is no whole number of the disk's blocks: the end of an object, or of the first of
    several bodies. From there on the page cache is used. The kernel keeps both kinds of writes in order.
    """

    def __init__(self, fd: int, *, past_page_cache: bool) -> None:
        self._fd = fd
        self._is_direct = past_page_cache and _set_direct(fd, on=True)

    def write(self, chunk: memoryview) -> None:
        """
        Write *chunk* whole.

        Raises:
            OSError: The file cannot be written.
        """
        left = chunk
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except OSError as error:
                if not (self._is_direct and error.errno == errno.EINVAL):
                    raise
                _set_direct(self._fd, on=False)
                self._is_direct = False


def _set_direct(fd: int, *, on: bool) -> bool:
    """Let writes to *fd* go past the page cache, or through it again; return whether it was possible."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


def _chunks(body: Body) -> Iterator[memoryview]:
    """Yield the body in pieces. Each piece is valid until the next one is requested."""
    if not isinstance(body, FileSlice):
        view = memoryview(body)
        yield from (view[start : start + _CHUNK_BYTES] for start in range(0, len(view), _CHUNK_BYTES))
        return
    # Memory of its own begins at a page, which a write past the page cache asks for.
    buffer = memoryview(mmap.mmap(-1, _CHUNK_BYTES))
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
