"""Names and files of a cache, and short words for what tests do with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.archive import Clock
from tieringd.cache.cache_directory import CacheDirectory
from tieringd.formats.cache_names import cached_name, chunk_name
from tieringd.formats.object_keys import data_key
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment

if TYPE_CHECKING:
    from pathlib import Path


def segment_key(number: int = 0) -> str:
    """Return a data object's key."""
    segment = RemoteSegment(number, number, 4096, 1, 0, 0, 7, "ab12", 0, 50)
    return data_key(TopicIdPartition("east", "orders", "AAAAAAAAAAAAAAAAAAAAAQ", 3), segment)


def a_chunk(number: int = 0, position: int = 0, *, buckets: int = 0) -> str:
    """Return a chunk's name."""
    return chunk_name(segment_key(number), position, buckets=buckets)


def an_index(number: int = 0, *, buckets: int = 0) -> str:
    """Return an index's name."""
    return cached_name(segment_key(number) + ".index", buckets=buckets)


def started(path: Path, *, clock: Clock | None = None, **options: int) -> CacheDirectory:
    """Return a cache directory in use, as after a restart."""
    directory = CacheDirectory(path, now_ms=clock or Clock(), **options)
    directory.start()
    return directory


def put(directory: CacheDirectory, name: str, data: bytes) -> None:
    """Put a file, as a hydrator does, and close it."""
    directory.accounts.reserve(len(data))
    part = directory.part(name, len(data))
    try:
        part.write(0, data)
        directory.publish(part).close()
    finally:
        part.abandon()
        directory.accounts.release(len(data))


def data_in(directory: CacheDirectory, name: str, size_bytes: int) -> bytes | None:
    """Return a file's bytes; None where the cache has none."""
    opened = directory.open(name, size_bytes)
    if opened is None:
        return None
    try:
        return (directory.path / name).read_bytes()
    finally:
        opened.close()


def files_in(path: Path) -> dict[str, bytes]:
    """Return every file below *path* with its bytes, but the access times."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != "access_times"
    }
