"""Joining on S3, against a server that tells as much of its copies as the test wants."""

from __future__ import annotations

import base64
import hashlib
import random
import re
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from crc32c import crc32c

from tests.support.raw_http import serving
from tieringd.errors import ChecksumRejected, ObjectNotFound, PreconditionFailed
from tieringd.storage.base import IfAbsent, JoinSource
from tieringd.storage.s3.joining import PART_BYTES_MIN
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings

DATE = "Fri, 02 Jan 2026 03:04:05 GMT"
PARTS = [
    random.Random(number).randbytes(size) for number, size in enumerate([PART_BYTES_MIN, 17, PART_BYTES_MIN])
]
WHOLE = b"".join(PARTS)


def encoded(data: bytes) -> str:
    return base64.b64encode(crc32c(data).to_bytes(4, "big")).decode()


def ranged(data: bytes, wanted: str) -> bytes:
    first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups()
    return data[int(first) : int(last) + 1]


class Server:
    """Objects in a dictionary, and the requests that a join makes of them."""

    def __init__(self, *, tells_crc32c: bool = False, tells_md5: bool = True, spoil=lambda data: data):
        self.objects: dict[str, bytes] = {}
        self.parts: dict[int, bytes] = {}
        self.tells_crc32c = tells_crc32c
        self.tells_md5 = tells_md5
        self.spoil = spoil
        self.copied: list[str | None] = []
        self.received_bytes = 0
        self.aborted = 0
        self.versions: dict[str, str] = {}

    async def __call__(self, exchange) -> None:
        body = await exchange.read_body()
        split = urlsplit(exchange.path)
        key, query = (
            unquote(split.path).removeprefix("/archive/"),
            parse_qs(split.query, keep_blank_values=True),
        )
        if split.path == "/archive":
            await exchange.answer("200 OK")
        elif exchange.method == "HEAD":
            await self._head(exchange, key)
        elif exchange.method == "GET":
            wanted, data = exchange.headers["range"], self.objects[key]
            facts = {"ETag": self._etag(data), "Last_Modified": DATE}
            facts["Content_Range"] = f"{wanted.replace('=', ' ')}/{len(data)}"
            await exchange.answer("206 Partial Content", ranged(data, wanted), **facts)
        elif "uploads" in query:
            await exchange.answer(
                "200 OK",
                b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
            )
        elif exchange.method == "DELETE":
            self.aborted += 1
            await exchange.answer("204 No Content")
        elif exchange.method == "POST":
            await self._complete(exchange, key, body)
        elif "x-amz-copy-source" in exchange.headers:
            await self._copy(exchange, int(query["partNumber"][0]))
        else:
            self.received_bytes += len(body)
            self.parts[int(query["partNumber"][0])] = body
            await exchange.answer("200 OK", ETag=self._etag(body))

    async def _head(self, exchange, key: str) -> None:
        if key not in self.objects:
            await exchange.answer("404 Not Found")
            return
        data = self.objects[key]
        lines = [f"ETag: {self.versions.get(key, self._etag(data))}", f"Last-Modified: {DATE}"]
        if self.tells_crc32c:
            lines += [f"x-amz-checksum-crc32c: {encoded(data)}", "x-amz-checksum-type: FULL_OBJECT"]
        head = ["HTTP/1.1 200 OK", f"Content-Length: {len(data)}", *lines, "", ""]
        exchange.writer.write("\r\n".join(head).encode())
        await exchange.writer.drain()

    async def _copy(self, exchange, number: int) -> None:
        key = unquote(exchange.headers["x-amz-copy-source"]).removeprefix("archive/")
        wanted = exchange.headers.get("x-amz-copy-source-range")
        self.copied.append(wanted)
        data = self.objects[key]
        if exchange.headers["x-amz-copy-source-if-match"] != self._etag(data):
            await exchange.answer(
                "412 Precondition Failed", b"<Error><Code>PreconditionFailed</Code></Error>"
            )
            return
        if wanted:
            data = ranged(data, wanted)
        data = self.parts[number] = self.spoil(data)
        checksum = f"<ChecksumCRC32C>{encoded(data)}</ChecksumCRC32C>" if self.tells_crc32c else ""
        body = f"<CopyPartResult><ETag>{self._etag(data)}</ETag>{checksum}</CopyPartResult>"
        await exchange.answer("200 OK", body.encode())

    async def _complete(self, exchange, key: str, body: bytes) -> None:
        if exchange.headers.get("if-none-match") == "*" and key in self.objects:
            await exchange.answer(
                "412 Precondition Failed", b"<Error><Code>PreconditionFailed</Code></Error>"
            )
            return
        numbers = [int(number) for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())]
        assert numbers == sorted(self.parts)
        if self.tells_crc32c:  # As Amazon does, it wants each part's checksum again.
            told = re.findall(r"<ChecksumCRC32C>([^<]+)</ChecksumCRC32C>", body.decode())
            assert told == [encoded(self.parts[number]) for number in numbers]
        self.objects[key] = b"".join(self.parts[number] for number in numbers)
        answer = b'<CompleteMultipartUploadResult><ETag>"whole-3"</ETag></CompleteMultipartUploadResult>'
        await exchange.answer("200 OK", answer)

    def _etag(self, data: bytes) -> str:
        return f'"{hashlib.md5(data).hexdigest()}"' if self.tells_md5 else f'"{crc32c(data):08x}-1"'


@asynccontextmanager
async def store_of(server: Server):
    async with serving(server) as url:
        store = await S3Store.open(
            S3Settings(bucket="archive", endpoint_url=url, access_key="k", secret_key="s", url_style="path")
        )
        try:
            yield store
        finally:
            await store.close()


def filled(server: Server, parts=PARTS) -> list[JoinSource]:
    sources = []
    for number, data in enumerate(parts):
        server.objects[f"a part/{number}"] = data
        sources.append(JoinSource(f"a part/{number}", len(data), crc32c(data)))
    return sources


LARGE = [PARTS[0], PARTS[2]]


@pytest.mark.parametrize(
    ("tells", "parts", "is_proven"),
    [
        pytest.param({"tells_crc32c": True}, PARTS, True, id="checksums-and-ranges"),
        pytest.param({"tells_crc32c": True, "tells_md5": False}, LARGE, True, id="checksums-alone"),
        pytest.param({"tells_md5": True}, LARGE, True, id="md5-of-whole-sources"),
        pytest.param({"tells_md5": True}, PARTS, False, id="md5-of-a-range-proves-nothing"),
        pytest.param({"tells_md5": False}, LARGE, False, id="nothing"),
    ],
)
async def test_copies_are_proven_by_what_the_server_tells(tells, parts, is_proven):
    """Checksums prove any copy, and MD5s that of a whole source. A copy without either is unproven."""
    server = Server(**tells)
    async with store_of(server) as store:
        whole = b"".join(parts)
        joined = await store.join("key", filled(server, parts), crc32c=crc32c(whole))
    assert server.objects["key"] == whole
    assert (joined.info.size_bytes, joined.info.crc32c, joined.is_proven) == (
        len(whole),
        crc32c(whole),
        is_proven,
    )
    # The part that is too small takes what it lacks from the next one.
    assert joined.host_bytes == server.received_bytes == (PART_BYTES_MIN if parts is PARTS else 0)
    assert server.aborted == 0


@pytest.mark.parametrize("tells", [{"tells_crc32c": True}, {"tells_md5": True}], ids=["crc32c", "md5"])
async def test_copy_that_is_wrong_is_found_out(tells):
    """A part that is not its source never counts as proven, and with a checksum nothing is stored."""
    server = Server(**tells, spoil=lambda data: data[:-1] + b"x")
    async with store_of(server) as store:
        sources, whole = filled(server, LARGE), b"".join(LARGE)
        if "tells_crc32c" in tells:
            with pytest.raises(ChecksumRejected):
                await store.join("key", sources, crc32c=crc32c(whole))
            assert ("key" in server.objects, server.aborted) == (False, 1)
        else:
            assert not (await store.join("key", sources, crc32c=crc32c(whole))).is_proven


async def test_source_that_is_replaced_meanwhile_ends_the_join():
    """The copy names the version that was checked; that is no lost condition of ours."""
    server = Server()
    async with store_of(server) as store:
        sources = filled(server, LARGE)
        server.versions["a part/1"] = '"another"'
        with pytest.raises(ChecksumRejected, match="a part/1 was replaced"):
            await store.join("key", sources, crc32c=crc32c(b"".join(LARGE)))
    assert ("key" in server.objects, server.aborted) == (False, 1)


async def test_condition_is_decided_by_the_completing_request():
    """An object that is there stays, and the parts go."""
    server = Server()
    async with store_of(server) as store:
        sources = filled(server, LARGE)
        server.objects["key"] = b"first"
        with pytest.raises(PreconditionFailed):
            await store.join("key", sources, crc32c=crc32c(b"".join(LARGE)), condition=IfAbsent())
    assert (server.objects["key"], server.aborted) == (b"first", 1)


async def test_sources_are_checked_before_anything_is_begun():
    """A source with another checksum, or none at all, costs no upload."""
    server = Server(tells_crc32c=True)
    async with store_of(server) as store:
        sources = filled(server, LARGE)
        server.objects["a part/1"] = bytes(len(LARGE[1]))
        with pytest.raises(ChecksumRejected):
            await store.join("key", sources, crc32c=crc32c(b"".join(LARGE)))
        assert server.copied == []
        del server.objects["a part/1"]
        with pytest.raises(ObjectNotFound):
            await store.join("key", sources, crc32c=crc32c(b"".join(LARGE)))
    assert (server.copied, server.aborted) == ([], 0)
