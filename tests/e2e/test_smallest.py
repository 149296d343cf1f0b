"""The smallest configuration: a log directory, a directory as the bucket, and the admin page."""

from __future__ import annotations

import pytest

from tests.e2e.archives import (
    FileObjects,
    archived_bytes,
    archived_manifest,
    assert_whole,
    closed_segments,
    stored_segments,
)
from tests.e2e.log_files import RECORDS, add_segments, write_partition
from tests.support.daemon import directory_config, run_command, running_daemon, write_config


@pytest.fixture
def archive(tmp_path):
    """Give a directory that stands in for a bucket."""
    path = tmp_path / "archive"
    path.mkdir()
    return path


@pytest.fixture
def config(tmp_path, archive):
    """Give a configuration with what is required and nothing else."""
    config = directory_config([tmp_path / "logs"], archive, tmp_path / "state")
    return write_config(tmp_path / "tieringd.yaml", config)


def test_run_once_twice_uploads_everything_once(tmp_path, archive, config):
    """The first pass stores every closed segment, the second finds nothing to do; both exit 0."""
    directory = write_partition(tmp_path / "logs", "orders-0", segments=5)

    first = run_command("run", "--once", "--config", str(config))
    objects = FileObjects(archive)
    keys = objects.keys()
    second = run_command("run", "--once", "--config", str(config))

    assert (first.returncode, second.returncode) == (0, 0), (first.stderr + second.stderr).decode()
    assert b"1 partitions: 5 segments uploaded, 0 trimmed, 0 partitions unfinished" in first.stderr
    assert b"1 partitions: 0 segments uploaded, 0 trimmed, 0 partitions unfinished" in second.stderr
    assert objects.keys() == keys
    assert stored_segments(objects, archived_manifest(objects, "orders")) == closed_segments(directory)
    assert archived_bytes(config, "orders") == b"".join(closed_segments(directory).values())
    assert_whole(config)


def test_directory_is_trimmed_by_unlinking_what_is_durable(tmp_path, archive):
    """Durable segments past the local target are unlinked without a broker, and the archive has them."""
    directory = write_partition(tmp_path / "logs", "orders-0", segments=5)
    closed = closed_segments(directory)
    config = directory_config(
        [tmp_path / "logs"], archive, tmp_path / "state", retention_local_target_bytes_default=1
    )
    path = write_config(tmp_path / "tieringd.yaml", config)

    done = run_command("run", "--once", "--config", str(path))

    assert done.returncode == 0, done.stderr.decode()
    assert b"5 segments uploaded, 5 trimmed" in done.stderr
    assert closed_segments(directory) == {}
    assert archived_bytes(path, "orders") == b"".join(closed.values())


def test_admin_page_of_an_idle_daemon(tmp_path, config):
    """Health, readiness, status and metrics say what has been archived and what is still pending."""
    directory = write_partition(tmp_path / "logs", "orders-0", segments=3)
    with running_daemon(config) as daemon:
        daemon.until_next_offset("orders", 3 * RECORDS)
        daemon.until(lambda: daemon.get("/readyz") == (200, "ok\n"), "the daemon is ready")

        assert daemon.get("/healthz") == (200, "ok\n")
        assert daemon.partition("orders")["fault"] is None
        # The active segment's records are behind the archive's end.
        assert daemon.metric("vectorized_ntp_archiver_pending", namespace="kafka", topic="orders") == RECORDS
        assert daemon.metric("tieringd_uploads_total", topic="orders") == 3
        assert daemon.metric("tieringd_upload_bytes_total", topic="orders") == sum(
            map(len, closed_segments(directory).values())
        )
        assert daemon.metric("tieringd_led_partitions") == 1
        assert daemon.metric("tieringd_upload_pending_segments", topic="orders") == 0


def test_running_daemon_archives_what_is_closed_meanwhile(tmp_path, archive, config):
    """Segments and partitions that appear while the daemon runs are archived without a restart."""
    directory = write_partition(tmp_path / "logs", "orders-0", segments=1)
    with running_daemon(config) as daemon:
        daemon.until_next_offset("orders", RECORDS)
        add_segments(directory, segments=2)
        late = write_partition(tmp_path / "logs", "a.late_topic-with-dashes-3", segments=2)
        daemon.until_next_offset("orders", 3 * RECORDS)
        daemon.until_next_offset("a.late_topic-with-dashes", 2 * RECORDS, 3)

    objects = FileObjects(archive)
    manifests = [archived_manifest(objects, "orders"), archived_manifest(objects, late.name[:-2], 3)]
    assert [stored_segments(objects, one) for one in manifests] == [
        closed_segments(directory),
        closed_segments(late),
    ]


def test_config_check_accepts_what_the_daemon_runs_with(config):
    """The check of a good file exits 0 and says so."""
    done = run_command("config", "check", str(config))
    assert (done.returncode, done.stdout.decode()) == (0, f"{config}: ok\n")
