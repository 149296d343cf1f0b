"""
Google's and Azure's stores, beside obstore's and bare sockets, over TLS.

The stores alone, as *tieringd, bytes only* is for S3: the same segments with checksums that were computed
before. Both check more on their own account: Azure's sums up the bytes as it reads them.
"""

from __future__ import annotations

import asyncio
import base64
import os
from typing import TYPE_CHECKING, Any

import obstore
import uvloop
from crc32c import crc32c
from obstore.store import AzureStore as ObstoreAzure
from obstore.store import GCSStore as ObstoreGcs

from benchmarks.peers import RAW_AT_ONCE, ByThreads, closed_logs, obstore_client
from benchmarks.raw_sockets import RawTlsSocket
from benchmarks.sink import BUCKET
from tieringd.storage.azure.store import AzureStore
from tieringd.storage.base import FileSlice
from tieringd.storage.gcs.store import GcsStore
from tieringd.storage.store_settings import AzureSettings, GcsSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from benchmarks.harness import Alternative
    from benchmarks.sink import Endpoint
    from tieringd.storage.base import ObjectStore

_OBSTORE_AT_ONCE = 4
_ACCOUNT, _ACCOUNT_KEY = "benchmark", base64.b64encode(b"benchmark").decode()


class _OwnStore:
    def __init__(self, log_dir: Path, endpoint: Endpoint) -> None:
        self._crc32c = {path: crc32c(path.read_bytes()) for path in closed_logs(log_dir)}
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._store = self._runner.run(self.open_store(endpoint))

    async def open_store(self, endpoint: Endpoint) -> ObjectStore:
        """Open the store."""
        raise NotImplementedError

    def upload(self) -> None:
        """Put every file."""
        self._runner.run(self._put_all())

    def sent(self) -> Mapping[str, Path]:
        """Return each file by its name."""
        return {path.name: path for path in self._crc32c}

    def close(self) -> None:
        """Close the store and its loop."""
        self._runner.run(self._store.close())
        self._runner.close()

    async def _put_all(self) -> None:
        left = iter(self._crc32c.items())

        async def put_some() -> None:
            for path, checksum in left:
                with path.open("rb") as file:
                    body = FileSlice(file.fileno(), 0, os.fstat(file.fileno()).st_size)
                    await self._store.put(path.name, body, crc32c=checksum)

        await asyncio.gather(*(put_some() for _ in range(RAW_AT_ONCE)))


class TieringdGcs(_OwnStore):
    """The daemon's Google store, without a token."""

    async def open_store(self, endpoint: Endpoint) -> ObjectStore:
        """Open the store."""
        return await GcsStore.open(
            GcsSettings(
                BUCKET,
                endpoint=endpoint.url,
                credentials_source="anonymous",
                trust_file=_text(endpoint.trust_file),
            )
        )


class TieringdAzure(_OwnStore):
    """The daemon's Azure store, in one PUT for each file."""

    async def open_store(self, endpoint: Endpoint) -> ObjectStore:
        """Open the store."""
        return await AzureStore.open(
            AzureSettings(
                _ACCOUNT,
                BUCKET,
                endpoint=endpoint.url,
                shared_key=_ACCOUNT_KEY,
                trust_file=_text(endpoint.trust_file),
            )
        )


class _Obstore(ByThreads):
    def __init__(self, log_dir: Path, endpoint: Endpoint) -> None:
        super().__init__(log_dir, _OBSTORE_AT_ONCE)
        self._store = self.open_store(endpoint)

    def open_store(self, endpoint: Endpoint) -> Any:
        """Open the store."""
        raise NotImplementedError

    def upload_file(self, path: Path) -> None:
        """Upload one file in one request: the sink knows no other for these two."""
        obstore.put(self._store, path.name, path, use_multipart=False)


class ObstoreToGcs(_Obstore):
    """obstore's Google store, which speaks the XML API."""

    def open_store(self, endpoint: Endpoint) -> ObstoreGcs:
        """Open the store."""
        return ObstoreGcs(
            BUCKET,
            base_url=endpoint.url,
            client_options=obstore_client(endpoint),
            # Without one it asks the machine's metadata service, whatever it is told of signatures.
            credential_provider=lambda: {"token": "benchmark", "expires_at": None},
        )


class ObstoreToAzure(_Obstore):
    """obstore's Azure store."""

    def open_store(self, endpoint: Endpoint) -> ObstoreAzure:
        """Open the store."""
        return ObstoreAzure(
            BUCKET,
            account_name=_ACCOUNT,
            account_key=_ACCOUNT_KEY,
            endpoint=endpoint.url,
            client_options=obstore_client(endpoint),
        )


ALTERNATIVES: dict[str, Callable[..., Alternative]] = {
    "tieringd, GCS": TieringdGcs,
    "obstore, GCS": ObstoreToGcs,
    "tieringd, Azure": TieringdAzure,
    "obstore, Azure": ObstoreToAzure,
    "raw socket": RawTlsSocket,
}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
