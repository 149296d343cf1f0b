"""A real daemon with much to check does so in machine code, and nothing else differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.builders import segment_bytes
from tests.e2e.archives import archived_bytes
from tests.e2e.log_files import RECORDS, add_segments, segment_path, write_partition
from tests.support.daemon import directory_config, running_daemon, write_config
from tieringd.broker.segment_file import READ_BUFFER_BYTES
from tieringd.compiled.loading import WORTH_BATCHES, WORTH_BYTES

if TYPE_CHECKING:
    from pathlib import Path

_VALUE_BYTES = 1_300_000
"""Twelve such values make a segment of less than 16 MiB, as a broker's limit of 16 MiB does."""
_SEGMENT_BYTES = 12 * _VALUE_BYTES
_DAMAGED_AT = _SEGMENT_BYTES - 1_000_000
_SMALL_BATCHES = 2000
"""In each damaged segment, which is as large: together they are more than `WORTH_BATCHES`."""


def test_many_bytes_are_checked_in_machine_code(tmp_path, monkeypatch):
    """Machine code is loaded after a GiB, checks the next segment, and finds the damage in the one after."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    log = write_partition(tmp_path / "log", "orders-0", segments=1, value_bytes=_VALUE_BYTES)
    config = directory_config([tmp_path / "log"], tmp_path / "archive", tmp_path / "state")
    path = write_config(tmp_path / "tieringd.yaml", config)
    # Segments that end with damage are checked and not stored.
    # What is read together with the damage does not count.
    count = WORTH_BYTES // (_DAMAGED_AT - READ_BUFFER_BYTES) + 1
    assert count * _SMALL_BATCHES > 1.5 * WORTH_BATCHES
    _write_damaged(tmp_path / "log", count)
    with running_daemon(path) as daemon:
        daemon.until(lambda: daemon.next_offset("orders") == RECORDS, "the first segment is archived")
        daemon.until(lambda: daemon.events("batches are checked in machine code"), "it is loaded")
        daemon.until(
            lambda: daemon.metric("tieringd_quarantined_partitions") == count, "all damage is found in Python"
        )
        active = segment_path(log, 2)
        add_segments(log, segments=1, value_bytes=_VALUE_BYTES)
        daemon.until(lambda: daemon.next_offset("orders") == 2 * RECORDS, "the second one is archived")
        with active.open("r+b") as file:
            file.seek(_DAMAGED_AT)
            file.write(b"damage")
        add_segments(log, segments=1, value_bytes=_VALUE_BYTES)
        daemon.until(
            lambda: daemon.metric("tieringd_quarantined_partitions") == count + 1, "the damage is found"
        )
        assert daemon.next_offset("orders") == 2 * RECORDS
    stored = b"".join(segment_path(log, number).read_bytes() for number in range(2))
    assert archived_bytes(path, "orders") == stored
    assert list((tmp_path / "state" / "machine-code").rglob("*.nbc"))


def _write_damaged(log_dir: Path, count: int) -> None:
    """Write *count* partitions with the same segment, one of whose last batches is damaged."""
    first = log_dir / "damaged-0"
    first.mkdir()
    closed, active = (first / f"{offset:020d}.log" for offset in (0, _SMALL_BATCHES))
    value = bytes(_SEGMENT_BYTES // _SMALL_BATCHES)
    closed.write_bytes(segment_bytes(0, batches=_SMALL_BATCHES, records_per_batch=1, value=value))
    active.touch()
    with closed.open("r+b") as file:
        file.seek(_DAMAGED_AT)
        file.write(b"damage")
    for number in range(1, count):
        directory = log_dir / f"damaged-{number}"
        directory.mkdir()
        for path in (closed, active):
            (directory / path.name).hardlink_to(path)
