"""A daemon that is stopped while leadership goes away and comes back: what it meant to do is off."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archive_in, reconciler_of, tiered_config, values_in
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import DistantStore
from tests.fakes.virtual_loop import virtually
from tests.fakes.wire import Wire
from tests.simulation.cluster_broker import ClusterBroker
from tests.simulation.replica import Replica
from tests.simulation.replication import Replication
from tieringd.formats.manifest_codec import decode_manifest
from tieringd.formats.object_keys import manifest_key

if TYPE_CHECKING:
    from pathlib import Path

    from tieringd.model.manifest import PartitionManifest

pytestmark = pytest.mark.usefixtures("quiet")
ROUND_SECONDS = 3
LONG_SECONDS = 20 * ROUND_SECONDS


class GateWire(Wire):
    """A wire whose daemon is stopped at one operation: before that takes effect, or after it."""

    def __init__(self) -> None:
        self.stop_before = ""
        self.stop_after = ""
        self.stopped = asyncio.Event()
        self.running = asyncio.Event()
        self.running.set()
        self.carried: list[str] = []

    async def sendable(self) -> None:
        """Wait until the daemon runs."""
        await self.running.wait()

    async def carry(self, operation, effect, *, lost, detach=None):
        """Bring a request to its effect once the daemon runs."""
        self._stop_if(operation == self.stop_before)
        await self.running.wait()
        await asyncio.sleep(0.001)
        self.carried.append(operation)
        answer = await effect()
        self._stop_if(operation == self.stop_after)
        await self.running.wait()
        return answer

    async def until_stopped(self) -> None:
        """Wait until the daemon has come to where it stops."""
        async with asyncio.timeout(LONG_SECONDS):
            await self.stopped.wait()

    def _stop_if(self, is_here: bool) -> None:  # noqa: FBT001 - it is the condition itself
        if is_here and not self.stopped.is_set():
            self.stopped.set()
            self.running.clear()


class Pair:
    """One partition on two brokers with a daemon beside each; broker 1 lags behind from offset 30 on."""

    def __init__(self, root: Path, *, target_bytes: int, elects_uncleanly: bool = False) -> None:
        self.store = MemoryStore()
        self._root = root
        self._target_bytes = target_bytes
        self._elects_uncleanly = elects_uncleanly
        journal: dict[int, set[bytes]] = {}
        roots = [root / f"broker-{broker}" for broker in range(2)]
        self.partition = Replication([Replica(one / "log", one / "pins", 0, journal) for one in roots])
        self.wires: list[GateWire] = []
        self._tasks: list[asyncio.Task[None]] = []
        for broker in range(2):
            self.partition.hear(broker)
        self.write(b"old", times=10)
        self.partition.drop_out(1)
        self.write(b"old-a", times=5)
        self.partition.log.roll()
        self.write(b"old-a2")

    def start(self, *, stop_before: str = "", stop_after: str = "") -> GateWire:
        """Start the next broker's daemon, which stops there; return its wire to its broker."""
        number = len(self.wires)
        wire = GateWire()
        wire.stop_before, wire.stop_after = stop_before, stop_after
        archive = archive_in(DistantStore(self.store, Wire()), writer_id=f"{number:04x}", now_ms=self._now_ms)
        broker = ClusterBroker(
            number,
            [self.partition],
            wire,
            on_trim=lambda *_: None,
            elects_uncleanly=self._elects_uncleanly,
        )
        config = tiered_config(
            self._root / f"broker-{number}" / "log",
            target_bytes=self._target_bytes,
            interval_ms=ROUND_SECONDS * 1000,
        )
        reconciler = reconciler_of(config, archive, broker, now_ms=self._now_ms)
        self.wires.append(wire)
        self._tasks.append(asyncio.get_running_loop().create_task(reconciler.run()))
        return wire

    def write(self, value: bytes, *, times: int = 1) -> None:
        """Let the leader append batches of three records; followers that are in sync fetch them."""
        for _ in range(times):
            self.partition.log.append(value, value, value)
        for broker in self.partition.in_sync:
            self.partition.fetch(broker)
        self.partition.advance()

    def elect(self, broker: int) -> None:
        """Let *broker* lead, and all hear of it."""
        self.partition.elect(broker)
        for each in range(2):
            self.partition.hear(each)

    def fetch_all(self) -> None:
        """Let the follower catch up, and the high watermark come to it."""
        for _ in range(2):
            for broker in range(2):
                self.partition.fetch(broker)
        self.partition.advance()

    def move_away_and_back(self) -> None:
        """Elect broker 1 uncleanly at offset 30, let it write there, and elect broker 0 again."""
        self.elect(1)
        for number in range(8):
            self.write(b"new-b")
            self.fetch_all()
            if number == 3:
                self.partition.replicas[0].roll()
        self.fetch_all()
        self.elect(0)
        self.write(b"new-a")
        self.fetch_all()

    async def expect_nothing_lost(self) -> None:
        """See that each acknowledged record can be read as it was written, trimmed or not."""
        log = self.partition.log
        log.roll()
        self.write(b"active")
        self.fetch_all()
        await asyncio.sleep(LONG_SECONDS)
        manifest = self.manifest
        assert manifest.gaps == ()
        wanted = log.values(read_committed=False)
        archived = await values_in(archive_in(self.store), manifest)
        assert archived == {offset: wanted[offset] for offset in archived}
        kept = set(log.held_offsets()) - set(range(log.log_start_offset))
        assert set(wanted) <= kept | set(archived)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    @property
    def manifest(self) -> PartitionManifest:
        """Return what the bucket holds."""
        data, _ = self.store.objects[manifest_key(self.partition.log.identified)]
        return decode_manifest(data)

    def _now_ms(self) -> int:
        return DEFAULT_TIME_MS + round(asyncio.get_running_loop().time() * 1000)


STOPS = [
    pytest.param({"stop_before": "trim"}, id="before it asks who leads"),
    pytest.param({"stop_after": "trim"}, id="after it asked who leads"),
]


@pytest.mark.parametrize("has_other_daemon", [True, False])
@pytest.mark.parametrize("stop", STOPS)
@virtually
async def test_trim_of_an_earlier_leadership_lets_go_of_nothing(tmp_path, stop, *, has_other_daemon):
    """The broker leads again when the daemon goes on, under a later epoch and with other records."""
    pair = Pair(tmp_path, target_bytes=1)
    wire = pair.start(**stop)
    if has_other_daemon:
        pair.start()
    await wire.until_stopped()
    pair.move_away_and_back()
    await asyncio.sleep(LONG_SECONDS)
    wire.running.set()
    await asyncio.sleep(LONG_SECONDS)
    await pair.expect_nothing_lost()
    assert pair.partition.log.log_start_offset > 0, "nothing was trimmed in the end"


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param({"stop_after": "replicas"}, id="with leadership known"),
        pytest.param({"stop_before": "log_bounds"}, id="with the files read"),
        pytest.param({"stop_after": "log_bounds"}, id="with the bounds known"),
    ],
)
@virtually
async def test_scan_that_leadership_overtakes_is_discarded(tmp_path, stop):
    """Old leadership with a newer log would append the new lineage to the old one, for good."""
    pair = Pair(tmp_path, target_bytes=-1)
    wire = pair.start()
    await asyncio.sleep(3 * ROUND_SECONDS)
    assert pair.manifest.next_offset == 45
    wire.stop_before, wire.stop_after = stop.get("stop_before", ""), stop.get("stop_after", "")
    await wire.until_stopped()
    pair.move_away_and_back()
    pair.partition.log.roll()
    pair.write(b"later")
    pair.fetch_all()
    wire.running.set()
    await asyncio.sleep(LONG_SECONDS)
    await pair.expect_nothing_lost()
    assert pair.manifest.replacements


@virtually
async def test_trim_waits_for_replicas_that_could_be_elected_without_its_records(tmp_path):
    """No later leader replaces records that every replica holds, so a late request does no harm."""
    pair = Pair(tmp_path, target_bytes=1, elects_uncleanly=True)
    wire = pair.start()
    await asyncio.sleep(LONG_SECONDS)
    assert pair.manifest.next_offset == 45
    assert "trim" in wire.carried
    assert "delete_records" not in wire.carried
    pair.fetch_all()
    await asyncio.sleep(LONG_SECONDS)
    assert "delete_records" in wire.carried
    await pair.expect_nothing_lost()
