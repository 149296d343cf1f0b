"""What the S3 store makes of reads that a server answers in another form than Amazon, or with other bytes."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from tests.support.raw_http import Exchange, serving
from tieringd.errors import StorageUnavailable
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings

CONTENT = b"0123456789"
WAYS = 2
"""The SDK sends the first request, and we send the others (`storage.s3.direct_requests`)."""


@asynccontextmanager
async def store_of(handle):
    async with serving(handle) as url:
        settings = S3Settings(
            bucket="archive", endpoint_url=url, access_key="me", secret_key="secret", url_style="path"
        )
        store = await S3Store.open(settings)
        try:
            yield store
        finally:
            await store.close()


@pytest.fixture(params=["whole", "handed on"])
def read(request):
    """Return a function that reads a range from a server, in each of the two ways."""

    async def read(handle, *, position: int, size_bytes: int) -> bytes:
        async with store_of(handle) as store:
            if request.param == "whole":
                return await store.get_range("key", position=position, size_bytes=size_bytes)
            found = bytearray()
            count = await store.read_range(
                "key", position=position, size_bytes=size_bytes, begin=lambda: found.extend
            )
            assert count == len(found)
            return bytes(found)

    return read


async def send(exchange: Exchange, status: str, body: bytes, *headers: str) -> None:
    """Answer with a body as it stands, of which no header tells the length."""
    head = (
        f"HTTP/1.1 {status}",
        'ETag: "0123456789abcdef0123456789abcdef"',
        "Last-Modified: Fri, 02 Jan 2026 03:04:05 GMT",
        *headers,
    )
    exchange.writer.write("\r\n".join([*head, "", ""]).encode() + body)
    await exchange.writer.drain()


def in_chunks(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)


@pytest.mark.parametrize("headers", [{}, {"Content_Range": "bytes 0-9/10"}], ids=["unsaid", "said"])
async def test_range_is_cut_from_a_whole_answer(read, headers):
    """A server that ignores the range answers 200 with the whole object."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("200 OK", CONTENT, **headers)

    assert await read(handle, position=3, size_bytes=4) == b"3456"


@pytest.mark.parametrize(
    ("said", "body"),
    [
        pytest.param("bytes 4-7/10", b"4567", id="elsewhere"),
        pytest.param("bytes 3-5/10", b"345", id="short"),
        pytest.param("bytes 3-9/10", b"3456789", id="long"),
        pytest.param("bytes 3-6/*", b"3456", id="of-unknown-length"),
        pytest.param("", b"3456", id="unsaid"),
    ],
)
async def test_other_range_than_asked_for_is_refused(read, said, body):
    """Bytes of another place would be taken for those of this one."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("206 Partial Content", body, Content_Range=said)

    with pytest.raises(StorageUnavailable, match="get_range key in bucket archive"):
        await read(handle, position=3, size_bytes=4)


async def test_range_over_the_end_is_what_there_is(read):
    """The answer says how long the object is."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("206 Partial Content", b"89", Content_Range="bytes 8-9/10")

    assert await read(handle, position=8, size_bytes=4) == b"89"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        pytest.param("206 Partial Content", in_chunks(b"34", b"56", b""), id="range"),
        pytest.param("200 OK", in_chunks(CONTENT, b""), id="whole"),
    ],
)
async def test_range_in_chunks_is_read(read, status, body):
    """A range that comes in chunks has no length, and the last chunk tells that it is whole."""

    async def handle(exchange: Exchange) -> None:
        await send(exchange, status, body, "Transfer-Encoding: chunked", "Content-Range: bytes 3-6/10")

    assert await read(handle, position=3, size_bytes=4) == b"3456"


async def test_other_range_in_chunks_is_refused(read):
    """A range in chunks is compared with the one that was asked for, although it has no length."""

    async def handle(exchange: Exchange) -> None:
        chunks = in_chunks(b"345", b"")
        await send(
            exchange,
            "206 Partial Content",
            chunks,
            "Transfer-Encoding: chunked",
            "Content-Range: bytes 3-6/10",
        )

    with pytest.raises(StorageUnavailable, match="received 3 bytes from position 3, not 4"):
        await read(handle, position=3, size_bytes=4)


async def test_object_in_chunks_is_read():
    """An object that comes in chunks is read by both ways of sending a request."""

    async def handle(exchange: Exchange) -> None:
        await send(exchange, "200 OK", in_chunks(b"01234", b"56789", b""), "Transfer-Encoding: chunked")

    async with store_of(handle) as store:
        for _ in range(WAYS):
            data, info = await store.get("key")
            assert (data, info.size_bytes) == (CONTENT, len(CONTENT))


async def test_object_whose_last_chunk_is_missing_is_refused():
    """A connection that ends before the last chunk has not brought the whole object."""

    async def handle(exchange: Exchange) -> None:
        await send(exchange, "200 OK", in_chunks(b"01234"), "Transfer-Encoding: chunked")
        exchange.writer.close()

    async with store_of(handle) as store:
        for _ in range(WAYS):
            with pytest.raises(StorageUnavailable, match="get key in bucket archive"):
                await store.get("key")


async def test_object_that_ends_with_its_connection_is_refused():
    """A body without length and chunks may have been cut anywhere. The error names the proxies."""

    async def handle(exchange: Exchange) -> None:
        await send(exchange, "200 OK", CONTENT, "Connection: close")
        exchange.writer.close()

    async with store_of(handle) as store:
        for _ in range(WAYS):
            with pytest.raises(StorageUnavailable, match="no content-length") as caught:
                await store.get("key")
            assert "proxies" in caught.value.hint


async def test_head_without_a_length_is_refused():
    """A HEAD whose answer has no length tells no size, and the error allows another try."""

    async def handle(exchange: Exchange) -> None:
        await send(exchange, "200 OK", b"", "Transfer-Encoding: chunked")

    async with store_of(handle) as store:
        for _ in range(WAYS):
            with pytest.raises(StorageUnavailable, match="no ContentLength"):
                await store.head("key")


async def test_range_that_ends_with_its_connection_is_read(read):
    """A range without length and chunks is whole if it has what its Content-Range tells."""

    async def handle(exchange: Exchange) -> None:
        await send(
            exchange, "206 Partial Content", b"3456", "Connection: close", "Content-Range: bytes 3-6/10"
        )
        exchange.writer.close()

    assert await read(handle, position=3, size_bytes=4) == b"3456"
