"""
How fast does a scrub on Spark read an archive that is in memory already, on each core?

Segments of 64 MiB lie in a directory, and in the page cache. Each round scrubs all of it: the session is
there before, as in a notebook, and its workers have done a round that does not count. Beside it one
process reads the same files in one loop and sums each up with CRC32C, which is the least that any look at
all bytes can do; a scrub also checks each batch, each offset and each index. Both have to find the same
bytes, and the checksums that the manifest names.

CPU seconds are of the driver, the JVM and the workers together: on a machine that does other things as
well they tell more than the clock.

    python -m benchmarks.spark_scrub [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median

from crc32c import crc32c

from benchmarks.harness import machine, write_json
from benchmarks.segments import write_partition
from tests.support.spark_session import running_spark
from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.config import Config, parse_config
from tieringd.formats.object_keys import TopicKey, data_key, index_key
from tieringd.formats.segment_scan import SegmentScanner
from tieringd.formats.sidecar import encode_sidecar
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment, SegmentIndex
from tieringd.spark.jobs.scrub import scrub
from tieringd.storage.file import FileStore
from tieringd.storage.file_root import make_marker

_TOPIC = TopicKey("bench", "orders", "W1xNUlUlTfigw_K-dvdxsA")
_WRITER = "0a" * 16
_BUFFER_BYTES = 1 << 20
_TICKS = os.sysconf("SC_CLK_TCK")
_CORES = min(2, os.cpu_count() or 1)


async def fill(root: Path, logs: list[Path], next_offset: int) -> dict[Path, int]:
    """Archive *logs*; return the stored files and the checksums that the manifest names."""
    store, partition = FileStore(root), TopicIdPartition(_TOPIC.cluster, _TOPIC.topic, _TOPIC.topic_id, 0)
    rows, files = list[RemoteSegment](), dict[Path, int]()
    ends = [*(int(log.stem) for log in logs[1:]), next_offset]
    for log, end in zip(logs, ends, strict=True):
        data = log.read_bytes()
        scanner = SegmentScanner(int(log.stem), end)
        scan = scanner.finish(len(data) - scanner.feed(memoryview(data)))
        index = SegmentIndex(
            base_offset=int(log.stem),
            last_offset=end - 1,
            size_bytes=scan.size_bytes,
            crc32c=scan.crc32c,
            record_count=scan.record_count,
            batch_count=scan.batch_count,
            epochs=scan.epochs,
            aborted=(),
            entries=scan.entries,
        )
        sidecar = encode_sidecar(index)
        row = RemoteSegment(
            index.base_offset,
            index.last_offset,
            size_bytes=index.size_bytes,
            crc32c=index.crc32c,
            base_timestamp_ms=scan.base_timestamp_ms,
            max_timestamp_ms=scan.max_timestamp_ms,
            leader_epoch=0,
            writer_id=_WRITER,
            uploaded_at_ms=0,
            index_size_bytes=len(sidecar),
            index_crc32c=crc32c(sidecar),
        )
        await store.put(data_key(partition, row), data, crc32c=row.crc32c)
        await store.put(index_key(partition, row), sidecar, crc32c=row.index_crc32c)
        rows.append(row)
        files[root / data_key(partition, row)] = row.crc32c
    manifests = ManifestStore(store, writer_id=_WRITER, now_ms=lambda: 0)
    manifest = PartitionManifest.begin(partition, start_offset=0).appended(rows, [(0, 0)])
    await manifests.ensure_topic(_TOPIC, partition_count=1)
    await manifests.commit(StoredManifest(None, None), manifest, leader_epoch=0)
    await store.close()
    return files


def read_plainly(files: dict[Path, int]) -> int:
    """Read every file and sum it up; return the bytes."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    read_bytes = 0
    for path, wanted in files.items():
        checksum = 0
        with path.open("rb", buffering=0) as file:
            while size_bytes := file.readinto(buffer):
                checksum = crc32c(buffer[:size_bytes], checksum)
                read_bytes += size_bytes
        assert checksum == wanted, f"{path} is damaged"
    return read_bytes


def bucket_config(root: Path) -> Config:
    """Return the configuration of a bucket in a directory."""
    text = f"state_directory: {root}.state\ncloud_storage_backend: file\ncloud_storage_file_root: {root}\n"
    return parse_config(text, source="benchmark", environ={}, needs_broker=False)


def cpu_seconds() -> float:
    """Return what this process and all below it have used: the driver, its JVM, and the workers."""
    used, parents = dict[int, float](), dict[int, int]()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            used[int(entry.name)] = sum(map(int, fields[11:15])) / _TICKS
            parents[int(entry.name)] = int(fields[1])

    def is_below(process_id: int) -> bool:
        while process_id in parents and process_id != os.getpid():
            process_id = parents[process_id]
        return process_id == os.getpid()

    return sum(seconds for process_id, seconds in used.items() if is_below(process_id))


def run(directory: Path, *, segments: int, rounds: int) -> dict[str, list[float]]:
    """Measure in turns; return what each round gave, by figure."""
    logs = write_partition(directory / "logs", segments=segments)
    next_offset = int(next(log.stem for log in sorted((directory / "logs").glob("*.log"))[::-1]))
    root = directory / "bucket"
    root.mkdir()
    make_marker(root)
    files = asyncio.run(fill(root, logs, next_offset))
    for log in logs:
        log.unlink()
    config = bucket_config(root)
    found: dict[str, list[float]] = {"each core": [], "CPU second": [], "plain loop": []}
    quiet = {"spark.ui.showConsoleProgress": "false"}
    with running_spark(directory / "spark", cores=_CORES, options=quiet) as spark:
        for number in range(rounds + 1):
            begun, cpu_begun = time.perf_counter(), cpu_seconds()
            report = scrub(spark, config)
            scrub_seconds, used_seconds = time.perf_counter() - begun, cpu_seconds() - cpu_begun
            begun = time.perf_counter()
            read_bytes = read_plainly(files)
            plain_seconds = time.perf_counter() - begun
            assert report.faults == (), report.as_text()
            assert report.figures["size_bytes"] == read_bytes, "the two have read other bytes"
            if number:
                found["each core"].append(read_bytes / 1e9 / scrub_seconds / _CORES)
                found["CPU second"].append(read_bytes / 1e9 / used_seconds)
                found["plain loop"].append(read_bytes / 1e9 / plain_seconds)
    return found


def main() -> None:
    """Measure, print a table, and write the figures where they are wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    segments, rounds = (24, 3) if options.quick else (96, 7)
    with ExitStack() as resources:
        place = tempfile.TemporaryDirectory(prefix="tieringd-spark-scrub-")
        directory = Path(resources.enter_context(place))
        found = run(directory, segments=segments, rounds=rounds)
    print(f"{segments} segments of 64 MiB in the page cache, {rounds} rounds, Spark on local[{_CORES}]")
    print(f"{'GB/s':24}|   min    med    max")
    rows = {
        "scrub_gb_per_s": ("scrub, of each core", found["each core"]),
        "scrub_gb_per_cpu_s": ("scrub, by CPU seconds", found["CPU second"]),
        "plain_gb_per_s": ("one plain loop", found["plain loop"]),
    }
    figures: dict[str, float] = {}
    for key, (name, speeds) in rows.items():
        print(f"{name:24}| {min(speeds):6.2f} {median(speeds):6.2f} {max(speeds):6.2f}")
        figures |= {key: median(speeds), f"{key}_min": min(speeds), f"{key}_max": max(speeds)}
    ratios = {"scrub_core_against_plain": figures["scrub_gb_per_s"] / figures["plain_gb_per_s"]}
    print(f"scrub_core_against_plain: {ratios['scrub_core_against_plain']:.2f}")
    if options.json:
        write_json(
            options.json,
            name="spark_scrub",
            machine=machine("pyspark", "crc32c"),
            figures=figures,
            ratios=ratios,
        )


if __name__ == "__main__":
    main()
