"""
Which failures of a store are asked again, and which are raised: the same table for several stores.

A proxy spoils the first exchange with a real server. A store's test class inherits this one, gives
the fixtures `server_url`, `bucket` and `open_backend`, and says in what words its server fails.
"Retried" means: the second attempt succeeds, and the bucket holds exactly one object with the
right bytes.
"""

from __future__ import annotations

import asyncio
import random
import socket
import uuid
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, ClassVar

import pytest
from crc32c import crc32c

from tests.support.fault_proxy import (
    DamageAnswer,
    DelayAnswer,
    NoAnswer,
    ResetAnswer,
    ResetRequest,
    StallAnswer,
    StallRequest,
    TruncateAnswer,
    fault_proxy,
)
from tieringd.errors import BucketNotFound, ChecksumRejected, StorageDenied, StorageUnavailable
from tieringd.storage.base import IfAbsent
from tieringd.storage.resilient import ResilientStore, StoreLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.fault_proxy import Answer, Fault, FaultProxy

MIB = 1 << 20
SEGMENT = random.Random(1).randbytes(12 * MIB)  # More than the sockets on the way hold.
MANIFEST = random.Random(2).randbytes(100_000)
PATIENCE_SECONDS = 90.0

REFUSALS = ("429", "429-retry-after", "500", "503", "503-retry-after")
LOST_ANSWERS = [
    pytest.param(NoAnswer(), id="reset-before-the-answer"),
    pytest.param(DelayAnswer(), id="delayed-answer"),
]
BROKEN_UPLOADS = [
    pytest.param(ResetRequest(0), id="reset-before-the-body"),
    pytest.param(ResetRequest(MIB), id="reset-mid-body"),
    pytest.param(StallRequest(MIB), id="stalled-body"),
]
BROKEN_DOWNLOADS = [
    pytest.param(ResetAnswer(1000), id="reset-mid-answer"),
    pytest.param(TruncateAnswer(1000), id="truncated-answer"),
    pytest.param(StallAnswer(1000), id="stalled-answer"),
]

LARGE_DOWNLOADS = [
    pytest.param(ResetAnswer(3 * MIB), id="reset"),
    pytest.param(TruncateAnswer(3 * MIB), id="truncated"),
    pytest.param(StallAnswer(3 * MIB), id="stalled"),
    pytest.param(NoAnswer(), id="no-answer"),
]

READS = {
    "get": lambda store: store.get("key"),
    "get_range": lambda store: store.get_range("key", position=5, size_bytes=90_000),
    "head": lambda store: store.head("key"),
    "list_page": lambda store: store.list_page(""),
    "delete_many": lambda store: store.delete_many(["key"]),
}
"""The calls that HTTP calls idempotent, for a key that exists."""


_getaddrinfo = socket.getaddrinfo


def _unresolved(host, *args, **kwargs):
    """Look up a name as a system does that has heard of no host `store.invalid`."""
    if host == "store.invalid":
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return _getaddrinfo(host, *args, **kwargs)


def patience(fault: Fault | None = None) -> float:
    """
    Return for how many seconds a store bears silence.

    The attempt that follows must not exceed it. A server is slower to store a segment than to read.
    Where a request waits on the loop, the clock leaps over the silence (`leap`). A thread that moves a
    large body waits for as long as the system says: there the store bears less.
    """
    is_body_of_thread = isinstance(fault, (StallAnswer, StallRequest)) and fault.after_bytes >= MIB
    return 10.0 if is_body_of_thread else PATIENCE_SECONDS


async def put_manifest(store, key: str = "manifest", condition=None):
    return await store.put(key, MANIFEST, crc32c=crc32c(MANIFEST), condition=condition)


def leaping_clock(monkeypatch) -> Callable[[float], None]:
    """Return what moves the running loop's clock forward: timers that fall due by that fire at once."""
    loop = asyncio.get_running_loop()
    time, ahead = loop.time, 0.0

    def leap(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    # The loop has no setting for its clock, and deadlines of minutes cannot be waited for.
    monkeypatch.setattr(loop, "time", lambda: time() + ahead)
    return leap


class Scene:
    """
    A proxy, the bucket behind it, and the stores that a test has opened; they are closed at its end.

    `leap` moves the loop's clock forward by a number of seconds.
    """

    leap: Callable[[float], None]

    def __init__(self, proxy: FaultProxy, bucket, open_backend, stores: AsyncExitStack) -> None:
        self.proxy = proxy
        self.bucket = bucket
        self.outcomes: list[str] = []
        """The error of each attempt, or `ok`."""
        self.told: list[str] = []
        """The outcome of each attempt in the metric: `throttled` where the store asked for fewer requests."""
        self._open_backend = open_backend
        self._stores = stores

    def note(self, outcome: str) -> None:
        """Note the outcome of an attempt. A store that asks for fewer requests is unavailable."""
        self.told.append(outcome)
        self.outcomes.append("StorageUnavailable" if outcome == "throttled" else outcome)

    async def store(
        self, fault: Fault | None = None, *, url: str | None = None, seconds: float = 300, **changes
    ) -> ResilientStore:
        """Open a store that asks the proxy, or *url*, for at most so many seconds, and will meet *fault*."""
        changes = {"connect_timeout_seconds": 120, "read_timeout_seconds": patience(fault)} | changes
        backend = await self._open_backend(url or self.proxy.url, **changes)
        limits = StoreLimits(
            initial_backoff_seconds=0.001,
            segment_upload_timeout_seconds=seconds,
            manifest_upload_timeout_seconds=seconds,
        )
        store = ResilientStore(backend, limits, on_request=lambda *each: self.note(each[1]))
        self._stores.push_async_callback(store.close)
        return store


class RetryTable:
    """The cases that every store has."""

    refusals: ClassVar[dict[str, Answer]]
    """What the server says when it has trouble, for each of `REFUSALS`."""
    in_doubt: ClassVar[set[str]]
    """Those of them after which a put may have taken effect."""
    denial: ClassVar[Answer]
    no_bucket: ClassVar[Answer]
    wait: ClassVar[Answer]
    """A refusal that asks to wait for a second."""

    @pytest.fixture
    def prefix(self):
        return uuid.uuid4().hex

    @pytest.fixture
    async def here(self, server_url, bucket, open_backend, monkeypatch):
        async with fault_proxy(server_url) as proxy, AsyncExitStack() as stores:
            scene = Scene(proxy, bucket, open_backend, stores)
            scene.leap = leaping_clock(monkeypatch)
            proxy.on_stall = lambda: scene.leap(PATIENCE_SECONDS)
            yield scene

    async def _upload_twice(self, here, body, fault: Fault) -> None:
        store = await here.store(fault)
        here.proxy.spoil(fault)
        await store.put("segment", body, crc32c=crc32c(SEGMENT))
        assert here.outcomes == ["StorageUnavailable", "ok"]
        assert [each.fault for each in here.proxy.exchanges] == [fault, None]
        assert here.bucket.keys() == ["segment"]
        assert here.bucket.read("segment") == SEGMENT

    @pytest.mark.parametrize("case", REFUSALS)
    async def test_refused_upload_is_retried(self, here, slice_of, case):
        """A segment's upload begins anew, and one object with its bytes is the result."""
        await self._upload_twice(here, slice_of(SEGMENT), self.refusals[case])

    @pytest.mark.parametrize("fault", [*BROKEN_UPLOADS, *LOST_ANSWERS])
    async def test_broken_upload_is_retried(self, here, slice_of, fault):
        """A segment that broke off, or whose answer was lost, is sent again: the object is the same."""
        await self._upload_twice(here, slice_of(SEGMENT), fault)

    @pytest.mark.parametrize("case", REFUSALS)
    @pytest.mark.parametrize("operation", READS)
    async def test_refused_request_is_retried(self, here, operation, case):
        """Reads and deletes are sent again, and listeners hear whether the store throttled."""
        here.bucket.write("key", MANIFEST)
        store = await here.store()
        throttled = []
        store.listen(lambda *, is_throttled: throttled.append(is_throttled))
        here.proxy.spoil(self.refusals[case])
        await READS[operation](store)
        assert here.outcomes == ["StorageUnavailable", "ok"]
        assert throttled == [case != "500", False]
        assert [one == "throttled" for one in here.told] == throttled
        assert [each.status for each in here.proxy.exchanges[:1]] == [int(case[:3])]

    @pytest.mark.parametrize("fault", [*BROKEN_DOWNLOADS, *LOST_ANSWERS])
    @pytest.mark.parametrize("is_range", [False, True], ids=["whole", "range"])
    async def test_broken_download_is_retried(self, here, fault, is_range):
        """A read whose answer broke off is asked again, and gives the right bytes."""
        here.bucket.write("key", MANIFEST)
        store = await here.store(fault)
        here.proxy.spoil(fault)
        if is_range:
            assert await store.get_range("key", position=5, size_bytes=90_000) == MANIFEST[5:90_005]
        else:
            assert (await store.get("key"))[0] == MANIFEST
        assert here.outcomes == ["StorageUnavailable", "ok"]

    @pytest.mark.parametrize("fault", LARGE_DOWNLOADS)
    async def test_broken_download_of_a_large_range_is_retried(self, here, fault):
        """A range that broke off after some MiB is read again from its beginning."""
        here.bucket.write("key", SEGMENT)
        store = await here.store(fault)
        here.proxy.spoil(fault)
        data = await store.get_range("key", position=5, size_bytes=8 * MIB)
        assert data == SEGMENT[5 : 5 + 8 * MIB]
        assert here.outcomes == ["StorageUnavailable", "ok"]

    @pytest.mark.parametrize(
        "fault", [ResetAnswer(10), TruncateAnswer(10), StallAnswer(10)], ids=["reset", "truncated", "stalled"]
    )
    async def test_broken_listing_is_retried(self, here, fault):
        """A listing that broke off is asked for again, and is not taken for a shorter one."""
        here.bucket.write("key", MANIFEST)
        store = await here.store(fault)
        here.proxy.spoil(fault)
        assert [each.key for each in (await store.list_page("")).objects] == ["key"]
        assert here.outcomes == ["StorageUnavailable", "ok"]

    async def test_upload_with_a_wrong_checksum_is_raised(self, here, slice_of):
        """A file whose bytes are not the announced ones is not sent again, and nothing stays of it."""
        store = await here.store()
        with pytest.raises(ChecksumRejected):
            await store.put("segment", slice_of(SEGMENT), crc32c=crc32c(SEGMENT) ^ 1)
        assert here.outcomes == ["ChecksumRejected"]
        assert here.bucket.keys() == []

    async def test_download_with_a_wrong_checksum_is_retried(self, here):
        """Bytes that were damaged on their way are read again."""
        store = await here.store()
        await put_manifest(store)
        here.proxy.spoil(DamageAnswer())
        assert (await store.get("manifest"))[0] == MANIFEST
        assert here.outcomes == ["ok", "StorageUnavailable", "ok"]

    @pytest.mark.parametrize("case", REFUSALS)
    async def test_refused_commit_is_retried_only_if_it_had_no_effect(self, here, case):
        """A refusal that came before the work is asked again; one that may have come after it is raised."""
        store = await here.store()
        here.proxy.spoil(self.refusals[case])
        if case in self.in_doubt:
            with pytest.raises(StorageUnavailable) as caught:
                await put_manifest(store, condition=IfAbsent())
            assert caught.value.outcome_unknown
            assert here.outcomes == ["StorageUnavailable"]
        else:
            await put_manifest(store, condition=IfAbsent())
            assert here.outcomes == ["StorageUnavailable", "ok"]
            assert here.bucket.read("manifest") == MANIFEST

    @pytest.mark.parametrize("fault", LOST_ANSWERS)
    @pytest.mark.parametrize("is_reused", [False, True], ids=["new-connection", "reused-connection"])
    async def test_commit_whose_answer_is_lost_is_sent_once(self, here, fault, is_reused):
        """
        The commit is raised with its outcome unknown.

        No layer repeats it: it has won, and would then lose.
        """
        here.bucket.write("key", b"warms a connection")
        store = await here.store(fault)
        if is_reused:
            await store.get("key")
        asked = len(here.proxy.exchanges)
        here.proxy.spoil(fault)
        with pytest.raises(StorageUnavailable) as caught:
            await put_manifest(store, condition=IfAbsent())
        assert caught.value.outcome_unknown
        assert here.outcomes[asked:] == ["StorageUnavailable"]
        assert [each.fault for each in here.proxy.exchanges[asked:]] == [fault]
        assert here.bucket.read("manifest") == MANIFEST

    @pytest.mark.parametrize("operation", READS)
    async def test_request_on_a_reused_connection_is_repeated_by_no_library(self, here, operation):
        """One attempt is one request: the HTTP client repeats nothing behind the policy's back."""
        here.bucket.write("key", MANIFEST)
        store = await here.store()
        await store.get("key")
        here.proxy.spoil(NoAnswer(), times=3)
        await READS[operation](store)
        assert here.outcomes == ["ok", *["StorageUnavailable"] * 3, "ok"]

    @pytest.mark.parametrize("fault", [NoAnswer(), ResetRequest(MIB)], ids=["no-answer", "mid-body"])
    async def test_upload_on_a_reused_connection_is_repeated_by_no_library(self, here, slice_of, fault):
        """One attempt to upload is one request, on a connection that has served before as well."""
        here.bucket.write("key", MANIFEST)
        store = await here.store()
        await store.get("key")
        here.proxy.spoil(fault, times=3)
        await store.put("segment", slice_of(SEGMENT), crc32c=crc32c(SEGMENT))
        assert here.outcomes == ["ok", *["StorageUnavailable"] * 3, "ok"]
        assert len(here.proxy.exchanges) == len(here.outcomes)
        assert here.bucket.read("segment") == SEGMENT

    async def test_denial_is_raised_at_once(self, here, slice_of):
        """A 403 ends uploads, commits and downloads after one attempt; nothing is stored."""
        await self._raises_at_once(here, slice_of, self.denial, StorageDenied)
        assert here.bucket.keys() == []

    async def test_missing_bucket_is_raised_at_once(self, here, slice_of):
        """A 404 of the bucket ends uploads, commits and downloads after one attempt; nothing is stored."""
        await self._raises_at_once(here, slice_of, self.no_bucket, BucketNotFound)
        assert here.bucket.keys() == []

    async def _raises_at_once(self, here, slice_of, answer, error) -> None:
        store = await here.store()
        here.proxy.spoil(answer, times=3)
        with pytest.raises(error):
            await store.put("segment", slice_of(SEGMENT), crc32c=crc32c(SEGMENT))
        with pytest.raises(error):
            await put_manifest(store, condition=IfAbsent())
        with pytest.raises(error):
            await store.get("segment")
        assert here.outcomes == [error.__name__] * 3
        assert here.proxy.faults_left == 0

    async def test_unknown_host_is_asked_until_the_deadline(self, here, monkeypatch):
        """A name that does not resolve is unavailable, with the certainty that nothing was stored."""
        # The system's own resolver may think for longer than the deadline.
        monkeypatch.setattr(socket, "getaddrinfo", _unresolved)
        store = await here.store(url="http://store.invalid", seconds=30.0)
        commit = asyncio.create_task(put_manifest(store, condition=IfAbsent()))
        while len(here.outcomes) < 3 and not commit.done():  # noqa: ASYNC110 a store reports no event
            await asyncio.sleep(0.001)
        here.leap(30)
        with pytest.raises(StorageUnavailable, match="gave up after") as caught:
            await commit
        # The deadline may cut the last attempt off. Those that came to their end are certain.
        assert not caught.value.__cause__.outcome_unknown
        assert "StorageUnavailable" in here.outcomes

    async def test_retry_waits_as_long_as_the_store_asks(self, here):
        """A Retry-After of a second is longer than the backoff, and is kept."""
        store = await here.store()
        here.proxy.spoil(self.wait)
        here.bucket.write("key", MANIFEST)
        now = asyncio.get_running_loop().time
        begun = now()
        await store.get("key")
        assert now() - begun >= 1
        assert here.outcomes == ["StorageUnavailable", "ok"]

    async def test_stalled_upload_is_cut_by_its_deadline(self, here, slice_of):
        """An upload that no longer moves ends with its deadline; until then it is the oldest in flight."""
        store = await here.store(seconds=30.0, read_timeout_seconds=600)
        here.proxy.spoil(StallRequest(MIB))
        upload = asyncio.create_task(store.put("segment", slice_of(SEGMENT), crc32c=crc32c(SEGMENT)))
        await here.proxy.stalled.wait()
        assert store.oldest_put_started is not None
        here.leap(30)
        with pytest.raises(StorageUnavailable, match=r"the limit is 30 s"):
            await upload
        assert store.oldest_put_started is None
        assert here.outcomes == ["timeout"]
        assert here.bucket.keys() == []
