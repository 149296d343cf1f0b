"""
Listings of a container, page by page: they start after a key, on top of Azure's markers.

Azure continues a listing from a marker of its own, never from a key. The markers of recent pages are kept,
so the next page costs one request. From any other key a listing begins anew and skips, 5000 keys per
request: that happens after a restart, not for every page.

A marker names the object that came next when it was given. What was stored before that object since then
would be left out. So a page that is asked for later begins at the marker of the page before it, and skips.

The documents are parsed here and not by the SDK, which blocks the event loop for 140 ms per thousand
entries. The entries of directories in a hierarchical namespace are left out.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import quote, unquote
from xml.etree import ElementTree as ET

from tieringd.errors import StorageUnavailable
from tieringd.storage.azure.azure_requests import Requests
from tieringd.storage.azure.errors import AzureCall
from tieringd.storage.base import ListPage, ObjectInfo

_OK = frozenset({200})
_PAGE_LIMIT = 5000
_REMEMBERED_PAGES = 256
_FRESH_SECONDS = 60.0
"""How long a listing goes on from the marker that its last page ended with."""
_IN_THREAD_FROM_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class _Place:
    """The position at which a listing continues after a page."""

    begin: str | None
    """Marker of the response in which the page ended: from here the listing skips. None is its beginning."""
    end: str | None
    """Marker of what follows that response; None if the page ended inside it."""
    asked_at: float
    """When the page was asked for, in seconds of the listing's clock."""


class Listing:
    """The listings of one container, below one prefix."""

    def __init__(
        self,
        requests: Requests,
        *,
        container: str,
        key_prefix: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = requests
        self._container = container
        self._key_prefix = key_prefix
        self._now = now
        self._places: OrderedDict[tuple[str, str], _Place] = OrderedDict()

    async def page(self, prefix: str, *, start_after: str | None, limit: int) -> ListPage:
        """Return up to *limit* objects after *start_after*; fewer only at the end."""
        asked_at, found = self._now(), list[ObjectInfo]()
        place = self._places.get((prefix, start_after or ""), _Place(None, None, asked_at))
        is_fresh = place.end is not None and asked_at - place.asked_at < _FRESH_SECONDS
        marker = place.end if is_fresh else place.begin
        after = b"" if is_fresh else (start_after or "").encode()
        while True:
            begun_at = marker
            wanted = _PAGE_LIMIT if after and not found else limit - len(found)
            entries, marker = await self._entries(prefix, marker, wanted)
            found += [info for info in entries if info.key.encode() > after]
            if len(found) >= limit or marker is None:
                break
        if len(found) <= limit and marker is None:
            return ListPage(tuple(found), None)
        last_key = found[limit - 1].key
        end = marker if len(found) == limit else None
        self._remember(prefix, last_key, _Place(begun_at, end, asked_at))
        return ListPage(tuple(found[:limit]), last_key)

    async def _entries(
        self, prefix: str, marker: str | None, limit: int
    ) -> tuple[list[ObjectInfo], str | None]:
        """Return the objects of one response, and the marker of the next; None at the end."""
        call = AzureCall(f"list {prefix}*", self._container)
        query = f"?restype=container&comp=list&include=metadata&maxresults={limit}"
        for name, value in (("prefix", self._key_prefix + prefix), ("marker", marker)):
            query += f"&{name}={quote(value, safe='')}" if value else ""
        answer = await self._requests.send(call, "GET", "", query=query, accept=_OK)
        try:
            if len(answer.data) < _IN_THREAD_FROM_BYTES:
                return _parsed(answer.data, self._key_prefix)
            return await asyncio.to_thread(_parsed, answer.data, self._key_prefix)
        except (ET.ParseError, KeyError, ValueError) as error:
            raise StorageUnavailable(f"{call.subject}: the response is not a listing ({error!r})") from error

    def _remember(self, prefix: str, last_key: str, place: _Place) -> None:
        self._places[prefix, last_key] = place
        self._places.move_to_end((prefix, last_key))
        while len(self._places) > _REMEMBERED_PAGES:
            self._places.popitem(last=False)


def parse_crc32c(text: str | None) -> int | None:
    """Return the checksum that we wrote; None for a blob that another program wrote."""
    try:
        return int(text, 16) if text else None
    except ValueError:
        return None


def parse_date_ms(text: str) -> int:
    """Return the time of an HTTP date, in milliseconds since the epoch."""
    return int(parsedate_to_datetime(text).timestamp() * 1000)


def _parsed(document: bytes, key_prefix: str) -> tuple[list[ObjectInfo], str | None]:
    # The document is the store's own, and expat limits the expansion of entities.
    root = ET.fromstring(document)  # noqa: S314
    blobs = root.find("Blobs")
    if blobs is None:
        raise ValueError("the listing has no Blobs")
    found = [info for blob in blobs.iter("Blob") if (info := _listed(blob, key_prefix)) is not None]
    return found, root.findtext("NextMarker") or None


def _listed(blob: ET.Element, key_prefix: str) -> ObjectInfo | None:
    name = blob.find("Name")
    metadata = {each.tag.lower(): each.text for each in blob.iterfind("Metadata/*")}
    properties = {each.tag: each.text or "" for each in blob.iterfind("Properties/*")}
    if name is None or name.text is None:
        raise ValueError("an entry has no Name")
    if metadata.get("hdi_isfolder") == "true" or properties.get("ResourceType") == "directory":
        return None
    # Names that XML cannot hold come percent-encoded.
    key = unquote(name.text) if name.get("Encoded") == "true" else name.text
    return ObjectInfo(
        key.removeprefix(key_prefix),
        int(properties["Content-Length"]),
        '"' + properties["Etag"].strip('"') + '"',  # Headers have the quotes, listings do not.
        parse_crc32c(metadata.get("crc32c")),
        parse_date_ms(properties["Last-Modified"]),
    )
