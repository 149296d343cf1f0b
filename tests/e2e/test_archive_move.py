"""An archive moves from an S3 server to a directory while a producer writes and a daemon uploads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import yaml

from tests.e2e.archives import FileObjects, archived_manifest, assert_whole, read_records
from tests.e2e.sample_topics import SEGMENTS, consumed
from tests.support.daemon import run_json, running_daemon, write_config

if TYPE_CHECKING:
    from pathlib import Path

_VALUES = [bytes([number]) * 100_000 for number in range(35)]


def base_of_active(kafka, topic) -> int:
    return max(int(path.stem) for path in (kafka.log_dir() / f"{topic}-0").glob("*.log"))


def in_a_directory(config: Path, root: Path) -> Path:
    """Write a configuration that differs from *config* in the bucket alone."""
    before = yaml.safe_load(config.read_text())
    kept = {name: value for name, value in before.items() if "cloud_storage_" not in name}
    switches = {
        "cloud_storage_enabled": True,
        "cloud_storage_enable_remote_read": True,
        "cloud_storage_reconciliation_interval_ms": 200,
        "cloud_storage_backend": "file",
        "cloud_storage_file_root": str(root),
    }
    return write_config(config.with_name("moved.yaml"), kept | switches)


async def test_archive_moves_under_a_producer(kafka, write_kafka_config, objects, topic, tmp_path):
    """What is read afterwards is what was written, record by record; the old bucket takes nothing more."""
    old = write_kafka_config(topics={topic: {"redpanda.remote.write": True}})
    new = in_a_directory(old, tmp_path / "moved")
    await kafka.create_topic(topic, configs=SEGMENTS)
    is_over = asyncio.Event()

    async def write_on() -> None:
        while not is_over.is_set():
            await kafka.produce(topic, _VALUES, max_batch_size=200_000)

    writing = asyncio.create_task(write_on())
    try:
        with running_daemon(old) as daemon:
            await asyncio.to_thread(
                daemon.until, lambda: (daemon.next_offset(topic) or 0) > 0, "something is archived"
            )
            outcome = await asyncio.to_thread(
                run_json, "archive", "move", "--to", str(new), "--config", str(old), "--verify"
            )
            await asyncio.to_thread(
                daemon.until, lambda: not daemon.partition(topic), "the old daemon archives the topic no more"
            )
        is_over.set()
        await writing
    finally:
        writing.cancel()
    assert outcome["faults"] == []
    assert {row["state"] for row in outcome["partitions"]} == {"moved"}
    closed = archived_manifest(objects, topic)
    assert closed.is_closed

    moved = FileObjects(tmp_path / "moved")
    with running_daemon(new) as daemon:
        daemon.until_next_offset(topic, base_of_active(kafka, topic))
    after = archived_manifest(moved, topic)
    assert after.next_offset > closed.next_offset
    assert after.gaps == ()
    assert archived_manifest(objects, topic) == closed
    assert read_records(new, topic) == (await consumed(kafka, topic, "read_uncommitted"))[: after.next_offset]
    assert_whole(new)
