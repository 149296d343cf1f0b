"""The retry table of the GCS store, in front of a real server: fake-gcs-server."""

# Long: each refusal of each operation, with the pauses of the retries.

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import ClassVar
from urllib.request import urlopen

import pytest
from crc32c import crc32c
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.contract.expiry_table import Issuer, RepeatedExpiryTable
from tests.contract.retry_table import MANIFEST, SEGMENT, RetryTable, Scene, put_manifest
from tests.support.fake_gcs import GcsBucket
from tests.support.fault_proxy import Answer, ResetAnswer, StallAnswer, TruncateAnswer, fault_proxy
from tests.support.gcs_token_endpoint import ACCOUNT, GcsTokenEndpoint
from tests.support.raw_http import serving
from tieringd.errors import ChecksumRejected, StorageUnavailable
from tieringd.storage.base import IfAbsent
from tieringd.storage.gcs.store import GcsStore
from tieringd.storage.store_settings import GcsSettings

BROKEN_RECEIPTS = [
    pytest.param(ResetAnswer(10), id="reset-mid-answer"),
    pytest.param(TruncateAnswer(10), id="truncated-answer"),
    pytest.param(StallAnswer(10), id="stalled-answer"),
]


def said(status: str, reason: str, message: str = "said the proxy", **headers: str) -> Answer:
    error = {"code": int(status[:3]), "message": message, "errors": [{"reason": reason}]}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, json.dumps({"error": error}).encode(), named)


@pytest.fixture(scope="module")
def private_key():
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


class ListedBucket(GcsBucket):
    """A bucket that also tells what is in it."""

    def keys(self) -> list[str]:
        """Return the keys below the prefix."""
        url = f"{self._endpoint}/storage/v1/b/{self._bucket}/o?prefix={self._prefix}/"
        with urlopen(url, timeout=30) as answer:
            items = json.load(answer).get("items", [])
        return [item["name"].removeprefix(f"{self._prefix}/") for item in items]


class TokenIssuer(Issuer):
    """Google's token endpoint."""

    def __init__(self, private_key) -> None:
        self.endpoint = GcsTokenEndpoint(private_key.public_key())
        super().__init__(self.endpoint)

    @property
    def issued(self) -> list[str]:
        """Return the tokens."""
        return [f"token-{number}" for number, _ in enumerate(self.endpoint.assertions, start=1)]


class TestGcsRetryTable(RetryTable):
    """One bucket for all cases, and a prefix for each."""

    refusals: ClassVar = {
        "429": said("429 Too Many Requests", "rateLimitExceeded"),
        "429-retry-after": said("429 Too Many Requests", "rateLimitExceeded", Retry_After="0"),
        "500": said("500 Internal Server Error", "internalError"),
        "503": said("503 Service Unavailable", "backendError"),
        "503-retry-after": said("503 Service Unavailable", "backendError", Retry_After="0"),
    }
    # Google throttles with 429. Its 503 may come from behind the write, whatever it asks to wait.
    in_doubt: ClassVar = {"500", "503", "503-retry-after"}
    denial = said("403 Forbidden", "forbidden")
    no_bucket = said("404 Not Found", "notFound", "The specified bucket does not exist.")
    wait = said("503 Service Unavailable", "backendError", Retry_After="1")

    @pytest.fixture
    def server_url(self, fake_gcs):
        return fake_gcs.endpoint

    @pytest.fixture
    def bucket(self, fake_gcs, prefix):
        return ListedBucket(fake_gcs.endpoint, bucket="contract", prefix=prefix)

    @pytest.fixture
    def open_backend(self, prefix):
        async def opened(url: str, **changes) -> GcsStore:
            values = {"bucket": "contract", "prefix": prefix, "endpoint": url}
            values |= {"credentials_source": "anonymous"}
            return await GcsStore.open(GcsSettings(**values | changes))

        return opened

    @pytest.mark.parametrize("fault", BROKEN_RECEIPTS)
    async def test_upload_with_a_broken_receipt_is_retried(self, here, slice_of, fault):
        """An upload whose answer broke off is sent again: the object is the same."""
        await self._upload_twice(here, slice_of(SEGMENT), fault)

    @pytest.mark.parametrize("fault", BROKEN_RECEIPTS)
    async def test_commit_with_a_broken_receipt_is_sent_once(self, here, fault):
        """A commit whose answer broke off has an unknown outcome, although its status was heard."""
        store = await here.store(fault)
        here.proxy.spoil(fault)
        with pytest.raises(StorageUnavailable) as caught:
            await put_manifest(store, condition=IfAbsent())
        assert caught.value.outcome_unknown
        assert here.outcomes == ["StorageUnavailable"]
        assert len(here.proxy.exchanges) == 1
        assert here.bucket.read("manifest") == MANIFEST

    async def test_upload_with_a_wrong_checksum_is_raised(self, here, slice_of):
        """Other bytes than those announced are taken back from a server that compares nothing."""
        await super().test_upload_with_a_wrong_checksum_is_raised(here, slice_of)
        assert [each.method for each in here.proxy.exchanges] == ["POST", "DELETE"]

    async def test_wrong_checksum_that_google_finds_is_raised(self, here, slice_of):
        """Google's own refusal of a checksum is final too."""
        store = await here.store()
        text = 'Provided CRC32C "AAAAAA==" doesn\'t match calculated CRC32C "AAAAAQ==".'
        here.proxy.spoil(said("400 Bad Request", "invalid", text))
        with pytest.raises(ChecksumRejected):
            await store.put("segment", slice_of(SEGMENT), crc32c=crc32c(SEGMENT))
        assert here.outcomes == ["ChecksumRejected"]

    async def test_throttling_as_a_403_is_retried(self, here):
        """A 403 whose reason is the rate is no denial, and had no effect."""
        store = await here.store()
        here.proxy.spoil(said("403 Forbidden", "rateLimitExceeded"))
        await put_manifest(store, condition=IfAbsent())
        assert here.outcomes == ["StorageUnavailable", "ok"]
        assert here.bucket.read("manifest") == MANIFEST


class TestGcsTokens(RepeatedExpiryTable):
    """The server takes any token, and the proxy refuses them."""

    expired = said("401 Unauthorized", "authError", "Invalid Credentials")
    attempts: ClassVar = ["StorageUnavailable", "ok"]

    @pytest.fixture
    async def issuer(self, private_key):
        return TokenIssuer(private_key)

    @pytest.fixture
    async def here(self, fake_gcs, private_key, prefix, issuer, tmp_path):
        pem = private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
        path = tmp_path / "account.json"

        async def opened(url: str, **changes) -> GcsStore:
            values = {"bucket": "contract", "prefix": prefix, "endpoint": url}
            values |= {"credentials_source": "config_file", "service_account_file": str(path)}
            return await GcsStore.open(GcsSettings(**values | changes))

        bucket = ListedBucket(fake_gcs.endpoint, bucket="contract", prefix=prefix)
        async with (
            serving(issuer) as url,
            fault_proxy(fake_gcs.endpoint) as proxy,
            AsyncExitStack() as stores,
        ):
            account = {"type": "service_account", "client_email": ACCOUNT, "private_key": pem}
            path.write_text(json.dumps(account | {"token_uri": f"{url}/token"}))
            yield Scene(proxy, bucket, opened, stores)
