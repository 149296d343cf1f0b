"""Listings of the Azure store: markers, restarts, directories, and what each page costs."""

from __future__ import annotations

from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

import pytest

from tests.support.raw_http import Exchange, serving
from tieringd.errors import StorageUnavailable
from tieringd.storage.azure.listing import Listing
from tieringd.storage.azure.store import AzureStore
from tieringd.storage.store_settings import AzureSettings


class Container:
    """Lists its keys page by page, as the service does: from a marker, never from a key."""

    def __init__(self, *keys: str, largest_page: int = 5000):
        self.keys = sorted(keys, key=str.encode)
        self.largest_page = largest_page
        self.directories: set[str] = set()
        self.attributes = ""
        self.requests: list[tuple[str, int]] = []

    async def __call__(self, exchange: Exchange) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(exchange.path).query).items()}
        assert (query["comp"], query["restype"], query["include"]) == ("list", "container", "metadata")
        limit = min(int(query["maxresults"]), self.largest_page)
        self.requests.append((query.get("marker", ""), int(query["maxresults"])))
        keys = [key for key in self.keys if key.startswith(query.get("prefix", ""))]
        start = self._start_of(query.get("marker", ""), keys)
        end = start + limit
        entries = "".join(self._entry(key) for key in keys[start:end])
        marker = self._marker_at(end, keys) if end < len(keys) else ""
        document = (
            f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults><Blobs>{entries}</Blobs>'
            f"<NextMarker>{marker}</NextMarker></EnumerationResults>"
        )
        await exchange.answer("200 OK", document.encode(), Content_Type="application/xml")

    def _start_of(self, marker: str, keys: list[str]) -> int:
        del keys
        return int(marker.removeprefix("after-") or 0)

    def _marker_at(self, end: int, keys: list[str]) -> str:
        del keys
        return f"after-{end}"

    def _entry(self, key: str) -> str:
        metadata = (
            "<hdi_isfolder>true</hdi_isfolder>" if key in self.directories else "<crc32c>0000002a</crc32c>"
        )
        return (
            f"<Blob><Name{self.attributes}>{escape(key)}</Name><Properties><Etag>0x1</Etag>"
            "<Last-Modified>Fri, 02 Jan 2026 03:04:05 GMT</Last-Modified><Content-Length>7</Content-Length>"
            f"</Properties><Metadata>{metadata}</Metadata></Blob>"
        )


@asynccontextmanager
async def store_of(handle, **changes):
    async with serving(handle) as url:
        values = {"storage_account": "account", "container": "archive", "endpoint": f"{url}/account"}
        store = await AzureStore.open(AzureSettings(**values | {"shared_key": "c2VjcmV0"} | changes))
        try:
            yield store
        finally:
            await store.close()


async def listed(store: AzureStore, prefix: str, *, limit: int, start_after: str | None = None):
    pages = []
    while True:
        page = await store.list_page(prefix, start_after=start_after, limit=limit)
        pages.append([each.key for each in page.objects])
        start_after = page.next_start_after
        if start_after is None:
            return pages


def numbered(count: int) -> list[str]:
    return [f"key-{number:05d}" for number in range(count)]


async def test_entry_says_what_the_listing_knows():
    """A listed object has its key without the prefix, and the version that a head would tell."""
    async with store_of(Container("pre/a&b"), prefix="pre") as store:
        (entry,) = (await store.list_page("a")).objects
    assert (entry.key, entry.size_bytes, entry.version) == ("a&b", 7, '"0x1"')
    assert (entry.crc32c, entry.modified_ms) == (0x2A, 1_767_323_045_000)


async def test_next_page_costs_one_request():
    """Page after page, each goes on from the marker that the last one left."""
    container = Container(*numbered(10))
    async with store_of(container) as store:
        assert await listed(store, "key", limit=4) == [numbered(10)[:4], numbered(10)[4:8], numbered(10)[8:]]
    assert container.requests == [("", 4), ("after-4", 4), ("after-8", 4)]


async def test_two_listings_do_not_disturb_each_other():
    """Markers belong to a prefix and a key, so that listings can take turns."""
    container = Container(*(f"{name}/{number}" for name in "ab" for number in range(4)))
    async with store_of(container) as store:
        first = [await store.list_page(f"{name}/", limit=2) for name in "ab"]
        second = [
            await store.list_page(f"{name}/", start_after=page.next_start_after, limit=2)
            for name, page in zip("ab", first, strict=True)
        ]
    assert [[each.key for each in page.objects] for page in second] == [["a/2", "a/3"], ["b/2", "b/3"]]
    assert len(container.requests) == 4


async def test_listing_from_a_key_without_marker_skips_in_large_pages():
    """A listing from a key without a marker skips 5000 keys per request. Then each page costs one request."""
    keys = numbered(12_000)
    container = Container(*keys)
    async with store_of(container) as store:
        pages = await listed(store, "key", limit=1000, start_after=keys[8500])
    assert [key for page in pages for key in page] == keys[8501:]
    assert all(len(page) == 1000 for page in pages[:-1])
    assert container.requests[:2] == [("", 5000), ("after-5000", 5000)]
    assert len(container.requests) == len(pages) + 2  # One to skip, and one where a page crosses two answers.


async def test_short_answers_are_joined_to_a_page():
    """The service may answer with fewer entries than asked for; the page is full all the same."""
    container = Container(*numbered(7), largest_page=2)
    async with store_of(container) as store:
        assert await listed(store, "", limit=5) == [numbered(7)[:5], numbered(7)[5:]]


async def test_name_that_xml_cannot_hold_is_decoded():
    """A key with a control character comes percent-encoded, and is given as it was put."""

    async def handle(exchange: Exchange) -> None:
        container = Container("pre/a%01b")
        container.attributes = ' Encoded="true"'
        await container(exchange)

    async with store_of(handle, prefix="pre") as store:
        assert [each.key for each in (await store.list_page("")).objects] == ["a\x01b"]


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(b"<html>", id="not-xml"),
        pytest.param(b"<html/>", id="other-xml"),
        pytest.param(b"<r><Blobs><Blob><Name>a</Name></Blob></Blobs></r>", id="no-properties"),
    ],
)
async def test_answer_that_is_no_listing_is_worth_another_try(document):
    """Something between us and the store may answer 200 with a page of its own."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("200 OK", document)

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable, match="not a listing"):
            await store.list_page("")


@pytest.mark.parametrize("limit", [1, 2, 10])
async def test_directories_are_left_out(limit):
    """Directories of a hierarchical namespace are entries of a listing, but no objects."""
    container = Container("a", "a/b", "a/b/1", "a/b/2", "c", "d", "d/1", "z")
    container.directories = {"a", "a/b", "d", "z"}
    async with store_of(container) as store:
        pages = await listed(store, "", limit=limit)
    assert [key for page in pages for key in page] == ["a/b/1", "a/b/2", "c", "d/1"]
    assert all(len(page) == limit for page in pages[:-1] if page)


async def test_remembered_pages_are_bounded():
    """The store keeps few markers, however many listings begin, and the oldest go first."""
    container = Container(*(f"{number:03d}/{name}" for number in range(300) for name in "ab"))
    async with store_of(container) as store:
        for number in range(300):
            await store.list_page(f"{number:03d}/", limit=1)
        assert len(store._listing._places) == 256
        page = await store.list_page("000/", start_after="000/a", limit=1)
        assert [each.key for each in page.objects] == ["000/b"]


class NamingMarkers(Container):
    """Marks the end of a page with the key that comes next, as the service does."""

    def _start_of(self, marker: str, keys: list[str]) -> int:
        return sum(key < marker for key in keys)

    def _marker_at(self, end: int, keys: list[str]) -> str:
        return keys[end]


@pytest.mark.parametrize(
    ("seconds", "marker", "keys"),
    [
        pytest.param(59, "c/1", ["c/1", "c/2"], id="at-once"),
        pytest.param(60, "b/1", ["b/3", "b/4", "c/1", "c/2"], id="later"),
    ],
)
async def test_page_that_is_asked_for_later_has_what_was_stored_since(seconds, marker, keys):
    """A page that is asked for a minute after the last one begins where that one began, by one request."""
    container, now = NamingMarkers("a/1", "a/2", "b/1", "b/2", "c/1", "c/2"), 1000.0
    async with store_of(container) as store:
        listing = Listing(store._requests, container="archive", key_prefix="", now=lambda: now)
        await listing.page("", start_after=None, limit=2)
        page = await listing.page("", start_after="a/2", limit=2)
        assert page.next_start_after == "b/2"
        container.keys = sorted([*container.keys, "b/3", "b/4"])
        now += seconds
        page = await listing.page("", start_after="b/2", limit=10)
    assert [each.key for each in page.objects] == keys
    assert [asked for asked, _ in container.requests] == ["", "b/1", marker]


async def test_page_after_a_late_one_is_whole():
    """A listing whose pages all come late returns each object once, also from short answers."""
    container, now = NamingMarkers(*numbered(20), largest_page=4), 0.0
    async with store_of(container) as store:
        listing = Listing(store._requests, container="archive", key_prefix="", now=lambda: now)
        found, start_after = list[str](), None
        for _ in range(7):
            page = await listing.page("key", start_after=start_after, limit=3)
            found += [each.key for each in page.objects]
            start_after = page.next_start_after
            now += 3600
    assert (found, start_after) == (numbered(20), None)
