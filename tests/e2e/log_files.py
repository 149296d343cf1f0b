"""Log directories as a broker leaves them, made without one."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING

from tests.builders import segment_bytes

if TYPE_CHECKING:
    from pathlib import Path

BATCHES = 4
RECORDS_PER_BATCH = 3
RECORDS = BATCHES * RECORDS_PER_BATCH
"""In each segment."""


def write_partition(
    log_dir: Path, name: str, *, segments: int, value_bytes: int = 200, topic_id: str | None = None
) -> Path:
    """Make the directory of a partition with *segments* closed segments and an active one."""
    directory = log_dir / name
    directory.mkdir(parents=True)
    if topic_id is not None:
        (directory / "partition.metadata").write_text(f"version: 0\ntopic_id: {topic_id}\n")
    add_segments(directory, segments=segments + 1, value_bytes=value_bytes)
    return directory


def add_segments(
    directory: Path, *, segments: int, value_bytes: int = 200, written_seconds: float | None = None
) -> None:
    """
    Append segments to a partition: the one that was active is closed, the last one is active.

    *written_seconds* is when all of the log was last written, since the epoch. A daemon notices new files and
    not new times of files, so each file has its time before the log shows it.
    """
    if written_seconds is not None:
        for path in directory.glob("*.log"):
            os.utime(path, (written_seconds, written_seconds))
    begin = max((int(path.stem) // RECORDS + 1 for path in directory.glob("*.log")), default=0)
    for number in range(begin, begin + segments):
        base_offset = number * RECORDS
        value = Random(f"{directory.name} {number}").randbytes(value_bytes)  # the same each time
        data = segment_bytes(base_offset, batches=BATCHES, records_per_batch=RECORDS_PER_BATCH, value=value)
        path = segment_path(directory, number)
        staged = path.with_suffix(".staged")
        staged.write_bytes(data)
        if written_seconds is not None:
            os.utime(staged, (written_seconds, written_seconds))
        staged.rename(path)


def segment_path(directory: Path, number: int) -> Path:
    """Return the `.log` of the segment that comes after *number* others."""
    return directory / f"{number * RECORDS:020d}.log"
