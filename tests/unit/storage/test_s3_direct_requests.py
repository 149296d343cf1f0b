"""Requests that are sent in the form of the SDK's first one, beside those of the SDK."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from crc32c import crc32c

from tests.support.raw_http import serving
from tieringd.errors import ObjectNotFound, StorageDenied
from tieringd.storage.base import IfAbsent, IfVersion
from tieringd.storage.s3.direct_requests import DirectRequests, Form
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings

KEY = "a b/~ä+=%2F?k"
DATA = b"content"
OF_THE_SDK = "amz-sdk-invocation-id"
DIFFERS = {"authorization", "x-amz-date", "user-agent", OF_THE_SDK, "amz-sdk-request"}
"""What each request has anew, and what the SDK says of itself."""
ANSWER = {
    "ETag": '"version"',
    "Last_Modified": "Fri, 02 Jan 2026 03:04:05 GMT",
    "Date": "Fri, 02 Jan 2026 03:04:06 GMT",
    "x_amz_meta_crc32c": "unused",
    "x_amz_checksum_crc32c": "AAAAAA==",
}


@asynccontextmanager
async def asked(answer=None, **changes):
    """Give a store and the list of what its server is asked."""
    seen = []

    async def handle(exchange):
        await exchange.read_body()
        seen.append(exchange)
        if answer is None or not await answer(exchange):
            body = DATA if exchange.method == "GET" else b""
            await exchange.answer(
                "206 Partial Content" if "range" in exchange.headers else "200 OK", body, **ANSWER
            )

    async with serving(handle) as url:
        values = {"bucket": "archive", "endpoint_url": url, "access_key": "me", "secret_key": "secret"}
        store = await S3Store.open(S3Settings(**values | {"url_style": "path", "prefix": "pre"} | changes))
        try:
            yield store, seen
        finally:
            await store.close()


def calls_of(slice_of):
    return {
        "put": lambda store: store.put(KEY, DATA, crc32c=crc32c(DATA)),
        "put nothing": lambda store: store.put(KEY, b"", crc32c=0),
        "put where absent": lambda store: store.put(KEY, DATA, crc32c=crc32c(DATA), condition=IfAbsent()),
        "put over a version": lambda store: store.put(
            KEY, DATA, crc32c=crc32c(DATA), condition=IfVersion('"v"')
        ),
        "put a file": lambda store: store.put(KEY, slice_of(DATA), crc32c=crc32c(DATA)),
        "put much": lambda store: store.put(KEY, b"x" * (3 << 20), crc32c=1),
        "head": lambda store: store.head(KEY),
    }


def is_of_the_sdk(exchange) -> bool:
    return OF_THE_SDK in exchange.headers


@pytest.mark.parametrize("name", calls_of(None))
async def test_request_is_that_of_the_sdk(slice_of, name):
    """The first request is the SDK's and the second is not, and both say the same to the server."""
    encrypted = {"encryption": "aws:kms", "kms_key_id": "key", "storage_class": "STANDARD_IA"}
    call = calls_of(slice_of)[name]
    async with asked(**encrypted) as (store, seen):
        results = [await call(store) for _ in range(2)]
    first, second = seen
    assert is_of_the_sdk(first)
    assert not is_of_the_sdk(second)
    assert (first.method, first.path) == (second.method, second.path)
    sent = [{name: value for name, value in one.headers.items() if name not in DIFFERS} for one in seen]
    assert sent[0] == sent[1]
    signed = [one.headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0] for one in seen]
    assert signed[0] == signed[1]
    assert results[0] == results[1]


async def test_ranges_and_objects_are_read_as_by_the_sdk():
    """Both have the same headers, and give the same bytes."""

    async def with_range(exchange):
        if "range" in exchange.headers:
            await exchange.answer("206 Partial Content", DATA, Content_Range="bytes 3-9/20", **ANSWER)
        return "range" in exchange.headers

    async with asked(with_range) as (store, seen):
        ranges = [await store.get_range(KEY, position=3, size_bytes=7) for _ in range(2)]
    assert ranges == [DATA, DATA]
    assert [is_of_the_sdk(one) for one in seen] == [True, False]
    assert seen[0].headers["range"] == seen[1].headers["range"] == "bytes=3-9"


async def test_errors_are_those_of_the_sdk():
    """A refusal has the same type, message and cause, whichever way the request went."""
    refusals = iter(["404 Not Found", "404 Not Found", "403 Forbidden", "403 Forbidden"])

    async def refuse(exchange):
        status = next(refusals)
        code = "NoSuchKey" if "404" in status else "AccessDenied"
        await exchange.answer(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())
        return True

    errors = []
    async with asked(refuse) as (store, seen):
        for _ in range(4):
            with pytest.raises((ObjectNotFound, StorageDenied)) as caught:
                await store.get(KEY)
            errors.append(caught.value)
    assert [is_of_the_sdk(one) for one in seen] == [True, False, False, False]
    assert [type(one) for one in errors] == [ObjectNotFound] * 2 + [StorageDenied] * 2
    assert str(errors[0]) == str(errors[1])
    assert errors[0].__cause__.response["Error"] == errors[1].__cause__.response["Error"]


@pytest.mark.parametrize("status", ["301 Moved Permanently", "400 Bad Request"])
async def test_sdk_sends_again_what_another_region_refused(status):
    """The server has done nothing then, and the SDK knows how to find a bucket's region."""
    code = "PermanentRedirect" if "301" in status else "AuthorizationHeaderMalformed"

    async def elsewhere(exchange):
        if not is_of_the_sdk(exchange):
            await exchange.answer(status, f"<Error><Code>{code}</Code></Error>".encode())
        return not is_of_the_sdk(exchange)

    async with asked(elsewhere) as (store, seen):
        for _ in range(2):
            await store.put(KEY, DATA, crc32c=crc32c(DATA))
    assert [is_of_the_sdk(one) for one in seen] == [True, False, True]


async def test_every_response_tells_the_time():
    """Ages are counted by the server's clock, so no request may be silent about it."""
    times = []
    async with asked() as (store, _):
        store.tell_time_to(times.append)
        for _ in range(3):
            await store.put(KEY, DATA, crc32c=crc32c(DATA))
    assert len(times) == 3


def signed(authorization, *, payload="UNSIGNED-PAYLOAD", url="https://host/bucket/a%20b"):
    headers = {"Authorization": authorization, "X-Amz-Content-SHA256": payload}
    return SimpleNamespace(headers=headers, url=url)


USUAL = "AWS4-HMAC-SHA256 Credential=me/20261125/eu-west-1/s3/aws4_request, SignedHeaders=host, Signature=0"


def test_form_is_read_from_a_signed_request():
    """An access key may have slashes: those of some stores do."""
    expected = Form("https://host/bucket/", "eu-west-1")
    assert Form.of(signed(USUAL), "a b") == expected
    assert Form.of(signed(USUAL.encode()), "a b") == expected
    assert Form.of(signed(USUAL.replace("me/", "m/e/")), "a b") == expected


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(signed(USUAL.replace("/s3/", "/s3express/")), id="directory bucket"),
        pytest.param(signed(USUAL.replace("HMAC", "ECDSA-P256")), id="several regions"),
        pytest.param(signed("AWS me:signature"), id="version 2"),
        pytest.param(signed(""), id="unsigned"),
        pytest.param(signed(USUAL, payload="0" * 64), id="signed payload"),
        pytest.param(signed(USUAL, url="https://host/bucket/a+b"), id="another way to write a key"),
        pytest.param(signed(USUAL, url="https://host/bucket/a%20b?x=1"), id="a query"),
    ],
)
def test_unusual_requests_have_no_form(request_):
    """The SDK then sends every request."""
    assert Form.of(request_, "a b") is None


class UnusualClient:
    """An SDK that sends its requests in another form than the usual one."""

    def __init__(self):
        self.sent = 0
        self.meta = SimpleNamespace(events=self)
        self.head_object = self.get_object = self.put_object

    def register(self, _, observe):
        self._observe = observe

    async def put_object(self, **_):
        self.sent += 1
        self._observe(request=signed(USUAL.replace("/s3/", "/s3express/")))
        return {}


async def test_sdk_sends_everything_where_its_form_is_unusual():
    """The SDK's first request decides, for as long as the store lives."""
    client = UnusualClient()
    requests = DirectRequests(client, session=None, credentials=None, user_agent="", note_headers=dict)
    for _ in range(3):
        assert await requests.put_object(Bucket="archive", Key="a b", Body=DATA) == {}
    assert client.sent == 3
