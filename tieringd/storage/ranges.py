"""
A range of an object, handed on in windows as it arrives.

A window is filled, handed on, and filled again. So reading a large range needs little memory, which is still
in the processor's cache when it is checked and written. Fresh memory for a whole range costs a page fault for
each 4 KiB, and is out of the cache before it is used. The first piece is small: a reader may wait for the
first record.

`read_range` serves stores that return ranges whole as well.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Final

from tieringd.storage.base import ObjectStore, RangeStore, Take
from tieringd.storage.threads import in_thread

WINDOW_BYTES: Final = 2 << 20
"""The cheapest of 128 KiB, 256 KiB, 1, 2 and 4 MiB: more calls below it, more memory traffic above."""
FIRST_PIECE_BYTES: Final = 256 << 10
"""How much of a range is handed on first."""
_KEPT: Final = 8


class Windows:
    """Windows that are used again, by any thread. A few stay for the next reads."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def pour(self, size_bytes: int, fill: Callable[[memoryview], None], take: Take) -> None:
        """Have *fill* fill a window and *take* take it, again and again, until *size_bytes* have passed."""
        try:
            window = self._free.pop()
        except IndexError:
            window = bytearray(WINDOW_BYTES)
        piece_bytes = FIRST_PIECE_BYTES
        try:
            with memoryview(window) as view:
                while size_bytes:
                    with view[: min(piece_bytes, size_bytes)] as piece:
                        fill(piece)
                        take(piece)
                        size_bytes -= len(piece)
                    piece_bytes = WINDOW_BYTES
        finally:
            if len(self._free) < _KEPT:
                self._free.append(window)


class FileReading:
    """Reads an open file from a position on."""

    def __init__(self, fd: int, position: int) -> None:
        self._fd = fd
        self._position = position

    def fill(self, buffer: memoryview) -> None:
        """
        Fill *buffer* with the next bytes.

        Raises:
            OSError: The file cannot be read, or has become shorter.
        """
        at = 0
        while at < len(buffer):
            count = os.preadv(self._fd, [buffer[at:]], self._position)
            if not count:
                raise OSError(errno.EIO, "the file became shorter while it was read")
            self._position += count
            at += count


async def read_range(
    store: ObjectStore, key: str, *, position: int, size_bytes: int, begin: Callable[[], Take]
) -> int:
    """Hand on a range of an object of any store; see `RangeStore`."""
    if isinstance(store, RangeStore):
        return await store.read_range(key, position=position, size_bytes=size_bytes, begin=begin)
    data = await store.get_range(key, position=position, size_bytes=size_bytes)
    await in_thread(begin(), memoryview(data))
    return len(data)
