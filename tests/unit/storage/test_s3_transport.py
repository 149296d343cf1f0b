"""How the S3 store sends: once, through the environment's proxy, on few connections, with its attributes."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from crc32c import crc32c

from tests.support.raw_http import Exchange, serving
from tieringd.errors import StorageUnavailable
from tieringd.formats.crc32c_combine import combine_crc32c
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings

MODIFIED = {"ETag": '"version"', "Last_Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}
MIB = 1 << 20
CREATED = b"<InitiateMultipartUploadResult><UploadId>one</UploadId></InitiateMultipartUploadResult>"
COMPLETED = b'<CompleteMultipartUploadResult><ETag>"whole-2"</ETag></CompleteMultipartUploadResult>'


class Recorder:
    """Answers every request with success, and keeps the exchanges."""

    def __init__(self) -> None:
        self.seen: list[Exchange] = []

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.read_body()
        self.seen.append(exchange)
        body = b"content" if exchange.method == "GET" else b""
        if exchange.method == "POST":
            body = CREATED if exchange.path.endswith("?uploads") else COMPLETED
        await exchange.answer("200 OK", body, **MODIFIED)


@asynccontextmanager
async def store_at(url: str, **changes):
    values = {"bucket": "archive", "endpoint_url": url, "access_key": "me", "secret_key": "secret"}
    store = await S3Store.open(S3Settings(**values | {"url_style": "path"} | changes))
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, {}, id="the-bucket's"),
        pytest.param({"encryption": "AES256"}, {"": "AES256"}, id="managed"),
        pytest.param(
            {"encryption": "aws:kms", "kms_key_id": "a-key"},
            {"": "aws:kms", "-aws-kms-key-id": "a-key"},
            id="kms",
        ),
    ],
)
async def test_every_object_is_encrypted_as_configured(slice_of, changes, expected):
    """Small puts, files and uploads in parts ask for the encryption; their parts need not."""
    server, data = Recorder(), random.Random(4).randbytes(6 * MIB)
    async with (
        serving(server) as url,
        store_at(url, multipart_threshold_bytes=6 * MIB, multipart_part_bytes=5 * MIB, **changes) as store,
    ):
        await store.put("manifest", b"content", crc32c=0)
        await store.put("segment", slice_of(data[:MIB]), crc32c=0)
        await store.put("large", slice_of(data), crc32c=crc32c(data))
    asked = [each for each in server.seen if "partNumber" not in each.path and "uploadId" not in each.path]
    assert [each.method for each in asked] == ["PUT", "PUT", "POST"]
    name = "x-amz-server-side-encryption"
    for exchange in asked:
        headers = {key.removeprefix(name): v for key, v in exchange.headers.items() if key.startswith(name)}
        assert headers == expected


@pytest.mark.parametrize("code", ["InternalError", "SlowDown"])
async def test_completion_with_an_error_in_its_body_is_no_success(slice_of, code):
    """S3 may answer 200 to CompleteMultipartUpload, and tell only in the body that nothing was stored."""
    recorder, data = Recorder(), random.Random(4).randbytes(6 * MIB)

    async def server(exchange: Exchange) -> None:
        if exchange.method == "POST" and not exchange.path.endswith("?uploads"):
            await exchange.read_body()
            recorder.seen.append(exchange)
            body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>no</Message></Error>'
            await exchange.answer("200 OK", body.encode())
        else:
            await recorder(exchange)

    async with (
        serving(server) as url,
        store_at(url, multipart_threshold_bytes=6 * MIB, multipart_part_bytes=5 * MIB) as store,
    ):
        with pytest.raises(StorageUnavailable):
            await store.put("key", slice_of(data), crc32c=crc32c(data))
    completions = [one for one in recorder.seen if one.method == "POST" and "uploadId" in one.path]
    assert len(completions) == 1


async def test_storage_class_is_for_segments_only(slice_of):
    """Files and uploads in parts get the class; manifests, which are replaced often, do not."""
    server, data = Recorder(), random.Random(4).randbytes(6 * MIB)
    async with (
        serving(server) as url,
        store_at(url, multipart_threshold_bytes=6 * MIB, storage_class="STANDARD_IA") as store,
    ):
        await store.put("manifest", b"content", crc32c=0)
        await store.put("segment", slice_of(data[:MIB]), crc32c=0)
        await store.put("large", slice_of(data), crc32c=crc32c(data))
    classes = [each.headers.get("x-amz-storage-class") for each in server.seen]
    assert classes == [None, "STANDARD_IA", "STANDARD_IA", None, None]


async def test_request_is_sent_once():
    """A PUT whose connection breaks is not repeated below our retries: the first may have won."""
    requests = []

    async def handle(exchange: Exchange) -> None:
        requests.append(exchange.method)
        await exchange.read_body()
        if len(requests) == 1:
            exchange.reset()
        else:
            await exchange.answer("412 Precondition Failed")

    async with serving(handle) as url, store_at(url) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.put("key", b"content", crc32c=0)
    assert caught.value.outcome_unknown
    assert requests == ["PUT"]


async def test_connections_are_as_many_as_configured(slice_of):
    """Reads and writes share the pool, and the threads are as many as its connections."""
    server, data = Recorder(), random.Random(4).randbytes(2 * MIB)
    async with serving(server) as url, store_at(url, max_connections=3) as store:
        await asyncio.gather(
            *(store.put("segment", slice_of(data), crc32c=0) for _ in range(10)),
            *(store.get("key") for _ in range(20)),
        )
        assert store._executor._max_workers == 3
    assert {each.connection for each in server.seen} == {1, 2, 3}


@pytest.mark.parametrize("page", [b"<html></html>", b"<html><p>Welcome", b""])
async def test_answer_of_another_server_is_not_believed(page):
    """A page that answers in the store's place is no empty listing and no stored object."""

    async def handle(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.answer("200 OK", page, Content_Type="text/html")

    async with serving(handle) as url, store_at(url) as store:
        for call in (store.list_page(""), store.get("key"), store.put("key", b"content", crc32c=0)):
            with pytest.raises(StorageUnavailable):
                await call


async def test_proxy_of_the_environment_is_used(monkeypatch, slice_of):
    """A plain request goes to the proxy with its whole address, unless the host is exempt."""
    proxy, data = Recorder(), random.Random(4).randbytes(2 * MIB)
    async with serving(proxy) as proxy_url:
        monkeypatch.setenv("HTTP_PROXY", proxy_url)
        async with store_at("http://store.invalid:8333") as store:
            await store.put("key", slice_of(data), crc32c=0)
        assert [each.path for each in proxy.seen] == ["http://store.invalid:8333/archive/key"]
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        server = Recorder()
        async with serving(server) as url, store_at(url) as store:
            await store.get("key")
        assert (len(proxy.seen), len(server.seen)) == (1, 1)


async def test_proxy_of_the_environment_tunnels_tls(monkeypatch, slice_of, server_tls, certificate):
    """The proxy only connects a TLS client, and reads nothing of what the client sends."""
    server, data = Recorder(), random.Random(4).randbytes(2 * MIB)
    tunnels = []

    async def tunnel(exchange: Exchange) -> None:
        tunnels.append((exchange.method, exchange.path))
        host, port = exchange.path.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        exchange.writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            await asyncio.gather(_pipe(exchange.reader, writer), _pipe(reader, exchange.writer))
        finally:
            writer.transport.abort()

    async with serving(tunnel) as proxy_url, serving(server, tls=server_tls) as url:
        monkeypatch.setenv("HTTPS_PROXY", proxy_url)
        async with store_at(url, trust_file=str(certificate)) as store:
            await store.put("key", slice_of(data), crc32c=0)
    assert tunnels == [("CONNECT", urlsplit(url).netloc)]
    assert [each.path for each in server.seen] == ["/archive/key"]


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.mark.parametrize("cut", [0, 1, 7, 4096, 99_999, 100_000])
def test_checksums_of_pieces_combine_to_that_of_the_whole(cut):
    """The checksum of two pieces follows from theirs, wherever the cut is."""
    data = random.Random(5).randbytes(100_000)
    assert combine_crc32c(crc32c(data[:cut]), crc32c(data[cut:]), len(data) - cut) == crc32c(data)
