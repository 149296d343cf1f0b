"""An archive moves from an S3 server to a directory while a producer writes and a daemon uploads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.e2e.archives import FileObjects, archived_manifest, assert_whole, base_of_active, read_records
from tests.e2e.sample_topics import SEGMENTS, consumed
from tests.support.daemon import run_command, run_json, run_well, running_daemon, write_config
from tests.support.fault_proxy import StallRequest, fault_proxy
from tests.support.warm_start import start_command

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.archives import Objects
    from tests.support.fault_proxy import FaultProxy, ProxiedExchange

_VALUES = [bytes([number]) * 100_000 for number in range(35)]


def in_a_directory(config: Path, root: Path) -> Path:
    """Write a configuration that differs from *config* in the bucket alone, and begin the archive there."""
    before = yaml.safe_load(config.read_text())
    kept = {name: value for name, value in before.items() if "cloud_storage_" not in name}
    switches = {
        "cloud_storage_enabled": True,
        "cloud_storage_enable_remote_read": True,
        "cloud_storage_reconciliation_interval_ms": 200,
        "cloud_storage_backend": "file",
        "cloud_storage_file_root": str(root),
    }
    moved = write_config(config.with_name("moved.yaml"), kept | switches)
    run_well("archive", "init", "--config", str(moved))
    return moved


# Long: several passes of a move beside a producer and two daemons.
async def test_archive_moves_under_a_producer(kafka, write_kafka_config, objects, topic, tmp_path):
    """A later read gives what was written, record by record, and the old bucket takes nothing more."""
    old = write_kafka_config(topics={topic: {"redpanda.remote.write": True}})
    new = in_a_directory(old, tmp_path / "moved")
    await kafka.create_topic(topic, configs=SEGMENTS)
    is_over = asyncio.Event()

    async def write_on() -> None:
        is_last = False
        while not is_last:
            # Segments are closed after the move, too.
            is_last = is_over.is_set()
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
        daemon.until_next_offset(topic, base_of_active(kafka.log_dir() / f"{topic}-0"))
    after = archived_manifest(moved, topic)
    assert after.next_offset > closed.next_offset
    assert after.gaps == ()
    assert archived_manifest(objects, topic) == closed
    assert read_records(new, topic) == (await consumed(kafka, topic, "read_uncommitted"))[: after.next_offset]
    assert_whole(new)


def data_objects(objects: Objects) -> int:
    """Return how many data objects there are."""
    return sum(key.endswith(".log") for key in objects.keys())  # noqa: SIM118 a method, not a mapping's


def through(config: Path, proxy: FaultProxy) -> Path:
    """Write a configuration that differs from *config* in the way to the bucket."""
    port = int(proxy.url.rpartition(":")[2])
    found = yaml.safe_load(config.read_text()) | {"cloud_storage_api_endpoint_port": port}
    return write_config(config.with_name("through.yaml"), found)


def is_copied(exchange: ProxiedExchange) -> bool:
    """Say whether a request reads a data object."""
    return exchange.method == "GET" and exchange.path.partition("?")[0].endswith(".log")


def is_deletion(exchange: ProxiedExchange) -> bool:
    """Say whether a request deletes objects."""
    return exchange.method == "DELETE" or "?delete" in exchange.path


@pytest.mark.parametrize("stalled_at", [is_copied, is_deletion], ids=["while it copies", "at its end"])
async def test_killed_move_loses_nothing_and_goes_on(
    kafka, write_kafka_config, objects, topic, *, seaweedfs, stalled_at
):
    """Every record can be read at every time from one bucket or the other, and the second run ends it."""
    old = write_kafka_config(topics={topic: {"redpanda.remote.write": True}})
    moved = FileObjects(old.with_name("moved"))
    new = in_a_directory(old, old.with_name("moved"))
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES * 2, max_batch_size=200_000)
    assert run_command("run", "--once", "--config", str(old)).returncode == 0
    manifest, segments = archived_manifest(objects, topic), data_objects(objects)
    wanted = (await consumed(kafka, topic, "read_uncommitted"))[: manifest.next_offset]
    options = ("archive", "move", "--to", str(new), "--delete-source", "--deep", "--config")

    async with fault_proxy(seaweedfs.endpoint_url) as proxy:
        proxy.spoil(StallRequest(), where=stalled_at)
        process = start_command(*options, str(through(old, proxy)))
        async with asyncio.timeout(180):
            await proxy.stalled.wait()
        process.kill()
        process.wait()
    is_closed = stalled_at is is_deletion
    assert data_objects(objects) == segments
    assert archived_manifest(objects, topic).is_closed == is_closed
    assert read_records(new if is_closed else old, topic) == wanted

    outcome = run_json(*options, str(old))
    assert outcome["faults"] == []
    assert data_objects(objects) == 0
    assert data_objects(moved) == segments
    assert read_records(new, topic) == wanted
    assert_whole(new)
