"""A range that the store does not begin to send is asked for once more, and read from the second answer."""

from __future__ import annotations

import random
import uuid

from crc32c import crc32c

from tests.support.fault_proxy import StallRequest, fault_proxy
from tests.support.raw_http import PATIENT
from tests.support.seaweedfs import ACCESS_KEY, SECRET_KEY
from tieringd.metrics import Metrics
from tieringd.reading.late_ranges import KNOWN_MIN, LateRanges
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings

DATA = random.Random(5).randbytes(3 << 20)
RANGE = {"position": 1 << 20, "size_bytes": 1 << 20}


async def test_range_whose_first_request_is_never_answered_is_read(seaweedfs, slice_of):
    """The bytes are those of the range, the second request counts, and the store serves on."""
    metrics, brought, asked = Metrics(), bytearray(), []

    def begin():
        brought.clear()
        return brought.extend

    def weather(exchange):
        """Never answer the first request for a range."""
        if exchange.method == "GET":
            asked.append(exchange.path)
        return StallRequest() if len(asked) == 1 else None

    async with fault_proxy(seaweedfs.endpoint_url) as proxy:
        store = await S3Store.open(
            S3Settings(
                bucket="contract",
                prefix=uuid.uuid4().hex,
                endpoint_url=proxy.url,
                access_key=ACCESS_KEY,
                secret_key=SECRET_KEY,
                url_style="path",
                **PATIENT,
            )
        )
        try:
            await store.put("key", slice_of(DATA), crc32c=crc32c(DATA))
            ranges = LateRanges(store, metrics.cache)
            for _ in range(KNOWN_MIN):
                assert await ranges.read_range("key", **RANGE, begin=begin) == 1 << 20
            proxy.weather = weather
            assert await ranges.read_range("key", **RANGE, begin=begin) == 1 << 20
            assert bytes(brought) == DATA[1 << 20 : 2 << 20]
            assert len(asked) == 2
            assert metrics.cache.second_requests.labels("faster")._value.get() == 1
            assert await ranges.read_range("key", **RANGE, begin=begin) == 1 << 20
        finally:
            await store.close()
