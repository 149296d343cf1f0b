"""The store or the broker goes away under a running daemon, and comes back."""

# Long: a store and a broker go away, and come back.

from __future__ import annotations

import shutil
import signal

import pytest
import yaml

from tests.e2e.archives import (
    archived_manifest,
    assert_whole,
    base_of_active,
    closed_segments,
    read_records,
    stored_segments,
)
from tests.e2e.conftest import BUCKET
from tests.e2e.log_files import RECORDS, add_segments, write_partition
from tests.e2e.sample_topics import SEGMENTS
from tests.support.daemon import (
    directory_config,
    run_json,
    run_well,
    running_daemon,
    s3_properties,
    write_config,
)

_IMPATIENT = {
    # A minute of outage is not needed to see what an outage does.
    "cloud_storage_segment_upload_timeout_ms": 2000,
    "cloud_storage_manifest_upload_timeout_ms": 2000,
}


@pytest.fixture
def store_config(seaweedfs, prefix, tmp_path):
    """Give the configuration of a daemon without a broker, with a bucket in a real server."""
    config = directory_config([tmp_path / "logs"], tmp_path, tmp_path / "state", **_IMPATIENT)
    del config["cloud_storage_file_root"]
    return write_config(
        tmp_path / "tieringd.yaml", config | s3_properties(seaweedfs, bucket=BUCKET, prefix=prefix)
    )


# Long: the store stays away for longer than its requests' retries.
def test_store_outage_is_said_and_caught_up(store_config, seaweedfs, objects, topic, tmp_path):
    """
    The daemon lives and reports a fault while its store is away.

    It uploads what waits once the store is back.
    """
    directory = write_partition(tmp_path / "logs", f"{topic}-0", segments=1)
    with running_daemon(store_config) as daemon:
        daemon.until_next_offset(topic, RECORDS)
        daemon.until(lambda: daemon.get("/readyz")[0] == 200, "the daemon is ready")
        seaweedfs.stop()
        try:
            # It sees all or none of them.
            daemon.server.pause()
            add_segments(directory, segments=6)
            daemon.server.resume()
            daemon.until(lambda: daemon.partition(topic)["fault"], "the partition has a fault")
            daemon.until(lambda: daemon.get("/readyz")[0] == 503, "the daemon is not ready")

            assert "gave up after" in daemon.partition(topic)["fault"]
            assert "gave up after" in daemon.get("/readyz")[1]
            assert daemon.get("/healthz") == (200, "ok\n")
            assert (
                daemon.metric("tieringd_upload_failures_total", topic=topic, error="StorageUnavailable") >= 1
            )
            assert daemon.metric("tieringd_store_requests_total", outcome="StorageUnavailable") >= 1
            assert daemon.metric("tieringd_upload_pending_segments", topic=topic) == 6
            assert daemon.next_offset(topic) == RECORDS
        finally:
            seaweedfs.launch()
        daemon.until_next_offset(topic, 7 * RECORDS)
        daemon.until(lambda: daemon.get("/readyz") == (200, "ok\n"), "the daemon is ready again")
        assert daemon.partition(topic)["fault"] is None
    assert stored_segments(objects, archived_manifest(objects, topic)) == closed_segments(directory)


def test_daemon_starts_while_its_store_is_silent(store_config, seaweedfs, objects, topic, tmp_path):
    """A store that does not answer yet is no reason not to start, nor to end at a reload meanwhile."""
    directory = write_partition(tmp_path / "logs", f"{topic}-0", segments=3)
    seaweedfs.pause()
    try:
        with running_daemon(store_config) as daemon:
            daemon.send_signal(signal.SIGHUP)
            daemon.until(lambda: daemon.events("topic manifests cannot be read"), "the store is missed")
            daemon.until(lambda: daemon.events("configuration reloaded"), "the configuration is reloaded")
            assert daemon.get("/readyz")[0] == 503
            assert daemon.events("object store does not answer yet")
            seaweedfs.resume()
            daemon.until_next_offset(topic, 3 * RECORDS)
            daemon.until(lambda: daemon.get("/readyz")[0] == 200, "the daemon is ready")
    finally:
        seaweedfs.resume()
    assert stored_segments(objects, archived_manifest(objects, topic)) == closed_segments(directory)


def is_unreachable(daemon) -> bool:
    """Say whether the daemon is not ready because its broker cannot be reached."""
    status, text = daemon.get("/readyz")
    return status == 503 and "cannot be reached" in text


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_broker_restart_is_said_and_caught_up(kafka, write_kafka_config, objects, topic, end):
    """
    The daemon reports that the broker is away.

    Once the broker is back, it archives under the new epoch.
    """
    await kafka.create_topic(topic, configs=SEGMENTS)
    path = write_kafka_config(topics={topic: {"redpanda.remote.write": True}})
    directory = kafka.log_dir() / f"{topic}-0"
    values = [bytes([number]) * 100_000 for number in range(25)]
    with running_daemon(path) as daemon:
        last_offset = await kafka.produce(topic, values, max_batch_size=200_000)
        daemon.until_next_offset(topic, base_of_active(directory))
        first_epoch = daemon.partition(topic)["leader_epoch"]
        await getattr(kafka, end)()
        try:
            daemon.until(lambda: is_unreachable(daemon), "the daemon is not ready, and says why")
            assert daemon.get("/healthz") == (200, "ok\n")
        finally:
            await kafka.launch()
        await kafka.produce(topic, values, max_batch_size=200_000)
        daemon.until_next_offset(topic, base_of_active(directory))
        daemon.until(lambda: daemon.get("/readyz") == (200, "ok\n"), "the daemon is ready again")
        assert daemon.partition(topic)["leader_epoch"] > first_epoch
        assert daemon.events("archiver stopped: this broker no longer leads")

    manifest = archived_manifest(objects, topic)
    assert stored_segments(objects, manifest) == closed_segments(directory)
    assert manifest.epochs[0] == (first_epoch, 0)
    assert (manifest.epochs[1:] and manifest.epochs[1][1]) == last_offset + 1
    assert_whole(path)


async def test_broker_with_an_empty_disk_leaves_the_archive_to_an_operator(
    kafka, write_kafka_config, objects, topic
):
    """
    A broker that comes up without its files leads with an empty log, and producers go on.

    The archive stays as it is until an operator gives all of it up. Then it begins with the new log.
    """
    await kafka.create_topic(topic, configs=SEGMENTS)
    path = write_kafka_config(topics={topic: {"redpanda.remote.write": True}})
    directory = kafka.log_dir() / f"{topic}-0"
    # The new log is longer: the end of what is archived tells which of them it is.
    old, new = ([bytes([number]) * 100_000 for number in numbers] for numbers in (range(25), range(100, 145)))
    with running_daemon(path) as daemon:
        await kafka.produce(topic, old, max_batch_size=200_000)
        daemon.until_next_offset(topic, base_of_active(directory))
        before = archived_manifest(objects, topic)
        await kafka.stop()
        try:
            shutil.rmtree(directory)
        finally:
            await kafka.launch()
        await kafka.produce(topic, new, max_batch_size=200_000)
        daemon.until(lambda: daemon.partition(topic).get("waits_for_operator"), "an operator is asked")
        wait = daemon.partition(topic)["waits_for_operator"]
        last_offset = before.next_offset - 1
        assert wait["reason"] == "log_began_anew"
        assert (wait["base_offset"], wait["last_offset"]) == (0, last_offset)
        assert archived_manifest(objects, topic).segments == before.segments
        assert [one.value for one in read_records(path, topic)] == old[: before.next_offset]

        # The system chose the port; the command asks the daemon at the one of its configuration.
        write_config(path, yaml.safe_load(path.read_text()) | {"admin": {"port": daemon.admin_port}})
        resolve = ("archive", "resolve", f"{topic}-0", "--config", str(path))
        (way,) = run_json(*resolve, "--format", "json")["ways_out"]
        assert way["loses"].startswith(
            f"all that is archived from offset 0 on, {len(before.segments)} segments with "
        )
        run_well(*resolve, *way["option"].split())
        decided = {"topic": topic, "outcome": "carried_out"}
        daemon.until(lambda: daemon.metric("tieringd_operator_decisions_total", **decided), "it is decided")
        daemon.until_next_offset(topic, base_of_active(directory))

    manifest = archived_manifest(objects, topic)
    assert [(one.base_offset, one.last_offset) for one in manifest.replacements] == [(0, last_offset)]
    assert stored_segments(objects, manifest) == closed_segments(directory)
    assert [one.value for one in read_records(path, topic)] == new[: manifest.next_offset]
    assert_whole(path)
