"""Joining on Cloud Storage, against a server that composes: in steps of 32, and checked by its answer."""

from __future__ import annotations

import json
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from crc32c import crc32c

from tests.support.gcs_wire import document, refusal, store_of
from tieringd.errors import ChecksumRejected, ObjectNotFound, PreconditionFailed
from tieringd.storage.base import IfAbsent, JoinSource

ROOT = "/storage/v1/b/archive/o/"


class Server:
    """Objects in a dictionary, and the requests that a join makes of them."""

    def __init__(self, *, spoil=lambda data: data):
        self.objects: dict[str, bytes] = {}
        self.composed: list[tuple[str, int]] = []
        self.destinations: list[dict[str, str]] = []
        self.spoil = spoil

    async def __call__(self, exchange) -> None:
        body = await exchange.read_body()
        split = urlsplit(exchange.path)
        name, query = unquote(split.path.removeprefix(ROOT)), parse_qs(split.query)
        if exchange.method == "DELETE":
            self.objects.pop(name, None)
            await exchange.answer("204 No Content")
            return
        assert exchange.headers["content-type"] == "application/json"
        name = name.removesuffix("/compose")
        if query.get("ifGenerationMatch") == ["0"] and name in self.objects:
            await exchange.answer("412 Precondition Failed", refusal("412", "conditionNotMet", "exists"))
            return
        asked = json.loads(body)
        sources = [each["name"] for each in asked["sourceObjects"]]
        assert 1 <= len(sources) <= 32
        if not set(sources) <= set(self.objects):
            await exchange.answer("404 Not Found", refusal("404", "notFound", "No such object: archive/x"))
            return
        self.composed.append((name, len(sources)))
        self.destinations.append(asked["destination"])
        self.objects[name] = self.spoil(b"".join(self.objects[each] for each in sources))
        await exchange.answer("200 OK", document(self.objects[name], name=name))


def filled(server: Server, count: int) -> tuple[list[JoinSource], bytes]:
    sources, whole = [], b""
    for number in range(count):
        data = b"part %d, " % number
        server.objects[f"dir/a part/{number}"] = data
        sources.append(JoinSource(f"a part/{number}", len(data), crc32c(data)))
        whole += data
    return sources, whole


@pytest.mark.parametrize(("count", "requests"), [(1, 1), (32, 1), (33, 3), (100, 5), (1100, 38)])
async def test_many_sources_are_composed_in_steps(count, requests):
    """A request takes 32 objects, so more are joined in levels; what is in between is gone in the end."""
    server = Server()
    async with store_of(server, prefix="dir", storage_class="NEARLINE") as store:
        sources, whole = filled(server, count)
        joined = await store.join("key", sources, crc32c=crc32c(whole))
    assert server.objects["dir/key"] == whole
    assert (joined.info.size_bytes, joined.info.crc32c, joined.info.key) == (len(whole), crc32c(whole), "key")
    assert (joined.is_proven, joined.host_bytes, len(server.composed)) == (True, 0, requests)
    assert set(server.objects) == {"dir/key", *(f"dir/{source.key}" for source in sources)}
    assert all(one["storageClass"] == "NEARLINE" for one in server.destinations)


async def test_composed_object_with_other_bytes_is_taken_back():
    """Google tells the checksum of what it composed: a wrong one is deleted again, and raised."""
    server = Server(spoil=lambda data: data[::-1])
    async with store_of(server, prefix="dir") as store:
        sources, whole = filled(server, 2)
        with pytest.raises(ChecksumRejected):
            await store.join("key", sources, crc32c=crc32c(whole))
    assert "dir/key" not in server.objects


@pytest.mark.parametrize("count", [3, 40])
async def test_missing_source_leaves_nothing_behind(count):
    """A source that has gone ends the join, and what was composed on the way goes."""
    server = Server()
    async with store_of(server, prefix="dir") as store:
        sources, whole = filled(server, count)
        del server.objects[f"dir/a part/{count - 1}"]
        with pytest.raises(ObjectNotFound):
            await store.join("key", sources, crc32c=crc32c(whole))
    assert set(server.objects) == {f"dir/{source.key}" for source in sources[:-1]}


async def test_condition_is_the_last_request_s():
    """An object that is there stays as it was."""
    server = Server()
    async with store_of(server, prefix="dir") as store:
        sources, whole = filled(server, 40)
        server.objects["dir/key"] = b"first"
        with pytest.raises(PreconditionFailed):
            await store.join("key", sources, crc32c=crc32c(whole), condition=IfAbsent())
    assert server.objects["dir/key"] == b"first"
    assert not [name for name in server.objects if ".part-" in name]
