"""The archive's disk is unmounted: nothing is archived to the place where it was, and nothing is trimmed."""

from __future__ import annotations

import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.builders import segment_bytes
from tests.support.daemon import directory_config, run_command, run_json, running_daemon, write_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOPIC = "orders"


class Disk:
    """An ext4 in a file, which is mounted and unmounted."""

    def __init__(self, directory: Path) -> None:
        self.mount_point = directory / "disk"
        self.mount_point.mkdir()
        self._image = directory / "disk.image"
        with self._image.open("wb") as file:
            file.truncate(16 << 20)
        subprocess.run(["mkfs.ext4", "-q", self._image], check=True)
        self._is_mounted = False

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self._image, self.mount_point], check=True)
        self._is_mounted = True

    def unmount(self) -> None:
        # An operation of the daemon may be under way, for as long as which the disk is busy.
        for _ in range(500):
            done = subprocess.run(["umount", self.mount_point], check=False, capture_output=True)
            if done.returncode == 0:
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"the disk cannot be unmounted: {done.stderr.decode()}")
        self._is_mounted = False

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Mount it now, and see that it is unmounted in the end."""
        self.mount()
        try:
            yield
        finally:
            if self._is_mounted:
                self.unmount()


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path)
    with disk.mounted():
        yield disk


@pytest.fixture
def partition(tmp_path):
    directory = tmp_path / "logs" / f"{TOPIC}-0"
    directory.mkdir(parents=True)
    return directory


def config_in(tmp_path: Path, root: Path) -> Path:
    """Write a configuration that archives to *root*, and trims all that is durable."""
    properties = directory_config(
        [tmp_path / "logs"], root, tmp_path / "state", retention_local_target_bytes_default=1
    )
    del properties["retention_local_target_ms_default"]
    return write_config(tmp_path / "tieringd.yaml", properties)


def write(partition: Path, *base_offsets: int) -> None:
    """Add segments of 12 records; the last one is the active one."""
    for base_offset in base_offsets:
        (partition / f"{base_offset:020}.log").write_bytes(segment_bytes(base_offset))


def local(partition: Path) -> list[int]:
    return sorted(int(path.stem) for path in partition.glob("*.log"))


def archived(config: Path) -> list[tuple[int, int, int]]:
    rows = run_json("archive", "describe", TOPIC, "--config", str(config))
    return [(row["start_offset"], row["next_offset"], row["gap_offsets"]) for row in rows]


def test_disk_that_is_not_mounted_at_a_start(disk, partition, tmp_path):
    """The start fails, the mount point stays empty, no segment goes, and later the archive goes on whole."""
    config = config_in(tmp_path, disk.mount_point)
    write(partition, 0, 12, 24)
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    assert local(partition) == [24]
    write(partition, 36, 48)
    disk.unmount()

    done = run_command("run", "--once", "--config", str(config))
    assert done.returncode == 1
    assert "Mount the disk of the archive" in done.stderr.decode()
    assert run_command("archive", "describe", TOPIC, "--config", str(config)).returncode == 1
    assert list(disk.mount_point.iterdir()) == []
    assert local(partition) == [24, 36, 48]

    disk.mount()
    assert run_command("run", "--once", "--config", str(config)).returncode == 0
    assert (archived(config), local(partition)) == ([(0, 48, 0)], [48])


def test_disk_that_is_unmounted_under_a_daemon(disk, partition, tmp_path):
    """The daemon reports the missing disk, trims nothing, and goes on by itself once it is mounted again."""
    config = config_in(tmp_path, disk.mount_point / "below")
    write(partition, 0, 12, 24)
    with running_daemon(config) as daemon:
        daemon.until(lambda: local(partition) == [24], "what is durable is trimmed")
        disk.unmount()
        write(partition, 36, 48)
        daemon.until(lambda: daemon.get("/readyz")[0] == 503, "the daemon is not ready")
        daemon.until_rounds(3)
        assert "is not a directory. Mount the disk of the archive" in daemon.get("/readyz")[1]
        assert list(disk.mount_point.iterdir()) == []
        assert local(partition) == [24, 36, 48]

        disk.mount()
        daemon.until(lambda: local(partition) == [48], "what was written meanwhile is archived and trimmed")
        daemon.until(lambda: daemon.get("/readyz")[0] == 200, "the daemon is ready again")
    assert archived(config) == [(0, 48, 0)]
