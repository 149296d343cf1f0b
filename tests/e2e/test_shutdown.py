"""SIGTERM: uploads in hand are finished and committed, within a deadline."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.archives import archived_manifest, assert_whole, closed_segments, stored_segments
from tests.e2e.conftest import BUCKET
from tests.e2e.log_files import RECORDS, add_segments, write_partition
from tests.support.daemon import (
    Daemon,
    directory_config,
    run_command,
    running_daemon,
    s3_properties,
    write_config,
)

_STOPPING = "stopping: finishing the uploads in hand"
_CUT_OFF = "stopping without finishing: what was not committed is uploaded again next time"


@pytest.fixture
def directory(tmp_path, topic):
    """Give a partition with one closed segment."""
    return write_partition(tmp_path / "logs", f"{topic}-0", segments=1, value_bytes=50_000)


@pytest.fixture
def write(seaweedfs, prefix, directory, tmp_path):
    """Give a function that writes the configuration."""

    def write(**changes):
        config = directory_config([tmp_path / "logs"], tmp_path, tmp_path / "state", **changes)
        del config["cloud_storage_file_root"]
        return write_config(
            tmp_path / "tieringd.yaml", config | s3_properties(seaweedfs, bucket=BUCKET, prefix=prefix)
        )

    return write


@pytest.fixture
def freeze(seaweedfs, topic, directory):
    """Give a function that freezes the store under an upload; whatever happens it is thawed again."""

    def freeze(daemon: Daemon) -> None:
        daemon.until_next_offset(topic, RECORDS)
        seaweedfs.pause()
        # It sees both or none of them.
        daemon.server.pause()
        add_segments(directory, segments=2, value_bytes=50_000)
        daemon.server.resume()
        daemon.until_segment_in_flight()

    yield freeze
    seaweedfs.resume()


@pytest.fixture
def archived(objects, topic):
    """Give a function that returns the segments in the bucket, as its manifest names them."""
    return lambda: stored_segments(objects, archived_manifest(objects, topic))


def test_sigterm_finishes_the_uploads_in_hand(write, freeze, seaweedfs, archived, directory):
    """Told to stop during an upload, the daemon completes it, commits it and exits 0."""
    with running_daemon(write()) as daemon:
        freeze(daemon)
        daemon.send_signal(signal.SIGTERM)
        daemon.until(lambda: daemon.events(_STOPPING), "it is stopping")
        assert daemon.server.is_running
        seaweedfs.resume()
        assert daemon.wait() == 0, daemon.tail()

        assert daemon.events("stopped")
        assert not daemon.events(_CUT_OFF)
    assert archived() == closed_segments(directory)


@pytest.mark.parametrize("second_signal", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_does_not_wait(write, freeze, seaweedfs, archived, second_signal):
    """A second signal cuts the uploads off: exit 0, and the next run uploads what was not committed."""
    path = write()
    with running_daemon(path) as daemon:
        freeze(daemon)
        daemon.send_signal(signal.SIGTERM)
        daemon.until(lambda: daemon.events(_STOPPING), "it is stopping")
        daemon.send_signal(second_signal)
        assert daemon.wait() == 0, daemon.tail()
        assert daemon.events(_CUT_OFF)
        assert "Traceback" not in daemon.output_text()
    seaweedfs.resume()

    again = run_command("run", "--once", "--config", str(path))

    assert again.returncode == 0, again.stderr.decode()
    assert len(archived()) == 3
    assert_whole(path)


def test_deadline_ends_a_stop_that_cannot_finish(write, freeze, seaweedfs):
    """A stop ends at `shutdown_timeout_ms` with exit 0 if the store does not answer."""
    path = write(shutdown_timeout_ms=300)
    with running_daemon(path) as daemon:
        freeze(daemon)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.tail()
        assert daemon.events(_CUT_OFF)
        assert "Traceback" not in daemon.output_text()
    seaweedfs.resume()
    assert_whole(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_daemon_stops_at_once(write, topic, number):
    """A signal ends a daemon without work at once, with exit 0."""
    with running_daemon(write()) as daemon:
        daemon.until_next_offset(topic, RECORDS)
        daemon.send_signal(number)
        assert daemon.wait() == 0, daemon.tail()
        assert daemon.events("stopped")


def test_sigterm_ends_a_single_pass_after_the_segments_in_hand(write, seaweedfs, objects, topic, directory):
    """A pass that gets SIGTERM commits the segments in hand, and says that something is left."""
    for path in directory.glob("*.log"):
        path.unlink()
    add_segments(directory, segments=301, value_bytes=2_000)
    # At this rate the whole pass takes 20 s. The signal comes in time also on a busy machine.
    path = write(cloud_storage_upload_bytes_per_second=350_000)
    daemon = Daemon(path, path.with_suffix(".log"), "--once")
    daemon.launch()
    try:
        daemon.until(lambda: daemon.events("segment durable"), "a segment is durable")
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait() == 1, daemon.tail()
    finally:
        daemon.server.kill()

    manifest = archived_manifest(objects, topic)
    closed = closed_segments(directory)
    assert 0 < len(manifest.segments) < len(closed)
    assert stored_segments(objects, manifest) == dict(list(closed.items())[: len(manifest.segments)])
    assert "eligible segments are not uploaded" in daemon.output_text()
