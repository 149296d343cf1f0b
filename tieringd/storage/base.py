"""
The object store seam: what every backend does, and how each call may fail.

`ObjectStore` has the seven operations of every store. The other protocols are abilities that a store may
add, such as `JoiningStore` and `TimedStore`. Keys are relative to the configured bucket and prefix.
Versions are opaque strings: an ETag, a generation, a content hash. Every backend passes
`tests/contract/object_store_contract.py`, which defines the contract in full.

Backends do not retry or apply deadlines and limits: `storage.resilient` wraps a backend to do so.

`truncated` and `unreadable` build the errors for a faulty slice of a local file, alike for every store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from tieringd.errors import LocalFileError


@dataclass(frozen=True, slots=True)
class FileSlice:
    """
    Bytes of an open file, sent without becoming a Python object.

    The caller keeps *fd* open until the put returns. The slice holds an open descriptor instead of a
    path, because a broker may rename or delete the file meanwhile, and the bytes stay readable.
    """

    fd: int
    position: int
    size_bytes: int


Body: TypeAlias = bytes | FileSlice


@dataclass(frozen=True, slots=True)
class IfAbsent:
    """Write only when no object has the key."""


@dataclass(frozen=True, slots=True)
class IfVersion:
    """Write only when the object still has this version."""

    version: str


Condition: TypeAlias = IfAbsent | IfVersion

Take: TypeAlias = Callable[[memoryview], None]
"""Takes the next bytes of a range, in a thread. They are valid during the call only."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store reports about an object."""

    key: str
    size_bytes: int
    version: str
    crc32c: int | None
    """None when the store does not report it (listings often do not)."""
    modified_ms: int


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a listing, ascending by key in UTF-8 byte order."""

    objects: tuple[ObjectInfo, ...]
    next_start_after: str | None
    """Pass it as *start_after* for the next page; None on the last page."""


class ObjectStore(Protocol):
    """
    A bucket.

    Any call may raise `StorageUnavailable` (try again), `StorageDenied` or `BucketNotFound`
    (an operator must act). Cancelling a call is safe: an object is stored whole or not at all.
    """

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """
        Store an object whole; the store checks *crc32c* against the bytes that arrive.

        Raises:
            PreconditionFailed: *condition* did not hold; the object is as it was.
            ChecksumRejected: The bytes have another checksum; nothing was stored.
            StoreFull: No room; nothing was stored.
            StorageUnavailable: With `outcome_unknown` set when the object may be stored.
            LocalFileError: A `FileSlice` ended early: the file was truncated meanwhile.
        """

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """
        Return an object whole. For manifests and indexes, not for segments.

        Raises:
            ObjectNotFound: No such object.
        """

    async def get_range(self, key: str, *, position: int, size_bytes: int) -> bytes:
        """
        Return exactly the bytes from *position* that exist, at most *size_bytes*.

        A range that begins at or past the end gives b"".

        Raises:
            ObjectNotFound: No such object.
        """

    async def head(self, key: str) -> ObjectInfo:
        """
        Return what the store knows of an object, checksum included.

        Raises:
            ObjectNotFound: No such object.
        """

    async def list_page(self, prefix: str, *, start_after: str | None = None, limit: int = 1000) -> ListPage:
        """Return up to *limit* (1 to 1000) objects whose key begins with *prefix*, after *start_after*."""

    async def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects; a key that is absent counts as deleted."""

    async def close(self) -> None:
        """Release connections. The store is unusable afterwards; closing twice is allowed."""


@runtime_checkable
class RangeStore(Protocol):
    """A store that hands on the bytes of a range as they arrive, and keeps no range in memory."""

    async def read_range(self, key: str, *, position: int, size_bytes: int, begin: Callable[[], Take]) -> int:
        """
        Hand on the bytes that `get_range` would return; return how many.

        *begin* returns what takes them, in order. It is called once more for each attempt, which hands on
        all bytes anew. An error that it raises ends the read; it is one of our tree.

        Raises:
            ObjectNotFound: No such object.
        """


@runtime_checkable
class OpenableStore(Protocol):
    """A store whose objects may be files on a disk of this host."""

    async def open_object(self, key: str) -> int | None:
        """
        Return a descriptor of an object, open for reading, which the caller closes.

        None: the objects of this store are on no disk of this host. An object that is replaced or deleted
        meanwhile stays whole behind the descriptor.

        Raises:
            ObjectNotFound: No such object.
        """


@runtime_checkable
class ExpiringStore(Protocol):
    """A store whose credentials expire, and are renewed before they do."""

    @property
    def credentials_end(self) -> float | None:
        """Return when the current credentials expire, in Unix time; None without credentials or expiry."""


@runtime_checkable
class KeepingStore(Protocol):
    """A store that may keep the bytes of deleted objects, and can report whether it does."""

    async def kept_after_delete(self, key: str) -> tuple[str, ...]:
        """
        Return how the bucket keeps deleted objects, in words for people; empty where it does not keep them.

        Versioning, soft delete and locks keep deleted objects. *key* names an object that was stored
        lately: some stores report per object what they do not report for the bucket.

        Raises:
            StorageDenied: Our credentials may not ask.
            StorageUnavailable: The store does not answer.
        """


@runtime_checkable
class PartsStore(Protocol):
    """A store that keeps the parts of uploads whose process was killed. No listing of objects shows them."""

    async def unfinished_uploads(self) -> list[str]:
        """
        Return the keys of all unfinished uploads, also of those that are under way.

        Raises:
            StorageDenied: Our credentials may not ask.
            StorageUnavailable: The store does not answer.
        """


@dataclass(frozen=True, slots=True)
class JoinSource:
    """A whole, non-empty object that is to become a part of another one."""

    key: str
    size_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Joined:
    """An object that a store made by joining others."""

    info: ObjectInfo
    is_proven: bool
    """Whether checksums proved that it holds exactly the sources' bytes. If not, only its size is known."""
    host_bytes: int
    """Bytes that this host read and wrote again; 0 where the store copied everything itself."""


@runtime_checkable
class JoiningStore(Protocol):
    """A store that can make one object of several without sending their bytes to this host."""

    async def join(
        self, key: str, sources: Sequence[JoinSource], *, crc32c: int, condition: Condition | None = None
    ) -> Joined | None:
        """
        Store the bytes of *sources* (at least one) as one object, one source after the other.

        The sources stay. *crc32c* is that of the whole. Returns None when this store cannot join these
        sources: nothing was stored, and the caller sends the bytes itself. Joining the same sources
        again gives the same object.

        Raises:
            ObjectNotFound: A source is gone.
            PreconditionFailed: *condition* did not hold; the object is as it was.
            ChecksumRejected: A source, or the whole, has another size or checksum; nothing was stored.
            StorageUnavailable: With `outcome_unknown` set when the object may be stored.
        """


@runtime_checkable
class TriedStore(Protocol):
    """A store that can be tried once, to find out whether it compares checksums (`storage.checked_puts`)."""

    @property
    def reads_back(self) -> bool:
        """Return whether the store was tried and compares no checksums: each put is read back."""

    async def try_checksums(self) -> None:
        """
        Try whether the store compares checksums, unless that is known already.

        Raises:
            StorageError: An operator must act.
            StorageUnavailable: The store does not answer, so nothing is known.
        """


@runtime_checkable
class TimedStore(Protocol):
    """
    A store that reports the time of its own clock with the responses that it sends anyway.

    The ability is optional. Without it, only this host's clock and the manifests tell the time
    (`policies.retention_time`).
    """

    has_own_clock: bool
    """Whether the store's clock is another machine's. The clock of a directory may be this host's own."""

    def tell_time_to(self, listener: Callable[[int | None], None]) -> None:
        """
        Call *listener* on the event loop's thread with the time of each response.

        The listener gets milliseconds since the epoch by the store's clock, read less than half a minute
        before the call, or None for a response that carries no time. No request is sent for it. A store
        with its own clock is waited for: nothing is deleted by age before its first response.
        """


def truncated(file_slice: FileSlice, position: int) -> LocalFileError:
    """Return the error for a file that ends at *position*, inside the slice."""
    path = _path_of(file_slice.fd)
    end = file_slice.position + file_slice.size_bytes
    return LocalFileError(
        f"{path} ends at byte {position}, but was to be stored up to byte {end}",
        path=path,
        hint="the file was truncated during the upload; nothing was stored",
    )


def unreadable(fd: int, error: OSError) -> LocalFileError:
    """Return the error for a file that the kernel cannot read."""
    path = _path_of(fd)
    return LocalFileError(f"{path} cannot be read: {error.strerror}", path=path)


def _path_of(fd: int) -> str:
    """Return the current path of an open file."""
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return f"descriptor {fd}"
