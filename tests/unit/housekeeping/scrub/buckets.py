"""A bucket to be scrubbed: an archive in it, hands to damage it with, and the parts that scrub it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.fakes.archive import Clock, archive_in, archiver_of, observed, tiered_config
from tests.fakes.broker import FakeBroker
from tests.fakes.manifests import stored_manifest
from tests.fakes.memory_store import MemoryStore
from tieringd.daemon.scrubbing import scrub_parts
from tieringd.formats.object_keys import TopicKey, data_key, index_key
from tieringd.housekeeping.scrub import WholeScrub
from tieringd.policies.total_retention import RetentionPace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.log_writer import LogWriter
    from tieringd.archiving.claim import Claim
    from tieringd.housekeeping.scrub import ScrubReport
    from tieringd.model.local_log import LocalLog
    from tieringd.model.manifest import PartitionManifest

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
PACE = RetentionPace(interval_ms=60_000, delete_delay_ms=600_000)


class DatedStore(MemoryStore):
    """A bucket whose clock is the test's."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def add(self, key: str, data: bytes):
        """Store an object at the test's time."""
        info = replace(super().add(key, data), modified_ms=self.clock())
        self.place(key, data, info)
        return info

    def bytes_of(self, key: str) -> bytes:
        return self.objects[key][0]

    def stored_keys(self, *, without: str = "quarantine/") -> list[str]:
        """Return all keys, but those in quarantine."""
        return sorted(key for key in self.objects if not key.startswith(without))


class Bucket:
    """One partition's log and archive, and all that scrubs it."""

    def __init__(self, writer: LogWriter, *, work_directory: Path, store: DatedStore | None = None) -> None:
        self.clock = store.clock if store else Clock()
        self.writer = writer
        self.store = store or DatedStore(self.clock)
        self.archive = archive_in(self.store, now_ms=self.clock)
        self.config = tiered_config(work_directory)
        self.archiver = archiver_of(writer, self.archive, FakeBroker(writer), now_ms=self.clock)
        self.offered = []
        self.local_log: Callable[[], LocalLog | None] = self.writer.local_log
        """What a healer finds of the local log."""
        self.offer = self.take
        """What happens to a change that a healer offers."""
        self.parts = scrub_parts(
            self.config,
            self.archive,
            writer_id="c3",
            local_log=lambda _: self.local_log(),
            offer=self._offer,
        )

    @property
    def claim(self) -> Claim:
        """The archiver's claim, for a commit beside its steps."""
        return self.archiver._claim

    async def _offer(self, partition, change) -> None:
        await self.offer(partition, change)

    async def take(self, _partition, change) -> None:
        """Commit a change as the archiver would do it within its step."""
        self.offered.append(change)
        await change.commit(self.claim, await self.claim.current(lambda: None))

    @property
    def topic_key(self) -> TopicKey:
        one = self.writer.identified
        return TopicKey(one.cluster, one.topic, one.topic_id)

    @property
    def manifest(self) -> PartitionManifest:
        """Return the live manifest as it is stored."""
        return stored_manifest(self.store, self.writer)

    async def fill(self, segments: int = 6, *, local: int | None = None) -> None:
        """Archive closed segments; where the log keeps only *local* of them, the older ones spill."""
        await self.archive.manifests.ensure_topic(self.topic_key, partition_count=1)
        for number in range(segments):
            self.writer.closed_segment(b"a%d" % number, b"b%d" % number)
        await self.step()
        if local is not None:
            for _ in range(segments - local):
                self.writer.drop_head()
            await self.step()

    async def step(self, **changes) -> None:
        """Let the archiver do all there is."""
        while (
            await self.archiver.step(
                observed(self.writer, retention_pace=PACE, target_manifest_bytes=1, **changes)
            )
        ).uploaded:
            pass

    async def whole_manifest(self) -> PartitionManifest:
        """Return the manifest with all that is spilled."""
        return await archive_in(self.store).manifests.spillovers.with_history(self.manifest)

    async def data_keys(self) -> list[str]:
        return [data_key(self.writer.identified, one) for one in (await self.whole_manifest()).segments]

    async def index_keys(self) -> list[str]:
        return [index_key(self.writer.identified, one) for one in (await self.whole_manifest()).segments]

    def orphan(self, number: int = 0, *, base_offset: int = 0) -> str:
        """Store an object that an earlier process has left behind, and return its key."""
        segment = self.manifest.segments[-1]
        left = replace(segment, base_offset=base_offset, writer_id=f"dead{number:04x}")
        key = data_key(self.writer.identified, left)
        self.store.add(key, b"left behind %d" % number)
        return key

    async def scrub(self, *, deep: bool = False, fix: bool = False, days: int = 7) -> ScrubReport:
        """Scrub all of the bucket; what is in quarantine for so many days is due."""
        whole = WholeScrub(self.parts, self.store, self.archive.manifests)
        return await whole.run(deep=deep, fix=fix, expire_before_ms=lambda: self.clock() - days * DAY_MS)


async def left_behind(bucket: Bucket, orphans: int = 3) -> dict[str, bytes]:
    """Archive a little, leave some orphans behind, and let their grace pass; return them."""
    await bucket.fill(3)
    keys = [bucket.orphan(number) for number in range(orphans)]
    bucket.clock.now_ms += 2 * DAY_MS
    return {key: bucket.store.bytes_of(key) for key in keys}
