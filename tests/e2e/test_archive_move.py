"""An archive moves from an S3 server to a directory while a producer writes and a daemon uploads."""

from __future__ import annotations

import asyncio
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.e2e.archives import FileObjects, archived_manifest, assert_whole, read_records
from tests.e2e.sample_topics import SEGMENTS, consumed
from tests.support.daemon import command, run_command, run_json, running_daemon, write_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.archives import Objects

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


def data_objects(objects: Objects) -> int:
    """Return how many data objects there are."""
    return sum(key.endswith(".log") for key in objects.keys())  # noqa: SIM118 a method, not a mapping's


def killed_when(is_time: Callable[[], bool], *arguments: str) -> None:
    """Run a `tieringd` command, and kill it as soon as *is_time* says so."""
    with subprocess.Popen(command(*arguments), stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not is_time():
            time.sleep(0.001)
        process.kill()


@pytest.mark.parametrize("is_closed", [False, True], ids=["while it copies", "once the source is closed"])
async def test_killed_move_loses_nothing_and_goes_on(kafka, write_kafka_config, objects, topic, is_closed):
    """Every record can be read at every time from one bucket or the other, and the second run ends it."""
    old = write_kafka_config(topics={topic: {"redpanda.remote.write": True}})
    moved = FileObjects(old.with_name("moved"))
    new = in_a_directory(old, old.with_name("moved"))
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES * 2, max_batch_size=200_000)
    assert run_command("run", "--once", "--config", str(old)).returncode == 0
    manifest, segments = archived_manifest(objects, topic), data_objects(objects)
    wanted = (await consumed(kafka, topic, "read_uncommitted"))[: manifest.next_offset]
    options = ("archive", "move", "--to", str(new), "--config", str(old), "--delete-source", "--deep")

    def is_time() -> bool:
        return archived_manifest(objects, topic).is_closed if is_closed else data_objects(moved) >= 2

    await asyncio.to_thread(killed_when, is_time, *options)
    assert data_objects(objects) == segments
    assert archived_manifest(objects, topic).is_closed == is_closed
    assert read_records(new if is_closed else old, topic) == wanted

    outcome = run_json(*options)
    assert outcome["faults"] == []
    assert data_objects(objects) == 0
    assert data_objects(moved) == segments
    assert read_records(new, topic) == wanted
    assert_whole(new)
