"""Reads, listings and deletes of the GCS store, from servers that answer short, damaged or oddly."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.support.gcs_wire import MEDIA, answering, document, query_of, store_of
from tieringd.errors import StorageDenied, StorageUnavailable

if TYPE_CHECKING:
    from tests.support.raw_http import Exchange


async def test_truncated_download_is_noticed():
    """An answer that ends before its announced length is unavailable, not a short object."""

    async def handle(exchange: Exchange) -> None:
        head = "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-99/100\r\nContent-Length: 100\r\n"
        exchange.writer.write(f"{head}x-goog-generation: 7\r\n\r\n".encode() + b"only this")
        await exchange.writer.drain()
        exchange.reset()

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable):
            await store.get("key")
        with pytest.raises(StorageUnavailable):
            await store.get_range("key", position=0, size_bytes=100)


@pytest.mark.parametrize(
    ("body", "content_range"),
    [
        pytest.param(b"part", "bytes 10-13/100", id="fewer"),
        pytest.param(b"contents", "bytes 0-7/100", id="elsewhere"),
        pytest.param(b"contents", "", id="unsaid"),
    ],
)
async def test_range_that_is_not_the_one_asked_for_is_noticed(body, content_range):
    """A partial answer of another place or length, or of none, is not returned."""
    handle = answering(body, "206 Partial Content", Content_Range=content_range)
    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable):
            await store.get_range("key", position=10, size_bytes=8)


async def test_damaged_download_is_noticed():
    """Bytes that do not match the checksum that the server tells are not returned."""

    async def handle(exchange: Exchange) -> None:
        head = (
            "HTTP/1.1 200 OK\r\nContent-Length: 7\r\nx-goog-hash: md5=x==\r\nx-goog-hash: crc32c=AAAAAA==\r\n"
        )
        stamp = "x-goog-generation: 7\r\nLast-Modified: Fri, 02 Jan 2026 03:04:05 GMT\r\n\r\n"
        exchange.writer.write((head + stamp).encode() + b"content")
        await exchange.writer.drain()

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable, match="checksum"):
            await store.get("key")


async def test_object_without_a_checksum_is_read():
    """A server may keep no checksum of an object; its bytes are returned all the same."""
    async with store_of(answering(b"content", **MEDIA)) as store:
        data, info = await store.get("key")
    assert (data, info.crc32c, info.version) == (b"content", None, "7")


async def test_range_is_cut_from_a_whole_answer():
    """A server that ignores the range and answers 200 with everything does no harm."""
    async with store_of(answering(b"0123456789", **MEDIA)) as store:
        assert await store.get_range("key", position=3, size_bytes=4) == b"3456"


async def test_listing_passes_over_pages_without_objects():
    """A page may hold nothing, or only the key to start after, and yet have a successor."""
    pages = {
        None: {"nextPageToken": "one"},
        "one": {"items": [json.loads(document(b"", name="pre/a"))], "nextPageToken": "two"},
        "two": {"items": [json.loads(document(b"", name=f"pre/{name}")) for name in "bcd"]},
    }
    seen = []

    async def handle(exchange: Exchange) -> None:
        seen.append(query_of(exchange))
        await exchange.answer("200 OK", json.dumps(pages[seen[-1].get("pageToken")]).encode())

    async with store_of(handle, prefix="pre") as store:
        page = await store.list_page("", start_after="a", limit=2)
    assert [each.key for each in page.objects] == ["b", "c"]
    assert page.next_start_after == "c"
    assert [(query["startOffset"], query["maxResults"]) for query in seen] == [("pre/a", "3")] * 3


@pytest.mark.parametrize(
    ("status", "error"),
    [
        pytest.param("403 Forbidden", StorageDenied, id="denied"),
        pytest.param("500 Internal Server Error", StorageUnavailable, id="failed"),
    ],
)
async def test_delete_names_the_key_that_was_refused(status, error):
    """One refused key of many is an error that names it."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer(status if exchange.path.endswith("key-30") else "204 No Content")

    async with store_of(handle) as store:
        with pytest.raises(error, match="delete key-30 in bucket archive"):
            await store.delete_many([f"key-{number}" for number in range(40)])


async def test_deletes_are_sent_some_at_once():
    """Deletes overlap, and no more of them than sixteen."""
    waiting, most, are_enough = 0, 0, asyncio.Event()

    async def handle(exchange: Exchange) -> None:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        if waiting == 16:
            for _ in range(500):  # Turns of the loop in which more could come, were they sent.
                await asyncio.sleep(0)
            are_enough.set()
        await are_enough.wait()
        await exchange.answer("204 No Content")
        waiting -= 1

    async with store_of(handle, max_connections=40) as store:
        await store.delete_many([f"key-{number}" for number in range(40)])
    assert most == 16


async def test_entry_of_a_listing_without_a_name_is_refused():
    """An entry without a name makes the page no listing, and is no object with the key None."""
    entry = json.loads(document(b""))
    del entry["name"]
    async with store_of(answering(json.dumps({"items": [entry]}).encode())) as store:
        with pytest.raises(StorageUnavailable, match="without a name"):
            await store.list_page("")


async def test_body_that_ends_with_its_connection_is_refused():
    """A body without length and chunks may have been cut anywhere. The error names the proxies."""

    async def handle(exchange: Exchange) -> None:
        head = "HTTP/1.1 200 OK\r\nx-goog-generation: 7\r\nLast-Modified: Fri, 02 Jan 2026 03:04:05 GMT\r\n"
        exchange.writer.write(f"{head}Connection: close\r\n\r\n01234".encode())
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
        head = "HTTP/1.1 200 OK\r\nx-goog-generation: 7\r\nLast-Modified: Fri, 02 Jan 2026 03:04:05 GMT\r\n"
        body = "Transfer-Encoding: chunked\r\n\r\n5\r\n01234\r\n5\r\n56789\r\n0\r\n\r\n"
        exchange.writer.write(f"{head}{body}".encode())
        await exchange.writer.drain()

    async with store_of(handle) as store:
        assert (await store.get("key"))[0] == b"0123456789"
        assert await store.get_range("key", position=3, size_bytes=4) == b"3456"
