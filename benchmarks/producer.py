"""
A stand-in for a broker's append path: a process that checks batches and appends them to log files.

For each batch of 16 KiB it sets the offset, computes the CRC32C that a broker checks, and writes to
one of many files without fsync. A file that is full begins anew in place, so that the page cache
takes the bytes and the disk does not decide the figure.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import TYPE_CHECKING, Self

from crc32c import crc32c

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

_BATCH_BYTES = 16 << 10
_FILES = 8
_FILE_BYTES = 32 << 20
_BATCHES_PER_CHECK = 64
"""At the clock: often enough for a window of seconds."""


class Producer:
    """A producer's process, as its parent sees it. A context manager."""

    def __init__(self, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, directory), name="producer")
        self._process.start()
        theirs.close()
        assert self._connection.recv() == "ready"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._connection.close()
        self._process.join()

    def begin(self, *, seconds: float) -> None:
        """Let it produce for *seconds*."""
        self._connection.send(seconds)

    def appended_bytes(self) -> int:
        """Wait for the end of what was begun, and return how much was appended in that time."""
        return int(self._connection.recv())


def _run(connection: Connection, directory: Path) -> None:
    directory.mkdir(parents=True)
    files = [os.open(directory / f"{number}.log", os.O_RDWR | os.O_CREAT) for number in range(_FILES)]
    batch = bytearray(os.urandom(_BATCH_BYTES))
    for file in files:
        # Once through, so that every page is there before anything is measured.
        for position in range(0, _FILE_BYTES, _BATCH_BYTES):
            os.pwrite(file, batch, position)
    connection.send("ready")
    while True:
        try:
            seconds = connection.recv()
        except EOFError:
            break
        connection.send(_produce(files, batch, seconds=seconds))
    for file in files:
        os.close(file)


def _produce(files: list[int], batch: bytearray, *, seconds: float) -> int:
    count = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for number in range(count, count + _BATCHES_PER_CHECK):
            batch[0:8] = number.to_bytes(8)
            crc32c(batch)
            position = number // _FILES * _BATCH_BYTES % _FILE_BYTES
            os.pwrite(files[number % _FILES], batch, position)
        count += _BATCHES_PER_CHECK
    return count * _BATCH_BYTES
