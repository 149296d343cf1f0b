"""Copies of objects between files: the bytes, their checksum, and the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
from contextlib import ExitStack

import pytest
from crc32c import crc32c

from tests.support.small_disks import ext4_disk_at
from tieringd.errors import StorageUnavailable, StoreFull
from tieringd.storage.base import FileSlice
from tieringd.storage.file import FileStore
from tieringd.storage.file_copy import PAST_PAGE_CACHE_BYTES_MIN, copied
from tieringd.storage.file_root import make_marker

MIN = PAST_PAGE_CACHE_BYTES_MIN
PAGE = mmap.PAGESIZE
DATA = random.Random(40).randbytes(3 * MIN)


@pytest.fixture
def body(tmp_path):
    """Return a function that gives part of a file as a body."""
    (tmp_path / "source").write_bytes(DATA)
    with ExitStack() as files:
        source = files.enter_context((tmp_path / "source").open("rb"))
        yield lambda position, size: FileSlice(source.fileno(), position, size)


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """Mount an ext4: other file systems may keep all in memory."""
    with ext4_disk_at(tmp_path_factory.mktemp("ext4") / "disk", 32 << 20, reserved_percent=0) as path:
        yield path


@pytest.fixture
def copy(disk):
    """Give a path on that disk for a copy."""
    yield disk / "copy"
    (disk / "copy").unlink()


@pytest.fixture
def archive(tmp_path):
    """Give an empty archive on a disk of its own."""
    with ext4_disk_at(tmp_path / "disk", 32 << 20, reserved_percent=0) as path:
        make_marker(path)
        yield path


def resident_pages(path) -> int:
    """Return how many pages of a file are in the page cache."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        vector = (ctypes.c_ubyte * -(-size // PAGE))()
        first = ctypes.byref(ctypes.c_char.from_buffer(mapped))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(first, ctypes.c_size_t(size), vector) == 0, os.strerror(ctypes.get_errno())
        del first
    return sum(each & 1 for each in vector)


def copy_to(path, *bodies, begin=b""):
    """Copy *bodies* to a file after *begin*, past the page cache where that is possible."""
    with path.open("xb", buffering=0) as file:
        file.write(begin)
        return copied(bodies, file.fileno(), threading.Event(), past_page_cache=True)


@pytest.mark.parametrize("more", [-1, 0, 1, 511, 4096, 4097, 1 << 20, (1 << 20) + 4095])
@pytest.mark.parametrize("position", [0, 1, 4096])
def test_bytes_and_checksum_are_those_of_the_body(copy, body, position, more):
    """Any size at any position, above and below what is written past the page cache."""
    expected = DATA[position : position + MIN + more]
    assert copy_to(copy, body(position, MIN + more)) == crc32c(expected)
    assert copy.read_bytes() == expected


@pytest.mark.parametrize("sizes", [(MIN, MIN), (MIN + 1, 5, MIN), (0, MIN), (17, MIN + 4096)])
def test_several_bodies_follow_each_other(copy, body, sizes):
    """A body that ends within a block is followed by the next one, also by bytes in memory."""
    bodies, expected = [], b""
    for number, size in enumerate(sizes):
        bodies.append(body(number, size) if number % 2 == 0 else DATA[number : number + size])
        expected += DATA[number : number + size]
    assert copy_to(copy, *bodies) == crc32c(expected)
    assert copy.read_bytes() == expected


def test_place_that_is_no_block_is_written_through_the_page_cache(copy, body):
    """A file system that refuses a write past the page cache gets it again."""
    assert copy_to(copy, body(0, MIN), begin=b"begin") == crc32c(DATA[:MIN])
    assert copy.read_bytes() == b"begin" + DATA[:MIN]


async def stored(archive, body, **options):
    """Store 4 MiB and some bytes; return how many of its pages are in the page cache."""
    store = FileStore(archive, **options)
    try:
        data = DATA[: MIN + 100]
        info = await store.put("a/segment", body(0, len(data)), crc32c=crc32c(data))
        pages = resident_pages(archive / "a/segment")
        assert (info.size_bytes, (await store.get("a/segment"))[0]) == (len(data), data)
        return pages
    finally:
        await store.close()


async def test_large_object_takes_no_room_in_the_page_cache(archive, body):
    """A broker's readers are served from there. Only the end of the object is no whole block."""
    assert await stored(archive, body) <= 1


@pytest.mark.parametrize("kind", ["nfs4", "ceph", "fuse.sshfs", "tmpfs", ""])
async def test_large_object_elsewhere_than_on_a_disk_goes_through_the_page_cache(archive, body, kind):
    """A host sends what it has there in large requests, and several at a time."""
    pages = await stored(archive, body, filesystem_of=lambda _: kind, has_single_writer=True)
    assert pages >= MIN // PAGE


async def test_disk_that_becomes_full_in_the_middle_is_told_and_left_clean(archive, body):
    """Nothing is stored, and what was written goes."""
    (archive / "other").write_bytes(bytes(18 << 20))
    store = FileStore(archive)
    try:
        with pytest.raises(StoreFull):
            await store.put("segment", body(0, len(DATA)), crc32c=crc32c(DATA))
        assert not (archive / "segment").exists()
        assert [*(archive / ".tieringd-tmp").glob("*.part")] == []
    finally:
        await store.close()


def test_copy_that_is_stopped_ends(copy, body):
    """A put that is cancelled writes no further chunk."""
    stop = threading.Event()
    stop.set()
    with copy.open("xb") as file, pytest.raises(StorageUnavailable, match="cancelled"):
        copied([body(0, MIN)], file.fileno(), stop, past_page_cache=True)
