"""The Azure store against servers that answer late, short, wrong or never."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import threading
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest
from crc32c import crc32c

from tests.support.azure_wire import STORED, content, store_of
from tests.support.executors import RecordingExecutor
from tieringd.errors import (
    ChecksumRejected,
    LocalFileError,
    PreconditionFailed,
    StorageDenied,
    StorageUnavailable,
)
from tieringd.storage.azure.azure_requests import endpoint_of
from tieringd.storage.base import FileSlice, IfAbsent, IfVersion
from tieringd.storage.store_settings import AzureSettings

if TYPE_CHECKING:
    from tests.support.raw_http import Exchange

LARGE = 24 << 20  # More than the sockets of a connection ever hold.


class Recorder:
    """Remembers what it was asked, and says that it was done; or gives *answers* in turn."""

    def __init__(self, *answers: tuple[str, str]):
        self.answers = list(answers)
        self.seen: list[tuple[Exchange, bytes]] = []

    async def __call__(self, exchange: Exchange) -> None:
        self.seen.append((exchange, await exchange.read_body()))
        status, code = self.answers.pop(0) if self.answers else ("201 Created", "")
        await exchange.answer(status, **STORED, **({"x_ms_error_code": code} if code else {}))

    @property
    def operations(self) -> list[str]:
        """Return what each request was: the `comp` of its query, or nothing for the blob itself."""
        return [parse_qs(urlsplit(each.path).query).get("comp", [""])[0] for each, _ in self.seen]


def base64_md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
async def test_put_sends_the_file_with_its_checksum_in_one_request(slice_of, server_tls, certificate, is_tls):
    """A put is one request: the slice, its CRC32C as metadata, and an MD5 where there is no TLS."""
    data, server = content(LARGE), Recorder()
    tls = {"tls": server_tls, "trust_file": str(certificate)} if is_tls else {}
    async with store_of(server, prefix="pre/fix", access_tier="Cool", **tls) as store:
        info = await store.put("dir/kéy", slice_of(data), crc32c=crc32c(data), condition=IfAbsent())
    ((exchange, body),) = server.seen
    assert body == data
    assert (exchange.method, exchange.path) == ("PUT", "/account/archive/pre/fix/dir/k%C3%A9y")
    assert exchange.headers["x-ms-meta-crc32c"] == f"{crc32c(data):08x}"
    assert exchange.headers["x-ms-blob-type"] == "BlockBlob"
    assert exchange.headers["x-ms-access-tier"] == "Cool"
    assert exchange.headers["if-none-match"] == "*"
    assert exchange.headers["authorization"].startswith("SharedKey account:")
    assert exchange.headers.get("content-md5") == (None if is_tls else base64_md5(data))
    assert not {"expect", "transfer-encoding"} & set(exchange.headers)
    assert (info.key, info.size_bytes, info.version) == ("dir/kéy", LARGE, '"version"')
    assert info.modified_ms == 1_767_323_045_000


async def test_bytes_carry_an_md5_over_tls_too(server_tls, certificate):
    """A manifest is small: the service compares its MD5 whatever the transport."""
    server = Recorder()
    async with store_of(server, tls=server_tls, trust_file=str(certificate)) as store:
        await store.put("key", b"content", crc32c=crc32c(b"content"), condition=IfVersion('"v"'))
    ((exchange, _),) = server.seen
    assert exchange.headers["content-md5"] == base64_md5(b"content")
    assert exchange.headers["if-match"] == '"v"'


@pytest.mark.parametrize("in_blocks", [False, True])
async def test_md5_of_the_answer_is_compared(slice_of, in_blocks):
    """A service whose answer has another MD5 has stored other bytes."""

    async def handle(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.answer("201 Created", Content_MD5=base64_md5(b"other bytes"), **STORED)

    data = content(3 << 20)
    async with store_of(handle, single_put_bytes=1 << 20 if in_blocks else 4 << 20) as store:
        for body in (slice_of(data), b"content"):
            checksum = crc32c(body) if isinstance(body, bytes) else crc32c(data)
            with pytest.raises(StorageUnavailable, match="other bytes than it was sent"):
                await store.put("key", body, crc32c=checksum)


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
async def test_large_file_goes_up_in_blocks_that_the_last_request_joins(
    slice_of, server_tls, certificate, is_tls
):
    """Blocks carry the file in order and no condition; the commit names them, with condition and metadata."""
    data, server = content(5 << 20), Recorder()
    tls = {"tls": server_tls, "trust_file": str(certificate)} if is_tls else {}
    async with store_of(
        server, single_put_bytes=1 << 20, block_bytes=2 << 20, access_tier="Hot", **tls
    ) as store:
        await store.put("key", slice_of(data), crc32c=crc32c(data), condition=IfAbsent())
    assert server.operations == ["block", "block", "block", "blocklist"]
    *blocks, (commit, document) = server.seen
    assert b"".join(body for _, body in blocks) == data
    names = [parse_qs(urlsplit(each.path).query)["blockid"][0] for each, _ in blocks]
    assert len(set(names)) == 3
    assert len({len(name) for name in names}) == 1
    assert document.decode().endswith(
        "<BlockList>" + "".join(f"<Uncommitted>{name}</Uncommitted>" for name in names) + "</BlockList>"
    )
    assert commit.headers["if-none-match"] == "*"
    assert commit.headers["x-ms-meta-crc32c"] == f"{crc32c(data):08x}"
    assert commit.headers["x-ms-access-tier"] == "Hot"
    for exchange, body in blocks:
        assert not {"if-none-match", "x-ms-meta-crc32c", "x-ms-access-tier"} & set(exchange.headers)
        assert exchange.headers.get("content-md5") == (None if is_tls else base64_md5(body))


async def test_two_uploads_of_a_key_do_not_share_block_names(slice_of):
    """Blocks of an attempt that failed cannot be taken for those of the next."""
    data, server = content(2 << 20), Recorder()
    async with store_of(server, single_put_bytes=1, block_bytes=2 << 20) as store:
        for _ in range(2):
            await store.put("key", slice_of(data), crc32c=crc32c(data))
    paths = [exchange.path for exchange, _ in server.seen if "comp=block&" in exchange.path]
    assert len(set(paths)) == 2


@pytest.mark.parametrize(
    ("answers", "error", "outcome_unknown"),
    [
        pytest.param([("500 Failed", "InternalError")], StorageUnavailable, False, id="block"),
        pytest.param([("201 Created", ""), ("500 Failed", "")], StorageUnavailable, True, id="commit"),
        pytest.param(
            [("201 Created", ""), ("409 Conflict", "BlobAlreadyExists")], PreconditionFailed, None, id="lost"
        ),
    ],
)
async def test_failed_block_upload_is_in_doubt_only_at_its_commit(slice_of, answers, error, outcome_unknown):
    """A block that fails has stored nothing; only the commit can, and only it can lose the condition."""
    data = content(2 << 20)
    async with store_of(Recorder(*answers), single_put_bytes=1, block_bytes=2 << 20) as store:
        with pytest.raises(error) as caught:
            await store.put("key", slice_of(data), crc32c=crc32c(data), condition=IfAbsent())
    assert getattr(caught.value, "outcome_unknown", None) is outcome_unknown


@pytest.mark.parametrize("in_blocks", [False, True], ids=["one-request", "blocks"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
async def test_file_with_another_checksum_never_arrives_whole(
    slice_of, server_tls, certificate, is_tls, in_blocks
):
    """The last bytes of a file with another checksum are never sent, and nothing is joined."""
    data, whole = content(5 << 20), []
    received = asyncio.Queue()

    async def handle(exchange: Exchange) -> None:
        if exchange.length > 3 << 20 or exchange.path.endswith("blocklist"):
            received.put_nowait((exchange.length, len(await exchange.read_to_end())))
            return
        whole.append(await exchange.read_body())
        await exchange.answer("201 Created", **STORED)

    tls = {"tls": server_tls, "trust_file": str(certificate)} if is_tls else {}
    threshold = {"single_put_bytes": 1, "block_bytes": 1 << 20} if in_blocks else {}
    async with store_of(handle, **tls, **threshold) as store:
        with pytest.raises(ChecksumRejected, match="nothing was stored") as caught:
            await store.put("key", slice_of(data), crc32c=crc32c(data) ^ 1)
        assert caught.value.key == "key"
        if not in_blocks:
            promised, arrived = await received.get()
            assert arrived < promised == len(data)
    assert received.empty()
    assert len(whole) == (4 if in_blocks else 0)


async def test_unanswered_put_has_an_unknown_outcome_and_is_not_repeated(slice_of):
    """A PUT may have stored its object if the connection ends after the last byte. It is not repeated."""
    data, requests = content(LARGE), []

    async def handle(exchange: Exchange) -> None:
        requests.append(exchange.method)
        await exchange.read_body()
        exchange.reset()

    async with store_of(handle) as store:
        for body in (data[:100], slice_of(data)):
            checksum = crc32c(data if isinstance(body, FileSlice) else body)
            with pytest.raises(StorageUnavailable) as caught:
                await store.put("key", body, crc32c=checksum)
            assert caught.value.outcome_unknown
    assert requests == ["PUT", "PUT"]


@pytest.mark.parametrize("single_put_bytes", [1, 1 << 20], ids=["in-blocks", "in-one-request"])
async def test_put_without_a_version_has_an_unknown_outcome(slice_of, single_put_bytes):
    """An answer without an ETag may come from a proxy: the blob may be stored, or not."""

    async def handle(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.answer("201 Created", Last_Modified=STORED["Last_Modified"])

    async with store_of(handle, single_put_bytes=single_put_bytes) as store:
        for body in (b"content", slice_of(b"content")):
            with pytest.raises(StorageUnavailable, match="no ETag") as caught:
                await store.put("key", body, crc32c=crc32c(b"content"), condition=IfAbsent())
            assert caught.value.outcome_unknown


async def test_put_that_breaks_off_is_known_to_be_lost(slice_of):
    """A PUT has stored nothing if the connection ends before the last byte has left."""
    data = content(LARGE)

    async def handle(exchange: Exchange) -> None:
        await exchange.reader.readexactly(1 << 20)
        exchange.reset()

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.put("key", slice_of(data), crc32c=crc32c(data))
    assert not caught.value.outcome_unknown


async def test_silent_server_is_given_up():
    """A server that owes an answer for too long is unavailable, and a put's outcome unknown."""

    async def handle(exchange: Exchange) -> None:
        await exchange.read_to_end()

    async with store_of(handle, read_timeout_seconds=0.1) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.put("key", b"content", crc32c=crc32c(b"content"))
        assert caught.value.outcome_unknown
        with pytest.raises(StorageUnavailable):
            await store.get("key")


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
async def test_server_that_stops_reading_is_given_up(slice_of, server_tls, certificate, is_tls):
    """A server that takes no byte of a body for too long is unavailable, and has stored nothing."""
    data = content(LARGE)

    async def handle(exchange: Exchange) -> None:
        await exchange.reader.readexactly(1 << 20)
        await asyncio.Event().wait()

    tls = {"tls": server_tls, "trust_file": str(certificate)} if is_tls else {}
    async with store_of(handle, read_timeout_seconds=0.2, **tls) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.put("key", slice_of(data), crc32c=crc32c(data))
        assert not caught.value.outcome_unknown


async def test_refusal_before_the_body_is_read_is_heard(slice_of):
    """An answer that comes while the body is still being sent decides, and the sending ends."""
    data = content(LARGE)

    async def handle(exchange: Exchange) -> None:
        await exchange.reader.readexactly(1 << 20)
        await exchange.answer("403 Forbidden", x_ms_error_code="AuthorizationFailure", Connection="close")
        await exchange.read_to_end()

    async with store_of(handle, max_connections=1) as store:
        for _ in range(3):
            with pytest.raises(StorageDenied):
                await store.put("key", slice_of(data), crc32c=crc32c(data))


@pytest.mark.parametrize("in_blocks", [False, True], ids=["one-request", "blocks"])
async def test_cancelled_put_frees_its_thread_and_its_file(slice_of, in_blocks):
    """The file may be closed at once after a cancelled PUT, and the store's only thread is free."""
    begun, joined = asyncio.Event(), []
    data = content(LARGE)

    async def handle(exchange: Exchange) -> None:
        if "stuck" in exchange.path:
            await exchange.reader.readexactly(1 << 20)
            begun.set()
            await asyncio.Event().wait()
        joined.append(await exchange.read_body())
        await exchange.answer("201 Created", **STORED)

    threshold = {"single_put_bytes": 1} if in_blocks else {}
    async with store_of(handle, read_timeout_seconds=60, **threshold) as store:
        store._requests.executor.shutdown()
        store._requests.executor = executor = RecordingExecutor(1)
        file_slice = slice_of(data)
        fd = os.dup(file_slice.fd)
        stuck = store.put("stuck", FileSlice(fd, file_slice.position, LARGE), crc32c=crc32c(data))
        task = asyncio.create_task(stuck)
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert executor.submitted
        assert executor.is_idle()
        os.close(fd)
        await store.put("next", file_slice, crc32c=crc32c(data))
        executor.shutdown()
    assert joined[0] == data


async def test_cancelled_put_outlasts_the_read_of_its_file(slice_of, server_tls, certificate):
    """A put does not return while a thread still reads its file, however slow the disk."""
    data, is_reading, disk = content(2 << 20), threading.Event(), threading.Event()

    class SlowExecutor(RecordingExecutor):
        def submit(self, function, /, *arguments, **options):
            def run():
                is_reading.set()
                disk.wait()
                return function(*arguments, **options)

            return super().submit(run)

    async with store_of(Recorder(), tls=server_tls, trust_file=str(certificate)) as store:
        store._requests.executor.shutdown()
        store._requests.executor = executor = SlowExecutor(1)
        task = asyncio.create_task(store.put("key", slice_of(data), crc32c=crc32c(data)))
        await asyncio.to_thread(is_reading.wait)
        task.cancel()
        _, pending = await asyncio.wait({task}, timeout=0.2)
        assert pending
        disk.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert executor.is_idle()
        executor.shutdown()


async def test_short_file_is_told_apart_from_a_broken_connection(slice_of, server_tls, certificate):
    """A file that ends early is the file's fault: LocalFileError, not StorageUnavailable."""
    whole = slice_of(content(LARGE))

    async def handle(exchange: Exchange) -> None:
        await exchange.read_to_end()

    for tls in ({}, {"tls": server_tls, "trust_file": str(certificate)}):
        async with store_of(handle, **tls) as store:
            with pytest.raises(LocalFileError, match="truncated"):
                await store.put("key", FileSlice(whole.fd, whole.position, LARGE + 100), crc32c=0)


async def test_delete_goes_on_after_a_refusal_and_reports_it():
    """One refused key of many is an error that names it and counts the refused; the others are deleted."""
    seen = []

    async def handle(exchange: Exchange) -> None:
        seen.append(exchange.path.rpartition("/")[2])
        status, code = {
            "busy": ("503 Server Busy", "ServerBusy"),
            "held": ("409 Conflict", "SnapshotsPresent"),
            "gone": ("404 Not Found", "BlobNotFound"),
        }.get(seen[-1], ("202 Accepted", ""))
        await exchange.answer(status, x_ms_error_code=code)

    async with store_of(handle, max_connections=2) as store:
        with pytest.raises(Exception, match=r"delete held in container archive.*2 of 5 objects.*snapshots"):
            await store.delete_many(["gone", "busy", "held", "a", "b"])
    assert sorted(seen) == ["a", "b", "busy", "gone", "held"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, "https://acc.blob.core.windows.net", id="azure"),
        pytest.param({"disable_tls": True}, "http://acc.blob.core.windows.net", id="no-tls"),
        pytest.param({"endpoint": "https://own.example:8443/acc/"}, "https://own.example:8443/acc", id="own"),
        pytest.param(
            {"endpoint": "own.example:8080", "disable_tls": True}, "http://own.example:8080", id="host"
        ),
        pytest.param(
            {"endpoint": "acc.dfs.core.windows.net"}, "https://acc.blob.core.windows.net", id="adls"
        ),
    ],
)
def test_endpoint_is_where_the_account_speaks_the_blob_protocol(changes, expected):
    """An endpoint may be a URL or a host; the ADLS name of an account stands for its Blob name."""
    assert endpoint_of(AzureSettings(storage_account="acc", container="c", **changes)) == expected
