"""Every object under a prefix, over all pages of a store's listing."""

from __future__ import annotations

from collections.abc import AsyncIterator

from tieringd.storage.base import ObjectInfo, ObjectStore


async def list_objects(
    store: ObjectStore, prefix: str, *, start_after: str | None = None
) -> AsyncIterator[ObjectInfo]:
    """
    Yield the objects whose key begins with *prefix*, by key. The next page is requested when it is needed.

    Keys up to *start_after* are left out.

    Raises:
        StorageUnavailable: The store does not answer.
    """
    while True:
        page = await store.list_page(prefix, start_after=start_after)
        for info in page.objects:
            yield info
        start_after = page.next_start_after
        if start_after is None:
            return
