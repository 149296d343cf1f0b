"""Uploads of the GCS store, to servers that answer late, wrong or never."""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from crc32c import crc32c

from tests.support.executors import RecordingExecutor
from tests.support.gcs_wire import answering, document, parts_of, query_of, store_of
from tieringd.errors import ChecksumRejected, LocalFileError, StorageDenied, StorageUnavailable
from tieringd.storage.base import FileSlice, IfAbsent, IfVersion
from tieringd.storage.body import CHUNK_BYTES
from tieringd.storage.gcs.gcs_responses import encoded_crc32c

if TYPE_CHECKING:
    from tests.support.raw_http import Exchange

LARGE = 24 << 20  # More than the sockets of a connection ever hold.


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
async def test_put_is_one_request_with_the_checksum_and_the_condition(
    slice_of, server_tls, certificate, is_tls
):
    """A put of any size is one multipart upload: the description with the CRC32C, and the slice."""
    data, seen = content(LARGE), []

    async def handle(exchange: Exchange) -> None:
        seen.append((exchange, await exchange.read_body()))
        await exchange.answer("200 OK", document(data))

    tls = {"tls": server_tls, "trust_file": str(certificate)} if is_tls else {}
    async with store_of(handle, prefix="pre/fix", **tls) as store:
        info = await store.put("dir/key", slice_of(data), crc32c=crc32c(data), condition=IfAbsent())
    ((exchange, body),) = seen
    description, sent = parts_of(exchange, body)
    assert sent == data
    assert description == {"name": "pre/fix/dir/key", "crc32c": encoded_crc32c(crc32c(data))}
    assert (exchange.method, urlsplit(exchange.path).path) == ("POST", "/upload/storage/v1/b/archive/o")
    query = query_of(exchange)
    assert (query["uploadType"], query["ifGenerationMatch"]) == ("multipart", "0")
    assert not {"expect", "transfer-encoding", "authorization", "cookie"} & set(exchange.headers)
    assert (info.key, info.size_bytes, info.version) == ("dir/key", LARGE, "7")
    assert (info.crc32c, info.modified_ms) == (crc32c(data), 1_767_323_045_678)


async def test_put_names_class_key_and_version():
    """The storage class goes with the description, the encryption key and the version with the request."""
    seen = []

    async def handle(exchange: Exchange) -> None:
        seen.append((query_of(exchange), parts_of(exchange, await exchange.read_body())[0]))
        await exchange.answer("200 OK", document(b"x"))

    async with store_of(handle, storage_class="NEARLINE", kms_key_name="projects/p/k") as store:
        await store.put("key", b"x", crc32c=crc32c(b"x"), condition=IfVersion("41"))
    ((query, description),) = seen
    assert (query["kmsKeyName"], query["ifGenerationMatch"]) == ("projects/p/k", "41")
    assert description["storageClass"] == "NEARLINE"


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
async def test_threads_move_the_file(slice_of, server_tls, certificate, is_tls):
    """A file is a few pieces of work for a thread, with TLS and without: the loop moves none of it."""
    data = content(LARGE)
    tls = {"tls": server_tls, "trust_file": str(certificate)} if is_tls else {}
    async with store_of(answering(document(data)), **tls) as store:
        store._client.executor.shutdown()
        store._client.executor = executor = RecordingExecutor(1)
        await store.put("key", slice_of(data), crc32c=crc32c(data))
        executor.shutdown()
    assert len(executor.submitted) <= 4
    assert LARGE // CHUNK_BYTES > 4


async def test_unanswered_put_has_an_unknown_outcome(slice_of):
    """A PUT may have stored its object if the connection ends after the last byte. Nothing is sent again."""
    requests = []

    async def handle(exchange: Exchange) -> None:
        requests.append(await exchange.read_body())
        exchange.reset()

    async with store_of(handle) as store:
        for body in (b"content", slice_of(content(LARGE))):
            with pytest.raises(StorageUnavailable) as caught:
                await store.put("key", body, crc32c=0, condition=IfAbsent())
            assert caught.value.outcome_unknown
    assert len(requests) == 2


async def test_put_that_breaks_off_is_known_to_be_lost(slice_of):
    """A PUT has stored nothing if the connection ends before the last byte has left."""

    async def handle(exchange: Exchange) -> None:
        await exchange.reader.readexactly(1 << 20)
        exchange.reset()

    async with store_of(handle) as store:
        for body in (content(LARGE), slice_of(content(LARGE))):
            with pytest.raises(StorageUnavailable) as caught:
                await store.put("key", body, crc32c=0)
            assert not caught.value.outcome_unknown


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("is_file", [False, True], ids=["bytes", "file"])
async def test_server_that_stops_reading_is_given_up(slice_of, server_tls, certificate, is_tls, is_file):
    """A server that takes no byte of a body for too long is unavailable, and has stored nothing."""

    async def handle(exchange: Exchange) -> None:
        await exchange.reader.readexactly(1 << 20)
        await asyncio.Event().wait()

    tls = {"tls": server_tls, "trust_file": str(certificate)} if is_tls else {}
    data = content(LARGE)
    async with store_of(handle, read_timeout_seconds=0.2, **tls) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.put("key", slice_of(data) if is_file else data, crc32c=0)
        assert not caught.value.outcome_unknown


async def test_refusal_before_the_body_is_read_is_heard(slice_of):
    """An answer that comes while the body is still being sent decides, and the sending ends."""

    async def handle(exchange: Exchange) -> None:
        await exchange.reader.readexactly(1 << 20)
        await exchange.answer("403 Forbidden", Connection="close")
        await exchange.read_to_end()

    async with store_of(handle, max_connections=1) as store:
        for _ in range(3):
            with pytest.raises(StorageDenied):
                await store.put("key", slice_of(content(LARGE)), crc32c=0)


async def test_cancelled_put_frees_its_thread_and_its_file(slice_of):
    """The file may be closed at once after a cancelled PUT, and the store's only thread is free."""
    begun = asyncio.Event()
    data, bodies = content(LARGE), []

    async def handle(exchange: Exchange) -> None:
        if not begun.is_set():
            await exchange.reader.readexactly(1 << 20)
            begun.set()
            await asyncio.Event().wait()
        bodies.append(parts_of(exchange, await exchange.read_body())[1])
        await exchange.answer("200 OK", document(data))

    async with store_of(handle, read_timeout_seconds=60) as store:
        store._client.executor.shutdown()
        store._client.executor = executor = RecordingExecutor(1)
        file_slice = slice_of(data)
        fd = os.dup(file_slice.fd)
        task = asyncio.create_task(store.put("stuck", FileSlice(fd, file_slice.position, LARGE), crc32c=0))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert executor.submitted
        assert executor.is_idle()
        os.close(fd)
        await store.put("next", file_slice, crc32c=crc32c(data))
        executor.shutdown()
    assert bodies == [data]


async def test_short_file_is_told_apart_from_a_broken_connection(slice_of):
    """A file that ends early is the file's fault: LocalFileError, not StorageUnavailable."""
    whole = slice_of(content(LARGE))

    async def handle(exchange: Exchange) -> None:
        await exchange.read_to_end()

    async with store_of(handle) as store:
        with pytest.raises(LocalFileError, match="truncated"):
            await store.put("key", FileSlice(whole.fd, whole.position, LARGE + 100), crc32c=0)


@pytest.mark.parametrize(
    ("status", "match"), [("204 No Content", "other bytes than"), ("403 Forbidden", "still holds.*7")]
)
async def test_other_bytes_are_taken_back(status, match):
    """A generation with other bytes than were sent is deleted, and no other generation."""
    deleted = []

    async def handle(exchange: Exchange) -> None:
        await exchange.read_body()
        if exchange.method == "DELETE":
            deleted.append(exchange.path)
            await exchange.answer(status)
        else:
            await exchange.answer("200 OK", document(b"other"))

    async with store_of(handle) as store:
        with pytest.raises(ChecksumRejected, match=match):
            await store.put("dir/key", b"content", crc32c=crc32c(b"content"))
    assert deleted == ["/storage/v1/b/archive/o/dir%2Fkey?generation=7"]


async def test_put_without_a_confirmed_checksum_is_no_success():
    """An answer without a checksum proves nothing of what is stored; the object is left for the next try."""
    methods = []

    async def handle(exchange: Exchange) -> None:
        methods.append(exchange.method)
        await exchange.read_body()
        await exchange.answer("200 OK", document(b"content", crc32c=None))

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable, match="no checksum") as caught:
            await store.put("key", b"content", crc32c=crc32c(b"content"))
    assert caught.value.outcome_unknown
    assert methods == ["POST"]
