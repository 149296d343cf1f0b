"""Two workers write into one cache directory, and the daemon's keeper holds the limit for both."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack, suppress

from tests.fakes.hydration import CHUNK_BYTES, Host, running
from tests.fakes.virtual_loop import virtually
from tieringd.daemon.workers.cache_room import CacheRooms, RemoteRoom
from tieringd.policies.cache_trim import TrimLimits
from tieringd.reading.shared_cache import SharedCacheKeeper


class Wire:
    """The link of a worker, in one process."""

    def __init__(self, handlers):
        self.handlers = handlers
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def ask(self, name, *arguments):
        """Return the daemon's answer, once it may."""
        found = self.handlers[name](*arguments)
        answer = await found if asyncio.iscoroutine(found) else found
        await self.go_on.wait()
        return answer

    def tell(self, name, *arguments):
        """Send a note."""
        self.handlers[name](*arguments)


class Workers:
    """The daemon's keeper of one directory, and hosts that share it."""

    def __init__(self, tmp_path, store, *, chunks):
        limits = TrimLimits(size_bytes=chunks * CHUNK_BYTES, objects=1000)
        self.daemon = Host(tmp_path / "cache", store, limits=limits)
        self.rooms = CacheRooms(self.daemon.keeper)
        self.wires, self.hosts = [], []
        for _ in range(2):
            host = Host(tmp_path / "cache", store)
            wire = Wire(self.rooms.handlers(host))
            host.keeper = SharedCacheKeeper(
                host.directory, host.open_chunks, room=RemoteRoom(wire), metrics=host.metrics.cache
            )
            self.wires.append(wire)
            self.hosts.append(host)
        self.daemon.keeper.on_evicted = self.evicted

    def evicted(self, names):
        """Tell the workers, as the daemon does."""
        for host in self.hosts:
            host.keeper.note_evicted(names)

    @property
    def use(self):
        """Return what the daemon counts."""
        return self.daemon.directory.accounts.use()

    def tell_touched(self):
        """Let the workers tell what they have read, and a second pass."""
        for host in self.hosts:
            host.keeper.tell_touched()
        self.daemon.clock.now_ms += 1000

    def name(self, stored, number):
        """Return the name of a chunk in the cache."""
        return str(self.daemon.path_of(stored, number).relative_to(self.daemon.directory.path))

    def files(self, stored):
        """Return the numbers of the chunks that are on the disk."""
        return [number for number in range(4) if self.daemon.path_of(stored, number).exists()]


@virtually
async def test_limit_holds_for_both_and_the_least_recently_read_goes(tmp_path, store, stored):
    """Chunks of both workers count together, and a worker finds what the other one has written."""
    workers = Workers(tmp_path, store, chunks=3)
    first, second = workers.hosts
    async with AsyncExitStack() as stack:
        for host in (workers.daemon, first, second):
            stack.push_async_callback(host.start().close)
        await first.read(stored, 0)
        await second.read(stored, 1)
        workers.tell_touched()
        requests = len(store.requests)
        await second.read(stored, 0)
        assert len(store.requests) == requests, "it is read from the disk"
        workers.tell_touched()
        await first.read(stored, 2)
        assert workers.use.size_bytes == 3 * CHUNK_BYTES
        await first.read(stored, 3)
        assert workers.files(stored) == [0, 2, 3], "1 was read before 0 was read again"
        assert (workers.use.size_bytes, workers.use.reserved_bytes) == (3 * CHUNK_BYTES, 0)
        assert not second.open_chunks.holds(workers.name(stored, 1)), "its room is free"


@virtually
async def test_room_comes_back_from_a_worker_that_ended(tmp_path, store, stored):
    """Room that a worker held comes back, and room that a cancelled reader had asked for."""
    workers = Workers(tmp_path, store, chunks=3)
    host, wire = workers.hosts[0], workers.wires[0]
    async with running(workers.daemon):
        assert await host.keeper.reserve(CHUNK_BYTES)
        wire.go_on.clear()
        asking = asyncio.ensure_future(host.keeper.reserve(CHUNK_BYTES))
        await asyncio.sleep(0.2)
        assert workers.use.reserved_bytes == 2 * CHUNK_BYTES
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        wire.go_on.set()
        await asyncio.sleep(0.1)
        assert workers.use.reserved_bytes == CHUNK_BYTES
        workers.rooms.end(host)
        assert workers.use.reserved_bytes == 0


@virtually
async def test_file_that_a_worker_could_not_report_is_counted_after_its_end(tmp_path, store, stored):
    """The daemon compares its counts with the disk."""
    workers = Workers(tmp_path, store, chunks=3)
    host = workers.hosts[0]
    async with running(workers.daemon), running(host):
        workers.wires[0].handlers = {**workers.wires[0].handlers, "cache_published": lambda *_: None}
        await host.read(stored, 0)
        assert workers.use.size_bytes == 0
        workers.rooms.end(host)
        await workers.daemon.keeper.step()
        assert (workers.use.size_bytes, workers.use.reserved_bytes) == (CHUNK_BYTES, 0)


WRITING = """
import sys, time
from pathlib import Path
from tieringd.cache.cache_directory import CacheDirectory
part = CacheDirectory(Path(sys.argv[1]), now_ms=lambda: 0).part("chunk", 1 << 20)
print("ready", flush=True)
time.sleep(60)
"""


def kill_while_writing(cache):
    """Have a process begin a file in *cache*, and kill it."""
    with subprocess.Popen([sys.executable, "-c", WRITING, cache], stdout=subprocess.PIPE) as worker:
        assert worker.stdout.readline() == b"ready\n"
        worker.kill()


@virtually
async def test_unfinished_file_of_a_killed_worker_takes_no_room(tmp_path, store):
    """The file is in no account and under no limit, so the daemon removes it at once."""
    workers = Workers(tmp_path, store, chunks=3)
    cache = tmp_path / "cache"
    async with running(workers.daemon):
        await workers.daemon.keeper.step()
        mine = workers.daemon.directory.part("mine", 1)
        kill_while_writing(cache)
        assert len(list(cache.glob("incoming/*.part"))) == 2
        workers.rooms.end(workers.hosts[0])
        await workers.daemon.keeper.step()
        assert len(list(cache.glob("incoming/*.part"))) == 1
        mine.abandon()


@virtually
async def test_full_cache_serves_readers_without_it(tmp_path, store, stored):
    """The daemon refuses room, and the chunk is handed out in memory."""
    workers = Workers(tmp_path, store, chunks=0)
    host = workers.hosts[0]
    async with running(workers.daemon), running(host):
        assert len(await host.read(stored, 0)) == CHUNK_BYTES
        assert workers.files(stored) == []
