"""Manifests as an endpoint knows them: read once for all callers, fresh enough, and kept in an outage."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.fakes.archive import archive_in, archived
from tests.fakes.log_writer import LogWriter
from tests.fakes.slow_store import LateStore
from tieringd.endpoint.served_manifests import ServedPartitions
from tieringd.errors import StorageUnavailable

pytestmark = pytest.mark.looptime

INTERVAL_SECONDS = 30.0


def away():
    return StorageUnavailable("away")


@pytest.fixture
async def partitions(archive):
    """Give what is known of manifests; in the end nothing is under way."""
    partitions = ServedPartitions(archive.manifests, interval_seconds=INTERVAL_SECONDS, at_once=3)
    yield partitions
    await partitions.close()


@pytest.fixture
async def one(writer, archive):
    """Give a partition with one archived segment."""
    writer.closed_segment()
    await archived(writer, archive)
    return writer.identified


def operations(store):
    return [operation for operation, _ in store.requests]


async def test_simultaneous_callers_cause_one_read(partitions, one, store):
    """The next caller within the interval causes none."""
    store.latency_seconds = 1.0
    store.requests.clear()
    found = await asyncio.gather(*(partitions.manifest(one) for _ in range(10)))
    assert {manifest.next_offset for manifest in found} == {3}
    await partitions.manifest(one)
    assert operations(store) == ["get"]
    await asyncio.sleep(INTERVAL_SECONDS + 1)
    await asyncio.gather(*(partitions.manifest(one) for _ in range(10)))
    assert operations(store) == ["get", "head"]


async def test_cancelled_caller_does_not_end_the_read_of_the_others(partitions, one, store):
    """The read goes on, and the other callers get its result."""
    store.latency_seconds = 1.0
    store.requests.clear()
    first, second = (asyncio.create_task(partitions.manifest(one)) for _ in range(2))
    await asyncio.sleep(0.5)
    first.cancel()
    assert (await second).next_offset == 3
    assert first.cancelled()
    assert operations(store) == ["get"]


async def test_slow_store_delays_no_request_with_a_known_manifest(partitions, one, store):
    """The first callers wait a little. Later ones do not wait while the store is still away."""
    await partitions.manifest(one)
    await asyncio.sleep(INTERVAL_SECONDS + 1)
    store.latency_seconds = 100.0
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert (await partitions.manifest(one)).next_offset == 3
    first = loop.time()
    assert 0 < first - began < 10
    assert (await partitions.manifest(one)).next_offset == 3
    assert loop.time() == first


async def test_outage_leaves_what_is_known(partitions, one, store):
    """One request after the interval asks for it again."""
    await partitions.manifest(one)
    store.requests.clear()
    for round_number in range(3):
        await asyncio.sleep(INTERVAL_SECONDS + 1)
        store.fail_next("head", away)
        for _ in range(5):
            assert (await partitions.manifest(one)).next_offset == 3
        assert operations(store) == ["head"] * (round_number + 1)


async def test_first_read_that_fails_is_not_repeated_at_once(partitions, one, store):
    """A moment later it is."""
    store.fail_next("get", away)
    store.requests.clear()
    for _ in range(5):
        with pytest.raises(StorageUnavailable):
            await partitions.manifest(one)
    assert operations(store) == ["get"]
    await asyncio.sleep(2)
    assert (await partitions.manifest(one)).next_offset == 3


async def test_watchers_are_told_of_a_change(partitions, one, writer, archive):
    """Watchers hear of a change, whichever caller found it. An equal manifest is no change."""
    await partitions.manifest(one)
    with partitions.watching([one]) as changed:
        await partitions.newest(one)
        assert not changed.is_set()
        writer.closed_segment()
        await archived(writer, archive)
        await partitions.newest(one)
        assert changed.is_set()
    with partitions.watching([one]) as changed:
        partitions.end_waits()
        assert changed.is_set()
        assert partitions.is_ending


async def test_many_partitions_are_read_together(partitions, archive, store, tmp_path):
    """Manifests are read several at once, up to the limit, and one that cannot be read is left out."""
    wanted = []
    for number in range(6):
        writer = LogWriter(tmp_path / "more", "many", number)
        writer.closed_segment()
        await archived(writer, archive)
        wanted.append(writer.identified)
    loop = asyncio.get_running_loop()
    store.latency_seconds = 1.0
    store.fail_next("get", away)
    began = loop.time()
    await partitions.ensure_fresh([*wanted, *wanted])
    assert loop.time() - began == pytest.approx(2.0)
    assert [partitions.known(one) is None for one in wanted] == [True, *[False] * 5]


async def test_manifest_without_requests_is_forgotten(partitions, archive, one, tmp_path):
    """Manifests of a long history are large. A watcher keeps the manifests it watches."""
    await partitions.manifest(one)
    other = LogWriter(tmp_path / "more", "other")
    other.closed_segment()
    await archived(other, archive)
    with partitions.watching([one]):
        await asyncio.sleep(4000)
        await partitions.manifest(other.identified)
        assert partitions.known(one) is not None
    await asyncio.sleep(4000)
    await partitions.manifest(LogWriter(tmp_path / "third", "third").identified)
    assert partitions.known(one) is None
    assert partitions.known(other.identified) is None


async def test_no_more_manifests_are_kept_than_there_is_room_for(archive, tmp_path):
    """The least recently requested one goes first. A watcher keeps the manifests it watches."""
    partitions = ServedPartitions(archive.manifests, interval_seconds=INTERVAL_SECONDS, kept_max=3)
    names = [LogWriter(tmp_path / str(number), f"t{number}").identified for number in range(5)]
    with partitions.watching(names[:1]):
        for name in (*names[:3], names[1], *names[3:]):
            await partitions.manifest(name)
            await asyncio.sleep(1)
    assert [partitions.known(name) is None for name in names] == [False, True, True, False, False]
    await partitions.close()


async def test_offset_past_the_end_is_searched_in_the_store(partitions, one, writer, archive, store):
    """The offset may be newer than the manifest, which is read anew, but not for each request."""
    assert (await partitions.reaching(one, 5)).next_offset == 3
    writer.closed_segment()
    await archived(writer, archive)
    store.requests.clear()
    await asyncio.sleep(0.1)
    assert (await partitions.reaching(one, 3)).next_offset == 3
    assert operations(store) == []
    found = await asyncio.gather(*(partitions.reaching(one, 5) for _ in range(5)))
    assert {manifest.next_offset for manifest in found} == {6}
    assert operations(store) == ["head", "get"]


async def test_offset_past_the_end_is_not_searched_in_an_answer_that_came_late(
    partitions, one, writer, archive, store
):
    """The read began before the newer manifest was stored, so its answer tells nothing of the offset."""
    await partitions.manifest(one)
    load, answered = store.head, asyncio.Event()

    async def late(key):
        found = await load(key)
        await answered.wait()
        return found

    store.head = late
    reading = asyncio.create_task(partitions.newest(one))
    await asyncio.sleep(0.1)
    store.head = load
    writer.closed_segment()
    await archived(writer, archive)
    searching = asyncio.create_task(partitions.reaching(one, 5))
    await asyncio.sleep(2)
    answered.set()
    assert (await reading).next_offset == 3
    assert (await searching).next_offset == 6


async def test_offset_past_the_end_is_unknown_while_the_store_is_away(partitions, one, store):
    """An offset past the known end may exist by now, so the client has to try again."""
    await partitions.manifest(one)
    await asyncio.sleep(2)
    store.fail_next("head", away)
    store.requests.clear()
    for _ in range(3):
        with pytest.raises(StorageUnavailable):
            await partitions.reaching(one, 5)
        assert (await partitions.reaching(one, 3)).next_offset == 3
    assert operations(store) == ["head"]


async def test_size_is_told_and_no_manifest_kept_for_it(partitions, one, store):
    """An admin tool asks for every partition of the bucket; one that is served is not read again."""
    manifest = await partitions.newest(one)
    store.requests.clear()
    assert await partitions.size_bytes(one) == manifest.segments.total_bytes
    assert operations(store) == []
    other = replace(one, partition=1)
    assert await partitions.size_bytes(other) == 0
    assert operations(store) == ["get"]
    assert partitions.known(other) is None


async def test_late_answer_of_the_store_takes_no_end_back(writer):
    """An older manifest that arrives after a newer one would let a partition's high watermark go back."""
    store = LateStore()
    archive = archive_in(store)
    partitions = ServedPartitions(archive.manifests, interval_seconds=INTERVAL_SECONDS)
    ends = []

    async def ask(seconds):
        writer.closed_segment()
        await archived(writer, archive)
        store.late_seconds.append(seconds)
        await partitions.newest(writer.identified)
        ends.append(partitions.known(writer.identified).next_offset)

    try:
        await ask(0)
        first = asyncio.create_task(ask(10))
        await asyncio.sleep(1)
        await asyncio.gather(first, ask(0))
        await partitions.newest(writer.identified)
        ends.append(partitions.known(writer.identified).next_offset)
    finally:
        await partitions.close()
    assert ends == sorted(ends)
    assert (ends[0], ends[-1]) == (3, 9)
