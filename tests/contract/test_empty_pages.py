"""Listings of S3, Cloud Storage and Azure, whose servers may send an empty page before the last one."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.contract.object_store_contract import EmptyPagesContract
from tests.support import azure_wire, gcs_wire
from tests.support.raw_http import Exchange, serving
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings

TOKEN = "page-"


def paged(pages, *, token_name, start_name, answer):
    """Return a server: it goes on from a token, or after the key that the client has got last."""
    # Without a marker, a listing that starts after a key starts after its page.
    after = {page[-1]: number + 1 for number, page in enumerate(pages) if page}

    async def handle(exchange: Exchange) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(exchange.path).query).items()}
        number = after.get(query.get(start_name, ""), 0)
        if token_name in query:
            number = int(query[token_name].removeprefix(TOKEN))
        keys = pages[number] if number < len(pages) else []
        token = f"{TOKEN}{number + 1}" if number + 1 < len(pages) else ""
        await answer(exchange, keys, token)

    return handle


class TestS3(EmptyPagesContract):
    """ListObjectsV2."""

    @pytest.fixture
    def paging(self):
        async def answer(exchange, keys, token):
            entries = "".join(
                f"<Contents><Key>{key}</Key><Size>7</Size><ETag>&quot;v&quot;</ETag>"
                "<LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>"
                for key in keys
            )
            document = (
                '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
                f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>"
                f"{f'<NextContinuationToken>{token}</NextContinuationToken>' if token else ''}"
                f"{entries}</ListBucketResult>"
            )
            await exchange.answer("200 OK", document.encode())

        @asynccontextmanager
        async def opened(pages):
            handle = paged(pages, token_name="continuation-token", start_name="start-after", answer=answer)
            async with serving(handle) as url:
                settings = S3Settings(
                    bucket="archive", endpoint_url=url, access_key="me", secret_key="secret", url_style="path"
                )
                store = await S3Store.open(settings)
                try:
                    yield store
                finally:
                    await store.close()

        return opened


class TestGcs(EmptyPagesContract):
    """The list of Google's own API, which says that a page may be empty."""

    @pytest.fixture
    def paging(self):
        async def answer(exchange, keys, token):
            items = [json.loads(gcs_wire.document(b"content", name=key)) for key in keys]
            document = {"items": items} | ({"nextPageToken": token} if token else {})
            await exchange.answer("200 OK", json.dumps(document).encode())

        # A page that starts at a key begins with it, and the store leaves it out.
        return lambda pages: gcs_wire.store_of(
            paged(pages, token_name="pageToken", start_name="startOffset", answer=answer)
        )


class TestAzure(EmptyPagesContract):
    """List Blobs, whose pages may be empty where a partition of the service ends."""

    @pytest.fixture
    def paging(self):
        async def answer(exchange, keys, token):
            blobs = "".join(
                f"<Blob><Name>{key}</Name><Properties><Etag>0x1</Etag>"
                "<Last-Modified>Fri, 02 Jan 2026 03:04:05 GMT</Last-Modified>"
                "<Content-Length>7</Content-Length></Properties>"
                "<Metadata><crc32c>0000002a</crc32c></Metadata></Blob>"
                for key in keys
            )
            document = (
                f"<EnumerationResults><Blobs>{blobs}</Blobs>"
                f"<NextMarker>{token}</NextMarker></EnumerationResults>"
            )
            await exchange.answer("200 OK", document.encode(), Content_Type="application/xml")

        return lambda pages: azure_wire.store_of(
            paged(pages, token_name="marker", start_name="unused", answer=answer)
        )
