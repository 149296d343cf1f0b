"""Compaction and erasure of one partition without Spark: the parts of the jobs, one after the other."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archive_in
from tieringd.archive.segment_rewriter import SegmentRewriter
from tieringd.archive.segment_swap import SegmentSwap
from tieringd.formats.object_keys import data_key
from tieringd.formats.records import control_type
from tieringd.formats.transactions import TransactionTracker
from tieringd.model.segment import REWRITER_PREFIX
from tieringd.policies.record_removal import CompactionBasis
from tieringd.policies.rewriting import Remainder, plan_rewrites
from tieringd.spark.key_eraser import ErasureCut
from tieringd.spark.latest_records import CompactionRules, LatestCut, LatestKeys

if TYPE_CHECKING:
    from collections.abc import Collection
    from random import Random

    from tests.fakes.archive import Clock
    from tests.fakes.log_writer import LogWriter
    from tieringd.archive.segment_swap import Successor, Swapped
    from tieringd.daemon.archive import Archive
    from tieringd.formats.records import Record
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.storage.base import ObjectStore

PLENTY = 1 << 30
_KEYS = [b"", b"a", b"b", b"c", None]
_PRODUCERS = [None, 7, 8]


class Job:
    """A job's writing on one partition of a bucket."""

    def __init__(
        self,
        store: ObjectStore,
        partition: TopicIdPartition,
        *,
        job_id: str = "e1",
        target_manifest_bytes: int = PLENTY,
        clock: Clock | None = None,
    ) -> None:
        self.archive = archive_in(store, writer_id="0b", now_ms=clock)
        self.partition = partition
        self.rewriter = SegmentRewriter(
            store,
            self.archive.reader,
            writer_id=f"{REWRITER_PREFIX}{job_id}",
            work_directory=Path(tempfile.gettempdir()),
        )
        self.swap = SegmentSwap(
            store,
            self.archive.manifests,
            now_ms=clock or (lambda: 5_000),
            target_manifest_bytes=target_manifest_bytes,
        )

    async def manifest(self) -> PartitionManifest:
        """Return the stored manifest with all its history."""
        stored = await self.archive.manifests.load(self.partition)
        return await self.archive.manifests.spillovers.with_history(stored.existing)

    async def compact(self, *, target_bytes: int = PLENTY, **rules: object) -> Swapped | None:
        """Compact the partition; None where nothing would go."""
        manifest = await self.manifest()
        prepared = await self.compacted(manifest, target_bytes=target_bytes, **rules)
        return await self.swap_in(manifest, prepared) if prepared else None

    async def swap_in(
        self, manifest: PartitionManifest, prepared: Collection[Successor], *, has_log: bool = True
    ) -> Swapped:
        """Name what was stored of *manifest*, all of which was read; a broker may have the log."""
        basis = CompactionBasis(manifest.segments, manifest.replacements, has_log)
        return await self.swap.rewrite(self.partition, prepared, is_whole=True, basis=basis)

    async def compacted(
        self,
        manifest: PartitionManifest,
        *,
        target_bytes: int = PLENTY,
        head: int | None = None,
        **rules: object,
    ) -> list[Successor]:
        """Store what compaction leaves of all segments, or of the first *head*, as the job's tasks do."""
        table = manifest.segments if head is None else manifest.segments.head(head)
        the_rules = CompactionRules(manifest.start_offset, **({"due_before_ms": None} | rules))
        latest: dict[bytes, tuple[int, bool]] = {}
        found: list[LatestKeys] = []
        for segment in table:
            index = await self.archive.remote_log.index_of(self.partition, segment)
            found.append(LatestKeys(index, the_rules))
            key = data_key(self.partition, segment)
            async for batch in self.archive.reader.batches(key, index, from_offset=0):
                found[-1].note(batch)
            latest |= found[-1].latest
        winners = np.array(sorted(offset for offset, is_due in latest.values() if not is_due), np.int64)
        remainders = [
            Remainder(segment, keys.records, keys.keyless + len(_within(winners, segment, segment)))
            for segment, keys in zip(table, found, strict=True)
        ]
        return [
            await self.rewriter.rewrite(
                self.partition,
                tuple(one.segment for one in run),
                LatestCut(_within(winners, run[0].segment, run[-1].segment), the_rules),
            )
            for run in plan_rewrites(manifest, remainders, target_bytes=target_bytes)
        ]

    async def erase(self, keys: Collection[bytes]) -> Swapped | None:
        """Erase *keys*; None where there is none of them."""
        prepared = await self.erased(await self.manifest(), keys)
        return await self.swap.rewrite(self.partition, prepared, is_whole=False) if prepared else None

    async def erased(self, manifest: PartitionManifest, keys: Collection[bytes]) -> list[Successor]:
        """Store what erasing leaves, as the job's tasks do."""
        wanted = frozenset(keys)
        return [
            await self.rewriter.rewrite(self.partition, (segment,), ErasureCut(wanted))
            for segment in manifest.segments
            if await self.rewriter.removes_any(self.partition, segment, ErasureCut(wanted))
        ]


def _within(winners, first, last):
    begin, end = np.searchsorted(winners, (first.base_offset, last.next_offset))
    return winners[begin:end]


async def records_of(archive: Archive, manifest: PartitionManifest, *, read_committed: bool) -> list[Record]:
    """Return what a reader of the archive sees."""
    reading = archive.records.records(
        manifest, from_offset=0, read_committed=read_committed, on_gap=lambda _: None
    )
    return [record async for record in reading]


def latest_of(
    committed: Collection[Record], *, due_before_ms: int | None = None, drops_keyless: bool = False
) -> list[Record]:
    """Return what compaction should leave of the records that a `read_committed` reader sees."""
    latest = {record.key: record for record in committed if record.key is not None}
    return [
        record
        for record in committed
        if (not drops_keyless if record.key is None else latest[record.key] is record)
        and not (
            record.key is not None
            and record.value is None
            and due_before_ms is not None
            and 0 <= record.timestamp_ms < due_before_ms
        )
    ]


def write(writer: LogWriter, random: Random, *, segments: int) -> None:
    """Write a few keys again and again, and deletions, in and out of transactions over segments' ends."""
    for _ in range(segments):
        for _ in range(random.randrange(5)):
            count = random.randrange(1, 5)
            writer.append(
                *(random.choice([b"x", None, random.randbytes(20)]) for _ in range(count)),
                keys=random.choices(_KEYS, k=count),
                producer_id=random.choice(_PRODUCERS),
                timestamp_ms=DEFAULT_TIME_MS + random.randrange(1000),
            )
            for producer_id in writer.open_producers:
                if random.random() < 0.3:
                    random.choice([writer.commit, writer.abort])(producer_id)
        if random.random() < 0.2:
            writer.begin_epoch(writer.epochs[-1][0] + 1)
        writer.roll()
    for producer_id in writer.open_producers:
        random.choice([writer.commit, writer.abort])(producer_id)
    writer.append(b"last", keys=[b"last"])
    writer.roll()


async def open_in(store: ObjectStore, manifest: PartitionManifest) -> set[int]:
    """Return the producers of whose last transactions the archive holds records and no marker."""
    archive, tracker = archive_in(store), TransactionTracker()
    for segment in manifest.segments:
        index = await archive.remote_log.index_of(manifest.partition, segment)
        async for batch in archive.reader.batches(
            data_key(manifest.partition, segment), index, from_offset=0
        ):
            if batch.header.is_control:
                tracker.note_marker(batch.header, control_type(batch.data))
            elif batch.header.is_transactional:
                tracker.note_data(batch.header)
    return set(tracker.open_transactions)


async def assert_sound(store: ObjectStore, manifest: PartitionManifest) -> None:
    """Have a deep scrub find no fault."""
    assert manifest.faults() == ()
    assert (await archive_in(store).verifier.verify(manifest, deep=True)).faults == ()
