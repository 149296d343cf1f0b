"""Stores that keep the bytes of deleted objects: what Cloud Storage and Azure say of it."""

from __future__ import annotations

import json

import pytest

from tests.fakes.memory_store import MemoryStore
from tests.support import azure_wire, gcs_wire
from tieringd.errors import StorageDenied, StorageUnavailable
from tieringd.storage.resilient import ResilientStore


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({}, ()),
        ({"versioning": {"enabled": False}, "softDeletePolicy": {"retentionDurationSeconds": "0"}}, ()),
        (
            {"versioning": {"enabled": True}},
            ("the bucket keeps versions: a deleted object stays as a noncurrent version",),
        ),
        (
            {
                "softDeletePolicy": {"retentionDurationSeconds": "604800"},
                "retentionPolicy": {"retentionPeriod": "60"},
                "defaultEventBasedHold": True,
                "objectRetention": {"mode": "Enabled"},
            },
            (
                "soft delete keeps deleted objects for 604800 seconds",
                "the bucket's retention policy keeps objects for 60 seconds",
                "new objects have a hold, and stay until the hold is released",
                "objects may be locked",
            ),
        ),
    ],
)
async def test_cloud_storage_tells_by_the_bucket_s_document(said, kept):
    """Soft delete is on in every bucket that is made without a word about it."""
    asked = []

    async def handle(exchange):
        asked.append(exchange.path.partition("?")[0])
        await exchange.answer("200 OK", json.dumps(said).encode())

    async with gcs_wire.store_of(handle) as store:
        assert await store.kept_after_delete("key") == kept
    assert asked == ["/storage/v1/b/archive"]


async def test_bucket_s_document_may_be_denied():
    """The rights that objects take do not include it: then nothing is known."""
    handle = gcs_wire.refusing("403 Forbidden", "forbidden", "storage.buckets.get is denied")
    async with gcs_wire.store_of(handle) as store:
        with pytest.raises(StorageDenied):
            await store.kept_after_delete("key")


def properties(policy: str) -> bytes:
    """Return an account's properties, with the mark of the order of bytes that Azure begins them with."""
    text = (
        f'<?xml version="1.0" encoding="utf-8"?><StorageServiceProperties>{policy}</StorageServiceProperties>'
    )
    return b"\xef\xbb\xbf" + text.encode()


SOFT_DELETE = "<DeleteRetentionPolicy><Enabled>{}</Enabled><Days>7</Days></DeleteRetentionPolicy>"


@pytest.mark.parametrize(
    ("policy", "of_blob", "of_container", "kept"),
    [
        ("", {}, {}, ()),
        (SOFT_DELETE.format("false"), {}, {"x_ms_has_legal_hold": "false"}, ()),
        (SOFT_DELETE.format("true"), {}, {}, ("soft delete keeps deleted blobs for 7 days",)),
        (
            "",
            {"x_ms_version_id": "2026-01-02T03:04:05.6789012Z"},
            {"x_ms_has_immutability_policy": "true", "x_ms_has_legal_hold": "true"},
            (
                "the account keeps versions: a deleted blob stays as an older version",
                "an immutability policy keeps blobs",
                "a legal hold keeps blobs",
            ),
        ),
    ],
)
async def test_azure_tells_by_blob_container_and_account(policy, of_blob, of_container, kept):
    """Only the answer about a blob shows that versions are kept."""
    asked = []

    async def handle(exchange):
        asked.append((exchange.method, exchange.path))
        if exchange.method == "HEAD":
            await exchange.answer("200 OK", **azure_wire.STORED, **of_blob)
        elif "restype=container" in exchange.path:
            await exchange.answer("200 OK", **of_container)
        else:
            await exchange.answer("200 OK", properties(policy))

    async with azure_wire.store_of(handle) as store:
        assert await store.kept_after_delete("key") == kept
    assert asked == [
        ("HEAD", "/account/archive/key"),
        ("GET", "/account/archive?restype=container"),
        ("GET", "/account/?restype=service&comp=properties"),
    ]


async def test_answer_that_is_no_account_s_is_told():
    """A proxy has answered."""

    async def handle(exchange):
        await exchange.answer("200 OK", b"" if exchange.method == "HEAD" else b"<html>", **azure_wire.STORED)

    async with azure_wire.store_of(handle) as store:
        with pytest.raises(StorageUnavailable, match="not XML"):
            await store.kept_after_delete("key")


class Silent:
    """A store of another package, which has not heard of the question."""


async def test_store_that_cannot_be_asked_is_not_taken_for_one_that_keeps_nothing():
    """Nothing is known of it."""
    assert await ResilientStore(MemoryStore()).kept_after_delete("key") == ()
    (told,) = await ResilientStore(Silent()).kept_after_delete("key")
    assert "does not report" in told
