"""The object store that Parquet files are exported to, for code that does not await."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

from crc32c import crc32c

from tieringd.errors import ConfigError, ObjectNotFound, PreconditionFailed, StorageUnavailable
from tieringd.storage.base import FileSlice, IfAbsent, IfVersion
from tieringd.storage.checked_puts import create
from tieringd.storage.file_tree import crc32c_of_file
from tieringd.storage.opening import StoreCheck

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from tieringd.config import Config
    from tieringd.storage.base import Body, ObjectInfo, ObjectStore

T = TypeVar("T")

_SCHEMES: Final = {"s3": "aws", "s3a": "aws", "gs": "google", "azure": "azure"}


def target_config(url: str, config: Config) -> Config:
    """
    Return how to reach *url*, with the credentials and the endpoint that *config* has for its own bucket.

    Raises:
        ConfigError: It is no URL of a store, or of another kind of store than the one of *config*.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError(
            "target: credentials have no place in a URL",
            hint="Put them into a configuration file of the target (`--target-config`)",
        )
    if parts.query or parts.fragment:
        # It may be a token of access, and is not told.
        raise ConfigError(
            "target: a URL with ? or # in it is no place for files",
            hint="Credentials belong in a configuration file of the target (`--target-config`)",
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
            hint="Give a configuration file of the target's own, with its credentials (`--target-config`)",
        )
    name = "cloud_storage_azure_container" if backend == "azure" else "cloud_storage_bucket"
    return config.model_copy(update={name: parts.netloc, "cloud_storage_prefix": prefix})


OWN_PREFIX: Final = "_tieringd/"
"""Of what is not for readers: they pass over names that begin so."""


class Runs(Protocol):
    """Whoever does requests on the event loop that a store belongs to: `Bucket.run`."""

    def __call__(self, work: Coroutine[object, object, T], /) -> T:
        """Return what *work* returns."""


class TargetStore:
    """What an export does with the store it writes to."""

    def __init__(self, store: ObjectStore, run: Runs) -> None:
        self._store = store
        self._run = run

    def check(self, config: Config) -> None:
        """
        Return when the store honours conditional writes.

        Raises:
            ConfigError: It does not: two runs at once could not be kept apart.
        """
        prefix = f"{config.cloud_storage_prefix}/{OWN_PREFIX}".strip("/")
        beside = config.model_copy(update={"cloud_storage_prefix": prefix})
        self._run(StoreCheck(beside, _Beside(self._store))())

    def read(self, key: str) -> tuple[bytes, str] | None:
        """Return an object and its version; None where there is none."""
        try:
            data, info = self._run(self._store.get(key))
        except ObjectNotFound:
            return None
        return data, info.version

    def swap(self, key: str, data: bytes, version: str | None) -> str | None:
        """
        Replace an object that still has *version*, or is absent where that is None; return the new version.

        None means that someone else was faster. *data* must not be what anyone else writes: it is how a
        write whose answer was lost is known again.

        Raises:
            StorageUnavailable: Nothing is known to have changed.
        """
        condition = IfAbsent() if version is None else IfVersion(version)
        try:
            put = self._store.put(key, data, crc32c=crc32c(data), condition=condition)
            return self._run(put).version
        except PreconditionFailed as refusal:
            found = self.read(key)
            if _version_of(found) == version:
                raise StorageUnavailable(
                    f"the store refused to replace {key}, which has not changed"
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
        Store a local file, unless there is an object with the key; return its size in bytes.

        One that is there was made of the same offsets, earlier: the archive may have had records then that
        have expired since. It may be committed by now, and is never replaced by a poorer one.
        """
        fd = os.open(path, os.O_RDONLY)
        try:
            body = FileSlice(fd, 0, os.fstat(fd).st_size)
            self._run(create(self._store, key, body, crc32c=crc32c_of_file(fd)))
        finally:
            os.close(fd)
        return body.size_bytes

    def holds_any(self, prefix: str) -> bool:
        """Say whether any object's key begins with *prefix*."""
        return bool(self._run(self._store.list_page(prefix, limit=1)).objects)


class _Beside:
    """A store whose keys are all beside the data: a trial that dies leaves something behind."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def put(self, key: str, body: Body, **options: Any) -> ObjectInfo:
        """Store an object."""
        return await self._store.put(OWN_PREFIX + key, body, **options)

    async def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects."""
        await self._store.delete_many([OWN_PREFIX + key for key in keys])


def _version_of(found: tuple[bytes, str] | None) -> str | None:
    return None if found is None else found[1]
