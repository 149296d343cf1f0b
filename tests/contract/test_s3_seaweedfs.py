"""The contract, kept by the S3 store with a real server: SeaweedFS."""

# Long: the whole contract of stores against a real server.

from __future__ import annotations

import uuid

import pytest
from crc32c import crc32c

from tests.contract.object_store_contract import (
    MIB,
    JoinContract,
    MissingBucketContract,
    NestedKeysContract,
    ObjectStoreContract,
    TwoOpeningsContract,
    content,
    put,
)
from tests.support.raw_http import PATIENT
from tests.support.s3_bucket import S3Bucket
from tieringd.errors import StorageDenied
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings


def settings(server, **changes) -> S3Settings:
    values = {
        "bucket": "contract",
        "endpoint_url": server.endpoint_url,
        "access_key": server.access_key,
        "secret_key": server.secret_key,
        "url_style": "path",
    }
    return S3Settings(**PATIENT | values | changes)


class TestS3StoreWithSeaweedFS(
    ObjectStoreContract, JoinContract, MissingBucketContract, NestedKeysContract, TwoOpeningsContract
):
    """One bucket for all tests, and a prefix for each: every bucket costs the server seven volumes."""

    # It keeps keys as a tree, and lists a directory where its name sorts without the slash.
    lists_in_byte_order = False
    # It lets them through one after another, and takes a third of a second for each.
    racers = 8

    @pytest.fixture
    def prefix(self):
        return uuid.uuid4().hex

    @pytest.fixture
    async def store(self, seaweedfs, prefix):
        store = await S3Store.open(settings(seaweedfs, prefix=prefix))
        yield store
        await store.close()

    @pytest.fixture
    async def other(self, seaweedfs, prefix):
        store = await S3Store.open(settings(seaweedfs, prefix=prefix))
        yield store
        await store.close()

    @pytest.fixture
    def bucket(self, seaweedfs, prefix):
        with S3Bucket(seaweedfs.endpoint_url, bucket="contract", prefix=prefix) as bucket:
            yield bucket

    @pytest.fixture
    async def missing_store(self, seaweedfs):
        store = await S3Store.open(settings(seaweedfs, bucket="not-there"))
        yield store
        await store.close()

    @pytest.mark.parametrize(
        "wrong",
        [
            pytest.param({"secret_key": "wrong"}, id="secret"),
            pytest.param({"access_key": "unknown"}, id="key"),
        ],
    )
    async def test_wrong_credentials_are_denied_by_every_operation(self, seaweedfs, slice_of, wrong):
        """Every call raises StorageDenied, with a hint at the settings and without the secret."""
        store = await S3Store.open(settings(seaweedfs, **wrong))
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
            with pytest.raises(StorageDenied, match="cloud_storage_secret_key") as caught:
                await call()
            assert "wrong" not in str(caught.value)
        await store.close()
