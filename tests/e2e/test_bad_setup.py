"""A wrong configuration or a store that cannot be used: an error that says what to change."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from tests.e2e.archives import FileObjects, archived_manifest, assert_whole, closed_segments, stored_segments
from tests.e2e.conftest import BUCKET
from tests.e2e.log_files import RECORDS, add_segments, write_partition
from tests.support.daemon import (
    directory_config,
    run_command,
    running_daemon,
    s3_properties,
    write_config,
)


@pytest.fixture
def partition(tmp_path):
    """Give a partition with three closed segments."""
    return write_partition(tmp_path / "logs", "orders-0", segments=3)


@pytest.fixture
def archive(tmp_path):
    """Give a directory that stands in for a bucket."""
    (tmp_path / "archive").mkdir()
    return tmp_path / "archive"


@pytest.fixture
def s3_config(seaweedfs, prefix, partition, tmp_path):
    """Give a function that writes a configuration for S3, under which everything durable is trimmed."""

    def write(**changes):
        config = directory_config(
            [tmp_path / "logs"], tmp_path, tmp_path / "state", retention_local_target_bytes_default=1
        )
        del config["cloud_storage_file_root"]
        config |= s3_properties(seaweedfs, bucket=BUCKET, prefix=prefix) | changes
        return write_config(tmp_path / "tieringd.yaml", config)

    return write


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"cloud_storage_bucket": "not-there"}, ["not-there"], id="bucket"),
        pytest.param({"cloud_storage_secret_key": "wrong"}, ["cloud_storage_secret_key"], id="secret"),
        pytest.param({"cloud_storage_access_key": "unknown"}, ["cloud_storage_access_key"], id="access-key"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--once",)], ids=["daemon", "once"])
def test_unusable_bucket_ends_the_command(s3_config, partition, changes, says, options):
    """
    A missing bucket or wrong credentials end daemon and pass, with what to look at, and no trim.

    The exit code is that of a faulty configuration, with which the unit does not start the daemon again.
    """
    closed = closed_segments(partition)

    done = run_command("run", *options, "--config", str(s3_config(**changes)))

    told = done.stderr.decode()
    assert done.returncode == 2
    (error,) = [line for line in told.splitlines() if line.startswith("error: ")]
    assert all(text in error for text in says), error
    assert "Traceback" not in told
    assert "wrong" not in told
    assert closed_segments(partition) == closed


def test_missing_file_root_ends_the_command(partition, tmp_path):
    """A directory on a disk that is not mounted is an error that names it, and is not created."""
    root = tmp_path / "not-mounted" / "archive"
    config = directory_config([tmp_path / "logs"], root, tmp_path / "state")

    done = run_command("run", "--config", str(write_config(tmp_path / "tieringd.yaml", config)))

    assert done.returncode == 1
    assert str(root) in done.stderr.decode()
    assert not root.exists()


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        pytest.param(
            "cloud_storage_enabeld: true\nadmin:\n  prot: 1\n",
            ["cloud_storage_enabeld", ".yaml:1", "cloud_storage_enabled", "prot", ".yaml:3", "port"],
            id="mistyped-keys",
        ),
        pytest.param(
            "cloud_storage_reconciliation_interval_ms: soon\n",
            ["cloud_storage_reconciliation_interval_ms", ".yaml:1"],
            id="mistyped-value",
        ),
        pytest.param("log:\n  format: [json\n", [".yaml:3"], id="not-yaml"),
    ],
)
@pytest.mark.parametrize("command", [("run", "--config"), ("config", "check")], ids=["run", "check"])
def test_wrong_configuration_names_key_and_line(partition, tmp_path, text, problems, command):
    """Every wrong line is named with its key, at once; nothing is started; exit 2."""
    path = tmp_path / "tieringd.yaml"
    rest = directory_config([tmp_path / "logs"], tmp_path / "archive", tmp_path / "state")
    for section in ("admin", "cloud_storage_enabled", "cloud_storage_reconciliation_interval_ms"):
        del rest[section]
    path.write_text(text + yaml.safe_dump(rest))

    done = run_command(*command, str(path))

    told = done.stderr.decode()
    assert done.returncode == 2
    assert told.startswith("error: ")
    assert [problem for problem in problems if problem not in told] == [], told
    assert "Traceback" not in told
    assert not (tmp_path / "state").exists()


def test_missing_configuration_file_is_named(tmp_path):
    """A configuration file that is not there is an error that names it, with exit 2."""
    path = tmp_path / "not-there.yaml"
    done = run_command("run", "--config", str(path))
    assert done.returncode == 2
    assert str(path) in done.stderr.decode()


def test_port_in_use_is_named(partition, archive, tmp_path):
    """An admin port that another process has is an error that names the property, with exit 2."""
    config = directory_config([tmp_path / "logs"], archive, tmp_path / "state")
    with running_daemon(write_config(tmp_path / "one.yaml", config)) as daemon:
        port = daemon.events("admin page listens")[0]["port"]
        other = config | {"state_directory": str(tmp_path / "other"), "admin": {"port": port}}
        done = run_command("run", "--config", str(write_config(tmp_path / "two.yaml", other)))
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr.decode()
    assert "admin.port" in done.stderr.decode()


@pytest.fixture
def small_disk(tmp_path):
    """Give a directory on a disk of eight megabytes."""
    root = tmp_path / "small"
    root.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(root)], check=False, capture_output=True
    )
    assert mounted.returncode == 0, (
        f"this test mounts a small tmpfs, which takes root and the mount program: {mounted.stderr.decode()}"
    )
    yield root
    subprocess.run(["umount", str(root)], check=True)


def test_full_disk_is_said_and_caught_up(small_disk, tmp_path):
    """A full disk stops uploads and trims nothing that is not stored; with room again all is uploaded."""
    directory = write_partition(tmp_path / "logs", "orders-0", segments=3, value_bytes=20_000)
    ballast = small_disk / ".ballast"
    ballast.write_bytes(bytes(6 << 20))
    config = directory_config(
        [tmp_path / "logs"], small_disk, tmp_path / "state", retention_local_target_bytes_default=1
    )
    path = write_config(tmp_path / "tieringd.yaml", config)
    with running_daemon(path) as daemon:
        daemon.until_next_offset("orders", 3 * RECORDS)
        daemon.until(lambda: closed_segments(directory) == {}, "what is stored is trimmed")
        add_segments(directory, segments=12, value_bytes=20_000)
        full = closed_segments(directory)
        daemon.until(
            lambda: "No space left" in (daemon.partition("orders")["fault"] or ""), "the disk is full"
        )
        daemon.until(lambda: daemon.get("/readyz")[0] == 503, "the daemon is not ready")
        kept = closed_segments(directory)
        archived = archived_manifest(FileObjects(small_disk), "orders")
        unstored = {base: data for base, data in full.items() if base >= archived.next_offset}
        assert unstored
        assert unstored.items() <= kept.items()
        assert_whole(path)

        ballast.unlink()
        daemon.until_next_offset("orders", 15 * RECORDS)
        daemon.until(lambda: daemon.get("/readyz")[0] == 200, "the daemon is ready again")
    manifest = archived_manifest(FileObjects(small_disk), "orders")
    stored = stored_segments(FileObjects(small_disk), manifest)
    assert {base: stored[base] for base in full} == full
    assert manifest.gaps == ()
    assert_whole(path)
