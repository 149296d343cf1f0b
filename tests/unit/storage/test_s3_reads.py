"""What the S3 store makes of servers that answer a range with other bytes than those asked for."""

from __future__ import annotations

import pytest

from tests.support.raw_http import Exchange, serving
from tieringd.errors import StorageUnavailable
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings

CONTENT = b"0123456789"


@pytest.fixture(params=["whole", "handed on"])
def read(request):
    """Return a function that reads a range from a server, in each of the two ways."""

    async def read(handle, *, position: int, size_bytes: int) -> bytes:
        async with serving(handle) as url:
            settings = S3Settings(
                bucket="archive", endpoint_url=url, access_key="me", secret_key="secret", url_style="path"
            )
            store = await S3Store.open(settings)
            try:
                if request.param == "whole":
                    return await store.get_range("key", position=position, size_bytes=size_bytes)
                found = bytearray()
                count = await store.read_range(
                    "key", position=position, size_bytes=size_bytes, begin=lambda: found.extend
                )
                assert count == len(found)
                return bytes(found)
            finally:
                await store.close()

    return read


@pytest.mark.parametrize("headers", [{}, {"Content_Range": "bytes 0-9/10"}], ids=["unsaid", "said"])
async def test_range_is_cut_from_a_whole_answer(read, headers):
    """A server that ignores the range answers 200 with the whole object."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("200 OK", CONTENT, **headers)

    assert await read(handle, position=3, size_bytes=4) == b"3456"


@pytest.mark.parametrize(
    ("said", "body"),
    [
        pytest.param("bytes 4-7/10", b"4567", id="elsewhere"),
        pytest.param("bytes 3-5/10", b"345", id="short"),
        pytest.param("bytes 3-9/10", b"3456789", id="long"),
        pytest.param("bytes 3-6/*", b"3456", id="of-unknown-length"),
        pytest.param("", b"3456", id="unsaid"),
    ],
)
async def test_other_range_than_asked_for_is_refused(read, said, body):
    """Bytes of another place would be taken for those of this one."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("206 Partial Content", body, Content_Range=said)

    with pytest.raises(StorageUnavailable, match="get_range key in bucket archive"):
        await read(handle, position=3, size_bytes=4)


async def test_range_over_the_end_is_what_there_is(read):
    """The answer says how long the object is."""

    async def handle(exchange: Exchange) -> None:
        await exchange.answer("206 Partial Content", b"89", Content_Range="bytes 8-9/10")

    assert await read(handle, position=8, size_bytes=4) == b"89"
