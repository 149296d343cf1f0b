"""Objects made of others: by the store, through a file where it cannot, and checked before use."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from crc32c import crc32c

from tests.fakes.memory_store import MemoryStore
from tieringd.archive.object_joiner import PIECE_BYTES, ObjectJoiner
from tieringd.errors import ChecksumRejected, LocalFileError, ObjectNotFound
from tieringd.storage.base import Joined, JoinSource

PARTS = [random.Random(number).randbytes(size) for number, size in enumerate([1000, PIECE_BYTES + 17, 5])]
WHOLE = b"".join(PARTS)


class PlainStore(MemoryStore):
    """A store that cannot join."""

    join = None


class HelplessStore(MemoryStore):
    """A store that can join others, and not these."""

    async def join(self, *_, **__):
        return None


class CarelessStore(MemoryStore):
    """A store that joins, and knows no checksum of what came of it; *spoil* changes that."""

    def __init__(self, spoil=lambda data: data):
        super().__init__()
        self.spoil = spoil

    async def join(self, key, sources, *, crc32c, condition=None):
        data = self.spoil(b"".join(self.objects[source.key][0] for source in sources))
        return Joined(self.add(key, data), is_proven=False, host_bytes=0)


def filled(store, parts=PARTS):
    sources = []
    for number, data in enumerate(parts):
        store.add(f"part-{number}", data)
        sources.append(JoinSource(f"part-{number}", len(data), crc32c(data)))
    return sources


def joiner(store, tmp_path):
    return ObjectJoiner(store, work_directory=tmp_path)


@pytest.mark.parametrize(
    ("store", "host_bytes"),
    [
        pytest.param(MemoryStore(), 0, id="joins"),
        pytest.param(PlainStore(), len(WHOLE), id="has-no-join"),
        pytest.param(HelplessStore(), len(WHOLE), id="cannot-join-these"),
        pytest.param(CarelessStore(), len(WHOLE), id="knows-no-checksum"),
    ],
)
async def test_object_holds_the_sources_in_order(store, tmp_path, host_bytes):
    """
    The object has the bytes of its sources, whatever the store can do.

    The result gives the number of bytes that came through this host.
    """
    assert await joiner(store, tmp_path).join("key", filled(store), crc32c=crc32c(WHOLE)) == host_bytes
    assert store.objects["key"][0] == WHOLE
    assert list(tmp_path.iterdir()) == []


async def test_no_more_than_a_piece_is_read_at_once(tmp_path):
    """Memory is bounded however large the sources are: each read asks for a piece."""
    sizes = []

    class Watched(PlainStore):
        async def get_range(self, key, *, position, size_bytes):
            sizes.append(size_bytes)
            return await super().get_range(key, position=position, size_bytes=size_bytes)

    store = Watched()
    await joiner(store, tmp_path).join("key", filled(store), crc32c=crc32c(WHOLE))
    assert sizes == [1000, PIECE_BYTES, 17, 5]


@pytest.mark.parametrize("store_class", [MemoryStore, PlainStore])
async def test_sources_without_bytes_are_left_out(store_class, tmp_path):
    """Segments may be empty; all of them together may be."""
    store = store_class()
    sources = filled(store, [b"", b"one", b"", b"two", b""])
    await joiner(store, tmp_path).join("key", sources, crc32c=crc32c(b"onetwo"))
    assert store.objects["key"][0] == b"onetwo"
    await joiner(store, tmp_path).join("none", filled(store, [b"", b""]), crc32c=0)
    assert store.objects["none"][0] == b""


@pytest.mark.parametrize("store_class", [MemoryStore, PlainStore, CarelessStore])
async def test_other_bytes_than_announced_are_refused(store_class, tmp_path):
    """A source that has changed is noticed, whether the store or this process reads it."""
    store = store_class()
    sources = filled(store)
    store.add("part-0", b"X" * 1000)
    with pytest.raises(ChecksumRejected):
        await joiner(store, tmp_path).join("key", sources, crc32c=crc32c(WHOLE))


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data: data[:-1], id="short"),
        pytest.param(lambda data: data + b"x", id="long"),
        pytest.param(lambda data: data[::-1], id="other-bytes"),
    ],
)
async def test_store_that_joins_wrongly_is_found_out(spoil, tmp_path):
    """An object that the store has no checksum of is read before anything names it."""
    store = CarelessStore(spoil)
    with pytest.raises(ChecksumRejected):
        await joiner(store, tmp_path).join("key", filled(store), crc32c=crc32c(WHOLE))


async def test_object_that_changes_after_the_join_is_found_out(tmp_path):
    """The last check is of what the store holds now: its size and its checksum."""

    class Late(MemoryStore):
        async def join(self, key, sources, *, crc32c, condition=None):
            joined = await super().join(key, sources, crc32c=crc32c)
            self.add(key, b"something else")
            return joined

    store = Late()
    with pytest.raises(ChecksumRejected, match="has 14 bytes"):
        await joiner(store, tmp_path).join("key", filled(store), crc32c=crc32c(WHOLE))


@pytest.mark.parametrize("store_class", [MemoryStore, PlainStore])
async def test_missing_source_is_named(store_class, tmp_path):
    """A source that has gone ends the join, and no object comes of it."""
    store = store_class()
    sources = filled(store)
    await store.delete_many(["part-2"])
    with pytest.raises(ObjectNotFound, match="part-2"):
        await joiner(store, tmp_path).join("key", sources, crc32c=crc32c(WHOLE))
    assert "key" not in store.objects


async def test_short_source_is_refused(tmp_path):
    """A source that ends before it should does not keep the reader waiting."""
    store = PlainStore()
    sources = filled(store)
    store.add("part-2", b"")
    with pytest.raises(ChecksumRejected, match="part-2 ends after 0 bytes"):
        await joiner(store, tmp_path).join("key", sources, crc32c=crc32c(WHOLE))


async def test_work_directory_that_is_missing_is_named(tmp_path):
    """The error names the setting of the directory if the file cannot be made."""
    store = PlainStore()
    with pytest.raises(LocalFileError, match="state_directory"):
        await joiner(store, tmp_path / "missing").join("key", filled(store), crc32c=crc32c(WHOLE))


async def test_cancelled_join_leaves_nothing_open(tmp_path):
    """Cancelled at any of its steps, a join through a file closes it, and the next join goes well."""
    store = PlainStore()
    sources = filled(store)
    await joiner(store, tmp_path).join("key", sources, crc32c=crc32c(WHOLE))  # Threads have started.
    before = open_descriptors()
    cancelled = 0
    for steps in range(60):
        task = asyncio.create_task(joiner(store, tmp_path).join("key", sources, crc32c=crc32c(WHOLE)))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        cancelled += task.cancelled()
        assert open_descriptors() == before
    assert cancelled > 10
    assert store.objects["key"][0] == WHOLE


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
