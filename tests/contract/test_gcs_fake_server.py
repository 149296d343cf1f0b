"""The contract, kept by the GCS store with a real server: fake-gcs-server."""

from __future__ import annotations

import asyncio
import json
import uuid
from contextlib import asynccontextmanager

import pytest
from crc32c import crc32c

from tests.contract.object_store_contract import (
    JoinContract,
    MissingBucketContract,
    NestedKeysContract,
    ObjectStoreContract,
    put,
)
from tests.support.fake_gcs import GcsBucket
from tests.support.fault_proxy import Answer, fault_proxy
from tests.support.raw_http import PATIENT
from tieringd.errors import ObjectNotFound, PreconditionFailed
from tieringd.storage.base import IfAbsent
from tieringd.storage.gcs.store import GcsStore
from tieringd.storage.store_settings import GcsSettings

AWKWARD_KEYS = ("a b", "a%2Fb", "a+b", "a&b=c", "a?b#c", 'a"b', "a;b,c", "a\\b", "é/日本")


def settings(server, **changes) -> GcsSettings:
    values = {"bucket": "contract", "endpoint": server.endpoint, "credentials_source": "anonymous"}
    return GcsSettings(**PATIENT | values | changes)


class TestGcsStoreWithFakeServer(
    ObjectStoreContract, JoinContract, MissingBucketContract, NestedKeysContract
):
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
    def store_behind(self, fake_gcs, prefix):
        """Give a function that opens the store behind a proxy."""

        @asynccontextmanager
        async def behind():
            async with fault_proxy(fake_gcs.endpoint) as proxy:
                store = await GcsStore.open(settings(fake_gcs, prefix=prefix, endpoint=proxy.url))
                yield proxy, store
                await store.close()

        return behind

    @pytest.fixture
    async def missing_store(self, fake_gcs):
        store = await GcsStore.open(settings(fake_gcs, bucket="not-there"))
        yield store
        await store.close()

    async def test_missing_source_ends_the_join(self, store_behind, bucket):
        """The fake says 500 where Google says 404; the proxy answers as Google does."""
        async with store_behind() as (proxy, store):
            sources = await self._sources(store, [b"one", b"two"])
            message = {"error": {"code": 404, "message": "No such object: contract/two"}}
            proxy.spoil(
                Answer("404 Not Found", json.dumps(message).encode()),
                where=lambda each: "/compose" in each.path,
            )
            with pytest.raises(ObjectNotFound):
                await store.join("joined", sources, crc32c=crc32c(b"onetwo"))
        assert await asyncio.to_thread(bucket.read, "joined") is None

    async def test_join_under_a_condition_replaces_nothing_else(self, store_behind):
        """The fake composes whatever the condition, so its being sent and refused is what is seen here."""
        async with store_behind() as (proxy, store):
            sources = await self._sources(store, [b"one", b"two"])
            proxy.spoil(
                Answer("412 Precondition Failed", b"{}"),
                where=lambda each: "/compose" in each.path and "ifGenerationMatch=0" in each.path,
            )
            with pytest.raises(PreconditionFailed):
                await store.join("joined", sources, crc32c=crc32c(b"onetwo"), condition=IfAbsent())
            assert proxy.faults_left == 0

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
