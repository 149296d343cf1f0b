"""Files to send, a certificate to trust, and stores that are closed again."""

from __future__ import annotations

import gc
import ssl
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.support.certificate import write_certificate
from tieringd.storage.base import FileSlice

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_others():
    """See that no test is blamed for what the tests of another file have left behind."""
    gc.collect()
    # What lives now outlives the tests of this file. A collection after each of them would walk
    # through all of it: a worker that has run a thousand tests holds a million objects.
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_forgotten(caplog):
    """Fail a test that leaves a task or future behind whose exception was not retrieved."""
    yield
    gc.collect()
    records = caplog.get_records("call") + caplog.get_records("teardown")
    assert [record.getMessage() for record in records if record.name == "asyncio"] == []


@pytest.fixture
def slice_of(tmp_path):
    """Return a function that puts bytes into the middle of a file, and gives the open slice."""
    with ExitStack() as files:

        def make(data: bytes) -> FileSlice:
            path = tmp_path / f"slice-{len(list(tmp_path.iterdir()))}"
            path.write_bytes(b"before" + data + b"after")
            return FileSlice(files.enter_context(path.open("r+b")).fileno(), len(b"before"), len(data))

        yield make


@pytest.fixture(scope="session")
def certificate(tmp_path_factory) -> Path:
    """Return a PEM file with a key and a certificate of its own for 127.0.0.1."""
    return write_certificate(tmp_path_factory.mktemp("tls") / "server.pem")


@pytest.fixture
def server_tls(certificate) -> ssl.SSLContext:
    """Return the server's side of TLS with that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context
