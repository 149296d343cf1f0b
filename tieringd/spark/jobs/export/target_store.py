"""The object store that Parquet files are exported to, for synchronous code."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

from crc32c import crc32c

from tieringd.errors import ConfigError, ObjectNotFound, PreconditionFailed, StorageUnavailable
from tieringd.storage.base import Body, FileSlice, IfAbsent, IfVersion, ObjectInfo, ObjectStore
from tieringd.storage.checked_puts import create
from tieringd.storage.file_copy import crc32c_of_file
from tieringd.storage.store_opening import StoreCheck

if TYPE_CHECKING:
    # An ordinary import would load pydantic and xxhash into processes that do not need them.
    from tieringd.config import Config

T = TypeVar("T")

_SCHEMES: Final = {"s3": "aws", "s3a": "aws", "gs": "google", "azure": "azure"}


def target_config(url: str, config: Config) -> Config:
    """
    Return a configuration for the store at *url*, with the credentials and the endpoint of *config*.

    Raises:
        ConfigError: *url* is not the URL of a store, has credentials in it, or is of another kind of store
            than that of *config*.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError(
            "target: a URL must not have credentials",
            hint="Put the credentials into a configuration file of the target (`--target-config`)",
        )
    if parts.query or parts.fragment:
        # The message does not repeat the URL, which may have an access token in it.
        raise ConfigError(
            "target: a URL with ? or # cannot name a place for files",
            hint="Put credentials into a configuration file of the target (`--target-config`)",
        )
    prefix = parts.path.strip("/")
    if parts.scheme == "file":
        if parts.netloc or not prefix or not parts.path.startswith("/"):
            raise ConfigError(f"target: {url} names no directory", hint="Write file:///path/to/directory")
        return config.model_copy(
            update={
                "cloud_storage_backend": "file",
                "cloud_storage_file_root": Path(parts.path),
                "cloud_storage_prefix": "",
            }
        )
    backend = _SCHEMES.get(parts.scheme)
    if backend is None or not parts.netloc:
        raise ConfigError(
            f"target: {url} is not a place for Parquet files",
            hint="Write file:///directory, s3://bucket/prefix, gs://bucket/prefix or azure://container/prefix",
        )
    if backend != config.backend:
        raise ConfigError(
            f"target: {url} cannot be reached with the credentials of a store of the kind {config.backend}",
            hint="Give a configuration file for the target, with its credentials (`--target-config`)",
        )
    name = "cloud_storage_azure_container" if backend == "azure" else "cloud_storage_bucket"
    return config.model_copy(update={name: parts.netloc, "cloud_storage_prefix": prefix})


OWN_PREFIX: Final = "_tieringd/"
"""The prefix of our own objects. Readers ignore names that begin with an underscore."""


class Runs(Protocol):
    """A function that runs requests on the event loop of a store, such as `Bucket.run`."""

    def __call__(self, work: Coroutine[object, object, T], /) -> T:
        """Run *work*, and return its result."""


class TargetStore:
    """The operations of an export on the store that it writes to."""

    def __init__(self, store: ObjectStore, run: Runs) -> None:
        self._store = store
        self._run = run

    def check(self, config: Config) -> None:
        """
        Check that the store honours conditional writes.

        Raises:
            ConfigError: It does not, so that concurrent runs could not be kept apart.
        """
        prefix = f"{config.cloud_storage_prefix}/{OWN_PREFIX}".strip("/")
        beside = config.model_copy(update={"cloud_storage_prefix": prefix})
        self._run(StoreCheck(beside, _Beside(self._store))())

    def read(self, key: str) -> tuple[bytes, str] | None:
        """Return an object's bytes and its version; None if the object does not exist."""
        try:
            data, info = self._run(self._store.get(key))
        except ObjectNotFound:
            return None
        return data, info.version

    def swap(self, key: str, data: bytes, version: str | None) -> str | None:
        """
        Replace an object if it still has *version*; with *version* None, create it if it does not exist.

        *data* must be different from the data of any other writer. By its data, a write whose answer was lost
        is recognised.

        Returns:
            The new version; None if another writer was faster.

        Raises:
            StorageUnavailable: The store does not answer, or refused the write although the object is
                unchanged.
        """
        condition = IfAbsent() if version is None else IfVersion(version)
        try:
            put = self._store.put(key, data, crc32c=crc32c(data), condition=condition)
            return self._run(put).version
        except PreconditionFailed as refusal:
            found = self.read(key)
            if _version_of(found) == version:
                raise StorageUnavailable(
                    f"the store refused to replace {key}, although it has not changed"
                ) from refusal
        except StorageUnavailable as error:
            if not error.outcome_unknown:
                raise
            found = self.read(key)
            if _version_of(found) == version:
                raise
        return found[1] if found is not None and found[0] == data else None

    def store_file(self, key: str, path: Path) -> int:
        """
        Store a local file, unless an object with the key exists; return the local file's size in bytes.

        An existing object was made earlier from the same offsets, and may have records that have expired
        since. It may be committed, and is never replaced by a file with fewer records. One that arrived
        damaged is replaced.
        """
        fd = os.open(path, os.O_RDONLY)
        try:
            body = FileSlice(fd, 0, os.fstat(fd).st_size)
            self._run(create(self._store, key, body, crc32c=crc32c_of_file(fd), replaces_damaged=True))
        finally:
            os.close(fd)
        return body.size_bytes

    def holds_any(self, prefix: str) -> bool:
        """Return whether any object's key begins with *prefix*."""
        return bool(self._run(self._store.list_page(prefix, limit=1)).objects)


class _Beside:
    """
    A store that puts all keys under OWN_PREFIX, for the check of conditional writes.

    A check that dies may leave objects behind, which must not be among the data.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def put(self, key: str, body: Body, **options: Any) -> ObjectInfo:
        """Store an object under OWN_PREFIX."""
        return await self._store.put(OWN_PREFIX + key, body, **options)

    async def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects under OWN_PREFIX."""
        await self._store.delete_many([OWN_PREFIX + key for key in keys])


def _version_of(found: tuple[bytes, str] | None) -> str | None:
    return None if found is None else found[1]
