"""Azure's side of the wire, said by hand: servers that a test controls, and stores that speak to them."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager

from tests.support.raw_http import serving
from tieringd.storage.azure.store import AzureStore
from tieringd.storage.settings import AzureSettings

STORED = {"ETag": '"version"', "Last_Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}
"""What an answer says of an object, as arguments of `Exchange.answer`."""


def azure_settings(url: str, **changes) -> AzureSettings:
    """Return settings for an account at *url*."""
    values = {"storage_account": "account", "container": "archive", "endpoint": f"{url}/account"}
    return AzureSettings(**values | {"shared_key": "c2VjcmV0", "read_timeout_seconds": 20} | changes)


@asynccontextmanager
async def store_of(handle, *, tls=None, **changes):
    """Serve *handle*, and give a store that speaks to it."""
    async with serving(handle, tls=tls) as url:
        store = await AzureStore.open(azure_settings(url, **changes))
        try:
            yield store
        finally:
            await store.close()


def content(size: int) -> bytes:
    """Return so many bytes, always the same."""
    return random.Random(size).randbytes(size)
