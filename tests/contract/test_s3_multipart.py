"""Objects sent in parts, to two servers: stored whole or not at all, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import random
import uuid

import pytest
from crc32c import crc32c

from tests.support.fault_proxy import Answer, StallRequest, fault_proxy
from tests.support.raw_http import PATIENT
from tests.support.s3_bucket import S3Bucket
from tests.support.seaweedfs import ACCESS_KEY, SECRET_KEY, s3_client
from tieringd.daemon.assembly import _clean_up
from tieringd.errors import ChecksumRejected, LocalFileError, PreconditionFailed, StorageUnavailable
from tieringd.formats.object_keys import quarantined_key
from tieringd.storage.base import FileSlice, IfAbsent, IfVersion, JoinSource
from tieringd.storage.checked_puts import require_conditional_writes
from tieringd.storage.resilient import ResilientStore
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings

MIB = 1 << 20
DATA = random.Random(3).randbytes(12 * MIB + 17)  # Three parts, of which the last is short.
BUCKET = "contract"


def said(status: str, code: str) -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>said the proxy</Message></Error>".encode())


@pytest.fixture(params=["seaweedfs", "moto"])
def endpoint(request):
    """Return the URL of a server that has the bucket."""
    if request.param == "seaweedfs":
        return request.getfixturevalue("seaweedfs").endpoint_url
    url = request.getfixturevalue("moto_url")
    with S3Bucket(url, bucket=BUCKET, prefix="") as bucket:
        bucket.create()
    return url


@pytest.fixture
def is_moto(endpoint, request):
    return request.node.callspec.params["endpoint"] == "moto"


@pytest.fixture
def prefix():
    return uuid.uuid4().hex


@pytest.fixture
def bucket(endpoint, prefix):
    with S3Bucket(endpoint, bucket=BUCKET, prefix=prefix) as bucket:
        yield bucket


@pytest.fixture
def client(endpoint):
    client = s3_client(endpoint)
    yield client
    client.close()


@pytest.fixture
async def store_at(prefix):
    """Return a function that opens a store at a URL; all are closed at the end."""
    stores = []

    async def open_store(url: str) -> S3Store:
        settings = S3Settings(
            bucket=BUCKET,
            prefix=prefix,
            endpoint_url=url,
            access_key=ACCESS_KEY,
            secret_key=SECRET_KEY,
            url_style="path",
            multipart_threshold_bytes=6 * MIB,
            multipart_part_bytes=5 * MIB,
            **PATIENT,
        )
        stores.append(await S3Store.open(settings))
        return stores[-1]

    yield open_store
    for store in stores:
        await store.close()


@pytest.fixture
async def store(store_at, endpoint):
    return await store_at(endpoint)


def unfinished(client, prefix) -> list[str]:
    answer = client.list_multipart_uploads(Bucket=BUCKET, Prefix=f"{prefix}/")
    return [each["Key"] for each in answer.get("Uploads", ())]


async def put(store, file_slice, **changes):
    return await store.put("key", file_slice, **{"crc32c": crc32c(DATA)} | changes)


async def test_parts_become_one_object(store, bucket, client, prefix, slice_of):
    """The object holds the slice, and the store knows the checksum of the whole."""
    info = await put(store, slice_of(DATA))
    assert bucket.read("key") == DATA
    assert (info.size_bytes, info.crc32c) == (len(DATA), crc32c(DATA))
    assert info.version.strip('"').endswith("-3")
    head = await store.head("key")
    assert (head.version, head.size_bytes, head.crc32c) == (info.version, len(DATA), crc32c(DATA))
    assert unfinished(client, prefix) == []


async def test_existing_object_is_not_replaced(store, bucket, client, prefix, slice_of):
    """The completing request decides whether the key is still free; the loser's parts are gone."""
    await store.put("key", b"first", crc32c=crc32c(b"first"))
    with pytest.raises(PreconditionFailed):
        await put(store, slice_of(DATA), condition=IfAbsent())
    assert bucket.read("key") == b"first"
    assert unfinished(client, prefix) == []


@pytest.mark.parametrize("endpoint", ["seaweedfs"], indirect=True)  # Moto ignores this condition.
async def test_only_the_expected_version_is_replaced(store, bucket, client, prefix, slice_of):
    """The completing request decides whether the object is still the one that the writer has read."""
    first = await store.put("key", b"first", crc32c=crc32c(b"first"))
    second = await store.put("key", b"second", crc32c=crc32c(b"second"))
    with pytest.raises(PreconditionFailed):
        await put(store, slice_of(DATA), condition=IfVersion(first.version))
    assert bucket.read("key") == b"second"
    assert unfinished(client, prefix) == []
    await put(store, slice_of(DATA), condition=IfVersion(second.version))
    assert bucket.read("key") == DATA


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        pytest.param(said("412 Precondition Failed", "PreconditionFailed"), PreconditionFailed, id="412"),
        pytest.param(said("409 Conflict", "ConditionalRequestConflict"), StorageUnavailable, id="409"),
    ],
)
async def test_completion_that_another_writer_forestalls_is_given_up(  # noqa: PLR0917 - fixtures
    store_at, endpoint, bucket, client, prefix, slice_of, answer, error
):
    """A lost condition is final, a conflict is tried again; after either, the parts are gone."""
    async with fault_proxy(endpoint) as proxy:
        store = await store_at(proxy.url)
        first = await store.put("key", b"first", crc32c=crc32c(b"first"))
        proxy.spoil(answer, where=lambda each: each.method == "POST" and "uploadId=" in each.path)
        with pytest.raises(error):
            await put(store, slice_of(DATA), condition=IfVersion(first.version))
        assert proxy.faults_left == 0
    assert bucket.read("key") == b"first"
    assert unfinished(client, prefix) == []


async def test_part_of_which_the_store_has_other_bytes_is_no_success(  # noqa: PLR0917 - fixtures
    store_at, endpoint, bucket, client, prefix, slice_of
):
    """The answer to a part tells its checksum, and is compared."""
    async with fault_proxy(endpoint) as proxy:
        store = await store_at(proxy.url)
        answer = Answer("200 OK", headers={"ETag": '"part"', "x-amz-checksum-crc32c": "AAAABw=="})
        proxy.spoil(answer, where=lambda each: "partNumber=2" in each.path)
        with pytest.raises(StorageUnavailable, match="other bytes of a part"):
            await put(store, slice_of(DATA))
    assert bucket.keys() == []
    assert unfinished(client, prefix) == []


async def test_wrong_checksum_is_refused(store, bucket, client, prefix, slice_of):
    """Parts that do not add up to the announced checksum never become an object."""
    with pytest.raises(ChecksumRejected):
        await put(store, slice_of(DATA), crc32c=crc32c(DATA) ^ 1)
    assert bucket.keys() == []
    assert unfinished(client, prefix) == []


async def test_truncated_file_is_reported(store, bucket, client, prefix, slice_of):
    """A file that ends inside a part is the file's fault, and its upload is aborted."""
    whole = slice_of(DATA)
    os.ftruncate(whole.fd, 11 * MIB)
    with pytest.raises(LocalFileError, match="truncated"):
        await put(store, FileSlice(whole.fd, whole.position, len(DATA)))
    assert bucket.keys() == []
    assert unfinished(client, prefix) == []


async def test_failed_part_aborts_the_upload(store_at, endpoint, bucket, client, prefix, slice_of):  # noqa: PLR0917 - fixtures
    """The error of a part is raised, and the upload's other parts are given up."""
    async with fault_proxy(endpoint) as proxy:
        store = await store_at(proxy.url)
        proxy.spoil(Answer("503 Slow Down"), where=lambda each: "partNumber=2" in each.path)
        with pytest.raises(StorageUnavailable) as caught:
            await put(store, slice_of(DATA))
        assert proxy.faults_left == 0
    assert not caught.value.outcome_unknown
    assert bucket.keys() == []
    assert unfinished(client, prefix) == []


async def test_cancelled_upload_is_aborted(store_at, endpoint, bucket, client, prefix, slice_of):  # noqa: PLR0917 - fixtures
    """A cancelled put leaves no object, no part and no thread at work on the file."""
    async with fault_proxy(endpoint) as proxy:
        store = await store_at(proxy.url)
        proxy.spoil(StallRequest(1000), where=lambda each: "partNumber=2" in each.path)
        task = asyncio.create_task(put(store, slice_of(DATA)))
        await proxy.stalled.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert bucket.keys() == []
    assert unfinished(client, prefix) == []


@pytest.fixture
async def sources(store):
    """Store three objects to be joined: the second is too small to be copied."""
    parts = [DATA[: 6 * MIB], DATA[6 * MIB : 6 * MIB + 17], DATA[6 * MIB + 17 :]]
    found = []
    for number, part in enumerate(parts):
        await store.put(f"source-{number}", part, crc32c=crc32c(part))
        found.append(JoinSource(f"source-{number}", len(part), crc32c(part)))
    return found


@pytest.mark.parametrize("where", ["x-amz-copy-source", "partNumber=2"])
async def test_failed_part_aborts_the_join(store_at, endpoint, bucket, client, prefix, sources, where):  # noqa: PLR0917 - fixtures
    """No object and no part is left if the store fails to copy or to take a part."""
    async with fault_proxy(endpoint) as proxy:
        store = await store_at(proxy.url)
        proxy.spoil(
            Answer("503 Slow Down"),
            where=lambda each: where in each.path or where in str(each.headers).lower(),
        )
        with pytest.raises(StorageUnavailable) as caught:
            await store.join("key", sources, crc32c=crc32c(DATA))
        assert proxy.faults_left == 0
    assert not caught.value.outcome_unknown
    assert bucket.read("key") is None
    assert unfinished(client, prefix) == []


async def test_join_streams_only_what_is_too_small(store, bucket, client, prefix, sources):
    """A source that cannot be a part, and what it takes of the next one, are all that comes here."""
    joined = await store.join("key", sources, crc32c=crc32c(DATA))
    assert bucket.read("key") == DATA
    assert joined.host_bytes == 5 * MIB
    assert unfinished(client, prefix) == []


async def test_server_that_copies_no_parts_is_told_apart(store_at, endpoint, bucket, client, prefix, sources):  # noqa: PLR0917 - fixtures
    """A server that does not know the request says 501; the caller sends the bytes, and nothing is left."""
    async with fault_proxy(endpoint) as proxy:
        store = await store_at(proxy.url)
        proxy.spoil(
            said("501 Not Implemented", "NotImplemented"), where=lambda each: "partNumber=1" in each.path
        )
        assert await store.join("key", sources, crc32c=crc32c(DATA)) is None
        assert proxy.faults_left == 0
    assert bucket.read("key") is None
    assert unfinished(client, prefix) == []


async def test_abandoned_uploads_are_discarded(store, client, prefix, is_moto):
    """Uploads of a killed process go once they are old; younger ones and those of others stay."""
    ours, foreign, outside = f"{prefix}/dir/key", f"{prefix}/their/key", f"other-{prefix}/dir/key"
    for key in (ours, ours, foreign, outside):
        client.create_multipart_upload(Bucket=BUCKET, Key=key)

    def is_ours(key: str) -> bool:
        return key == "dir/key"

    if not is_moto:  # It says that every upload began in 2010.
        assert await store.discard_abandoned_uploads(is_ours) == 0
    assert await store.discard_abandoned_uploads(is_ours, older_than_seconds=-60) == 2
    assert unfinished(client, prefix) == [foreign]
    assert unfinished(client, f"other-{prefix}") == [outside]


@pytest.mark.parametrize("endpoint", ["moto"], indirect=True)  # It says that every upload began in 2010.
async def test_abandoned_moves_into_quarantine_are_discarded(store, client, prefix):
    """A daemon aborts uploads of all objects of partitions, in their places and in quarantine."""
    data = "53e124b5/cluster/orders/0_W1xNUlUlTfigw_K-dvdxsA/0-2-155-0-a1-2c57cacf.log"
    ours = [data, f"{data}.index", quarantined_key(data), quarantined_key(f"{data}.index")]
    for key in (*ours, "their/key", "quarantine/objects/their/key"):
        client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{key}")
    assert await _clean_up(ResilientStore(store))() == len(ours)
    left = [f"{prefix}/quarantine/objects/their/key", f"{prefix}/their/key"]
    assert sorted(unfinished(client, prefix)) == left


async def test_unfinished_uploads_are_listed(store, client, prefix):
    """All below the prefix are listed, whatever their age, and nothing of others."""
    for key in (f"{prefix}/dir/key", f"{prefix}/other", f"other-{prefix}/dir/key"):
        client.create_multipart_upload(Bucket=BUCKET, Key=key)
    assert sorted(await ResilientStore(store).unfinished_uploads()) == ["dir/key", "other"]


async def test_servers_with_conditional_writes_pass_the_probe(store, bucket):
    """Both servers honour conditions, and the trial leaves nothing in the bucket."""
    await require_conditional_writes(store)
    assert bucket.keys() == []
