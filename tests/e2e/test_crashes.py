"""kill -9 at any moment of an upload: nothing lost, nothing doubled, nothing unreadable."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from datetime import datetime
from itertools import cycle, islice

import pytest

from tests.e2e.archives import (
    FileObjects,
    archived_bytes,
    archived_manifest,
    archived_manifests,
    assert_whole,
    closed_segments,
    data_keys,
    stored_segments,
    unreferenced,
)
from tests.e2e.log_files import add_segments, write_partition
from tests.e2e.sample_topics import SEGMENTS
from tests.support.daemon import (
    Daemon,
    directory_config,
    run_command,
    running_daemon,
    write_config,
)
from tieringd.formats.object_keys import parse_data_key

_KILLS = 20
_TOPICS = ("first", "second", "third")
_PENDING_SEGMENTS = 25
"""Of each partition, before each kill: as much work as the uninterrupted run had."""
_VALUE_BYTES = 6_000


def assert_sound(objects, topic, directory) -> int:
    """Assert that what the manifest names is a prefix of the log; return how many segments it names."""
    closed = closed_segments(directory)
    stored = {}
    for manifest in archived_manifests(objects, topic).values():
        assert manifest.faults() == ()
        stored = stored_segments(objects, manifest)
    assert stored == dict(list(closed.items())[: len(stored)])
    return len(stored)


def single_pass(config, output) -> Daemon:
    return Daemon(config, output, "--once")


def run_until_killed(config, output, after_seconds) -> float | None:
    """Run one pass, and kill it that long after it has begun. Return the seconds of one that ended before."""
    daemon = single_pass(config, output)
    daemon.launch()
    daemon.until(lambda: daemon.events("starting"), "it has begun")
    try:
        # The moment of the kill is what this test varies.
        daemon.wait(after_seconds)
    except subprocess.TimeoutExpired:
        daemon.send_signal(signal.SIGKILL)
        if daemon.wait() == -signal.SIGKILL:
            return None
    return seconds_of(daemon)


def seconds_of(daemon) -> float:
    """Return how long a pass took from its beginning to its last commit."""
    (begun,) = daemon.events("starting")
    last = daemon.events("segment durable")[-1]
    return (moment_of(last) - moment_of(begun)).total_seconds()


def seconds_of_whole_run(tmp_path, log_dir) -> float:
    """Return how long one pass takes from its beginning to its last commit, without a kill."""
    (tmp_path / "reference").mkdir()
    config = directory_config([log_dir], tmp_path / "reference", tmp_path / "reference-state")
    daemon = single_pass(write_config(tmp_path / "reference.yaml", config), tmp_path / "reference.log")
    daemon.launch()
    assert daemon.wait() == 0
    return seconds_of(daemon)


def moment_of(event) -> datetime:
    return datetime.fromisoformat(event["timestamp"])


def left_over(objects) -> set[str]:
    """Return the writers of the objects that no manifest names."""
    manifests = [one for topic in _TOPICS for one in archived_manifests(objects, topic).values()]
    return {parse_data_key(key).writer_id for key in unreferenced(objects, manifests)}


# Long: twenty processes are killed.
@pytest.mark.timeout(1800)
def test_twenty_kills_during_uploads_lose_and_double_nothing(tmp_path):
    """The archive is a sound prefix whenever the process is killed, and the next runs complete it."""
    log_dir, archive = tmp_path / "logs", tmp_path / "archive"
    archive.mkdir()
    directories = {
        topic: write_partition(log_dir, f"{topic}-0", segments=_PENDING_SEGMENTS, value_bytes=_VALUE_BYTES)
        for topic in _TOPICS
    }
    whole_run_seconds = seconds_of_whole_run(tmp_path, log_dir)
    config = write_config(
        tmp_path / "tieringd.yaml", directory_config([log_dir], archive, tmp_path / "state")
    )
    objects = FileObjects(archive)
    # One moment in each twentieth of a run, in any order.
    moments = [(number + random.random()) / _KILLS for number in range(_KILLS)]
    random.shuffle(moments)
    runs = 0
    while moments or (runs < 3 * _KILLS and len(left_over(objects)) < 3):
        for topic, directory in directories.items():
            pending = len(closed_segments(directory)) - assert_sound(objects, topic, directory)
            add_segments(directory, segments=max(0, _PENDING_SEGMENTS - pending), value_bytes=_VALUE_BYTES)
        runs += 1
        moment = moments[-1] if moments else random.random()
        seconds = run_until_killed(config, tmp_path / f"run-{runs}.log", moment * whole_run_seconds)
        if seconds is not None:
            # It has ended before its kill: the machine is less busy now, and the next run may be faster.
            whole_run_seconds = 0.9 * seconds
        elif moments:
            moments.pop()
        else:
            # The machine is busier than in the reference run, and the kills came before the uploads.
            whole_run_seconds *= 1.25
    for topic, directory in directories.items():
        assert_sound(objects, topic, directory)
    interrupted = left_over(objects)

    last = run_command("run", "--once", "--config", str(config))

    assert last.returncode == 0, last.stderr.decode()
    for topic, directory in directories.items():
        closed = closed_segments(directory)
        assert stored_segments(objects, archived_manifest(objects, topic)) == closed
        assert archived_bytes(config, topic) == b"".join(closed.values())
    assert_whole(config)
    # Kills hit during uploads: objects without an entry in a manifest are what they leave.
    assert len(interrupted) >= 3


async def test_kills_beside_a_broker_lose_and_double_nothing(
    kafka, write_kafka_config, objects, topic, tmp_path
):
    """A daemon that is killed again and again beside a real broker ends with every closed segment stored."""
    await kafka.create_topic(topic, configs=SEGMENTS)
    path = write_kafka_config(topics={topic: {"redpanda.remote.write": True}})
    directory = kafka.log_dir() / f"{topic}-0"
    incomplete = 0
    delays_seconds = (0, 0.02, 0, 0.01)
    # On a busy machine each of these kills may come after the last upload. Then there are some more.
    for number, delay_seconds in enumerate(islice(cycle(delays_seconds), _KILLS)):
        if number >= len(delays_seconds) and incomplete:
            break
        await kafka.produce(topic, [random.randbytes(100_000) for _ in range(85)], max_batch_size=200_000)
        with running_daemon(path, tmp_path / f"run-{number}.log") as daemon:
            daemon.until(lambda daemon=daemon: daemon.events("segment durable"), "a segment is durable")
            # One step commits four segments; the kill comes within the next one.
            await asyncio.sleep(delay_seconds)
        archived = assert_sound(objects, topic, directory)
        incomplete += archived < len(closed_segments(directory))

    last = run_command("run", "--once", "--config", str(path))

    closed = closed_segments(directory)
    manifest = archived_manifest(objects, topic)
    assert last.returncode == 0, last.stderr.decode()
    assert len(closed) >= 30
    assert stored_segments(objects, manifest) == closed
    assert archived_bytes(path, topic) == b"".join(closed.values())
    assert_whole(path)
    assert incomplete >= 1
    assert len(data_keys(objects)) == len(closed) + len(unreferenced(objects, [manifest]))
