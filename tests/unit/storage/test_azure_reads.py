"""What the Azure store reads from servers that answer short, damaged, or with other bytes than asked for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.support.azure_wire import STORED, content, store_of
from tieringd.errors import StorageUnavailable
from tieringd.storage.base import JoinSource

if TYPE_CHECKING:
    from tests.support.raw_http import Exchange


async def test_truncated_download_is_noticed():
    """An answer that ends before its announced length is unavailable, and is not asked for again."""
    requests = []

    async def handle(exchange: Exchange) -> None:
        requests.append(exchange.headers.get("x-ms-range"))
        head = "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-99/100\r\nContent-Length: 100\r\n"
        exchange.writer.write(f'{head}ETag: "v"\r\n\r\n'.encode() + b"only this")
        await exchange.writer.drain()
        exchange.reset()

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable):
            await store.get("key")
        with pytest.raises(StorageUnavailable):
            await store.get_range("key", position=0, size_bytes=100)
    assert requests == [None, "bytes=0-99"]


@pytest.mark.parametrize("size", [7, 2 << 20])
async def test_damaged_download_is_noticed(size):
    """Bytes that do not match the checksum in the blob's metadata are not returned."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("200 OK", content(size), x_ms_meta_crc32c="00000000", **STORED)

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable, match="checksum"):
            await store.get("key")


@pytest.mark.parametrize("text", ["", "nonsense"])
async def test_blob_of_another_program_has_no_checksum(text):
    """A blob without our metadata is read without being compared, and says so."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("200 OK", b"content", x_ms_meta_crc32c=text, **STORED)

    async with store_of(handle) as store:
        data, info = await store.get("key")
    assert (data, info.crc32c) == (b"content", None)


@pytest.mark.parametrize("headers", [{}, {"Content_Range": "bytes 0-9/10"}], ids=["unsaid", "said"])
async def test_range_is_cut_from_a_whole_answer(headers):
    """A server that ignores the range and answers 200 with everything does no harm, whatever it adds."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("200 OK", b"0123456789", **STORED, **headers)

    async with store_of(handle) as store:
        assert await store.get_range("key", position=3, size_bytes=4) == b"3456"
        assert await store.get_range("key", position=8, size_bytes=4) == b"89"
        assert await store.get_range("key", position=10, size_bytes=4) == b""


async def test_range_ends_with_the_object():
    """A range that reaches past the end gives the bytes that exist."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("206 Partial Content", b"89", Content_Range="bytes 8-9/10", **STORED)

    async with store_of(handle) as store:
        assert await store.get_range("key", position=8, size_bytes=4) == b"89"


@pytest.mark.parametrize(
    ("body", "content_range"),
    [
        pytest.param(b"contents", "bytes 0-7/100", id="elsewhere"),
        pytest.param(b"part", "bytes 10-13/100", id="fewer"),
        pytest.param(b"contents and more", "bytes 10-26/100", id="more"),
        pytest.param(b"contents", "", id="unsaid"),
        pytest.param(b"contents", "bytes 10-17/*", id="of-unknown-length"),
        pytest.param(b"contents", "nonsense", id="nonsense"),
    ],
)
async def test_range_that_is_not_the_one_asked_for_is_noticed(body, content_range):
    """A partial answer of another place or length, or of none, is not returned."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("206 Partial Content", body, Content_Range=content_range, **STORED)

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable, match="get_range key in container archive: "):
            await store.get_range("key", position=10, size_bytes=8)


@pytest.mark.parametrize("operation", ["get", "head"])
async def test_answer_without_a_version_is_refused(operation):
    """An answer without an ETag is no blob, and the error allows another try."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("200 OK", Last_Modified=STORED["Last_Modified"])

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable, match="no ETag") as caught:
            await getattr(store, operation)("key")
    assert "proxies" in caught.value.hint


async def test_head_without_a_length_is_refused():
    """A HEAD whose answer has no length, as of a proxy that sends chunks, tells no size."""

    async def handle(exchange: Exchange) -> None:
        exchange.writer.write(b'HTTP/1.1 200 OK\r\nETag: "v"\r\nTransfer-Encoding: chunked\r\n\r\n')
        await exchange.writer.drain()

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable, match="no Content-Length"):
            await store.head("key")
        source = JoinSource("key", 7, 0)
        with pytest.raises(StorageUnavailable, match="no Content-Length"):
            await store.join("joined", [source], crc32c=0)


async def test_body_that_ends_with_its_connection_is_refused():
    """A body without length and chunks may have been cut anywhere. The error names the proxies."""

    async def handle(exchange: Exchange) -> None:
        exchange.writer.write(b'HTTP/1.1 200 OK\r\nETag: "v"\r\nConnection: close\r\n\r\n01234')
        await exchange.writer.drain()
        exchange.writer.close()

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable, match="no content-length") as caught:
            await store.get("key")
        assert "proxies" in caught.value.hint
        with pytest.raises(StorageUnavailable, match="no content-length"):
            await store.get_range("key", position=3, size_bytes=4)


async def test_body_in_chunks_is_read():
    """A body in chunks has no length, and the last chunk tells that it is whole."""

    async def handle(exchange: Exchange) -> None:
        head = 'HTTP/1.1 200 OK\r\nETag: "v"\r\nTransfer-Encoding: chunked\r\n\r\n'
        exchange.writer.write(f"{head}5\r\n01234\r\n5\r\n56789\r\n0\r\n\r\n".encode())
        await exchange.writer.drain()

    async with store_of(handle) as store:
        assert (await store.get("key"))[0] == b"0123456789"
        assert await store.get_range("key", position=3, size_bytes=4) == b"3456"


async def test_time_that_cannot_be_read_is_ours():
    """A blob whose Last-Modified cannot be read has ours, as one without."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("200 OK", ETag='"v"', Last_Modified="yesterday")

    began = time.time()
    async with store_of(handle) as store:
        assert (await store.head("key")).modified_ms >= int(began * 1000)
