"""
The part of the retry table for credentials that expire while a store uses them.

The proxy answers as a server does to expired credentials; the service that issues them is one of
the tests' own. A store's test class inherits this table, and gives the fixtures `here`, a scene
whose stores get their credentials from that service, and `issuer`, an `Issuer`.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, ClassVar

import pytest
from crc32c import crc32c

from tests.contract.retry_table import MANIFEST, READS, SEGMENT, put_manifest
from tieringd.errors import StorageDenied
from tieringd.storage.base import IfAbsent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.fault_proxy import Answer, ProxiedExchange
    from tests.support.raw_http import Exchange


class Issuer:
    """The service that issues the credentials, with a switch for its failure; for `raw_http.serving`."""

    def __init__(self, service: Callable[[Exchange], Awaitable[None]]) -> None:
        self._service = service
        self.is_down = False
        self.has_failed = asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        if not self.is_down:
            await self._service(exchange)
            return
        await exchange.read_body()
        await exchange.answer("503 Service Unavailable", b"{}", Content_Type="application/json")
        self.has_failed.set()

    @property
    def issued(self) -> list[str]:
        """Return what it has issued, as `shown` tells it."""
        raise NotImplementedError

    def shown(self, exchange: ProxiedExchange) -> str:
        """Return what a request to the store came with."""
        return exchange.headers["authorization"].removeprefix("Bearer ")


class ExpiryTable:
    """The cases of every store whose credentials are issued."""

    expired: ClassVar[Answer]
    """What the server says to credentials that were good."""
    attempts: ClassVar[list[str]]
    """What becomes of the attempts at an operation that meets it: where renewal shows."""

    @pytest.fixture
    def prefix(self):
        return uuid.uuid4().hex

    def _expire(self, here, issuer) -> None:
        """Refuse from now on whatever comes with the credentials in use, or with the first ones."""
        current = max(0, len(issuer.issued) - 1)

        def is_expired(exchange: ProxiedExchange) -> bool:
            return issuer.shown(exchange) == issuer.issued[current]

        here.proxy.spoil(self.expired, times=10, where=is_expired)

    def _renewed(self, here, issuer) -> None:
        """Assert that the operation succeeded with the credentials that came next."""
        assert here.outcomes == self.attempts, here.outcomes
        *before, last = [issuer.shown(each) for each in here.proxy.exchanges]
        assert [*dict.fromkeys(before), last] == issuer.issued, (before, last)
        assert len(issuer.issued) == 2

    async def test_expired_credentials_are_replaced_under_an_upload(self, here, issuer, slice_of):
        """A segment that was refused is sent again with fresh credentials: one object is the result."""
        store = await here.store()
        self._expire(here, issuer)
        await store.put("segment", slice_of(SEGMENT), crc32c=crc32c(SEGMENT))
        self._renewed(here, issuer)
        assert here.bucket.keys() == ["segment"]
        assert here.bucket.read("segment") == SEGMENT

    async def test_expired_credentials_are_replaced_under_a_commit(self, here, issuer):
        """A commit that was refused had no effect: it is sent again, and wins."""
        store = await here.store()
        self._expire(here, issuer)
        await put_manifest(store, condition=IfAbsent())
        self._renewed(here, issuer)
        assert here.bucket.read("manifest") == MANIFEST

    @pytest.mark.parametrize("operation", READS)
    async def test_expired_credentials_are_replaced_under_other_requests(self, here, issuer, operation):
        """Reads and deletes are sent again with fresh credentials."""
        here.bucket.write("key", MANIFEST)
        store = await here.store()
        self._expire(here, issuer)
        await READS[operation](store)
        self._renewed(here, issuer)

    async def test_fresh_credentials_that_are_refused_are_raised(self, here, issuer):
        """An operator must act if the fresh credentials are refused like the expired ones."""
        store = await here.store()
        here.proxy.spoil(self.expired, times=10)
        with pytest.raises(StorageDenied):
            await put_manifest(store, condition=IfAbsent())
        assert here.outcomes == [*self.attempts[:-1], "StorageDenied"]
        assert len(issuer.issued) == 2
        assert here.bucket.keys() == []

    async def test_issuer_that_is_down_is_asked_again(self, here, issuer):
        """Nothing is sent without credentials, and a commit goes on when their issuer is back."""
        store = await here.store()
        issuer.is_down = True
        commit = asyncio.create_task(put_manifest(store, condition=IfAbsent()))
        await issuer.has_failed.wait()
        assert here.proxy.exchanges == []
        issuer.is_down = False
        await commit
        assert set(here.outcomes[:-1]) == {"StorageUnavailable"}
        assert here.outcomes[-1] == "ok"
        assert here.bucket.read("manifest") == MANIFEST


class RepeatedExpiryTable(ExpiryTable):
    """The case of stores that replace credentials at once, however young: Azure's identity waits a while."""

    async def test_credentials_may_expire_again(self, here, issuer):
        """Credentials that were accepted are replaced when their turn comes, as often as it does."""
        here.bucket.write("key", MANIFEST)
        store = await here.store()
        for _ in range(3):
            self._expire(here, issuer)
            assert (await store.get("key"))[0] == MANIFEST
        assert here.outcomes == self.attempts * 3
        assert len(issuer.issued) == 4
        assert issuer.shown(here.proxy.exchanges[-1]) == issuer.issued[-1]
