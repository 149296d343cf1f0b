"""Hand-written answers of Cloud Storage: documents, refusals, and servers that send them."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

from crc32c import crc32c

from tests.support.raw_http import PATIENT, Exchange, serving
from tieringd.storage.gcs.gcs_responses import encoded_crc32c
from tieringd.storage.gcs.store import GcsStore
from tieringd.storage.store_settings import GcsSettings

MEDIA = {"x_goog_generation": "7", "Last_Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}


def gcs_settings(url: str, **changes) -> GcsSettings:
    """Return settings for an emulator at *url*."""
    values = {"bucket": "archive", "endpoint": url, "credentials_source": "anonymous"}
    return GcsSettings(**PATIENT | values | changes)


@asynccontextmanager
async def store_of(handle, *, tls=None, **changes):
    """Serve *handle*, and yield a store that is connected to it."""
    async with serving(handle, tls=tls) as url:
        store = await GcsStore.open(gcs_settings(url, **changes))
        try:
            yield store
        finally:
            await store.close()


def document(data: bytes, **changes) -> bytes:
    """Return the document of an object that holds *data*."""
    facts = {
        "name": "key",
        "size": str(len(data)),
        "generation": "7",
        "crc32c": encoded_crc32c(crc32c(data)),
        "updated": "2026-01-02T03:04:05.678Z",
    }
    return json.dumps(facts | changes).encode()


def refusal(status: str, reason: str, message: str) -> bytes:
    """Return Google's error document."""
    return json.dumps(
        {
            "error": {
                "code": int(status[:3]),
                "message": message,
                "errors": [{"reason": reason, "message": message}],
            }
        }
    ).encode()


def refusing(status: str, reason: str = "", message: str = "said the server", **headers: str):
    """Return a handler that refuses everything; without a reason, with an empty body."""

    async def handle(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.answer(status, refusal(status, reason, message) if reason else b"", **headers)

    return handle


def answering(body: bytes, status: str = "200 OK", **headers: str):
    """Return a handler that sends the same answer to every request."""

    async def handle(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.answer(status, body, **headers)

    return handle


def parts_of(exchange: Exchange, body: bytes) -> tuple[dict[str, str], bytes]:
    """Return the description and the bytes in a multipart/related body."""
    kind, _, boundary = exchange.headers["content-type"].partition("; boundary=")
    assert kind == "multipart/related"
    mark = f"--{boundary}".encode()
    empty, description, data, end = body.split(mark)
    assert (empty, end) == (b"", b"--\r\n")
    head, _, text = description.partition(b"\r\n\r\n")
    assert head == b"\r\nContent-Type: application/json; charset=UTF-8"
    head, _, content = data.partition(b"\r\n\r\n")
    assert head == b"\r\nContent-Type: application/octet-stream"
    return json.loads(text), content.removesuffix(b"\r\n")


def query_of(exchange: Exchange) -> dict[str, str]:
    """Return the query parameters of a request."""
    return {name: value for name, (value,) in parse_qs(urlsplit(exchange.path).query).items()}
