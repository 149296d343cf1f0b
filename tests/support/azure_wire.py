"""Hand-written answers of Azure: servers that a test controls, and stores that are connected to them."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager

from tests.support.raw_http import PATIENT, serving
from tieringd.storage.azure.store import AzureStore
from tieringd.storage.store_settings import AzureSettings

STORED = {"ETag": '"version"', "Last_Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}
"""The headers of an answer with an object, as arguments of `Exchange.answer`."""


def azure_settings(url: str, **changes) -> AzureSettings:
    """Return settings for an account at *url*."""
    values = {"storage_account": "account", "container": "archive", "endpoint": f"{url}/account"}
    return AzureSettings(**PATIENT | values | {"shared_key": "c2VjcmV0"} | changes)


@asynccontextmanager
async def store_of(handle, *, tls=None, **changes):
    """Serve *handle*, and yield a store that is connected to it."""
    async with serving(handle, tls=tls) as url:
        store = await AzureStore.open(azure_settings(url, **changes))
        try:
            yield store
        finally:
            await store.close()


def content(size: int) -> bytes:
    """Return *size* bytes, always the same ones."""
    return random.Random(size).randbytes(size)
