"""A client that reads on from a slow store: what is prepared for it is not begun again and again."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from tests.fakes.daemons import Daemon
from tests.fakes.gateway_peers import MIB, fetched
from tests.fakes.virtual_loop import virtually
from tests.support.kafka_messages import fetch_request, milliseconds, request_frame
from tests.unit.gateway.test_remote_answers import serving
from tieringd.formats.kafka_wire.fetch import FetchResponseWalk
from tieringd.formats.kafka_wire.request_header import RequestHead
from tieringd.gateway.ahead import PERMIT_SECONDS, FetchAhead
from tieringd.gateway.combined_answers import answer
from tieringd.gateway.frames import PendingRequest
from tieringd.gateway.remote_answers import RemoteAnswers
from tieringd.gateway.responses import ArchivableResponse
from tieringd.gateway.wire import MemoryBudget
from tieringd.reading.partition_reader import PartitionReader

SEGMENTS = 6
RECORDS = 3
"""In each segment, as one batch."""
WAIT_SECONDS = 0.5
"""The client's maximum wait."""


class CountingReader(PartitionReader):
    """Counts how often each offset is read."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.held = Counter()

    async def hold(self, manifest, offset):
        """Count, and hold."""
        self.held[offset] += 1
        return await super().hold(manifest, offset)


class Client:
    """Reads one partition on, as a connection does for it. The broker has none of what it asks for."""

    def __init__(self, archive, *, is_permitted=lambda: True):
        self._archive = archive
        self._is_permitted = is_permitted
        self._known = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ahead = FetchAhead(
            self._loop,
            archive,
            timeout_seconds=25,
            bytes_max=lambda: MIB,
            on_known=self._known.set,
            on_broken=pytest.fail,
            on_failed=pytest.fail,
        )
        self.offset = 0
        self.answers = 0
        self.by_broker = 0
        self.longest_seconds = 0.0

    async def read_to(self, end):
        """Fetch until *end*."""
        while self.offset < end:
            began = self._loop.time()
            await self._fetch()
            self.answers += 1
            self.longest_seconds = max(self.longest_seconds, self._loop.time() - began)

    def close(self):
        self._ahead.close()

    async def _fetch(self):
        asked = {"orders": {0: {"fetch_offset": self.offset}}}
        frame = memoryview(
            request_frame(fetch_request(12, asked, max_wait=milliseconds(int(WAIT_SECONDS * 1000))))
        )
        head = RequestHead.read(frame)
        sent = self._ahead.claim(frame, head)
        while self._ahead.is_awaited:
            self._known.clear()
            await self._known.wait()
            sent = self._ahead.claim(frame, head)
        pending = PendingRequest(head, bytes(frame), prepared=sent)
        if sent is None:
            self.by_broker += 1
            sent = await answer(self._question(pending), self._archive, timeout_seconds=25, bytes_max=MIB)
        self._ahead.expect(pending, sent)
        for one in sent.next_fetches.values():
            self.offset = one.next_offset
        sent.release()
        self._ahead.begin()
        if self._is_permitted() and (following := self._ahead.to_ask()) is not None:
            self._ahead.is_asked()
            self._ahead.is_answered(self._question(PendingRequest(*following)))

    def _question(self, pending):
        response = fetched(pending.head, {"orders": {0: {"error_code": 1}}})
        walk = FetchResponseWalk(pending.head.version, len(response) - 4)
        walk.feed(memoryview(response))
        return ArchivableResponse(pending, bytes(response), tuple(walk.partitions))


@asynccontextmanager
async def slow(tmp_path, store, writers, seconds, **fields):
    """Give a client, and the reader of an archive whose store takes *seconds* for every answer."""
    for _ in range(SEGMENTS - 1):
        writers[0].closed_segment()
    daemon = Daemon(tmp_path, store, writers)
    async with serving(tmp_path, store, daemon) as behind:
        await daemon.round()
        for _ in range(SEGMENTS):
            writers[0].drop_head()
        await daemon.round()
        assert writers[0].bounds().log_start_offset == SEGMENTS * RECORDS
        reader = CountingReader(behind.host.hydrator, daemon.archive.manifests.spillovers)
        answers = RemoteAnswers(
            behind.partitions,
            reader,
            records=daemon.archive.records,
            history=daemon.archive.history,
            bucket=None,
            may_produce=lambda: True,
            budget=MemoryBudget(256 << 20),
            now=asyncio.get_running_loop().time,
        )
        store.latency_seconds = seconds
        client = Client(answers, **fields)
        yield client, reader
        client.close()
        await answers.close()


LAST = (SEGMENTS - 1) * RECORDS


@virtually
@pytest.mark.parametrize("seconds", [0.2, 0.4, 0.7, 2, 7])
async def test_each_offset_is_read_once_however_slow_the_store_is(tmp_path, store, writers, seconds):
    """Empty answers come when the client has waited as long as it asked, and the read goes on."""
    async with slow(tmp_path, store, writers, seconds) as (client, reader):
        await client.read_to(LAST)
        assert client.longest_seconds < WAIT_SECONDS + 0.2
        assert {offset: count for offset, count in reader.held.items() if offset < LAST and count > 1} == {}
        downloads = [one for one in store.requests if one[0] == "get_range"]
        assert len(downloads) == len(set(downloads))


@virtually
async def test_permit_that_ends_during_a_read_ends_no_read(tmp_path, store, writers):
    """The client's request goes to the broker, and takes the read over."""
    asked = iter(range(1 << 20))
    async with slow(
        tmp_path, store, writers, 3 * PERMIT_SECONDS, is_permitted=lambda: next(asked) % 2 == 0
    ) as (client, reader):
        await client.read_to(LAST)
        assert client.by_broker > 1
        assert {offset: count for offset, count in reader.held.items() if offset < LAST and count > 1} == {}
