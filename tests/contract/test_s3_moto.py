"""The contract, kept by the S3 store with a second server, moto: another reading of the same API."""

# Long: the whole contract of stores against one more server.

from __future__ import annotations

import uuid

import pytest

from tests.contract.object_store_contract import (
    JoinContract,
    MissingBucketContract,
    NestedKeysContract,
    ObjectStoreContract,
)
from tests.support.raw_http import PATIENT
from tests.support.s3_bucket import S3Bucket
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings


class TestS3StoreWithMoto(ObjectStoreContract, JoinContract, MissingBucketContract, NestedKeysContract):
    """A bucket for each test."""

    # It neither checks nor keeps the announced checksum, and stores whatever arrives.
    verifies_checksums = False
    tells_checksums = False

    @pytest.fixture
    def settings(self, moto_url):
        return S3Settings(
            bucket=f"contract-{uuid.uuid4().hex}",
            prefix="some/prefix",
            endpoint_url=moto_url,
            access_key="test",
            secret_key="testtest",
            url_style="path",
            **PATIENT,
        )

    @pytest.fixture
    async def missing_store(self, settings):
        store = await S3Store.open(settings)
        yield store
        await store.close()

    @pytest.fixture
    def bucket(self, moto_url, settings):
        with S3Bucket(moto_url, bucket=settings.bucket, prefix="some/prefix") as bucket:
            bucket.create()
            yield bucket

    @pytest.fixture
    async def store(self, bucket, settings):
        store = await S3Store.open(settings)
        yield store
        await store.close()

    async def test_versions_and_locks_keep_what_is_deleted(self, store, bucket):
        """The bucket reports versions, and locks only if it has versions."""
        client, name = bucket._client, bucket._bucket
        client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
        (versions,) = await store.kept_after_delete("key")
        assert "keeps versions" in versions
        client.put_object_lock_configuration(
            Bucket=name,
            ObjectLockConfiguration={
                "ObjectLockEnabled": "Enabled",
                "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 30}},
            },
        )
        assert await store.kept_after_delete("key") == (
            versions,
            "object lock keeps each version for 30 days",
        )
        client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Suspended"})
        assert (
            "the bucket kept versions earlier, and still has those versions"
            in await store.kept_after_delete("key")
        )
