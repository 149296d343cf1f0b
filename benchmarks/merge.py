"""
How many bytes come through the host when small segments are merged, where the store can join objects?

One partition's archive of 8 MiB segments lies in SeaweedFS. Each round merges all of it, up to 64 MiB,
in the two ways in turn: by the store's own joining, and through a file on this host. Every byte of the
bodies that go or come counts, those of indexes and manifests too. The merged objects of both ways have
to be the same.

    python -m benchmarks.merge [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from crc32c import crc32c

from benchmarks.harness import machine, write_json
from tests.support.seaweedfs import running_seaweedfs
from tieringd.archive.manifest_store import ManifestStore
from tieringd.archive.object_joiner import ObjectJoiner
from tieringd.archiving.claim import Claim
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.sidecar import encode_sidecar
from tieringd.housekeeping.merging import SegmentMerger
from tieringd.metrics import Metrics
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.model.segment import IndexEntry, RemoteSegment, SegmentIndex
from tieringd.policies.segment_merge import MergeLimits
from tieringd.storage.base import JoiningStore
from tieringd.storage.resilient import ResilientStore, StoreLimits
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_settings import S3Settings

if TYPE_CHECKING:
    from tieringd.storage.base import ObjectStore

MIB = 1 << 20
SEGMENT_BYTES = 8 * MIB
TARGET_BYTES = 64 * MIB
_OFFSETS = 1000
_INDEX_INTERVAL_BYTES = 1 << 16
_WRITER = "0b" * 16
_LIMITS = MergeLimits(TARGET_BYTES, TARGET_BYTES // 2, runs_max=1000)
_PATIENT = StoreLimits(segment_upload_timeout_seconds=300)
_WAYS = ("joined", "streamed")


class WithoutJoin(ResilientStore):
    """The same store, as if it could not join."""

    join = None


@dataclass(frozen=True, slots=True)
class Round:
    """One merge of the whole archive."""

    seconds: float
    host_bytes: int
    digest: bytes


async def fill(store: ObjectStore, partition: TopicIdPartition, segments: int) -> PartitionManifest:
    """Store the objects of *segments* segments; return the manifest that names them."""
    values, rows = random.Random(20240229), list[RemoteSegment]()
    for number in range(segments):
        base_offset = number * _OFFSETS
        data = values.randbytes(SEGMENT_BYTES)
        index = SegmentIndex(
            base_offset=base_offset,
            last_offset=base_offset + _OFFSETS - 1,
            size_bytes=len(data),
            crc32c=crc32c(data),
            record_count=_OFFSETS,
            batch_count=_OFFSETS,
            epochs=((0, base_offset),),
            aborted=(),
            entries=tuple(
                IndexEntry(base_offset + position * _OFFSETS // SEGMENT_BYTES, position, number)
                for position in range(0, SEGMENT_BYTES, _INDEX_INTERVAL_BYTES)
            ),
        )
        sidecar = encode_sidecar(index)
        row = RemoteSegment(
            base_offset,
            index.last_offset,
            size_bytes=index.size_bytes,
            crc32c=index.crc32c,
            base_timestamp_ms=number,
            max_timestamp_ms=number,
            leader_epoch=0,
            writer_id="0a" * 16,
            uploaded_at_ms=number,
            index_size_bytes=len(sidecar),
            index_crc32c=crc32c(sidecar),
        )
        await store.put(data_key(partition, row), data, crc32c=row.crc32c)
        await store.put(index_key(partition, row), sidecar, crc32c=row.index_crc32c)
        rows.append(row)
    return PartitionManifest.begin(partition, start_offset=0).appended(rows, [(0, 0)])


async def merge_all(s3: S3Store, way: str, number: int, segments: int, directory: Path) -> Round:
    """Merge a fresh archive, and count what the store's bodies have of it."""
    bodies = {"bytes": 0}

    def count(_operation: str, _outcome: str, _seconds: float, size_bytes: int) -> None:
        bodies["bytes"] += size_bytes

    kind = ResilientStore if way == "joined" else WithoutJoin
    store = kind(s3, _PATIENT, on_request=count)
    assert isinstance(store, JoiningStore) == (way == "joined")
    partition = TopicIdPartition("bench", way, "W1xNUlUlTfigw_K-dvdxsA", number)
    manifest = await fill(s3, partition, segments)
    leadership, metrics = Leadership(partition, 0), Metrics()
    claim = Claim(leadership, ManifestStore(store, writer_id=_WRITER, now_ms=lambda: 0), metrics=metrics)
    merger = SegmentMerger(
        leadership,
        store,
        joiner=ObjectJoiner(store, work_directory=directory),
        writer_id=_WRITER,
        metrics=metrics,
        now_ms=lambda: 0,
    )
    stored = await claim.current(lambda: manifest)
    begun, bodies["bytes"] = time.perf_counter(), 0
    for run in merger.plan(stored.existing, _LIMITS).runs:
        prepared = await merger.prepare(stored.existing, run)
        assert prepared is not None, "a run could not be merged"
        stored = await merger.commit(claim, stored, prepared)
    seconds, host_bytes = time.perf_counter() - begun, bodies["bytes"]
    found = stored.existing.segments
    assert len(found) == segments * SEGMENT_BYTES // TARGET_BYTES, f"{len(found)} segments are left"
    digest = hashlib.sha256()
    for segment in found:
        for position in range(0, segment.size_bytes, TARGET_BYTES):
            digest.update(
                await s3.get_range(data_key(partition, segment), position=position, size_bytes=TARGET_BYTES)
            )
    await s3.delete_many([one.key for one in (await s3.list_page("")).objects])
    return Round(seconds, host_bytes, digest.digest())


async def run(endpoint_url: str, directory: Path, *, rounds: int, segments: int) -> dict[str, list[Round]]:
    """Merge in turns; return the rounds of each way."""
    async with AsyncExitStack() as resources:
        s3 = await S3Store.open(
            S3Settings(
                bucket="bench",
                endpoint_url=endpoint_url,
                access_key="test",
                secret_key="testtest",
                url_style="path",
            )
        )
        resources.push_async_callback(s3.close)
        results: dict[str, list[Round]] = {way: [] for way in _WAYS}
        for number in range(rounds):
            for way in _WAYS:
                results[way].append(await merge_all(s3, way, number, segments, directory))
        return results


def main() -> None:
    """Measure, print a table, and write the figures where they are wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rounds, segments = (2, 24) if options.quick else (5, 128)
    data_bytes = segments * SEGMENT_BYTES
    with ExitStack() as resources:
        directory = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="tieringd-merge-")))
        server = resources.enter_context(running_seaweedfs(directory / "seaweedfs"))
        server.create_bucket("bench")
        results = asyncio.run(run(server.endpoint_url, directory, rounds=rounds, segments=segments))
    assert len({one.digest for each in results.values() for one in each}) == 1, "the two ways differ"
    print(
        f"{segments} segments of {SEGMENT_BYTES // MIB} MiB merged to {TARGET_BYTES // MIB}, {rounds} rounds"
    )
    print(f"{'':9}|   min    med    max  MiB/s | of the data through this host")
    figures: dict[str, float] = {}
    for way, each in results.items():
        speeds = sorted(data_bytes / MIB / one.seconds for one in each)
        share = max(one.host_bytes for one in each) / data_bytes
        print(f"{way:9}| {speeds[0]:6.0f} {median(speeds):6.0f} {speeds[-1]:6.0f}        | {share:.3%}")
        figures |= {
            f"{way}_mib_per_second_min": speeds[0],
            f"{way}_mib_per_second": median(speeds),
            f"{way}_mib_per_second_max": speeds[-1],
            f"{way}_host_bytes_share": share,
        }
    ratios = {
        "host_bytes_share": figures["joined_host_bytes_share"],
        "joined_against_streamed": figures["joined_mib_per_second"] / figures["streamed_mib_per_second"],
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.4f}")
    if options.json:
        write_json(options.json, name="merge", machine=machine("aiobotocore"), figures=figures, ratios=ratios)


if __name__ == "__main__":
    main()
