"""The dates in the answers of object stores, and when they show the store's clock."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tests.support import azure_wire, gcs_wire
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings
from tieringd.storage.store_times import StoreTimes

if TYPE_CHECKING:
    from tests.support.raw_http import Exchange

DATE = "Fri, 02 Jan 2026 03:04:05 GMT"
DATE_MS = 1_767_323_045_000
SIZE_BYTES = 4 << 20


@pytest.mark.parametrize("store_of", [gcs_wire.store_of, azure_wire.store_of], ids=["gcs", "azure"])
async def test_date_is_heard_before_a_large_body(store_of):
    """A body that takes minutes does not make its answer's date look minutes old: it counts from the head."""
    heard: list[int | None] = []
    is_heard = asyncio.Event()

    def listen(told_ms: int | None) -> None:
        heard.append(told_ms)
        is_heard.set()

    async def handle(exchange: Exchange) -> None:
        stamps = f"Last-Modified: {DATE}\r\nDate: {DATE}\r\nContent-Length: {SIZE_BYTES}\r\n\r\n"
        head = 'HTTP/1.1 200 OK\r\nETag: "v"\r\nx-goog-generation: 7\r\n'
        exchange.writer.write((head + stamps).encode())
        await exchange.writer.drain()
        await is_heard.wait()
        exchange.writer.write(bytes(SIZE_BYTES))
        await exchange.writer.drain()

    async with store_of(handle, read_timeout_seconds=60) as store:
        store.tell_time_to(listen)
        data, _ = await store.get("key")
    assert (len(data), heard) == (SIZE_BYTES, [DATE_MS])


async def test_s3_answers_that_begin_long_before_they_end_tell_no_time():
    """S3 sends the head of a completion or a copy at once, and works for minutes after that."""
    heard: list[int | None] = []
    store = await S3Store.open(
        S3Settings(bucket="b", endpoint_url="http://127.0.0.1:1", access_key="me", secret_key="secret")
    )
    store.tell_time_to(heard.append)
    parsed = {"ResponseMetadata": {"HTTPHeaders": {"date": DATE}}}
    for name in ("CompleteMultipartUpload", "CopyObject", "UploadPartCopy", "PutObject"):
        model = SimpleNamespace(name=name)
        await store._client.meta.events.emit(
            f"after-call.s3.{name}", http_response=None, parsed=parsed, model=model, context={}
        )
    await store.close()
    assert heard == [DATE_MS]


@pytest.mark.parametrize(
    ("headers", "told_ms"),
    [
        ({"date": DATE}, DATE_MS),
        ({"Date": DATE}, DATE_MS),
        ({"date": DATE, "age": "60"}, None),
        ({"date": "yesterday"}, None),
        ({"date": "Fri, 02 Jan 2026 03:04:05 -0000"}, None),
        ({}, None),
    ],
)
def test_answers_without_a_time_of_their_own_say_so(headers, told_ms):
    """An answer out of a cache tells an old time; one without a readable date tells none."""
    times, heard = StoreTimes(), []
    times.listen(heard.append)
    times.note_date(headers)
    assert heard == [told_ms]
