"""Joining on Azure, against a service that copies blocks from its own blobs: Azurite cannot."""

from __future__ import annotations

import base64
import hashlib
import re
from contextlib import AsyncExitStack
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from crc32c import crc32c

from tests.support.azure_metadata_server import TokenService
from tests.support.azure_wire import content, store_of
from tests.support.raw_http import serving
from tieringd.errors import ChecksumRejected, ObjectNotFound, PreconditionFailed, StorageDenied
from tieringd.storage.azure.store import AzureStore
from tieringd.storage.base import IfAbsent, JoinSource
from tieringd.storage.store_settings import AzureSettings

PARTS = [content(1000), content(2000), content(3)]
WHOLE = b"".join(PARTS)
DATE = "Fri, 02 Jan 2026 03:04:05 GMT"


class Service:
    """Blobs in a dictionary, and the requests that a join makes of them."""

    def __init__(self, *, keeps_md5: bool = True, token: str | None = None):
        self.blobs: dict[str, bytes] = {}
        self.blocks: dict[str, bytes] = {}
        self.keeps_md5 = keeps_md5
        self.token = token
        self.copies: list[dict[str, str]] = []
        self.refuses_copies_with: tuple[str, str] | None = None

    async def __call__(self, exchange) -> None:
        body = await exchange.read_body()
        parts = urlsplit(exchange.path)
        key, operation = (
            unquote(parts.path).removeprefix("/account/archive/"),
            parse_qs(parts.query).get("comp"),
        )
        if exchange.method == "HEAD":
            await self._head(exchange, key)
        elif operation == ["block"] and "x-ms-copy-source" in exchange.headers:
            await self._copy(exchange, parse_qs(parts.query)["blockid"][0])
        elif operation == ["blocklist"]:
            await self._commit(exchange, key, body)
        else:
            await exchange.answer("400 Bad Request", x_ms_error_code="UnexpectedRequest")

    async def _head(self, exchange, key: str) -> None:
        if key not in self.blobs:
            await exchange.answer("404 Not Found", x_ms_error_code="BlobNotFound")
            return
        data = self.blobs[key]
        facts = {"ETag": self._etag(key), "Last_Modified": DATE, "x_ms_meta_crc32c": f"{crc32c(data):08x}"}
        if self.keeps_md5:
            facts["Content_MD5"] = self._md5(data)
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in facts.items()]
        head = ["HTTP/1.1 200 OK", f"Content-Length: {len(data)}", *lines, "", ""]
        exchange.writer.write("\r\n".join(head).encode())
        await exchange.writer.drain()

    async def _copy(self, exchange, block: str) -> None:
        headers = exchange.headers
        self.copies.append(headers)
        if self.refuses_copies_with is not None:
            status, code = self.refuses_copies_with
            await exchange.answer(status, x_ms_error_code=code)
            return
        source = urlsplit(headers["x-ms-copy-source"])
        key = unquote(source.path).removeprefix("/account/archive/")
        signature = parse_qs(source.query)
        may_read = (
            headers.get("x-ms-copy-source-authorization") == f"Bearer {self.token}"
            if self.token
            else signature.get("sp") == ["r"] and signature.get("sr") == ["b"] and "sig" in signature
        )
        data = self.blobs[key]
        if headers["content-length"] != "0" or not may_read:
            await exchange.answer("403 Forbidden", x_ms_error_code="CannotVerifyCopySource")
        elif headers["x-ms-source-if-match"] != self._etag(key):
            await exchange.answer("412 Precondition Failed", x_ms_error_code="SourceConditionNotMet")
        elif headers.get("x-ms-source-content-md5", self._md5(data)) != self._md5(data):
            await exchange.answer("400 Bad Request", x_ms_error_code="Md5Mismatch")
        else:
            self.blocks[block] = data
            await exchange.answer("201 Created")

    async def _commit(self, exchange, key: str, body: bytes) -> None:
        if exchange.headers.get("if-none-match") == "*" and key in self.blobs:
            await exchange.answer("409 Conflict", x_ms_error_code="BlobAlreadyExists")
            return
        names = re.findall("<Uncommitted>([^<]+)</Uncommitted>", body.decode())
        self.blobs[key] = b"".join(self.blocks[name] for name in names)
        assert exchange.headers["x-ms-meta-crc32c"] == f"{crc32c(self.blobs[key]):08x}"
        await exchange.answer("201 Created", ETag=self._etag(key), Last_Modified=DATE)

    def _etag(self, key: str) -> str:
        return f'"{crc32c(self.blobs[key]):08x}"'

    @staticmethod
    def _md5(data: bytes) -> str:
        return base64.b64encode(hashlib.md5(data).digest()).decode()


def filled(service: Service, *, prefix: str = "") -> list[JoinSource]:
    sources = []
    for number, data in enumerate(PARTS):
        service.blobs[f"{prefix}a part/{number}"] = data
        sources.append(JoinSource(f"a part/{number}", len(data), crc32c(data)))
    return sources


async def join(store, sources, **changes):
    return await store.join("key", sources, **{"crc32c": crc32c(WHOLE)} | changes)


@pytest.mark.parametrize("keeps_md5", [True, False])
async def test_service_copies_blocks_by_a_signed_address(keeps_md5):
    """A store with a shared key signs each source, and no byte comes through this host."""
    service = Service(keeps_md5=keeps_md5)
    async with store_of(service, prefix="dir") as store:
        joined = await join(store, filled(service, prefix="dir/"))
    assert service.blobs["dir/key"] == WHOLE
    assert (joined.info.size_bytes, joined.info.crc32c) == (len(WHOLE), crc32c(WHOLE))
    assert (joined.host_bytes, joined.is_proven) == (0, keeps_md5)
    assert len(service.copies) == 3


async def test_identity_shows_its_token_for_the_source(server_tls, certificate, monkeypatch):
    """A store with an identity sends its token for the source too. It asks for the token once."""
    tokens, service = TokenService(), Service(token="secret-token-1")
    async with AsyncExitStack() as resources:
        metadata = await resources.enter_async_context(serving(tokens))
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", metadata)
        url = await resources.enter_async_context(serving(service, tls=server_tls))
        store = await AzureStore.open(
            AzureSettings(
                storage_account="account",
                container="archive",
                endpoint=f"{url}/account",
                credentials="azure_vm_instance_metadata",
                trust_file=str(certificate),
            )
        )
        resources.push_async_callback(store.close)
        joined = await join(store, filled(service))
    assert joined is not None
    assert service.blobs["key"] == WHOLE
    assert tokens.requests == 1
    assert all("sig=" not in one["x-ms-copy-source"] for one in service.copies)


async def test_service_without_the_request_is_asked_once():
    """A service that does not know it says so; the caller streams, and the next join asks nothing."""
    service = Service()
    service.refuses_copies_with = ("501 Not Implemented", "NotImplemented")
    async with store_of(service) as store:
        sources = filled(service)
        assert await join(store, sources) is None
        assert await join(store, sources) is None
    assert len(service.copies) == 1
    assert "key" not in service.blobs


async def test_source_that_the_service_may_not_read_is_streamed():
    """An account may forbid signatures: that is no error, and it may change."""
    service = Service()
    service.refuses_copies_with = ("403 Forbidden", "CannotVerifyCopySource")
    async with store_of(service) as store:
        sources = filled(service)
        assert await join(store, sources) is None
        service.refuses_copies_with = None
        assert await join(store, sources) is not None


async def test_denied_join_is_denied():
    """Credentials that are wrong are no reason to move the bytes here."""
    service = Service()
    service.refuses_copies_with = ("403 Forbidden", "AuthenticationFailed")
    async with store_of(service) as store:
        with pytest.raises(StorageDenied):
            await join(store, filled(service))


async def test_condition_is_decided_when_the_blob_is_made():
    """A blob that is there stays as it was."""
    service = Service()
    async with store_of(service) as store:
        sources = filled(service)
        service.blobs["key"] = b"first"
        with pytest.raises(PreconditionFailed):
            await join(store, sources, condition=IfAbsent())
    assert service.blobs["key"] == b"first"


async def test_source_that_is_another_object_is_refused():
    """Another size or checksum than announced, or another blob meanwhile, ends the join."""
    service = Service()
    async with store_of(service) as store:
        sources = filled(service)
        with pytest.raises(ChecksumRejected):
            await join(store, sources, crc32c=1)
        service.blobs["a part/1"] = content(1999)
        with pytest.raises(ChecksumRejected):
            await join(store, sources)
        service.refuses_copies_with = ("412 Precondition Failed", "SourceConditionNotMet")
        filled(service)
        with pytest.raises(ChecksumRejected):
            await join(store, sources)
        del service.blobs["a part/2"]
        with pytest.raises(ObjectNotFound):
            await join(store, sources)
    assert "key" not in service.blobs
