"""
The bodies of Azure uploads, checked while they are read.

The service has no CRC32C, so this host compares: the threads that read a file compute its CRC32C, and
the last bytes are sent only if it is the announced one. Over TLS nothing can change the bytes after
that. Without TLS the request carries an MD5 as well, which the service compares.
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from crc32c import crc32c

from tieringd.storage.base import FileSlice
from tieringd.storage.body import CHUNK_BYTES, FileBody, read_chunk
from tieringd.storage.threads import finished

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter


class CheckedBody(FileBody):
    """
    A `FileBody` that computes the CRC32C of the bytes it sends.

    *checksum_before* is the CRC32C of the parts sent before this one. *expected* is the CRC32C up to the
    end of this part, or None when later parts follow.
    """

    def __init__(
        self,
        file_slice: FileSlice,
        *,
        executor: Executor,
        stall_seconds: float,
        checksum_before: int,
        expected: int | None,
    ) -> None:
        super().__init__(file_slice, executor=executor, stall_seconds=stall_seconds)
        self._checksum_before = checksum_before
        self._expected = expected
        self.checksum = checksum_before
        """The CRC32C of everything read so far, including the parts before."""
        self.is_rejected = False
        """Whether the bytes have another checksum than expected. The last bytes are then never sent."""

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the whole slice, and compute its checksum anew."""
        self.checksum = self._checksum_before
        await super().write(writer)

    async def _send_by_kernel(self, writer: AbstractStreamWriter) -> None:
        # `sendfile` would not show us the bytes.
        await self._send_chunks(writer, self._slice.position)

    def _read(self, size: int, position: int) -> bytes:
        chunk = super()._read(size, position)
        self.checksum = crc32c(chunk, self.checksum)
        is_last = position + len(chunk) == self._slice.position + len(self)
        if is_last and self._expected not in (None, self.checksum):
            self.is_rejected = True
            raise ConnectionAbortedError("the checksum of the file's bytes is not the expected one")
        return chunk


async def md5_of(file_slice: FileSlice, *, executor: Executor) -> bytes:
    """
    Return the MD5 of a slice. The thread that reads it ends before this returns.

    Raises:
        LocalFileError: The file is shorter than its slice, or cannot be read.
    """
    is_over = threading.Event()
    return await finished(executor.submit(_md5, file_slice, is_over), on_cancel=is_over.set)


def _md5(file_slice: FileSlice, is_over: threading.Event) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    position, end = file_slice.position, file_slice.position + file_slice.size_bytes
    while position < end and not is_over.is_set():
        chunk = read_chunk(file_slice, min(CHUNK_BYTES, end - position), position)
        digest.update(chunk)
        position += len(chunk)
    return digest.digest()
