"""The retry table of the S3 store, in front of a real server: SeaweedFS; and moto, for roles."""

# Long: every fault of the table goes over a real connection, and some are timeouts and closed connections.

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from typing import ClassVar

import pytest
from crc32c import crc32c

from tests.contract.expiry_table import Issuer, RepeatedExpiryTable
from tests.contract.parts_table import PartsTable
from tests.contract.retry_table import MIB, SEGMENT, RetryTable, Scene, put_manifest
from tests.support.aws_metadata_server import CredentialService
from tests.support.fault_proxy import (
    Answer,
    DamageRequest,
    ResetAnswer,
    StallAnswer,
    TruncateAnswer,
    fault_proxy,
)
from tests.support.raw_http import serving
from tests.support.s3_bucket import S3Bucket
from tieringd.errors import ChecksumRejected, StorageDenied, StorageUnavailable
from tieringd.storage.base import IfAbsent
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings


def said(status: str, code: str | None, **headers: str) -> Answer:
    """Return what S3 answers, or, without a code, a gateway on the way."""
    body = f"<Error><Code>{code}</Code><Message>said the proxy</Message></Error>".encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, body if code else b"", named)


EXPIRED = said("400 Bad Request", "ExpiredToken")


class RoleIssuer(Issuer):
    """An instance's metadata service, with a role attached to the instance."""

    def __init__(self) -> None:
        self.service = CredentialService()
        super().__init__(self.service)

    @property
    def issued(self) -> list[str]:
        """Return the access keys."""
        return [f"ASIA{number + 1}" for number in range(self.service.issued)]

    def shown(self, exchange) -> str:
        """Return the access key that a request was signed with."""
        (key,) = re.findall("Credential=(.*?)/", exchange.headers["authorization"])
        number = key.removeprefix("ASIA")
        assert exchange.headers["x-amz-security-token"] == f"hush-token-{number}"
        return key


class TestS3RetryTable(PartsTable, RetryTable):
    """One bucket for all cases, and a prefix for each."""

    refusals: ClassVar = {
        "429": said("429 Too Many Requests", "TooManyRequests"),
        "429-retry-after": said("429 Too Many Requests", "TooManyRequests", Retry_After="0"),
        "500": said("500 Internal Server Error", "InternalError"),
        "503": said("503 Slow Down", "SlowDown"),
        "503-retry-after": said("503 Slow Down", "SlowDown", Retry_After="0"),
    }
    in_doubt: ClassVar = {"500"}
    denial = said("403 Forbidden", "AccessDenied")
    no_bucket = said("404 Not Found", "NoSuchBucket")
    wait = said("503 Slow Down", "SlowDown", Retry_After="1")
    parts: ClassVar = {"multipart_threshold_bytes": 6 * MIB, "multipart_part_bytes": 5 * MIB}

    def is_part(self, exchange) -> bool:
        return "partNumber=" in exchange.path

    def is_join(self, exchange) -> bool:
        return exchange.method == "POST" and "uploadId=" in exchange.path

    @pytest.fixture
    def server_url(self, seaweedfs):
        return seaweedfs.endpoint_url

    @pytest.fixture
    def bucket(self, seaweedfs, prefix):
        with S3Bucket(seaweedfs.endpoint_url, bucket="contract", prefix=prefix) as bucket:
            yield bucket

    @pytest.fixture
    def open_backend(self, seaweedfs, prefix):
        async def opened(url: str, **changes) -> S3Store:
            values = {"bucket": "contract", "prefix": prefix, "endpoint_url": url, "url_style": "path"}
            values |= {"access_key": seaweedfs.access_key, "secret_key": seaweedfs.secret_key}
            return await S3Store.open(S3Settings(**values | changes))

        return opened

    async def test_damaged_upload_is_raised(self, here, slice_of):
        """Bytes that were damaged on their way are refused by the server, and nothing is stored."""
        store = await here.store()
        here.proxy.spoil(DamageRequest())
        with pytest.raises(ChecksumRejected):
            await store.put("segment", slice_of(SEGMENT), crc32c=crc32c(SEGMENT))
        assert here.outcomes == ["ChecksumRejected"]
        assert here.bucket.keys() == []

    @pytest.mark.parametrize(
        ("answer", "is_certain"),
        [
            pytest.param(said("503 Service Unavailable", None), False, id="503-of-a-gateway"),
            pytest.param(
                said("503 Service Unavailable", None, Retry_After="0"), False, id="with-retry-after"
            ),
            pytest.param(said("429 Too Many Requests", None), True, id="429-of-a-gateway"),
        ],
    )
    async def test_commit_is_repeated_only_when_the_store_has_not_begun_it(self, here, answer, is_certain):
        """A gateway's 503 may come after the service has done the work; its 429 comes before."""
        store = await here.store()
        here.proxy.spoil(answer)
        if is_certain:
            await put_manifest(store, condition=IfAbsent())
            assert here.outcomes == ["StorageUnavailable", "ok"]
        else:
            with pytest.raises(StorageUnavailable) as caught:
                await put_manifest(store, condition=IfAbsent())
            assert caught.value.outcome_unknown
            assert here.outcomes == ["StorageUnavailable"]

    @pytest.mark.parametrize(
        "fault",
        [
            pytest.param(ResetAnswer(10), id="reset"),
            pytest.param(TruncateAnswer(10), id="truncated"),
            pytest.param(StallAnswer(10), id="stalled"),
        ],
    )
    async def test_join_with_a_broken_receipt_is_sent_once(self, here, slice_of, fault):
        """A completion whose answer broke off has an unknown outcome, although its status was heard."""
        here.proxy.spoil(fault, where=self.is_join)
        with pytest.raises(StorageUnavailable) as caught:
            await self._put(here, slice_of(SEGMENT), fault)
        assert caught.value.outcome_unknown
        assert here.outcomes == ["StorageUnavailable"]
        assert [each.fault for each in here.proxy.exchanges if self.is_join(each)] == [fault]
        assert here.bucket.read("segment") == SEGMENT

    async def test_expired_keys_of_the_configuration_are_raised_at_once(self, here, slice_of):
        """An operator has to replace keys that are not renewed, so there is one attempt."""
        await self._raises_at_once(here, slice_of, EXPIRED, StorageDenied)
        assert here.bucket.keys() == []


class TestS3Roles(RepeatedExpiryTable):
    """SeaweedFS takes no session token that it has not issued itself; moto takes any."""

    expired = EXPIRED
    attempts: ClassVar = ["StorageUnavailable", "ok"]

    @pytest.fixture
    def bucket(self, moto_url, prefix):
        with S3Bucket(moto_url, bucket="roles", prefix=prefix) as bucket:
            bucket.create()
            yield bucket

    @pytest.fixture
    async def issuer(self, monkeypatch):
        issuer = RoleIssuer()
        async with serving(issuer) as url:
            monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
            yield issuer

    @pytest.fixture
    async def here(self, moto_url, bucket, prefix, issuer):
        async def opened(url: str, **changes) -> S3Store:
            values = {"bucket": "roles", "prefix": prefix, "endpoint_url": url, "url_style": "path"}
            values |= {"credentials_source": "aws_instance_metadata"}
            return await S3Store.open(S3Settings(**values | changes))

        async with fault_proxy(moto_url) as proxy, AsyncExitStack() as stores:
            yield Scene(proxy, bucket, opened, stores)
