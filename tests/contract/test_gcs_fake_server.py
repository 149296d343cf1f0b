"""The contract, kept by the GCS store with a real server: fake-gcs-server."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from tests.contract.object_store_contract import (
    MissingBucketContract,
    NestedKeysContract,
    ObjectStoreContract,
    put,
)
from tests.support.fake_gcs import GcsBucket
from tieringd.storage.gcs.settings import GcsSettings
from tieringd.storage.gcs.store import GcsStore

AWKWARD_KEYS = ("a b", "a%2Fb", "a+b", "a&b=c", "a?b#c", 'a"b', "a;b,c", "a\\b", "é/日本")


def settings(server, **changes) -> GcsSettings:
    values = {"bucket": "contract", "endpoint": server.endpoint, "credentials_source": "anonymous"}
    return GcsSettings(**values | changes)


class TestGcsStoreWithFakeServer(ObjectStoreContract, MissingBucketContract, NestedKeysContract):
    """One bucket for all tests, and a prefix for each."""

    # The server compares no checksum. The store does, with the one that the server computed, and takes the
    # object back; so a wrong checksum is refused here as well.
    verifies_checksums = True

    @pytest.fixture
    def prefix(self):
        return uuid.uuid4().hex

    @pytest.fixture
    async def store(self, fake_gcs, prefix):
        store = await GcsStore.open(settings(fake_gcs, prefix=prefix))
        yield store
        await store.close()

    @pytest.fixture
    def bucket(self, fake_gcs, prefix):
        return GcsBucket(fake_gcs.endpoint, bucket="contract", prefix=prefix)

    @pytest.fixture
    async def missing_store(self, fake_gcs):
        store = await GcsStore.open(settings(fake_gcs, bucket="not-there"))
        yield store
        await store.close()

    async def test_keys_are_taken_literally(self, store, bucket):
        """Characters that mean something in an address mean nothing in a key, in any operation."""
        for key in AWKWARD_KEYS:
            await put(store, key, key.encode())
            assert await asyncio.to_thread(bucket.read, key) == key.encode()
            assert (await store.get(key))[0] == key.encode()
        after = [(await store.list_page("", start_after=key)).objects for key in sorted(AWKWARD_KEYS)]
        assert [len(objects) for objects in after] == list(reversed(range(len(AWKWARD_KEYS))))
        await store.delete_many(AWKWARD_KEYS)
        assert (await store.list_page("")).objects == ()

    async def test_listing_tells_checksums(self, store):
        """A listing knows what `head` knows."""
        await put(store, "key", b"content")
        assert (await store.list_page("")).objects == (await store.head("key"),)
