"""A daemon that is killed and started again under the same leader epoch: it goes on, whatever comes late."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archive_in, reconciler_of, tiered_config
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import DistantStore
from tests.fakes.virtual_loop import virtually
from tests.fakes.wire import Wire
from tests.simulation.cluster_broker import ClusterBroker
from tests.simulation.replica import Replica
from tests.simulation.replication import Replication
from tieringd.errors import PreconditionFailed
from tieringd.formats.manifest_codec import decode_manifest
from tieringd.formats.object_keys import manifest_key
from tieringd.storage.base import IfVersion

if TYPE_CHECKING:
    from pathlib import Path

    from tieringd.archiving.reconciler import Reconciler
    from tieringd.model.manifest import PartitionManifest

pytestmark = pytest.mark.usefixtures("quiet")
ROUND_SECONDS = 3


class UnevenStore(MemoryStore):
    """A bucket in which one commit arrives late, or is refused for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.holds_next = False
        self.held = asyncio.Event()
        self.refusals = 0
        self._late: tuple | None = None

    async def put(self, key, body, *, crc32c, condition=None):
        """Store an object; a commit that is on its way takes effect when the next data object comes."""
        is_commit = key.endswith("/manifest") and isinstance(condition, IfVersion)
        if is_commit and self.holds_next:
            self.holds_next = False
            self._late = (key, body, crc32c, condition)
            self.held.set()
            await asyncio.Event().wait()
        if is_commit and self.refusals:
            self.refusals -= 1
            raise PreconditionFailed("409 ConditionalRequestConflict: nothing has changed", key=key)
        if self._late is not None and key.endswith(".log"):
            late_key, late_body, checksum, late_condition = self._late
            self._late = None
            await super().put(late_key, late_body, crc32c=checksum, condition=late_condition)
        return await super().put(key, body, crc32c=crc32c, condition=condition)


class Site:
    """One partition on one broker, and the daemons that were started beside it."""

    def __init__(self, root: Path) -> None:
        self.store = UnevenStore()
        self._root = root
        self.partition = Replication([Replica(root / "log", root / "pins", 0, {})])
        self.partition.hear(0)
        self.close_segment()

    def close_segment(self) -> None:
        """Let the broker close a segment."""
        self.partition.log.append()
        self.partition.log.roll()
        self.partition.log.append()
        self.partition.advance()

    def start(self, writer_id: str) -> tuple[Reconciler, asyncio.Task[None]]:
        """Start a daemon process; killing it is cancelling its task."""
        archive = archive_in(DistantStore(self.store, Wire()), writer_id=writer_id, now_ms=_now_ms)
        broker = ClusterBroker(0, [self.partition], Wire(), on_trim=lambda *_: None)
        config = tiered_config(self._root / "log", interval_ms=ROUND_SECONDS * 1000)
        reconciler = reconciler_of(config, archive, broker, now_ms=_now_ms)
        return reconciler, asyncio.get_running_loop().create_task(reconciler.run())

    async def goes_on(self) -> bool:
        """Say whether all that the broker closes from now on is archived within some rounds."""
        for _ in range(3):
            self.close_segment()
            await asyncio.sleep(3 * ROUND_SECONDS)
        newest = self.partition.log.local_log().segments[-1]
        return self.manifest.next_offset == newest.base_offset

    @property
    def manifest(self) -> PartitionManifest:
        """Return what the bucket holds."""
        return decode_manifest(self.store.objects[manifest_key(self.partition.log.identified)][0])


def _now_ms() -> int:
    return DEFAULT_TIME_MS + round(asyncio.get_running_loop().time() * 1000)


async def kill(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def faults(reconciler: Reconciler) -> list[str]:
    return [status.fault for status in reconciler.statuses().values() if status.fault]


@virtually
async def test_predecessors_late_commit_fences_no_restarted_daemon(tmp_path):
    """The commit of a killed process takes effect once, after its successor has read the manifest."""
    site = Site(tmp_path)
    _, task = site.start("aaaa")
    await asyncio.sleep(2 * ROUND_SECONDS)
    site.store.holds_next = True
    site.close_segment()
    await site.store.held.wait()
    await kill(task)
    after, task = site.start("bbbb")
    site.close_segment()
    assert await site.goes_on()
    assert faults(after) == []
    assert site.manifest.writer_id == "bbbb"
    await kill(task)


@virtually
async def test_refused_commit_that_changed_nothing_fences_no_writer(tmp_path):
    """A store may refuse writes that meet, as S3 does with 409; no other process has written then."""
    site = Site(tmp_path)
    _, task = site.start("aaaa")
    await asyncio.sleep(2 * ROUND_SECONDS)
    await kill(task)
    after, task = site.start("bbbb")
    site.store.refusals = 3
    assert await site.goes_on()
    assert site.store.refusals == 0
    assert faults(after) == []
    await kill(task)


@virtually
async def test_one_of_two_daemons_beside_one_broker_stops(tmp_path):
    """Both live, so one of them meets a second commit of the other; the archive goes on with one writer."""
    site = Site(tmp_path)
    daemons = [site.start(writer_id) for writer_id in ("aaaa", "bbbb")]
    await site.goes_on()
    assert await site.goes_on()
    (fault,) = [fault for reconciler, _ in daemons for fault in faults(reconciler)]
    assert "Run one tieringd for each broker" in fault
    await kill(*(task for _, task in daemons))
