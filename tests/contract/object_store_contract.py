"""
What every object store does: the definition of `storage.base`, as tests.

A backend subclasses `ObjectStoreContract` and gives two fixtures: `store`, the store under
test, empty; and `bucket`, a way around it to the same objects, for set-up and checks.
Where a server is known to differ, the subclass says so in one of the class attributes.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import tracemalloc
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from crc32c import crc32c

from tieringd.errors import (
    BucketNotFound,
    ChecksumRejected,
    LocalFileError,
    ObjectNotFound,
    PreconditionFailed,
)
from tieringd.storage.base import FileSlice, IfAbsent, IfVersion, JoinSource, RangeStore, TimedStore
from tieringd.storage.checked_puts import CheckedPuts
from tieringd.storage.listing import list_objects
from tieringd.storage.ranges import read_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tieringd.storage.base import ObjectInfo, ObjectStore, Take

MIB = 1 << 20

RANGES = pytest.mark.parametrize(
    ("position", "size", "expected"),
    [
        pytest.param(0, 10, b"0123456789", id="whole"),
        pytest.param(3, 4, b"3456", id="inside"),
        pytest.param(8, 5, b"89", id="over-the-end"),
        pytest.param(10, 5, b"", id="at-the-end"),
        pytest.param(11, 5, b"", id="past-the-end"),
        pytest.param(4, 0, b"", id="no-bytes"),
    ],
)
"""Ranges of ten bytes. A server may close its connection after one that it has nothing of."""


async def handed_on(store: ObjectStore, position: int, size_bytes: int) -> bytes:
    """Return the bytes of a range of the object `key` as a store hands them on."""
    found = bytearray()
    count = await read_range(
        store, "key", position=position, size_bytes=size_bytes, begin=lambda: found.extend
    )
    assert count == len(found)
    return bytes(found)


SIZES = [
    pytest.param(0, id="empty"),
    pytest.param(1, id="one-byte"),
    pytest.param(MIB, id="1MiB"),
    pytest.param(20 * MIB, id="20MiB"),  # Larger than a part of a multipart upload.
]
FLAT_KEYS = ("a", "a-b", "a.b", "ab", "b/c/d", "b/c/e", "b/é", "z", "é/1", "日本/1", "\uffee", "𐍈")


class Bucket(Protocol):
    """The same objects, without the store under test."""

    def read(self, key: str) -> bytes | None:
        """Return an object's bytes, or None."""

    def write(self, key: str, data: bytes) -> None:
        """Store an object."""


def content(size: int, *, seed: int = 0) -> bytes:
    return random.Random(f"{size} {seed}").randbytes(size)


async def put(store: ObjectStore, key: str, data: bytes, **conditions) -> ObjectInfo:
    return await store.put(key, data, crc32c=crc32c(data), **conditions)


async def listed(store: ObjectStore, prefix: str, *, limit: int) -> list[list[str]]:
    pages, start_after = [], None
    while True:
        page = await store.list_page(prefix, start_after=start_after, limit=limit)
        pages.append([each.key for each in page.objects])
        if page.next_start_after is None:
            return pages
        assert page.next_start_after == pages[-1][-1]
        start_after = page.next_start_after


@dataclass
class Peak:
    """How much Python held in memory at most, beyond what it held before."""

    size_bytes: int = 0


@contextmanager
def traced_peak() -> Iterator[Peak]:
    """Measure the peak of memory for the time of the context. Each allocation is counted, so it is exact."""
    peak = Peak()
    tracemalloc.start()
    try:
        yield peak
        _now, peak.size_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def in_byte_order(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=lambda key: key.encode())


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class ObjectStoreContract:
    """The behaviour that services rely on."""

    verifies_checksums = True
    """Whether a put with a wrong checksum is refused."""
    tells_checksums = True
    """Whether `head` knows the checksum that the put announced."""
    lists_in_byte_order = True
    """Whether `a-b` is listed before `a/b`."""
    racers = 16
    """How many writers race for one key."""

    async def test_bucket_that_was_just_made_keeps_nothing_that_is_deleted(self, store):
        """No versions, no soft delete, no locks: what an erasure deletes is gone."""
        await put(store, "key", b"content")
        assert await store.kept_after_delete("key") == ()

    @pytest.mark.parametrize("size", SIZES)
    async def test_bytes_come_back_as_they_were_put(self, store, bucket: Bucket, size: int):
        """An object put from bytes is stored and read back whole, with its size and checksum."""
        data = content(size)
        written = await put(store, "dir/key", data)
        assert (written.key, written.size_bytes, written.crc32c) == ("dir/key", size, crc32c(data))
        assert await asyncio.to_thread(bucket.read, "dir/key") == data
        read, info = await store.get("dir/key")
        assert read == data
        assert (info.key, info.size_bytes, info.version) == ("dir/key", size, written.version)

    @pytest.mark.parametrize("size", SIZES)
    async def test_file_slice_is_stored_without_its_surroundings(
        self, store, bucket: Bucket, slice_of: Callable[[bytes], FileSlice], size: int
    ):
        """A slice that begins and ends inside a file is stored exactly."""
        data = content(size)
        written = await store.put("key", slice_of(data), crc32c=crc32c(data))
        assert written.size_bytes == size
        assert await asyncio.to_thread(bucket.read, "key") == data

    async def test_answers_tell_the_time_of_the_stores_clock(self, store):
        """A listener hears what the store's clock shows with the answer to a request that was made anyway."""
        heard: list[int] = []
        assert isinstance(store, TimedStore)
        store.tell_time_to(heard.append)
        before_ms = time.time_ns() // 1_000_000
        written = await put(store, "key", b"data")
        after_ms = time.time_ns() // 1_000_000
        # Dates in headers have whole seconds, and a file's time lags behind by a tick.
        assert heard, "a put tells it"
        assert all(before_ms - 1100 <= one <= after_ms + 1000 for one in heard)
        assert abs(written.modified_ms - heard[-1]) <= 2000

    async def test_put_replaces_what_was_there(self, store, bucket: Bucket):
        """A put without a condition overwrites, and the version changes."""
        first = await put(store, "key", b"first, and longer")
        second = await put(store, "key", b"second")
        assert bucket.read("key") == b"second"
        assert second.version != first.version

    async def test_every_answer_names_the_same_version(self, store, bucket: Bucket):
        """The put, get, head and a listing agree on an object's version and size."""
        written = await put(store, "dir/key", b"content")
        _, got = await store.get("dir/key")
        (entry,) = (await store.list_page("dir/")).objects
        infos = (written, got, await store.head("dir/key"), entry)
        assert {(info.key, info.size_bytes, info.version) for info in infos} == {
            ("dir/key", 7, written.version)
        }

    async def test_head_tells_the_checksum(self, store):
        """The checksum of a stored object can be asked for; a store that has none says so."""
        data = content(1000)
        await put(store, "key", data)
        assert (await store.head("key")).crc32c == (crc32c(data) if self.tells_checksums else None)

    async def test_modification_time_is_now(self, store):
        """An object's modification time is near the clock of this machine, in milliseconds."""
        now_ms = time.time() * 1000
        written = await put(store, "key", b"content")
        head = await store.head("key")
        for info in (written, head):
            assert abs(info.modified_ms - now_ms) < 3_600_000

    async def test_missing_object_is_reported_by_every_read(self, store):
        """Reading a key that was never written raises ObjectNotFound, whatever the operation."""
        with pytest.raises(ObjectNotFound):
            await store.get("absent")
        with pytest.raises(ObjectNotFound):
            await store.get_range("absent", position=0, size_bytes=1)
        with pytest.raises(ObjectNotFound):
            await store.get_range("absent", position=0, size_bytes=0)
        for size in (0, 1):
            with pytest.raises(ObjectNotFound):
                await read_range(store, "absent", position=0, size_bytes=size, begin=lambda: len)
        with pytest.raises(ObjectNotFound):
            await store.head("absent")

    @RANGES
    async def test_range_gives_the_bytes_that_exist(self, store, bucket: Bucket, position, size, expected):
        """A range is cut at the object's end, and is empty from there on."""
        await asyncio.to_thread(bucket.write, "key", b"0123456789")
        assert await store.get_range("key", position=position, size_bytes=size) == expected

    @RANGES
    async def test_range_hands_on_the_bytes_that_exist(self, store, bucket: Bucket, position, size, expected):
        """A range that is handed on in windows is cut alike."""
        await asyncio.to_thread(bucket.write, "key", b"0123456789")
        assert await handed_on(store, position, size) == expected

    @pytest.mark.parametrize("size", [1 << 20, (2 << 20) + 1, 4 << 20])
    async def test_large_range_gives_just_its_bytes(self, store, bucket: Bucket, size: int):
        """Ranges that stores receive in a thread are exact too, up to and over the object's end."""
        data, position = content(3 << 20), 12_345
        await asyncio.to_thread(bucket.write, "key", data)
        assert await store.get_range("key", position=position, size_bytes=size) == data[position:][:size]
        assert await handed_on(store, position, size) == data[position:][:size]

    async def test_range_passes_through_a_window(self, store, bucket: Bucket):
        """A store that hands a range on as it arrives keeps no more of it than a window."""
        if not isinstance(store, RangeStore):
            return
        await asyncio.to_thread(bucket.write, "key", content(16 * MIB))
        checksums: list[int] = []

        def begin() -> Take:
            checksums.append(0)

            def take(data: memoryview) -> None:
                checksums[-1] = crc32c(data, checksums[-1])

            return take

        with traced_peak() as peak:
            assert await store.read_range("key", position=0, size_bytes=16 * MIB, begin=begin) == 16 * MIB
        assert checksums == [crc32c(content(16 * MIB))]
        assert peak.size_bytes < 3 * MIB, peak

    async def test_reader_of_a_range_may_refuse_it(self, store, bucket: Bucket):
        """Its error ends the read, and the store serves the next one."""

        def refuse(_: memoryview) -> None:
            raise LocalFileError("the disk is full", path="")

        await asyncio.to_thread(bucket.write, "key", content(3 * MIB))
        with pytest.raises(LocalFileError):
            await read_range(store, "key", position=0, size_bytes=3 * MIB, begin=lambda: refuse)
        assert await handed_on(store, 5, 2 * MIB) == content(3 * MIB)[5 : 5 + 2 * MIB]

    async def test_range_is_in_memory_once(self, store, bucket: Bucket):
        """Bytes of a range are received where they stay: there is no second copy, not even for a moment."""
        data = content(16 * MIB)
        await asyncio.to_thread(bucket.write, "key", data)
        await store.get_range("key", position=0, size_bytes=MIB)
        with traced_peak() as peak:
            found = await store.get_range("key", position=MIB, size_bytes=8 * MIB)
        assert found == data[MIB : 9 * MIB]
        assert peak.size_bytes < 1.5 * len(found), peak

    async def test_range_of_an_empty_object_is_empty(self, store, bucket: Bucket):
        """An empty object has an empty first byte range."""
        await asyncio.to_thread(bucket.write, "key", b"")
        assert await store.get_range("key", position=0, size_bytes=10) == b""

    async def test_race_to_create_has_one_winner(self, store, bucket: Bucket):
        """One of many writers that require absence wins, and its bytes are stored."""
        bodies = [f"writer {number}".encode() for number in range(self.racers)]
        results = await asyncio.gather(
            *(put(store, "key", body, condition=IfAbsent()) for body in bodies), return_exceptions=True
        )
        winners = [
            body for body, result in zip(bodies, results, strict=True) if not isinstance(result, Exception)
        ]
        assert {type(result) for result in results if isinstance(result, Exception)} == {PreconditionFailed}
        assert [await asyncio.to_thread(bucket.read, "key")] == winners

    async def test_race_to_replace_has_one_winner(self, store, bucket: Bucket):
        """One of many writers that replace the same version wins, and its bytes are stored."""
        version = (await put(store, "key", b"before")).version
        bodies = [f"writer {number}".encode() for number in range(self.racers)]
        results = await asyncio.gather(
            *(put(store, "key", body, condition=IfVersion(version)) for body in bodies),
            return_exceptions=True,
        )
        winners = [
            body for body, result in zip(bodies, results, strict=True) if not isinstance(result, Exception)
        ]
        assert {type(result) for result in results if isinstance(result, Exception)} == {PreconditionFailed}
        assert [await asyncio.to_thread(bucket.read, "key")] == winners

    async def test_counter_loses_no_update(self, store):
        """Eight writers that read, add one and swap, again and again, count to their sum."""
        await put(store, "counter", b"0")

        async def add_five() -> None:
            done = 0
            while done < 5:
                data, info = await store.get("counter")
                try:
                    await put(store, "counter", b"%d" % (int(data) + 1), condition=IfVersion(info.version))
                except PreconditionFailed:
                    continue
                done += 1

        await asyncio.gather(*(add_five() for _ in range(8)))
        assert (await store.get("counter"))[0] == b"40"

    async def test_lost_condition_changes_nothing(self, store, bucket: Bucket, slice_of):
        """A put whose condition does not hold leaves the object as it was, from bytes and from a file."""
        first = await put(store, "key", b"first")
        await put(store, "key", b"second", condition=IfVersion(first.version))
        data = content(2 * MIB)
        for condition in (IfAbsent(), IfVersion(first.version)):
            for body in (data, slice_of(data)):
                with pytest.raises(PreconditionFailed):
                    await store.put("key", body, crc32c=crc32c(data), condition=condition)
        assert bucket.read("key") == b"second"

    async def test_replacing_a_missing_object_fails(self, store, bucket: Bucket):
        """A swap of a version needs an object that has it."""
        version = (await put(store, "other", b"other")).version
        with pytest.raises(PreconditionFailed):
            await put(store, "key", b"content", condition=IfVersion(version))
        assert bucket.read("key") is None

    async def test_deleted_object_can_be_created_again(self, store, bucket: Bucket):
        """The key counts as absent after a delete, and its old version as gone."""
        old = await put(store, "dir/key", b"old")
        await store.delete_many(["dir/key"])
        with pytest.raises(PreconditionFailed):
            await put(store, "dir/key", b"new", condition=IfVersion(old.version))
        await put(store, "dir/key", b"new", condition=IfAbsent())
        assert bucket.read("dir/key") == b"new"

    async def test_wrong_checksum_is_refused(self, store, bucket: Bucket, slice_of):
        """Bytes that do not match the announced checksum are not stored."""
        if not self.verifies_checksums:
            assert (await store.put("key", b"content", crc32c=1)).key == "key"
            return
        data = content(2 * MIB)
        for body in (data, slice_of(data)):
            with pytest.raises(ChecksumRejected):
                await store.put("key", body, crc32c=crc32c(data) ^ 1)
        assert bucket.read("key") is None

    async def test_trial_tells_whether_checksums_are_compared(self, store, bucket: Bucket, slice_of):
        """One object with a wrong checksum tells it, and nothing stays of it; reading back finds no fault."""
        puts = CheckedPuts(store)
        await puts.find_out()
        assert puts.reads_back is not self.verifies_checksums
        assert await listed(store, "", limit=1000) == [[]]
        puts.reads_back = True
        data = content(9 * MIB)
        for number, body in enumerate((b"", data, slice_of(data))):
            size_bytes = len(data) if number else 0
            info = await puts.put("key", body, crc32c=crc32c(data[:size_bytes]))
            assert (info.size_bytes, info.crc32c) == (size_bytes, crc32c(data[:size_bytes]))
        assert bucket.read("key") == data

    @pytest.mark.parametrize("size", [pytest.param(1000, id="small"), pytest.param(2 * MIB, id="large")])
    async def test_file_that_was_truncated_is_reported(self, store, bucket: Bucket, slice_of, size: int):
        """A file that ends before its slice does raises LocalFileError, and stores nothing."""
        data = content(size)
        body = slice_of(data)
        os.ftruncate(body.fd, body.position + size - 10)
        with pytest.raises(LocalFileError, match="truncated"):
            await store.put("key", body, crc32c=crc32c(data))
        assert bucket.read("key") is None
        await put(store, "key", b"usable")
        assert bucket.read("key") == b"usable"

    @pytest.mark.parametrize("pause_seconds", [0, 0.001, 0.005, 0.02, 0.05])
    async def test_cancelled_put_stores_all_or_nothing(self, store, bucket: Bucket, slice_of, pause_seconds):
        """
        Cancelled at any moment, a put leaves the object absent or whole, and the store usable.

        A server that has all of it may store it later: so another object tells that.
        """
        data = content(20 * MIB)
        task = asyncio.create_task(store.put("key", slice_of(data), crc32c=crc32c(data)))
        await asyncio.wait({task}, timeout=pause_seconds)
        task.cancel()
        await asyncio.wait({task})
        assert await asyncio.to_thread(bucket.read, "key") in (None, data)
        await put(store, "other", b"usable")
        assert bucket.read("other") == b"usable"
        assert await asyncio.to_thread(bucket.read, "key") in (None, data)

    @pytest.mark.parametrize("limit", [1, 3, 12, 1000])
    async def test_listing_is_complete_over_its_pages(self, store, bucket: Bucket, limit: int):
        """Pages of any size, joined, hold every key once, in UTF-8 byte order."""
        for key in FLAT_KEYS:
            await asyncio.to_thread(bucket.write, f"list/{key}", b"x")
        await asyncio.to_thread(bucket.write, "other", b"x")
        pages = await listed(store, "list/", limit=limit)
        assert all(len(page) == limit for page in pages[:-1])
        assert 0 < len(pages[-1]) <= limit
        assert [key for page in pages for key in page] == in_byte_order(f"list/{key}" for key in FLAT_KEYS)

    async def test_listing_orders_a_directory_by_its_keys(self, store, bucket: Bucket):
        """The slash is a character like others: `a-b` comes before `a/b`, and `a.b` as well."""
        keys = ["l/a-b", "l/a.b", "l/a/b", "l/a/c", "l/a0"]
        for key in keys:
            await asyncio.to_thread(bucket.write, key, b"x")
        found = [key for page in await listed(store, "l/", limit=2) for key in page]
        assert sorted(found) == keys
        assert (found == keys) is self.lists_in_byte_order

    async def test_longest_topic_name_is_a_part_of_keys(self, store, bucket: Bucket):
        """Kafka's names have up to 249 characters, and a topic manifest's key has the topic id beside it."""
        keys = [
            f"meta/cluster/topics/{'t' * 248}{end}_AAAAAAAAAAAAAAAAAAAAAQ/topic_manifest.json"
            for end in "-.9_z"
        ]
        for key in keys:
            await put(store, key, key.encode())
        found = [key for page in await listed(store, "meta/", limit=2) for key in page]
        assert sorted(found) == sorted(keys)
        for key in keys:
            assert (await store.get(key))[0] == key.encode()
        await store.delete_many(keys[1:])
        assert [each.key for each in (await store.list_page("meta/")).objects] == keys[:1]

    @pytest.mark.parametrize(
        ("prefix", "expected"),
        [
            pytest.param("list/b/c", ["list/b/c/d", "list/b/c/e"], id="name-without-slash"),
            pytest.param("list/a", ["list/a", "list/a-b", "list/a.b", "list/ab"], id="beginning-of-names"),
            pytest.param("list/b/é", ["list/b/é"], id="whole-key"),
            pytest.param("list/zz", [], id="nothing"),
            pytest.param("absent/", [], id="no-directory"),
        ],
    )
    async def test_prefix_need_not_be_a_directory(self, store, bucket: Bucket, prefix, expected):
        """A listing takes any beginning of a key."""
        for key in FLAT_KEYS:
            await asyncio.to_thread(bucket.write, f"list/{key}", b"x")
        assert [each.key for each in (await store.list_page(prefix)).objects] == expected

    async def test_listing_starts_after_a_key_that_need_not_exist(self, store, bucket: Bucket):
        """The start of a page may be any string."""
        for key in ("l/a", "l/c", "l/d/e"):
            await asyncio.to_thread(bucket.write, key, b"x")
        page = await store.list_page("l/", start_after="l/b")
        assert [each.key for each in page.objects] == ["l/c", "l/d/e"]
        assert (await store.list_page("l/", start_after="m")).objects == ()

    async def test_delete_counts_absent_keys_as_deleted(self, store, bucket: Bucket):
        """Deleting what is not there is no error, and nothing else goes with it."""
        await asyncio.to_thread(bucket.write, "dir/here", b"x")
        await asyncio.to_thread(bucket.write, "dir/stays", b"x")
        await store.delete_many(["dir/here", "dir/absent", "nowhere/absent"])
        await store.delete_many(["dir/here"])
        await store.delete_many([])
        assert (bucket.read("dir/here"), bucket.read("dir/stays")) == (None, b"x")

    async def test_delete_takes_more_keys_than_one_request(self, store, bucket: Bucket):
        """More than a thousand keys are deleted, the first and the last included."""
        keys = [f"many/{number:04d}" for number in range(1005)]
        for key in (keys[0], keys[999], keys[1000], keys[-1]):
            await asyncio.to_thread(bucket.write, key, b"x")
        await store.delete_many(keys)
        assert (await store.list_page("many/")).objects == ()

    async def test_close_may_be_called_twice(self, store):
        """A store that is closed can be closed again."""
        await put(store, "key", b"content")
        await store.close()
        await store.close()

    async def test_puts_leave_no_descriptor_open(self, store, slice_of):
        """The number of open descriptors is the same before and after many PUTs, good and bad ones."""
        data = content(2 * MIB)
        body = slice_of(data)
        await store.put("key", body, crc32c=crc32c(data))
        too_long = FileSlice(body.fd, body.position, body.size_bytes + 2 * MIB)
        before = open_descriptors()
        for number in range(10):
            await store.put(f"key-{number}", body, crc32c=crc32c(data))
            with pytest.raises(PreconditionFailed):
                await store.put("key", body, crc32c=crc32c(data), condition=IfAbsent())
            with pytest.raises(LocalFileError):
                await store.put("short", too_long, crc32c=0)
        await store.put("key", body, crc32c=crc32c(data))
        assert open_descriptors() <= before


class JoinContract:
    """What a store does that makes one object of several by itself."""

    proves_joins = True
    """Whether it tells enough for a join to be proven."""
    copies_from_bytes = 0
    """What is smaller goes through this host; None where all of it does."""

    async def _sources(self, store, parts: Sequence[bytes], *, prefix: str = "source") -> list[JoinSource]:
        sources = []
        for number, data in enumerate(parts):
            key = f"{prefix}/{number:03d}"
            await put(store, key, data)
            sources.append(JoinSource(key, len(data), crc32c(data)))
        return sources

    @pytest.mark.parametrize(
        "sizes",
        [
            pytest.param([7], id="one-byte-source"),
            pytest.param([1000, 2000, 3000], id="small"),
            pytest.param([6 * MIB, 5 * MIB, 7 * MIB + 1], id="large"),
            pytest.param([6 * MIB, 1000, 8 * MIB, 2 * MIB, 4 * MIB, 6 * MIB, 17], id="mixed"),
            pytest.param([1000, 6 * MIB], id="small-then-large"),
            pytest.param([1] * 70, id="many"),
        ],
    )
    async def test_joined_object_is_its_sources_one_after_the_other(
        self, store, bucket: Bucket, sizes: list[int]
    ):
        """The bytes are in order, size and checksum are those of the whole, and the sources stay."""
        parts = [content(size, seed=number) for number, size in enumerate(sizes)]
        sources, whole = await self._sources(store, parts), b"".join(parts)
        joined = await store.join("dir/joined", sources, crc32c=crc32c(whole))
        assert await asyncio.to_thread(bucket.read, "dir/joined") == whole
        assert (joined.info.key, joined.info.size_bytes) == ("dir/joined", len(whole))
        assert joined.info.crc32c == crc32c(whole)
        head = await store.head("dir/joined")
        assert (head.version, head.size_bytes) == (joined.info.version, len(whole))
        assert head.crc32c in {None, crc32c(whole)}
        for source, data in zip(sources, parts, strict=True):
            assert await asyncio.to_thread(bucket.read, source.key) == data
        keys = [each for page in await listed(store, "dir/", limit=1000) for each in page]
        assert keys == ["dir/joined"]

    async def test_large_sources_do_not_come_here(self, store):
        """Bytes that the server copies do not count as ours. A join is proven if the server says enough."""
        parts = [content(6 * MIB, seed=number) for number in range(3)]
        whole = b"".join(parts)
        joined = await store.join("joined", await self._sources(store, parts), crc32c=crc32c(whole))
        assert joined.host_bytes == (len(whole) if self.copies_from_bytes is None else 0)
        assert joined.is_proven is self.proves_joins

    async def test_join_again_gives_the_same(self, store, bucket: Bucket):
        """A join that is repeated after a crash gives the same object, over what the first one left."""
        parts = [content(6 * MIB, seed=number) for number in range(2)]
        sources, whole = await self._sources(store, parts), b"".join(parts)
        for _ in range(2):
            await store.join("joined", sources, crc32c=crc32c(whole))
        assert await asyncio.to_thread(bucket.read, "joined") == whole

    async def test_joined_object_can_be_a_source(self, store, bucket: Bucket):
        """A merged object may be merged again."""
        parts = [content(6 * MIB, seed=number) for number in range(3)]
        sources, whole = await self._sources(store, parts), b"".join(parts)
        two = b"".join(parts[:2])
        await store.join("two", sources[:2], crc32c=crc32c(two))
        again = [JoinSource("two", len(two), crc32c(two)), sources[2]]
        await store.join("joined", again, crc32c=crc32c(whole))
        assert await asyncio.to_thread(bucket.read, "joined") == whole

    @pytest.mark.parametrize("size", [pytest.param(1000, id="small"), pytest.param(6 * MIB, id="large")])
    async def test_join_of_other_bytes_is_refused(self, store, bucket: Bucket, size: int):
        """Nothing is stored if other bytes than announced arrive, or the result is marked as unproven."""
        parts = [content(size, seed=number) for number in range(2)]
        sources, whole = await self._sources(store, parts), b"".join(parts)
        try:
            joined = await store.join("joined", sources, crc32c=crc32c(whole) ^ 1)
        except ChecksumRejected:
            assert await asyncio.to_thread(bucket.read, "joined") is None
        else:
            assert not joined.is_proven

    async def test_source_of_another_size_is_refused(self, store, bucket: Bucket):
        """A source that is not the object that was meant ends the join, and nothing is stored."""
        parts = [content(6 * MIB, seed=number) for number in range(2)]
        first, second = await self._sources(store, parts)
        with pytest.raises(ChecksumRejected):
            await store.join(
                "joined",
                [first, replace(second, size_bytes=second.size_bytes - 1)],
                crc32c=crc32c(parts[0] + parts[1][:-1]),
            )
        assert await asyncio.to_thread(bucket.read, "joined") is None

    async def test_missing_source_ends_the_join(self, store, bucket: Bucket):
        """A source that has gone raises ObjectNotFound, and nothing is stored."""
        parts = [content(6 * MIB, seed=number) for number in range(2)]
        sources = await self._sources(store, parts)
        await store.delete_many([sources[1].key])
        with pytest.raises(ObjectNotFound):
            await store.join("joined", sources, crc32c=crc32c(b"".join(parts)))
        assert await asyncio.to_thread(bucket.read, "joined") is None

    async def test_join_under_a_condition_replaces_nothing_else(self, store, bucket: Bucket):
        """A join whose condition does not hold leaves the object as it was."""
        parts = [content(6 * MIB, seed=number) for number in range(2)]
        sources, whole = await self._sources(store, parts), b"".join(parts)
        await put(store, "joined", b"first")
        with pytest.raises(PreconditionFailed):
            await store.join("joined", sources, crc32c=crc32c(whole), condition=IfAbsent())
        assert await asyncio.to_thread(bucket.read, "joined") == b"first"
        await store.join("other", sources, crc32c=crc32c(whole), condition=IfAbsent())
        assert await asyncio.to_thread(bucket.read, "other") == whole


class NestedKeysContract:
    """What stores do that hold keys and not paths; a directory refuses it with a clear error."""

    async def test_key_and_its_extension_are_both_objects(self, store, bucket: Bucket):
        """An object `a` and an object `a/b` do not disturb each other."""
        await put(store, "n/a", b"outer")
        await put(store, "n/a/b", b"inner")
        assert (bucket.read("n/a"), bucket.read("n/a/b")) == (b"outer", b"inner")
        await store.delete_many(["n/a"])
        assert (bucket.read("n/a"), bucket.read("n/a/b")) == (None, b"inner")


class VanishedBucketContract:
    """
    What a store does whose bucket goes away while it is open, and comes back.

    `vanishing` has the open store, whose bucket holds the object "kept"; `vanish` and `come_back`, which are
    called in turn; and `found_instead`, the names of what there is now in the bucket's place.
    """

    async def test_vanished_bucket_is_no_empty_bucket(self, vanishing, slice_of):
        """Every call raises BucketNotFound with a hint, and nothing is written in the bucket's place."""
        store = vanishing.store
        data = content(2 * MIB)
        vanishing.vanish()
        before = vanishing.found_instead()
        calls = [
            lambda: put(store, "key", b"content"),
            lambda: put(store, "key", b"content", condition=IfAbsent()),
            lambda: store.put("key", slice_of(data), crc32c=crc32c(data)),
            lambda: store.get("kept"),
            lambda: store.get_range("kept", position=0, size_bytes=1),
            lambda: store.head("kept"),
            lambda: store.list_page(""),
            lambda: store.delete_many(["kept"]),
        ]
        for call in calls:
            with pytest.raises(BucketNotFound) as caught:
                await call()
            assert caught.value.hint
        assert vanishing.found_instead() == before

    async def test_bucket_that_comes_back_is_used_on(self, vanishing):
        """The same open store reads what it stored before, and stores more."""
        vanishing.vanish()
        with pytest.raises(BucketNotFound):
            await vanishing.store.get("kept")
        vanishing.come_back()
        assert (await vanishing.store.get("kept"))[0] == b"kept"
        await put(vanishing.store, "more", b"more")
        assert [each.key for each in (await vanishing.store.list_page("")).objects] == ["kept", "more"]


class EmptyPagesContract:
    """
    What a store does whose server lists in pages, some of them empty and not the last.

    `paging` is an async context manager: it takes the keys of each page, and gives a store.
    """

    @pytest.mark.parametrize(
        "pages",
        [
            pytest.param([[], ["a"]], id="first"),
            pytest.param([["a", "b"], [], [], ["c"]], id="in between"),
            pytest.param([["a"], []], id="last"),
        ],
    )
    async def test_empty_page_is_not_the_end_of_a_listing(self, paging, pages):
        """Only the server says where a listing ends: what is not listed counts as gone."""
        async with paging(pages) as store:
            found = [one.key async for one in list_objects(store, "")]
        assert found == [key for page in pages for key in page]


class TwoOpeningsContract:
    """
    What two openings of one bucket see of each other, as two processes have them.

    `store` is one of them, and `other` the second.
    """

    async def test_openings_lose_no_update_of_each_other(self, store, other):
        """Each reads, adds one and swaps; neither takes what it knows of the object for what there is."""
        await put(store, "counter", b"0")

        async def add(one: ObjectStore) -> None:
            done = 0
            while done < 10:
                data, info = await one.get("counter")
                with suppress(PreconditionFailed):
                    await put(one, "counter", b"%d" % (int(data) + 1), condition=IfVersion(info.version))
                    done += 1

        await asyncio.gather(add(store), add(other))
        assert (await store.get("counter"))[0] == (await other.get("counter"))[0] == b"20"

    async def test_version_of_before_anothers_write_is_refused(self, store, other):
        """An old version is refused, however lately this opening has asked for the object."""
        old = await put(store, "key", b"first")
        assert (await other.head("key")).version == old.version
        await put(other, "key", b"by the other", condition=IfVersion(old.version))
        with pytest.raises(PreconditionFailed):
            await put(store, "key", b"by us", condition=IfVersion(old.version))
        with pytest.raises(PreconditionFailed):
            await put(store, "key", b"by us", condition=IfAbsent())
        assert (await store.get("key"))[0] == b"by the other"


class MissingBucketContract:
    """What a store does whose bucket is not there; `missing_store` is one."""

    async def test_missing_bucket_is_named_by_every_operation(self, missing_store, slice_of):
        """Every call raises BucketNotFound, and none creates the bucket."""
        data = content(2 * MIB)
        calls = [
            lambda: put(missing_store, "key", b"content"),
            lambda: missing_store.put("key", slice_of(data), crc32c=crc32c(data)),
            lambda: missing_store.get("key"),
            lambda: missing_store.get_range("key", position=0, size_bytes=1),
            lambda: missing_store.head("key"),
            lambda: missing_store.list_page(""),
            lambda: missing_store.delete_many(["key"]),
        ]
        for call in calls:
            with pytest.raises(BucketNotFound) as caught:
                await call()
            assert caught.value.hint
