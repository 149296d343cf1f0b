"""Damaged files: an error that names the file, nothing trimmed, and the other partitions go on."""

from __future__ import annotations

import struct
import threading

import pytest

from tests.builders import segment_bytes
from tests.e2e.archives import (
    FileObjects,
    archived_manifest,
    archived_manifests,
    assert_whole,
    closed_segments,
    stored_segments,
)
from tests.e2e.log_files import RECORDS, segment_path, write_partition
from tests.e2e.sample_topics import SEGMENTS
from tests.support.daemon import directory_config, run_command, running_daemon, write_config
from tieringd.formats.sidecar import decode_sidecar

_MOVE_SECONDS = 0.002


@pytest.fixture
def log_dir(tmp_path):
    """Give a log directory with a sound partition in it."""
    write_partition(tmp_path / "logs", "sound-0", segments=3)
    return tmp_path / "logs"


@pytest.fixture
def objects(tmp_path):
    """Give the objects of the directory that stands in for the bucket."""
    (tmp_path / "archive").mkdir()
    return FileObjects(tmp_path / "archive")


@pytest.fixture
def write(log_dir, objects, tmp_path):
    """Give a function that writes a configuration under which everything durable is trimmed."""

    def write(**changes):
        config = directory_config(
            [log_dir],
            tmp_path / "archive",
            tmp_path / "state",
            **{"retention_local_target_bytes_default": 1} | changes,
        )
        return write_config(tmp_path / "tieringd.yaml", config)

    return write


def truncate_last_batch(path):
    path.write_bytes(path.read_bytes()[:-100])


def change_a_record_byte(path):
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(bytes(data))


def append_zeros(path):
    path.write_bytes(path.read_bytes() + bytes(4096))


def make_it_a_directory(path):
    path.unlink()
    path.mkdir()


def make_it_a_dangling_link(path):
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


def repeat_the_segment_before(path):
    path.write_bytes(segment_path(path.parent, 0).read_bytes())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(truncate_last_batch, "torn tail", id="truncated-batch"),
        pytest.param(change_a_record_byte, "batch CRC is", id="crc-mismatch"),
        pytest.param(append_zeros, "zero tail", id="zero-tail"),
        pytest.param(
            repeat_the_segment_before, "batch offset 0 is out of order", id="offsets-of-another-segment"
        ),
        pytest.param(make_it_a_directory, "is not a regular file", id="directory"),
        pytest.param(make_it_a_dangling_link, "vanished", id="dangling-link"),
    ],
)
def test_damaged_segment_stops_its_partition_only(log_dir, write, objects, damage, says):
    """The pass fails and names the file; nothing of the partition is trimmed; the sound one is archived."""
    damaged = write_partition(log_dir, "damaged-0", segments=3)
    damage(segment_path(damaged, 1))
    sound = closed_segments(log_dir / "sound-0")
    before = sorted(damaged.iterdir())

    done = run_command("run", "--once", "--config", str(write()))

    told = done.stderr.decode()
    assert done.returncode == 1, told
    assert says in told
    assert "Traceback" not in told
    # The last line says what is left of the pass.
    assert str(segment_path(damaged, 1)) in told.splitlines()[-1]
    assert sorted(damaged.iterdir()) == before
    assert stored_segments(objects, archived_manifest(objects, "sound")) == sound
    assert closed_segments(log_dir / "sound-0") == {}


def test_empty_segment_is_archived_as_it_is(log_dir, write, objects):
    """A closed segment without bytes, which compaction leaves, is an empty object and not a fault."""
    directory = write_partition(log_dir, "emptied-0", segments=3)
    segment_path(directory, 1).write_bytes(b"")
    closed = closed_segments(directory)

    path = write()
    done = run_command("run", "--once", "--config", str(path))

    assert done.returncode == 0, done.stderr.decode()
    manifest = archived_manifest(objects, "emptied")
    assert stored_segments(objects, manifest) == closed
    assert (manifest.next_offset, manifest.gaps) == (3 * RECORDS, ())
    assert_whole(path)


def test_index_that_disagrees_with_the_log_is_left_out(log_dir, write, objects):
    """A wrong index file is named and not archived; the segment is, with an index of our own."""
    directory = write_partition(log_dir, "indexed-0", segments=2)
    closed = closed_segments(directory)
    index = segment_path(directory, 1).with_suffix(".index")
    index.write_bytes(struct.pack(">ii", 5, 999_999))

    path = write()
    done = run_command("run", "--once", "--config", str(path))

    assert done.returncode == 0, done.stderr.decode()
    (line,) = [one for one in done.stderr.decode().splitlines() if "broker index left out" in one]
    assert str(segment_path(directory, 1)) in line
    manifest = archived_manifest(objects, "indexed")
    assert stored_segments(objects, manifest) == closed
    (_, key) = [key for key in objects.keys() if "/indexed/" in key and key.endswith(".index")]  # noqa: SIM118
    assert decode_sidecar(objects.read(key)).broker.offset_index is None
    assert_whole(path)


def test_quarantine_of_a_running_daemon_ends_when_the_file_is_mended(log_dir, write, objects):
    """A damaged partition is on the status page until its file is replaced; then it is archived."""
    directory = write_partition(log_dir, "mended-0", segments=3)
    path = segment_path(directory, 1)
    good = path.read_bytes()
    change_a_record_byte(path)
    with running_daemon(write(retention_local_target_bytes_default=-1)) as daemon:
        daemon.until_next_offset("mended", RECORDS)
        daemon.until(lambda: daemon.metric("tieringd_quarantined_partitions") == 1, "it is quarantined")
        # A round counts it as soon as it is found; the partition has its state at the end of the step.
        daemon.until(lambda: str(path) in (daemon.partition("mended")["fault"] or ""), "the page names it")
        daemon.until_next_offset("sound", 3 * RECORDS)
        assert daemon.get("/healthz")[0] == 200

        # At once: a file that is still being written is a segment without bytes for a moment.
        staged = path.with_suffix(".staged")
        staged.write_bytes(good)
        staged.rename(path)
        daemon.until_next_offset("mended", 3 * RECORDS)
        daemon.until(lambda: daemon.metric("tieringd_quarantined_partitions") == 0, "it is lifted")
    assert stored_segments(objects, archived_manifest(objects, "mended")) == closed_segments(directory)


def test_directory_that_vanishes_during_scans_is_survived(log_dir, write, tmp_path):
    """A partition that comes and goes while it is scanned is left out, and the others are archived."""
    moving = write_partition(log_dir, "moving-0", segments=200)
    elsewhere, stop = tmp_path / "elsewhere", threading.Event()

    def move() -> None:
        # Without a pause it would take a whole core, which the scans need.
        while not stop.wait(_MOVE_SECONDS):
            moving.rename(elsewhere)
            stop.wait(_MOVE_SECONDS)
            elsewhere.rename(moving)

    path = write(cloud_storage_reconciliation_interval_ms=1, retention_local_target_bytes_default=-1)
    mover = threading.Thread(target=move)
    with running_daemon(path) as daemon:
        mover.start()
        try:
            daemon.until(
                lambda: any(
                    one["path"].startswith(str(moving)) for one in daemon.events("left out of this round")
                ),
                "a scan has met the moving directory",
            )
            segment_path(log_dir / "sound-0", 4).write_bytes(segment_bytes(4 * RECORDS))
            daemon.until_next_offset("sound", 4 * RECORDS)
        finally:
            stop.set()
            mover.join()
        daemon.until_next_offset("moving", 200 * RECORDS)
        daemon.until(lambda: daemon.status()["problems"] == {}, "nothing is in the way any more")
        assert "Traceback" not in daemon.output_text()


async def test_damaged_segment_beside_a_broker_is_quarantined(kafka, write_kafka_config, topic):
    """Segments before a damaged one are archived, nothing is trimmed, and the error names the file."""
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, [b"v" * 100_000] * 45, max_batch_size=200_000)
    directory = kafka.log_dir() / f"{topic}-0"
    bases = list(closed_segments(directory))
    change_a_record_byte(directory / f"{bases[1]:020d}.log")
    path = write_kafka_config(
        topics={topic: {"redpanda.remote.write": True}}, retention_local_target_bytes_default=1
    )

    done = run_command("run", "--once", "--config", str(path))

    told = done.stderr.decode()
    assert done.returncode == 1
    assert f"{directory}/{bases[1]:020d}.log" in told.splitlines()[-1]
    assert "1 segments uploaded, 0 trimmed" in told
    assert list(closed_segments(directory)) == bases


def test_unreadable_partition_does_not_hide_behind_exit_0(log_dir, write, objects):
    """A pass that had to leave a partition out exits 1 even when all the others are done."""
    alone = write_partition(log_dir, "alone-0", segments=1)
    (alone / "partition.metadata").write_text("nonsense\n")

    done = run_command("run", "--once", "--config", str(write()))

    assert done.returncode == 1
    assert str(alone / "partition.metadata") in done.stderr.decode()
    assert archived_manifests(objects, "alone") == {}
