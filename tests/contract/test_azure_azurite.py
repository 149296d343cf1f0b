"""The contract, kept by the Azure store with Microsoft's own emulator: Azurite."""

from __future__ import annotations

import asyncio
import base64
import uuid

import pytest
from crc32c import crc32c

from tests.contract.object_store_contract import (
    FLAT_KEYS,
    MIB,
    MissingBucketContract,
    NestedKeysContract,
    ObjectStoreContract,
    content,
    listed,
    put,
)
from tests.support.azurite import AzureBucket
from tests.support.raw_http import PATIENT
from tieringd.errors import ChecksumRejected, PreconditionFailed, StorageDenied, StorageError
from tieringd.storage.azure.errors import AzureCall
from tieringd.storage.azure.store import AzureStore
from tieringd.storage.base import IfAbsent, IfVersion, JoinSource
from tieringd.storage.store_settings import AzureSettings

WRONG_KEY = base64.b64encode(b"wrong").decode()


def settings(server, **changes) -> AzureSettings:
    values = {
        "storage_account": server.account,
        "container": "contract",
        "endpoint": server.endpoint,
        "shared_key": server.key,
    }
    return AzureSettings(**PATIENT | values | changes)


class TestAzureStoreWithAzurite(ObjectStoreContract, MissingBucketContract, NestedKeysContract):
    """One container for all tests, and a prefix for each."""

    @pytest.fixture
    def prefix(self):
        return uuid.uuid4().hex

    @pytest.fixture
    async def store(self, azurite, prefix):
        store = await AzureStore.open(settings(azurite, prefix=prefix))
        yield store
        await store.close()

    @pytest.fixture
    def bucket(self, azurite, prefix):
        with AzureBucket(azurite.endpoint, container="contract", prefix=prefix) as bucket:
            yield bucket

    @pytest.fixture
    async def missing_store(self, azurite):
        store = await AzureStore.open(settings(azurite, container="not-there"))
        yield store
        await store.close()

    @pytest.fixture
    async def block_store(self, azurite, prefix):
        store = await AzureStore.open(
            settings(azurite, prefix=prefix, single_put_bytes=MIB, block_bytes=3 * MIB)
        )
        yield store
        await store.close()

    @pytest.mark.parametrize("limit", [1, 3, 12, 1000])
    async def test_listing_is_complete_over_its_pages(self, store, bucket, limit):
        """Pages of any size hold every key once; the emulator, in JavaScript, orders by UTF-16 units."""
        for key in FLAT_KEYS:
            await asyncio.to_thread(bucket.write, f"list/{key}", b"x")
        await asyncio.to_thread(bucket.write, "other", b"x")
        pages = await listed(store, "list/", limit=limit)
        assert all(len(page) == limit for page in pages[:-1])
        assert 0 < len(pages[-1]) <= limit
        expected = sorted((f"list/{key}" for key in FLAT_KEYS), key=lambda key: key.encode("utf-16-be"))
        assert [key for page in pages for key in page] == expected

    async def test_blocks_become_one_object(self, block_store, store, bucket, slice_of):
        """A file above the threshold is stored in blocks, and reads as any other object."""
        data = content(10 * MIB)
        written = await block_store.put("key", slice_of(data), crc32c=crc32c(data))
        read, info = await store.get("key")
        assert read == data
        assert (info.version, info.crc32c) == (written.version, crc32c(data))

    async def test_blocks_that_lose_or_differ_leave_the_object_as_it_was(self, block_store, bucket, slice_of):
        """The condition and the checksum of a large file are decided before its blocks become an object."""
        data = content(10 * MIB)
        body = slice_of(data)
        with pytest.raises(ChecksumRejected):
            await block_store.put("key", body, crc32c=crc32c(data) ^ 1)
        assert bucket.read("key") is None
        first = await put(block_store, "key", b"first")
        second = await put(block_store, "key", b"second")
        for condition in (IfAbsent(), IfVersion(first.version)):
            with pytest.raises(PreconditionFailed):
                await block_store.put("key", body, crc32c=crc32c(data), condition=condition)
        assert bucket.read("key") == b"second"
        await block_store.put("key", body, crc32c=crc32c(data), condition=IfVersion(second.version))
        assert bucket.read("key") == data

    async def test_emulator_compares_the_md5_that_bytes_carry(self, store, bucket, prefix):
        """Our own comparison of the CRC32C is before the request; on the way, this one counts."""
        headers = {
            "x-ms-blob-type": "BlockBlob",
            "Content-Type": "application/octet-stream",
            "Content-MD5": base64.b64encode(bytes(16)).decode(),
        }
        call = AzureCall("put", "contract", "key")
        with pytest.raises(StorageError, match="contentMD5 doesn't match"):
            await store._requests.send(
                call, "PUT", f"{prefix}/key", headers=headers, content=b"content", accept=frozenset({201})
            )
        assert bucket.read("key") is None

    async def test_blocks_of_an_unfinished_upload_are_in_no_listing(self, block_store, slice_of):
        """The blocks that a cancelled upload leaves have no name."""
        data = content(10 * MIB)
        with pytest.raises(ChecksumRejected):
            await block_store.put("key", slice_of(data), crc32c=crc32c(data) ^ 1)
        assert (await block_store.list_page("")).objects == ()

    async def test_emulator_that_cannot_join_is_told_apart(self, store, bucket):
        """Azurite does not know the request that copies a block, so the caller sends the bytes itself."""
        await put(store, "source", b"content")
        sources = [JoinSource("source", 7, crc32c(b"content"))]
        assert await store.join("key", sources, crc32c=crc32c(b"content")) is None
        assert bucket.read("key") is None

    async def test_listing_tells_the_checksum(self, store):
        """A listing knows what a head would tell, the checksum included."""
        await put(store, "key", b"content")
        (entry,) = (await store.list_page("")).objects
        assert entry == await store.head("key")

    async def test_server_compares_the_md5(self, store, bucket, prefix):
        """The server refuses a body that its MD5 does not describe; the emulator's code is not Azure's."""
        headers = {
            "x-ms-blob-type": "BlockBlob",
            "Content-Type": "application/octet-stream",
            "Content-MD5": base64.b64encode(bytes(16)).decode(),
        }
        with pytest.raises(StorageError, match="contentMD5 doesn't match"):
            await store._requests.send(
                AzureCall("put", "contract", "key"),
                "PUT",
                f"{prefix}/key",
                headers=headers,
                content=b"content",
                accept=frozenset({201}),
            )
        assert bucket.read("key") is None

    @pytest.mark.parametrize(
        "wrong",
        [
            pytest.param({"shared_key": WRONG_KEY}, id="key"),
            pytest.param({"storage_account": "unknown"}, id="account"),
        ],
    )
    async def test_wrong_credentials_are_denied_by_every_operation(self, azurite, slice_of, wrong):
        """Every call raises StorageDenied, with a hint at the settings and without the key."""
        store = await AzureStore.open(settings(azurite, **wrong))
        data = content(20 * MIB)
        calls = [
            lambda: put(store, "key", b"content"),
            lambda: store.put("key", slice_of(data), crc32c=crc32c(data)),
            lambda: store.get("key"),
            lambda: store.get_range("key", position=0, size_bytes=1),
            lambda: store.head("key"),
            lambda: store.list_page(""),
            lambda: store.delete_many(["key"]),
        ]
        for call in calls:
            with pytest.raises(StorageDenied, match="cloud_storage_azure_shared_key") as caught:
                await call()
            assert WRONG_KEY not in str(caught.value)
        await store.close()
