"""
A chunk on its way into its file, and what readers may have of it before it is whole.

The bytes pass through a small window. Each batch is checked there, and then written. The checked beginning of
the file is the arrived part: whole batches that never change again, although the file has no name yet. A
reader gets the arrived part once its first record is in it, and reads it from the file as it does later.

An attempt that breaks off begins anew, and writes only what follows the arrived part. A chunk with a checksum
of its own is a whole segment: only the end of it tells whether that checksum is right, so no part of it is
given out before.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from tieringd.cache.cache_directory import PartFile
from tieringd.cache.faults import located
from tieringd.compiled.loading import loaded_walk
from tieringd.errors import CorruptDataError
from tieringd.formats.batch_check import BatchCheck
from tieringd.formats.batch_offsets import ExpectedBatches
from tieringd.policies.chunk_layout import Chunk
from tieringd.storage.base import Take


@dataclass(frozen=True, slots=True)
class ArrivedPart:
    """The checked beginning of a chunk, for one reader. *close* is called once."""

    chunk: Chunk
    """The part's batches, as a chunk of their own. It is shorter than the whole."""
    fd: int
    """The file, until `close`."""
    position: int
    """Where the part begins in the file."""
    close: Callable[[], None]
    mark_corrupt: Callable[[], None]
    """A function to call when the file cannot be read."""


class _File:
    """The file of one attempt, open for as long as the attempt or a reader needs it. Belongs to one loop."""

    def __init__(self, fd: int, position: int) -> None:
        # A descriptor of its own: the attempt closes its file, or gives it a name, while readers have it.
        self.fd = os.dup(fd)
        self.position = position
        self._holders = 1

    def hold(self) -> None:
        self._holders += 1

    def give_back(self) -> None:
        self._holders -= 1
        if not self._holders:
            os.close(self.fd)


class ArrivingChunk:
    """
    The arrived part of one chunk that is being downloaded, and the readers that wait for it.

    Belongs to one event loop. Only `grow` is called by the thread that receives the bytes.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self._loop = asyncio.get_running_loop()
        self._file: _File | None = None
        self._arrived = (0, 0)
        """The size of the arrived part in bytes, and the offset after it. The two change as one."""
        self._waiting: dict[asyncio.Future[None], int] = {}
        """The readers that wait, and the offset that each of them wants."""
        self._next_wanted: int | None = None
        """The lowest offset that a reader waits for."""
        self.is_mistrusted = False
        """Whether a reader could not read the file."""

    @property
    def arrived_bytes(self) -> int:
        """Return the size of the arrived part. It never shrinks while one file is filled."""
        return self._arrived[0]

    def begin(self, fd: int, name: str, *, position: int = 0) -> None:
        """
        Begin to fill, or to check, the open file of the chunk *name*, which begins at *position* there.

        `end` must follow, before the file is published, closed or abandoned.

        Raises:
            LocalFileError: No descriptor is left.
        """
        try:
            self._file, self._arrived = _File(fd, position), (0, 0)
        except OSError as error:
            raise located(name, "be opened once more", error) from error

    def end(self) -> None:
        """Give out nothing from now on. Readers keep what they have."""
        file, self._file = self._file, None
        if file is not None:
            file.give_back()

    def grow(self, size_bytes: int, next_offset: int) -> None:
        """Note that the file has *size_bytes* of checked batches up to *next_offset*. Any thread may call."""
        if size_bytes <= self._arrived[0] or size_bytes >= self._chunk.size_bytes:
            # A whole chunk gets its name in a moment.
            return
        self._arrived = (size_bytes, next_offset)
        # Only a reader that waits costs the loop a turn. A reader notes its offset before it looks again.
        wanted = self._next_wanted
        if wanted is not None and wanted < next_offset:
            self._loop.call_soon_threadsafe(self._tell)

    def take(self, offset: int) -> ArrivedPart | None:
        """Return the arrived part for one reader; None if no record at or after *offset* is in it."""
        file, (size_bytes, next_offset) = self._file, self._arrived
        if file is None or offset >= next_offset:
            return None
        file.hold()
        chunk = replace(self._chunk, size_bytes=size_bytes, next_offset=next_offset)
        return ArrivedPart(chunk, file.fd, file.position, file.give_back, self._mistrust)

    def until(self, offset: int) -> asyncio.Future[None]:
        """Return a future that is done when `take` may have a part for *offset*. The caller cancels it."""
        future = self._loop.create_future()
        self._waiting[future] = offset
        future.add_done_callback(self._forget)
        self._note_wanted()
        if self._file is not None and offset < self._arrived[1]:
            future.set_result(None)
        return future

    def _tell(self) -> None:
        for future, offset in list(self._waiting.items()):
            if offset < self._arrived[1] and not future.done():
                future.set_result(None)

    def _forget(self, future: asyncio.Future[None]) -> None:
        self._waiting.pop(future, None)
        self._note_wanted()

    def _note_wanted(self) -> None:
        self._next_wanted = min(self._waiting.values(), default=None)

    def _mistrust(self) -> None:
        self.is_mistrusted = True


class ArrivingBytes:
    """
    The bytes of a piece on their way to a file. With *expected*, their batches are checked.

    With *arriving* as well, readers get what is checked.
    """

    def __init__(
        self,
        part: PartFile,
        position: int,
        expected: ExpectedBatches | None,
        arriving: ArrivingChunk | None = None,
    ) -> None:
        self._part = part
        self._start = self._position = position
        self._expected = expected
        is_proven_by_batches = expected is not None and expected.checksum is None
        self._arriving = arriving if is_proven_by_batches else None
        self._check: BatchCheck | None = None
        self._fault: CorruptDataError | None = None

    def begin(self) -> Take:
        """Begin an attempt: the next byte is the first one."""
        self._position = self._start
        expected = self._expected
        self._check = None if expected is None else BatchCheck(expected, walk=loaded_walk())
        self._fault = None
        return self.take

    def take(self, data: memoryview) -> None:
        """
        Check the next bytes and write them.

        Raises:
            LocalFileError: The disk refuses them.
        """
        if self._fault is not None:
            return  # The rest only has to arrive, so that its connection can be used again.
        try:
            if self._check is not None:
                self._check.take(data)
            self._write(data)
        except CorruptDataError as error:
            self._fault = error
        except OSError as error:
            raise located(self._part.name, "be cached", error) from error
        else:
            if self._arriving is not None and self._check is not None:
                self._arriving.grow(*self._check.passed)
        self._position += len(data)

    def end(self) -> None:
        """
        Check that the last byte was there.

        Raises:
            CorruptDataError: The batches are wrong.
        """
        if self._fault is not None:
            raise self._fault
        if self._check is not None:
            self._check.end()

    def _write(self, data: memoryview) -> None:
        # Readers may have what an attempt before this one has written: it was checked, and stays as it is.
        there = 0 if self._arriving is None else self._arriving.arrived_bytes - self._position
        if there <= 0:
            self._part.write(self._position, data)
        elif there < len(data):
            self._part.write(self._position + there, data[there:])
