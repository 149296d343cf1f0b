"""A temporary file on this host, for an object that is put together or changed before it is stored."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import IO

from crc32c import crc32c

from tieringd.errors import LocalFileError
from tieringd.storage.base import FileSlice
from tieringd.storage.threads import in_thread, in_thread_or


class WorkFile:
    """A file without a name: a killed process leaves nothing of it behind."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.size_bytes = 0
        self.crc32c = 0
        """The checksum of the appended bytes."""

    async def append(self, piece: bytes) -> None:
        """Write *piece* at the end."""
        self.crc32c = await in_thread(self._append, piece)
        self.size_bytes += len(piece)

    async def body(self) -> FileSlice:
        """Return what was appended, to be stored."""
        await in_thread(self.file.flush)
        return FileSlice(self.file.fileno(), 0, self.size_bytes)

    def _append(self, piece: bytes) -> int:
        self.file.write(piece)
        return crc32c(piece, self.crc32c)


@asynccontextmanager
async def work_file(directory: Path | None, failure: str, *, hint: str) -> AsyncIterator[WorkFile]:
    """
    Open a work file in *directory*, or in the system's temporary directory, for the time of the context.

    Raises:
        LocalFileError: The directory cannot take the bytes. The message is *failure* with the reason.
    """
    try:
        file = await in_thread_or(_close, partial(_opened, directory))
        try:
            yield WorkFile(file)
        finally:
            await in_thread(file.close)
    except OSError as error:
        path = str(directory or tempfile.gettempdir())
        raise LocalFileError(f"{failure}: {error.strerror or error}", path=path, hint=hint) from error


def _opened(directory: Path | None) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=directory)


def _close(file: IO[bytes]) -> None:
    file.close()
