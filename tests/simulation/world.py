"""
A small world in which everything goes wrong that may: one seed, one history.

Brokers append, roll, leave transactions open, lose leadership and delete data; the store fails,
answers late or never; daemons die at any await point and run twice. After each event, and
after each manifest that reaches the bucket, the promises are checked.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archive_in, reconciler_of, tiered_config, values_in, written_below
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import CLUSTER, LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import DistantStore
from tests.fakes.wire import UnreliableWire, Wire
from tests.simulation.promises import Promises
from tests.simulation.scrubbing import expect_clean
from tieringd.broker.directory_broker import DirectoryBroker
from tieringd.storage.archive_clock import ArchiveClock
from tieringd.storage.resilient import ResilientStore, StoreLimits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tieringd.broker.base import Broker
    from tieringd.model.segment import RemoteSegment

EVENTS = 80
ROUND_SECONDS = 0.5
CONVERGENCE_SECONDS = 60
HOUR_MS = 3_600_000
PRODUCERS = (1, 2, 3)
_LIMITS = StoreLimits(
    initial_backoff_seconds=0.05,
    max_backoff_seconds=0.5,
    segment_upload_timeout_seconds=2.0,
    manifest_upload_timeout_seconds=1.5,
)


class Daemon:
    """One life of a daemon's process: its services over the world's store, broker and disk."""

    def __init__(self, world: World, writer_id: str, wire: Wire) -> None:
        store = ResilientStore(
            DistantStore(world.store, wire, on_put=world.on_put),
            _LIMITS,
            random=Random(world.random.random()),
        )
        self.wire = wire
        self.broker = world.broker_over(wire)
        self.had_company = False
        """Whether another one ran beside it at any time."""
        self.clock_error_ms = 0
        """How far this host's clock is ahead of the world's."""
        clock = ArchiveClock(
            wall_ms=lambda: world.now_ms() + self.clock_error_ms, steady_seconds=lambda: world.now_ms() / 1000
        )
        clock.listen_to(store.backend)
        self.archive = archive_in(store, writer_id=writer_id, clock=clock)
        self.reconciler = reconciler_of(world.config, self.archive, self.broker)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run until killed."""
        self._task = asyncio.get_running_loop().create_task(self.reconciler.run())

    @property
    def faults(self) -> dict[str, str]:
        """Return what holds its partitions back, and what its last scan could not see."""
        found = {str(one): each.fault for one, each in self.reconciler.statuses().items() if each.fault}
        return found | dict(self.reconciler.problems)

    @property
    def fences(self) -> list[str]:
        """Return why it has stopped archiving partitions, where another daemon beside it goes on."""
        return [why for why in self.faults.values() if "under the same leader epoch" in why]

    async def kill(self) -> None:
        """End it wherever it is."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self.broker.close()


class World:
    """Everything of one seed. Call `run` once, on a virtual loop."""

    def __init__(self, seed: int, log_dir: Path) -> None:
        self.random = Random(seed)
        self.store = MemoryStore(now_ms=self.now_ms)
        self.writers = [
            LogWriter(log_dir, "orders", number, first_offset=number * 100) for number in range(3)
        ]
        self.promises = Promises(
            self.store, self.writers, may_expire=self._may_expire, delete_delay_seconds=1.0
        )
        self._log_dir = log_dir
        self._has_broker = seed % 4 != 0
        # An election takes records away again, and then it is unknown how many bytes there once were.
        self._retention_bytes = self.random.choice([None, 500]) if not self._has_broker else None
        self._retention_ms = self.random.choice([None, None, 5000, 20_000])
        self.config = tiered_config(
            log_dir,
            target_bytes=self.random.choice([1, 300, 2000]),
            retention_ms=self._retention_ms,
            retention_bytes=self._retention_bytes,
        )
        for writer in self.writers if self._has_broker else ():
            writer.high_watermark = writer.next_offset
        self._keeps_trimmed_files = seed % 2 == 0
        self._deletes_by_itself = self.random.random() < 0.3
        self._epochs = {each.name: 0 for each in self.writers}
        self._corrupt: dict[LogWriter, int] = {}
        self._wires: list[UnreliableWire] = []
        self._brokers: list[FakeBroker] = []
        self._daemons: list[Daemon] = []
        self._lives = 0
        self.events: list[str] = []

    def now_ms(self) -> int:
        """Return the wall-clock time of this world."""
        return DEFAULT_TIME_MS + round(asyncio.get_running_loop().time() * 1000)

    def _may_expire(self, writer: LogWriter, segment: RemoteSegment) -> bool:
        """Say whether a segment is past total retention, from all that was ever written."""
        bases = [base for base in writer.bases if base >= segment.base_offset]
        is_too_much = self._retention_bytes is not None and (
            sum(len(writer.data_of(base)) for base in bases) > self._retention_bytes
        )
        is_too_old = self._retention_ms is not None and (
            segment.max_timestamp_ms <= self.now_ms() - self._retention_ms
        )
        return is_too_much or is_too_old

    def broker_over(self, wire: Wire) -> Broker:
        """Return a daemon's own way to the broker, or to the directory where there is none."""
        if not self._has_broker:
            return DirectoryBroker([str(self._log_dir)], cluster_id=CLUSTER)
        broker = FakeBroker(*self.writers, wire=wire, keeps_trimmed_files=self._keeps_trimmed_files)
        broker.epochs = dict(self._epochs)
        self._brokers.append(broker)
        return broker

    def on_put(self, key: str) -> None:
        """Check the promises each time that the bucket says something new of a partition."""
        if key.endswith("/manifest"):
            self.promises.check()

    async def run(self) -> None:
        """Let everything happen, then let all faults end, and see that nothing is left undone."""
        self._start_daemon()
        for _ in range(EVENTS):
            await self._one_event()
            self.promises.check()
            await asyncio.sleep(self.random.expovariate(2))
        await self._settle()

    def _chances(self) -> dict[Callable[[LogWriter], Awaitable[None] | None], int]:
        """Return how likely each event is."""
        return {
            self._append: 20,
            self._transact: 16,
            self._roll: 24,
            self._replicate: 20,
            self._delete_trimmed: 4,
            self._crash: 5,
            self._second_daemon: 3,
            self._outage: 4,
            self._new_leader: 4,
            self._drop_head: 8 if self._deletes_by_itself else 0,
            self._corrupt_one: 2,
            self._set_clock: 4,
        }

    async def _one_event(self) -> None:
        chances = self._chances()
        (event,) = self.random.choices(list(chances), list(chances.values()))
        self.events.append(event.__name__)
        done = event(self.random.choice(self.writers))
        if done is not None:
            await done

    def _append(self, writer: LogWriter) -> None:
        writer.append(*(b"plain %d" % self.random.randrange(100) for _ in range(self.random.randint(1, 4))))

    def _transact(self, writer: LogWriter) -> None:
        """Go on with a transaction of one of the producers, or end it."""
        producer = self.random.choice([*PRODUCERS, *2 * writer.open_producers])
        if producer in writer.open_producers and self.random.random() < 0.7:
            self.random.choice([writer.commit, writer.abort])(producer)
        else:
            writer.append(b"transacted", b"in %d" % producer, producer_id=producer)

    def _roll(self, writer: LogWriter) -> None:
        if writer.data_of(writer.bases[-1]):
            writer.roll()

    def _replicate(self, writer: LogWriter) -> None:
        """Let the followers fetch a part of what they lack."""
        if writer.high_watermark is not None:
            ahead = [each for each in writer.batch_bases if each >= writer.stable_end]
            writer.high_watermark = self.random.choice([*ahead, *[writer.next_offset] * len(ahead)])

    def _delete_trimmed(self, _: LogWriter) -> None:
        for broker in self._brokers[:1]:
            broker.delete_trimmed()

    async def _crash(self, _: LogWriter) -> None:
        if self._daemons:
            await self._daemons.pop(self.random.randrange(len(self._daemons))).kill()
        if not self._daemons:
            self._start_daemon()

    def _second_daemon(self, _: LogWriter) -> None:
        if len(self._daemons) < 2:
            self._start_daemon()

    def _outage(self, _: LogWriter) -> None:
        """Let the store and the broker be out of reach for a while, for one daemon or all."""
        loop = asyncio.get_running_loop()
        for wire in self._wires:
            wire.is_down = self.random.random() < 0.8
            loop.call_later(self.random.uniform(0.2, 3), wire.restore)

    def _set_clock(self, _: LogWriter) -> None:
        """Set a host's clock wrong, or right again."""
        if self._daemons:
            wrong = self.random.choice([-1, 1]) * self.random.choice([HOUR_MS, 400 * 24 * HOUR_MS])
            self.random.choice(self._daemons).clock_error_ms = self.random.choice([0, wrong])

    def _new_leader(self, writer: LogWriter) -> None:
        """Elect a leader that lacks what was not replicated; some daemons hear of it later than others."""
        if writer.high_watermark is not None:
            writer.truncate(writer.high_watermark)
        self._epochs[writer.name] += 1
        writer.begin_epoch(self._epochs[writer.name])
        for broker in self._brokers:
            if self.random.random() < 0.7:
                broker.epochs = dict(self._epochs)

    def _drop_head(self, writer: LogWriter) -> None:
        """Delete the oldest segments by the broker's own retention, some before they can be copied."""
        for producer_id in writer.open_producers:
            writer.commit(producer_id)
        for _ in range(2):
            writer.closed_segment(b"short-lived")
        if writer.high_watermark is not None:
            writer.high_watermark = writer.next_offset
        for _ in range(self.random.randint(1, 6)):
            first, *following = writer.bases_on_disk
            is_stable = bool(following) and following[0] <= writer.last_stable_offset
            is_trimmed = bool(following) and following[0] <= writer.log_start_offset
            if is_stable and not is_trimmed and self._corrupt.get(writer) != first:
                writer.drop_head()

    def _corrupt_one(self, writer: LogWriter) -> None:
        if writer in self._corrupt:
            self._mend(writer)
            return
        closed = [each for each in writer.bases_on_disk[:-1] if writer.data_of(each)]
        if closed and writer.next_offset == writer.stable_end:
            self._corrupt[writer] = self.random.choice(closed)
            writer.flip_byte(self._corrupt[writer])

    def _mend(self, writer: LogWriter) -> None:
        base_offset = self._corrupt.pop(writer)
        if base_offset in writer.bases_on_disk:
            writer.flip_byte(base_offset)

    def _start_daemon(self) -> None:
        self._lives += 1
        wire = UnreliableWire(self.random, fault_rate=self.random.choice([0.0, 0.02, 0.1]))
        self._wires.append(wire)
        daemon = Daemon(self, f"{self._lives:04x}", wire)
        self._daemons.append(daemon)
        for each in self._daemons if len(self._daemons) > 1 else ():
            each.had_company = True
        daemon.start()

    async def _settle(self) -> None:
        """End all faults, and expect a daemon, as it is, to finish the work."""
        await self._keep_one_daemon()
        for wire in self._wires:
            wire.end_faults()
            await asyncio.gather(*wire.late)
        for broker in self._brokers:
            broker.epochs = dict(self._epochs)
        for writer in list(self._corrupt):
            self._mend(writer)
        for daemon in self._daemons:
            daemon.clock_error_ms = 0
        self.promises.check()
        await self._converge()
        await self._daemons.pop().kill()
        for writer in self.writers:
            await self._expect_all_archived(writer)
            await expect_clean(archive_in(self.store), writer.identified)

    async def _keep_one_daemon(self) -> None:
        """
        End all daemons but one that goes on as it is.

        Of two beside one broker one stops archiving, and only an operator starts it again. One that was
        alone all the time has no reason to.
        """
        for daemon in self._daemons:
            assert daemon.had_company or not daemon.fences, f"fenced, and alone: {daemon.fences}"
        whole = [each for each in self._daemons if not each.fences]
        kept = whole[-1:]
        for daemon in [each for each in self._daemons if each not in kept]:
            await daemon.kill()
        self._daemons = kept
        if not kept:
            self._start_daemon()

    async def _converge(self) -> None:
        """Wait until all is archived, and fail when that takes too long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + CONVERGENCE_SECONDS
        while True:
            await asyncio.sleep(4 * ROUND_SECONDS)
            self.promises.check()
            if any(daemon.fences for daemon in self._daemons):
                # Met only now what the other one of two had written.
                await self._keep_one_daemon()
            faults = self._daemons[0].faults
            if not faults:
                try:
                    for writer in self.writers:
                        await self._expect_all_archived(writer)
                except AssertionError as error:
                    faults = {"archive": str(error)}
                else:
                    return
            assert loop.time() < until, f"{CONVERGENCE_SECONDS} s after the last fault: {faults}"

    async def _expect_all_archived(self, writer: LogWriter) -> None:
        """What is closed and stable is in the archive, and reads back as it was written."""
        manifest = self.promises.manifest_of(writer)
        stored = {each.base_offset for each in manifest.segments} if manifest else set()
        # What the broker deleted before it was copied is a gap, which is recorded once data follows it.
        ends = [
            end
            for base, end in pairwise(writer.bases)
            if end <= writer.last_stable_offset and (base in stored or base not in writer.dropped)
        ]
        if manifest is None:
            assert not ends, f"{writer.name}: nothing was archived"
            return
        # That these gaps are real is among the promises. Their data may have gone after all.
        eligible = max([manifest.start_offset, *ends, *(gap.next_offset for gap in manifest.gaps)])
        assert manifest.next_offset == eligible, f"{writer.name}: not all was archived"
        archive = archive_in(self.store)
        lost = {one for gap in manifest.gaps for one in range(gap.base_offset, gap.next_offset)}
        for read_committed in (False, True):
            expected = written_below(writer, eligible, read_committed=read_committed)
            found = await values_in(archive, manifest, read_committed=read_committed)
            kept = {
                each: value
                for each, value in expected.items()
                if each not in lost and each >= manifest.start_offset
            }
            assert found == kept, f"{writer.name}: {read_committed=} reads other records than were written"
