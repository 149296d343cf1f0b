"""
A real Azure Blob server on loopback, for tests and benchmarks: Azurite, from npm.

Azurite is installed outside the source tree, in `~/.cache/tieringd` or in `$TIERINGD_CACHE`. Each version has
a directory, which exists only when it is complete. `python -m tests.support.azurite` fetches it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from azure.core.exceptions import ResourceExistsError, ResourceNotFoundError
from azure.storage.blob import ContainerClient

from tests.support.components import used
from tests.support.kafka_jars import MissingPartError, cache_directory, tell_where
from tests.support.ports import free_ports
from tests.support.processes import Server
from tests.support.s3_bucket import answers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

AZURITE_VERSION = "3.35.0"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account and the key of every Azurite. They are published, and give access to nothing else."""


def azurite_directory() -> Path:
    """Return the directory of the installation, which may not exist yet."""
    return cache_directory() / f"azurite-{AZURITE_VERSION}"


def require_azurite() -> Path:
    """
    Return the blob server's program.

    Raises:
        MissingPartError: Azurite has not been fetched.
    """
    path = azurite_directory() / "node_modules" / ".bin" / "azurite-blob"
    if not path.exists():
        raise MissingPartError(f"{path} is missing; run `python -m tests.support.azurite`")
    return path


def fetch_azurite() -> Path:
    """
    Fetch Azurite unless it is installed, and return its directory.

    Raises:
        MissingPartError: Node.js or npm is not installed, or npm failed.
    """
    directory = azurite_directory()
    if directory.is_dir():
        return directory
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise MissingPartError("npm is not installed; install it (Debian: npm)")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The rename is the last step, so that an existing directory is always complete.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="fetching-") as temporary:
        fetched = Path(temporary) / "azurite"
        fetched.mkdir()
        command = [npm, "install", "--prefix", str(fetched), "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(
            [*command, f"azurite@{AZURITE_VERSION}"], check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise MissingPartError(f"npm could not fetch azurite:\n{done.stdout}{done.stderr}")
        try:
            fetched.rename(directory)
        except OSError:
            # Another process was faster; its directory is as complete as ours.
            if not directory.is_dir():
                raise
    return directory


class Azurite:
    """A blob server with its data in memory. Call `start` and `stop`."""

    account = ACCOUNT
    key = KEY

    def __init__(self, server: Server, *, port: int, scheme: str) -> None:
        self.server = server
        self.port = port
        self.endpoint = f"{scheme}://127.0.0.1:{port}/{ACCOUNT}"

    @classmethod
    def start(cls, directory: Path, *, certificate: Path | None = None) -> Azurite:
        """
        Start a server with its log under *directory*; return when it answers.

        With a *certificate*, a PEM file with a key and its certificate, the server uses TLS.

        Raises:
            MissingPartError: Azurite has not been fetched.
            ServerStartError: The server did not become ready.
        """
        program = require_azurite()
        (port,) = free_ports(1)
        command = [
            *(str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port)),
            # Without --skipApiVersionCheck Azurite refuses clients that are newer than itself.
            *("--skipApiVersionCheck", "--inMemoryPersistence", "--disableTelemetry", "--silent"),
        ]
        if certificate is not None:
            command += ["--cert", str(certificate), "--key", str(certificate)]
        azurite = cls(
            Server(command, output=directory / "azurite.log"),
            port=port,
            scheme="http" if certificate is None else "https",
        )
        azurite.launch()
        return azurite

    def launch(self) -> None:
        """Start the process and return when it answers."""
        self.server.launch()
        try:
            self.server.wait_until(lambda: answers("127.0.0.1", self.port))
        except BaseException:
            self.server.kill()
            raise

    def stop(self) -> None:
        """End the process. Its data is lost."""
        self.server.stop()

    def create_container(self, name: str) -> None:
        """Create a container; one that exists already stays as it is."""
        with container_client(self.endpoint, container=name) as client, suppress(ResourceExistsError):
            client.create_container()


@contextmanager
def running_azurite(directory: Path, *, certificate: Path | None = None) -> Iterator[Azurite]:
    """Run a server for the time of a `with` block."""
    used(f"Azurite {AZURITE_VERSION}")
    azurite = Azurite.start(directory, certificate=certificate)
    try:
        yield azurite
    finally:
        azurite.stop()


def container_client(endpoint: str, *, container: str) -> ContainerClient:
    """Return a plain, blocking client, for set-up and checks that bypass the store under test."""
    return ContainerClient(
        endpoint, container, credential={"account_name": ACCOUNT, "account_key": KEY}, retry_total=0
    )


class AzureBucket:
    """The objects below one prefix of a container."""

    def __init__(self, endpoint: str, *, container: str, prefix: str) -> None:
        self._client = container_client(endpoint, container=container)
        self._prefix = prefix

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def read(self, key: str) -> bytes | None:
        """Return an object's bytes; None if it does not exist."""
        try:
            return self._client.download_blob(f"{self._prefix}/{key}").readall()
        except ResourceNotFoundError:
            return None

    def keys(self) -> list[str]:
        """Return the keys of all objects below the prefix."""
        found = self._client.list_blob_names(name_starts_with=f"{self._prefix}/")
        return sorted(name.removeprefix(f"{self._prefix}/") for name in found)

    def write(self, key: str, data: bytes, *, metadata: dict[str, str] | None = None) -> None:
        """Store an object."""
        self._client.upload_blob(f"{self._prefix}/{key}", data, overwrite=True, metadata=metadata)


if __name__ == "__main__":
    sys.exit(tell_where(fetch_azurite))
