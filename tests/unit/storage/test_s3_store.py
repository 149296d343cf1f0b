"""The S3 store against servers that answer late, short, wrong or never."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import re
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.utils import parse_timestamp
from crc32c import crc32c

from tests.support.executors import RecordingExecutor
from tests.support.raw_http import NOBODY, PATIENT, Exchange, serving
from tieringd.errors import (
    BucketNotFound,
    ChecksumRejected,
    ConfigError,
    LocalFileError,
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageUnavailable,
)
from tieringd.storage.base import FileSlice, IfAbsent, IfVersion
from tieringd.storage.listing import list_objects
from tieringd.storage.s3.client import open_client, parsed_time
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings

LARGE = 24 << 20  # More than the sockets of a connection ever hold.
MODIFIED = {"ETag": '"version"', "Last_Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}


def settings(url: str, **changes) -> S3Settings:
    values = {"bucket": "archive", "endpoint_url": url, "access_key": "me", "secret_key": "secret"}
    return S3Settings(**PATIENT | values | {"url_style": "path"} | changes)


@asynccontextmanager
async def store_of(handle, *, tls=None, **changes):
    async with serving(handle, tls=tls) as url:
        store = await S3Store.open(settings(url, **changes))
        try:
            yield store
        finally:
            await store.close()


def error_document(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>said the server</Message></Error>".encode()


def refusing(status: str, code: str = "", **headers: str):
    async def handle(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.answer(status, error_document(code) if code else b"", **headers)

    return handle


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
async def test_put_sends_the_file_with_its_checksum_and_nothing_more(
    slice_of, server_tls, certificate, is_tls
):
    """A put is one request: the slice, unsigned and not hashed again, with the caller's CRC32C."""
    data, seen = content(LARGE), []

    async def handle(exchange: Exchange) -> None:
        seen.append((exchange, await exchange.read_body()))
        await exchange.answer("200 OK", ETag='"version"', Date="Fri, 02 Jan 2026 03:04:05 GMT")

    tls = {"tls": server_tls, "trust_file": str(certificate)} if is_tls else {}
    async with store_of(handle, prefix="pre/fix", **tls) as store:
        info = await store.put("dir/key", slice_of(data), crc32c=crc32c(data), condition=IfAbsent())
    ((exchange, body),) = seen
    assert body == data
    assert (exchange.method, exchange.path) == ("PUT", "/archive/pre/fix/dir/key")
    assert (
        exchange.headers["x-amz-checksum-crc32c"]
        == base64.b64encode(crc32c(data).to_bytes(4, "big")).decode()
    )
    assert exchange.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert exchange.headers["if-none-match"] == "*"
    assert exchange.headers["user-agent"].startswith("tieringd ")
    assert not {"expect", "content-md5", "x-amz-trailer", "transfer-encoding"} & set(exchange.headers)
    assert (info.key, info.size_bytes, info.version) == ("dir/key", LARGE, '"version"')
    assert info.modified_ms == 1_767_323_045_000


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        pytest.param("412 Precondition Failed", "PreconditionFailed", PreconditionFailed, id="lost"),
        pytest.param("409 Conflict", "FileAlreadyExists", PreconditionFailed, id="exists"),
        pytest.param("404 Not Found", "NoSuchKey", PreconditionFailed, id="missing-key"),
        pytest.param("404 Not Found", "NoSuchBucket", BucketNotFound, id="missing-bucket"),
        pytest.param("403 Forbidden", "AccessDenied", StorageDenied, id="policy"),
        pytest.param("401 Unauthorized", "", StorageDenied, id="no-code"),
        pytest.param("400 Bad Request", "ExpiredToken", StorageDenied, id="expired"),
        pytest.param("400 Bad Request", "BadDigest", ChecksumRejected, id="digest"),
        pytest.param("400 Bad Request", "XAmzContentChecksumMismatch", ChecksumRejected, id="checksum"),
        pytest.param("400 Bad Request", "InvalidDigest", ChecksumRejected, id="not-a-digest"),
        pytest.param("400 Bad Request", "EntityTooLarge", StorageError, id="other"),
        pytest.param("501 Not Implemented", "NotImplemented", StorageError, id="unknown-header"),
    ],
)
async def test_final_answers_have_classes_of_their_own(status, code, error):
    """A final answer of the store has a class of its own, with the key and without the secret."""
    async with store_of(refusing(status, code)) as store:
        with pytest.raises(error) as caught:
            await store.put("dir/key", b"content", crc32c=0, condition=IfVersion('"v"'))
    assert type(caught.value) is error
    assert caught.value.key == "dir/key"
    assert "dir/key" in str(caught.value)
    assert "secret " not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "may_pass"),
    [("RequestTimeTooSkewed", True), ("ExpiredToken", True), ("AccessDenied", False)],
)
async def test_refusal_says_whether_it_may_pass(code, may_pass):
    """A refusal for the clock, or for a role's old credentials, ends without a new configuration."""
    async with store_of(refusing("403 Forbidden", code)) as store:
        with pytest.raises(StorageDenied) as caught:
            await store.get("key")
    assert caught.value.may_pass is may_pass


@pytest.mark.parametrize("hours", [-2, 2])
async def test_refusal_of_a_request_that_is_out_of_time_tells_of_the_clock(hours):
    """A refused HEAD has no code: the store's Date says whether this machine's clock is the reason."""
    now = datetime.now(UTC)
    side = "behind" if hours > 0 else "ahead of"
    off = f"set this machine's clock: it is 7[12]\\d\\d s {side} the store's"
    for date, told in ((now, "check cloud_storage_access_key"), (now + timedelta(hours=hours) * 1.005, off)):
        async with store_of(refusing("403 Forbidden", Date=format_datetime(date, usegmt=True))) as store:
            with pytest.raises(StorageDenied) as caught:
                await store.head("key")
            assert re.match(told, caught.value.hint or "")
            assert caught.value.may_pass is (told == off)


@pytest.mark.parametrize(
    ("status", "code", "outcome_unknown"),
    [
        pytest.param("503 Slow Down", "SlowDown", False, id="throttled"),
        pytest.param("429 Too Many Requests", "", False, id="too-many"),
        pytest.param("409 Conflict", "ConditionalRequestConflict", False, id="met another write"),
        pytest.param("409 Conflict", "OperationAborted", True, id="met another operation"),
        pytest.param("409 Conflict", "", True, id="conflict without a code"),
        pytest.param("503 Service Unavailable", "", True, id="a gateway, perhaps after the write"),
        pytest.param("400 Bad Request", "RequestTimeout", False, id="body-too-slow"),
        pytest.param("400 Bad Request", "IncompleteBody", False, id="body-too-short"),
        pytest.param("404 Not Found", "NoSuchUpload", False, id="parts-cleaned-away"),
        pytest.param("500 Internal Server Error", "InternalError", True, id="internal"),
        pytest.param("502 Bad Gateway", "", True, id="gateway"),
        pytest.param("504 Gateway Timeout", "", True, id="gateway-timeout"),
    ],
)
async def test_trouble_of_the_server_is_worth_another_try(status, code, outcome_unknown):
    """Failures of the server are StorageUnavailable; those after which it may have stored say so."""
    async with store_of(refusing(status, code, Retry_After="7")) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.put("key", b"content", crc32c=0)
        assert caught.value.outcome_unknown is outcome_unknown
        assert caught.value.retry_after_seconds == 7
        with pytest.raises(StorageUnavailable) as caught:
            await store.get("key")
        assert not caught.value.outcome_unknown


async def test_put_tells_the_checksum_of_the_answer():
    """A server that tells what it has got is believed before what was announced."""

    async def handle(exchange: Exchange) -> None:
        await exchange.read_body()
        wrong = base64.b64encode((7).to_bytes(4, "big")).decode()
        await exchange.answer("200 OK", b"", x_amz_checksum_crc32c=wrong, **MODIFIED)

    async with store_of(handle) as store:
        assert (await store.put("key", b"content", crc32c=crc32c(b"content"))).crc32c == 7


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted", ""])
async def test_conflict_is_no_lost_condition(code):
    """Two writes that meet may both be refused: neither came first then, so the error allows a retry."""
    async with store_of(refusing("409 Conflict", code)) as store:
        for condition in (IfVersion('"v"'), IfAbsent()):
            with pytest.raises(StorageUnavailable):
                await store.put("key", b"content", crc32c=0, condition=condition)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        pytest.param("Fri, 02 Jan 2026 03:04:05 GMT", 0, id="past-date"),
        pytest.param("soon", None, id="nonsense"),
    ],
)
async def test_retry_after_may_be_a_date(header, expected):
    """A date that has passed asks for no wait, and an unreadable header is no header."""
    async with store_of(refusing("503 Slow Down", "SlowDown", Retry_After=header)) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.get("key")
    assert caught.value.retry_after_seconds == expected


async def test_unanswered_put_has_an_unknown_outcome(slice_of):
    """A PUT may have stored its object if the connection ends after the last byte."""
    data = content(LARGE)

    async def handle(exchange: Exchange) -> None:
        await exchange.read_body()
        exchange.reset()

    async with store_of(handle) as store:
        for body in (b"content", slice_of(data)):
            with pytest.raises(StorageUnavailable) as caught:
                await store.put("key", body, crc32c=0)
            assert caught.value.outcome_unknown


async def test_put_that_breaks_off_is_known_to_be_lost(slice_of):
    """A PUT has stored nothing if the connection ends before the last byte has left."""

    async def handle(exchange: Exchange) -> None:
        await exchange.reader.readexactly(1 << 20)
        exchange.reset()

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.put("key", slice_of(content(LARGE)), crc32c=0)
    assert not caught.value.outcome_unknown


async def test_refused_connection_is_known_to_be_without_effect():
    """A put that reached no server has no unknown outcome."""
    store = await S3Store.open(settings(NOBODY))
    with pytest.raises(StorageUnavailable) as caught:
        await store.put("key", b"content", crc32c=0)
    assert not caught.value.outcome_unknown
    await store.close()


async def test_silent_server_is_given_up():
    """A server that owes an answer for too long is unavailable, and a put's outcome unknown."""

    async def handle(exchange: Exchange) -> None:
        await exchange.read_to_end()

    async with store_of(handle, read_timeout_seconds=0.1) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.put("key", b"content", crc32c=0)
        assert caught.value.outcome_unknown
        with pytest.raises(StorageUnavailable):
            await store.get("key")


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
async def test_server_that_stops_reading_is_given_up(slice_of, server_tls, certificate, is_tls):
    """A server that takes no byte of a body for too long is unavailable, and has stored nothing."""

    async def handle(exchange: Exchange) -> None:
        await exchange.reader.readexactly(1 << 20)
        await asyncio.Event().wait()

    tls = {"tls": server_tls, "trust_file": str(certificate)} if is_tls else {}
    async with store_of(handle, read_timeout_seconds=0.2, **tls) as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.put("key", slice_of(content(LARGE)), crc32c=0)
        assert not caught.value.outcome_unknown


async def test_refusal_before_the_body_is_read_is_heard(slice_of):
    """An answer that comes while the body is still being sent decides, and the sending ends."""

    async def handle(exchange: Exchange) -> None:
        await exchange.reader.readexactly(1 << 20)
        await exchange.answer("403 Forbidden", error_document("AccessDenied"), Connection="close")
        await exchange.read_to_end()

    async with store_of(handle, max_connections=1) as store:
        for _ in range(3):
            with pytest.raises(StorageDenied):
                await store.put("key", slice_of(content(LARGE)), crc32c=0)


async def test_cancelled_put_frees_its_thread_and_its_file(slice_of):
    """The file may be closed at once after a cancelled PUT, and the store's only thread is free."""
    begun = asyncio.Event()
    bodies = []

    async def handle(exchange: Exchange) -> None:
        if exchange.path.endswith("stuck"):
            await exchange.reader.readexactly(1 << 20)
            begun.set()
            await asyncio.Event().wait()
        bodies.append(await exchange.read_body())
        await exchange.answer("200 OK", ETag='"version"')

    async with store_of(handle, read_timeout_seconds=60) as store:
        store._executor.shutdown()
        store._executor = executor = RecordingExecutor(1)
        file_slice = slice_of(content(LARGE))
        fd = os.dup(file_slice.fd)
        task = asyncio.create_task(store.put("stuck", FileSlice(fd, file_slice.position, LARGE), crc32c=0))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert executor.submitted
        assert executor.is_idle()
        os.close(fd)
        await store.put("next", file_slice, crc32c=0)
        executor.shutdown()
    assert bodies == [content(LARGE)]


async def test_short_file_is_told_apart_from_a_broken_connection(slice_of):
    """A file that ends early is the file's fault: LocalFileError, not StorageUnavailable."""
    whole = slice_of(content(LARGE))

    async def handle(exchange: Exchange) -> None:
        await exchange.read_to_end()

    async with store_of(handle) as store:
        with pytest.raises(LocalFileError, match="truncated"):
            await store.put("key", FileSlice(whole.fd, whole.position, LARGE + 100), crc32c=0)


async def test_truncated_download_is_noticed():
    """An answer that ends before its announced length is unavailable, not a short object."""

    async def handle(exchange: Exchange) -> None:
        head = "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-99/100\r\nContent-Length: 100\r\n"
        stamp = 'ETag: "v"\r\nLast-Modified: Fri, 02 Jan 2026 03:04:05 GMT\r\n\r\n'
        exchange.writer.write((head + stamp).encode() + b"only this")
        await exchange.writer.drain()
        exchange.reset()

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable):
            await store.get("key")
        with pytest.raises(StorageUnavailable):
            await store.get_range("key", position=0, size_bytes=100)


async def test_damaged_download_is_noticed():
    """Bytes that do not match the checksum that the server tells are not returned."""
    headers = {"x_amz_checksum_crc32c": base64.b64encode(bytes(4)).decode(), **MODIFIED}

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("200 OK", b"content", **headers)

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable, match="checksum"):
            await store.get("key")


async def test_checksum_of_a_multipart_object_is_not_taken_for_its_own():
    """A checksum composed of parts' checksums counts as none."""
    seen = []

    async def handle(exchange: Exchange) -> None:
        seen.append(exchange.headers.get("x-amz-checksum-mode"))
        head = 'HTTP/1.1 200 OK\r\nContent-Length: 7\r\nETag: "v"\r\nx-amz-checksum-crc32c: AAAAAA==-2\r\n'
        exchange.writer.write(f"{head}Last-Modified: Fri, 02 Jan 2026 03:04:05 GMT\r\n\r\n".encode())
        await exchange.writer.drain()

    async with store_of(handle) as store:
        assert (await store.head("key")).crc32c is None
    assert seen == ["ENABLED"]


async def test_head_tells_a_missing_bucket_from_a_missing_object():
    """A bare 404 to HEAD is looked into, because it has no code."""

    async def object_missing(exchange: Exchange) -> None:
        await exchange.answer("404 Not Found" if exchange.path.endswith("key") else "200 OK")

    async with store_of(object_missing) as store:
        with pytest.raises(ObjectNotFound):
            await store.head("key")
    async with store_of(refusing("404 Not Found")) as store:
        with pytest.raises(BucketNotFound):
            await store.head("key")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        pytest.param("AccessDenied", StorageDenied, id="denied"),
        pytest.param("InternalError", StorageUnavailable, id="failed"),
    ],
)
async def test_delete_reports_the_keys_that_were_refused(code, error):
    """One refused key of many is an error that names it and counts the refused."""
    entry = f"<Error><Key>pre/b</Key><Code>{code}</Code><Message>no</Message></Error>"
    gone = "<Error><Key>pre/a</Key><Code>NoSuchKey</Code></Error>"

    async def handle(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.answer("200 OK", f"<DeleteResult>{gone}{entry}</DeleteResult>".encode())

    async with store_of(handle, prefix="pre") as store:
        with pytest.raises(error, match=r"delete b in bucket archive.*1 of 3 objects"):
            await store.delete_many(["a", "b", "c"])


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"endpoint_url": "not a url"}, id="endpoint"),
        pytest.param({"trust_file": "/not/there.pem"}, id="trust-file"),
        pytest.param({"storage_class": "DEEP_ARCHIVE"}, id="storage-class"),
    ],
)
async def test_settings_that_cannot_work_are_refused_at_once(wrong):
    """A client that cannot be built is a fault of the configuration."""
    with pytest.raises(ConfigError, match="cloud_storage_"):
        await S3Store.open(settings("http://127.0.0.1:1", **wrong))


async def test_untrusted_certificate_names_the_setting(server_tls):
    """A server whose certificate is not trusted is unavailable, with a hint at the trust file."""
    async with store_of(refusing("200 OK"), tls=server_tls) as store:
        with pytest.raises(StorageUnavailable, match="cloud_storage_trust_file"):
            await store.get("key")


def test_secret_key_is_not_printed():
    """The settings can be logged."""
    assert "hush" not in repr(S3Settings(bucket="b", access_key="me", secret_key="hush"))


def listing(*keys: str, next_token: str | None = None) -> bytes:
    """Return a page of ListObjectsV2; with *next_token* it is not the last one."""
    entries = "".join(
        f"<Contents><Key>{key}</Key><Size>7</Size><ETag>&quot;v&quot;</ETag>"
        "<LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>"
        for key in keys
    )
    token = "" if next_token is None else f"<NextContinuationToken>{next_token}</NextContinuationToken>"
    is_truncated = str(next_token is not None).lower()
    return (
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<IsTruncated>{is_truncated}</IsTruncated>{token}{entries}</ListBucketResult>"
    ).encode()


async def test_empty_page_is_not_the_end_of_a_listing():
    """The store says where to go on. Two empty pages, then two with objects: all objects are listed."""
    pages = [
        listing(next_token="one"),
        listing(next_token="two"),
        listing("a", "b", next_token="three"),
        listing("c"),
    ]
    asked = []

    async def handle(exchange: Exchange) -> None:
        asked.append(parse_qs(urlsplit(exchange.path).query))
        await exchange.answer("200 OK", pages[len(asked) - 1])

    async with store_of(handle) as store:
        found = [one.key async for one in list_objects(store, "")]
    assert found == ["a", "b", "c"]
    assert [one.get("continuation-token") for one in asked] == [None, ["one"], ["two"], None]
    assert asked[-1]["start-after"] == ["b"]


async def test_times_of_a_listing_are_read_in_their_own_form():
    """The SDK tries every form of a time, which is most of a listing's work, and its result is local."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("200 OK", listing("a"))

    async with serving(handle) as url, AsyncExitStack() as resources:
        client, _, _ = await open_client(settings(url), resources)
        page = await client.list_objects_v2(Bucket="archive")
    (entry,) = page["Contents"]
    assert entry["LastModified"] == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert entry["LastModified"].tzinfo is UTC


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-02T03:04:05Z",
        "2026-11-28T03:55:09.561Z",
        "2026-11-28T03:55:09.561234Z",
        "2026-11-28T03:55:09+02:00",
        "Fri, 02 Jan 2026 03:04:05 GMT",
        "20260102T030405Z",
        "1767323045",
        1767323045,
    ],
)
def test_time_is_the_one_that_the_sdk_reads(text):
    """A server may give a time in any of these forms."""
    assert parsed_time(text) == parse_timestamp(text)


@pytest.mark.parametrize("text", ["yesterday", "2026-13-01T00:00:00Z", "----------TZ"])
def test_text_that_is_no_time_is_refused_as_by_the_sdk(text):
    """The SDK makes its own error of it."""
    with pytest.raises(ValueError, match="Invalid timestamp"):
        parsed_time(text)


async def test_truncated_page_without_a_token_is_no_end():
    """Nothing tells where the listing goes on, and what was not listed must not be taken for gone."""
    page = listing(next_token="x").replace(b"<NextContinuationToken>x</NextContinuationToken>", b"")

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("200 OK", page)

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable, match="NextContinuationToken"):
            await store.list_page("")


@pytest.mark.parametrize("dates", [{}, {"Date": "today"}], ids=["none", "unreadable"])
async def test_server_without_a_date_has_ours(dates):
    """A server without a readable Date is no fault: a put and the age of an upload are dated by our clock."""
    began = datetime.now(UTC)
    uploads = "".join(
        f"<Upload><Key>{key}</Key><UploadId>{key}</UploadId><Initiated>{initiated:%Y-%m-%dT%H:%M:%SZ}</Initiated></Upload>"
        for key, initiated in (("old", began - timedelta(days=2)), ("new", began - timedelta(hours=1)))
    )
    page = (
        '<ListMultipartUploadsResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<IsTruncated>false</IsTruncated>{uploads}</ListMultipartUploadsResult>"
    )
    deleted = []

    async def handle(exchange: Exchange) -> None:
        await exchange.read_body()
        if exchange.method == "DELETE":
            deleted.append(urlsplit(exchange.path).path)
        await exchange.answer(
            "200 OK", page.encode() if exchange.method == "GET" else b"", ETag='"v"', **dates
        )

    async with store_of(handle) as store:
        info = await store.put("key", b"content", crc32c=0)
        assert await store.discard_abandoned_uploads(lambda _: True) == 1
    assert deleted == ["/archive/old"]
    assert abs(info.modified_ms / 1000 - began.timestamp()) < 600


@pytest.mark.parametrize("field", ["Key", "Size", "ETag", "LastModified"])
async def test_entry_of_a_listing_without_a_field_is_refused(field):
    """An entry that lacks what each object has makes the page no listing. The error allows another try."""
    page = re.sub(rf"<{field}>.*</{field}>".encode(), b"", listing("a"))

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("200 OK", page)

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable, match=f"no {field}"):
            await store.list_page("")


@pytest.mark.parametrize("field", ["Key", "UploadId", "Initiated"])
async def test_unfinished_upload_without_a_field_is_refused(field):
    """An upload of which the server does not tell the beginning may be at work: it is not aborted."""
    upload = "<Key>a</Key><UploadId>one</UploadId><Initiated>2026-01-02T03:04:05Z</Initiated>"
    page = (
        '<ListMultipartUploadsResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        "<IsTruncated>false</IsTruncated><Upload>"
        + re.sub(f"<{field}>.*</{field}>", "", upload)
        + "</Upload>"
        "</ListMultipartUploadsResult>"
    )
    methods = []

    async def handle(exchange: Exchange) -> None:
        methods.append(exchange.method)
        await exchange.answer("200 OK", page.encode())

    async with store_of(handle) as store:
        with pytest.raises(StorageUnavailable, match=f"no {field}"):
            await store.discard_abandoned_uploads(lambda _: True)
    assert methods == ["GET"]


async def test_refused_delete_without_a_key_is_told():
    """A refusal that names no key counts as well."""
    answer = b"<DeleteResult><Error><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>"

    async def handle(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.answer("200 OK", answer)

    async with store_of(handle) as store:
        with pytest.raises(StorageDenied, match="delete in bucket archive: AccessDenied no") as caught:
            await store.delete_many(["a", "b"])
    assert "1 of 2 objects were refused" in caught.value.hint


@pytest.mark.parametrize("modified", ["Fri, 02 Jan 2026 03:04:05 GMT", "2026-01-02T03:04:05Z"])
async def test_time_of_an_object_may_have_either_form(modified):
    """A server that writes Last-Modified as listings do is understood by both ways of sending a request."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("200 OK", ETag='"v"', Last_Modified=modified)

    async with store_of(handle) as store:
        assert [(await store.head("key")).modified_ms for _ in range(2)] == [1_767_323_045_000] * 2
