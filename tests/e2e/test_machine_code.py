"""A real daemon with much to check does so in machine code, and nothing else differs."""

from __future__ import annotations

from tests.e2e.archives import archived_bytes
from tests.e2e.log_files import RECORDS, add_segments, segment_path, write_partition
from tests.support.daemon import directory_config, running_daemon, write_config

VALUE_BYTES = 1_300_000
"""So a segment has less than 16 MiB, as a broker's has that may have 16 MiB."""


def test_many_bytes_are_checked_in_machine_code(tmp_path, monkeypatch):
    """It is loaded for the fifth segment, checks the sixth, and finds the damage of the seventh."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    log = write_partition(tmp_path / "log", "orders-0", segments=4, value_bytes=VALUE_BYTES)
    config = directory_config([tmp_path / "log"], tmp_path / "archive", tmp_path / "state")
    path = write_config(tmp_path / "tieringd.yaml", config)
    with running_daemon(path) as daemon:
        daemon.until(lambda: daemon.next_offset("orders") == 4 * RECORDS, "the first segments are archived")
        assert not daemon.events("batches are checked in machine code")
        add_segments(log, segments=1, value_bytes=VALUE_BYTES)
        daemon.until(lambda: daemon.events("batches are checked in machine code"), "it is loaded")
        active = segment_path(log, 6)
        add_segments(log, segments=1, value_bytes=VALUE_BYTES)
        daemon.until(lambda: daemon.next_offset("orders") == 6 * RECORDS, "the sixth one is archived")
        with active.open("r+b") as file:
            file.seek(12_000_000)
            file.write(b"damage")
        add_segments(log, segments=1, value_bytes=VALUE_BYTES)
        daemon.until(lambda: daemon.metric("tieringd_quarantined_partitions") == 1, "the damage is found")
        assert daemon.next_offset("orders") == 6 * RECORDS
    stored = b"".join(segment_path(log, number).read_bytes() for number in range(6))
    assert archived_bytes(path, "orders") == stored
    assert list((tmp_path / "state" / "machine-code").rglob("*.nbc"))
