"""
One object from one bucket into another, byte for byte, with its checksum proved on the way.

Objects never change, and their names are unique: one that is there already, with the same size and
checksum, is the same. Memory is bounded by one piece for each copy; a larger object waits in a file without
a name, of which a killed process leaves nothing.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from crc32c import crc32c as crc32c_of

from tieringd.errors import CorruptDataError, LocalFileError, ObjectNotFound, StorageError
from tieringd.storage.base import FileSlice
from tieringd.storage.blocking import in_thread, in_thread_or

if TYPE_CHECKING:
    from pathlib import Path

    from tieringd.storage.base import ObjectInfo, ObjectStore

PIECE_BYTES = 8 << 20
"""What is read at once; an object that is no larger does not touch the disk."""
COPIES_MAX = 8
"""So many objects at a time: each holds one piece in memory."""


@dataclass(frozen=True, slots=True)
class CopySource:
    """An object of the source, and what is known of its bytes."""

    key: str
    size_bytes: int
    crc32c: int | None = None
    """None where only the source's store may know."""


class ObjectCopier:
    """Copy objects. Cancelling a copy is safe, and so is repeating it."""

    def __init__(
        self, source: ObjectStore, target: ObjectStore, *, work_directory: Path | None = None
    ) -> None:
        """Take the stores; without *work_directory* large objects go by way of the system's own."""
        self._source = source
        self._target = target
        self._directory = work_directory
        self._slots = asyncio.Semaphore(COPIES_MAX)

    async def copy(self, source: CopySource) -> int:
        """
        See that the target has the object; return the bytes that were written, 0 where it was there.

        Raises:
            ObjectNotFound: The source has it no more.
            CorruptDataError: The source has other bytes than are known of it.
            StorageError: The target has another object of this name; or an operator must act.
            LocalFileError: The work directory does not take the bytes.
        """
        async with self._slots:
            if await self.has(source):
                return 0
            if source.size_bytes <= PIECE_BYTES:
                data, _ = await self._source.get(source.key)
                checksum = _proved(source, len(data), crc32c_of(data))
                await self._target.put(source.key, data, crc32c=checksum)
            else:
                await self._stream(source)
            return source.size_bytes

    async def has(self, source: CopySource) -> bool:
        """
        Say whether the target has the object.

        Raises:
            StorageError: It has another one of this name.
        """
        try:
            info = await self._target.head(source.key)
        except ObjectNotFound:
            return False
        if not _is_same_object(source, info):
            raise StorageError(
                f"{source.key} is in the target already, and is another object: {info.size_bytes} bytes, "
                f"and not {source.size_bytes}, or another checksum",
                key=source.key,
                hint="Find out who wrote it there; delete it, and come again",
            )
        return True

    async def _stream(self, source: CopySource) -> None:
        """Read the object into a file, and put that."""
        try:
            file = await in_thread_or(_close, self._opened)
        except OSError as error:
            raise self._refused(error) from error
        try:
            checksum = position = 0
            while piece := await self._source.get_range(
                source.key, position=position, size_bytes=PIECE_BYTES
            ):
                checksum = await in_thread(_append, file, piece, checksum)
                position += len(piece)
            checksum = _proved(source, position, checksum)
            await in_thread(file.flush)
            await self._target.put(source.key, FileSlice(file.fileno(), 0, position), crc32c=checksum)
        except OSError as error:
            raise self._refused(error) from error
        finally:
            await in_thread(file.close)

    def _opened(self) -> IO[bytes]:
        return tempfile.TemporaryFile(dir=self._directory)

    def _refused(self, error: OSError) -> LocalFileError:
        place = self._directory or tempfile.gettempdir()
        return LocalFileError(
            f"objects cannot be copied by way of {place}: {error.strerror or error}",
            path=str(place),
            hint="Make room there for the largest segments, eight at a time",
        )


def _is_same_object(source: CopySource, info: ObjectInfo) -> bool:
    known = source.crc32c is not None and info.crc32c is not None
    return info.size_bytes == source.size_bytes and (not known or info.crc32c == source.crc32c)


def _proved(source: CopySource, size_bytes: int, checksum: int) -> int:
    """Return the checksum of what was read, if it is what was to be read."""
    if size_bytes != source.size_bytes or source.crc32c not in {None, checksum}:
        raise CorruptDataError(
            f"the object has {size_bytes} bytes with checksum {checksum:08x}, and is known to have "
            f"{source.size_bytes}" + (f" with {source.crc32c:08x}" if source.crc32c is not None else ""),
            source=source.key,
            hint="`tieringd archive verify --deep` on the source says more",
        )
    return checksum


def _append(file: IO[bytes], piece: bytes, checksum: int) -> int:
    file.write(piece)
    return crc32c_of(piece, checksum)


def _close(file: IO[bytes]) -> None:
    file.close()
