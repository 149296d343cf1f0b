"""Servers and files that the contract suite needs, each started once and only when asked for."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

from tests.support.azurite import running_azurite
from tests.support.components import used
from tests.support.fake_gcs import running_fake_gcs
from tests.support.ports import free_ports
from tests.support.processes import Server
from tests.support.s3_bucket import answers
from tests.support.seaweedfs import FRUGAL, running_seaweedfs
from tieringd.storage.base import FileSlice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.azurite import Azurite
    from tests.support.fake_gcs import FakeGcs
    from tests.support.seaweedfs import SeaweedFS

BEFORE, AFTER = b"bytes before the slice", b"bytes after it"


@pytest.fixture
def slice_of(tmp_path: Path) -> Iterator[Callable[[bytes], FileSlice]]:
    """Return a function that puts bytes into the middle of a file, and gives the open slice."""
    with ExitStack() as files:

        def make(data: bytes) -> FileSlice:
            path = tmp_path / f"slice-{os.urandom(4).hex()}"
            path.write_bytes(BEFORE + data + AFTER)
            file = files.enter_context(path.open("r+b"))
            return FileSlice(file.fileno(), len(BEFORE), len(data))

        yield make


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """Run SeaweedFS with a bucket named `contract`."""
    with running_seaweedfs(tmp_path_factory.mktemp("seaweedfs"), environment=FRUGAL) as server:
        server.create_bucket("contract")
        yield server


@pytest.fixture(scope="session")
def moto_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a moto server, and return its endpoint."""
    (port,) = free_ports(1)
    used(f"moto {version('moto')}")
    command = [sys.executable, "-m", "tests.support.moto_server", str(port)]
    server = Server(command, output=tmp_path_factory.mktemp("moto") / "moto.log")
    server.launch()
    try:
        server.wait_until(lambda: answers("127.0.0.1", port))
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """Run Azurite with a container named `contract`."""
    with running_azurite(tmp_path_factory.mktemp("azurite")) as server:
        server.create_container("contract")
        yield server


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcs]:
    """Run fake-gcs-server with a bucket named `contract`."""
    with running_fake_gcs(tmp_path_factory.mktemp("fake-gcs")) as server:
        server.create_bucket("contract")
        yield server
