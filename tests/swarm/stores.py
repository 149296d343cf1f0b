"""
The object store of a swarm: SeaweedFS, fake-gcs-server, Azurite, or a directory.

A directory has no requests that could be spoiled, and its faults are those of a file system. The servers for
Google Cloud Storage and Azure keep their data in memory, so they are never restarted.
"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.e2e.archives import FileObjects
from tests.support.azurite import AzureBucket, running_azurite
from tests.support.daemon import azure_properties, s3_properties
from tests.support.fake_gcs import GcsBucket, running_fake_gcs
from tests.support.gcs_metadata_server import running_metadata_server
from tests.support.s3_bucket import S3Bucket
from tests.support.seaweedfs import FRUGAL, running_seaweedfs
from tests.support.small_disks import ext4_disk_at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from pathlib import Path

    from tests.e2e.archives import Objects
    from tests.support.processes import Server

BUCKET = PREFIX = "swarm"
_TOKEN_SECONDS = 360
_DISK_BYTES = 24 << 30
"""The size of a directory's file system. Its image is sparse, and takes only what is written."""
_XML_ERROR = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"
)
_JSON_ERROR = b'{"error": {"code": 500, "message": "Backend Error", "status": "INTERNAL"}}'


@dataclass
class SwarmStore:
    """A running store."""

    objects: Objects
    properties: Mapping[str, Any]
    """The properties of a daemon that uses it, without the address of its server."""
    url: str = ""
    """The address of its server; empty for a directory."""
    server: Server | None = None
    relaunch: Callable[[], None] | None = None
    """Starts the server again with its data, once it has ended; None where the data is lost."""
    directory: Path | None = None
    """The root of a file system that is the store."""
    refused_from_seconds: float = math.inf
    """A request whose time is this far from the server's own is refused."""
    error_answer: tuple[bytes, str] = field(default=(_XML_ERROR, "application/xml"))
    """The document of an internal error, and its type."""

    @property
    def process(self) -> Server:
        """Return the server's process; a directory has none."""
        assert self.server is not None, "this store has no server"
        return self.server

    @property
    def root(self) -> Path:
        """Return the directory; a server has none."""
        assert self.directory is not None, "this store is no directory"
        return self.directory


@contextmanager
def _s3(directory: Path) -> Iterator[SwarmStore]:
    with running_seaweedfs(directory, environment=FRUGAL) as store:
        store.create_bucket(BUCKET)
        properties = s3_properties(store, bucket=BUCKET, prefix=PREFIX)
        with S3Bucket(store.endpoint_url, bucket=BUCKET, prefix=PREFIX) as objects:
            yield SwarmStore(
                objects,
                properties,
                store.endpoint_url,
                store.server,
                store.launch,
                # S3 answers RequestTimeTooSkewed from then on.
                refused_from_seconds=900,
            )


@contextmanager
def _gcs(directory: Path) -> Iterator[SwarmStore]:
    directory.mkdir()
    with running_fake_gcs(directory) as store:
        store.create_bucket(BUCKET)
        properties = {
            "cloud_storage_backend": "google",
            "cloud_storage_bucket": BUCKET,
            "cloud_storage_prefix": PREFIX,
            "cloud_storage_credentials_source": "gcp_instance_metadata",
        }
        objects = GcsBucket(store.endpoint, bucket=BUCKET, prefix=PREFIX)
        yield SwarmStore(
            objects,
            properties,
            store.endpoint,
            store.server,
            error_answer=(_JSON_ERROR, "application/json"),
        )


@contextmanager
def _azure(directory: Path) -> Iterator[SwarmStore]:
    directory.mkdir()
    with running_azurite(directory) as store:
        store.create_container(BUCKET)
        properties = {**azure_properties(store, container=BUCKET), "cloud_storage_prefix": PREFIX}
        url = store.endpoint.removesuffix(f"/{store.account}")
        with AzureBucket(store.endpoint, container=BUCKET, prefix=PREFIX) as objects:
            yield SwarmStore(objects, properties, url, store.server)


@contextmanager
def _file(directory: Path) -> Iterator[SwarmStore]:
    directory.mkdir()
    with ext4_disk_at(directory / "disk", _DISK_BYTES, reserved_percent=0) as disk:
        root = disk / "archive"
        root.mkdir()
        properties = {
            "cloud_storage_backend": "file",
            "cloud_storage_file_root": str(root),
        }
        yield SwarmStore(FileObjects(root), properties, directory=disk)


STORES = {"s3": _s3, "gcs": _gcs, "azure": _azure, "file": _file}


@asynccontextmanager
async def running_store(name: str, directory: Path) -> AsyncIterator[SwarmStore]:
    """Run the store with this name of `STORES`, with what it writes below *directory*."""
    if name != "gcs":
        with STORES[name](directory) as store:
            yield store
        return
    async with running_metadata_server(expires_in=_TOKEN_SECONDS) as metadata:
        with ExitStack() as stack:
            # The daemons inherit it.
            os.environ["GCE_METADATA_HOST"] = metadata.host
            stack.callback(os.environ.pop, "GCE_METADATA_HOST")
            yield stack.enter_context(STORES[name](directory))
