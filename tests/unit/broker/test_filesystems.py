"""Filesystems of this host: which directories share one, and what is free for the broker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.small_disks import ext4_disk_at, small_disk_at
from tieringd.broker.disk_use import LocalFilesystems
from tieringd.errors import LocalFileError


@pytest.fixture
def small_disk(tmp_path):
    """Give a directory on a filesystem of its own, of 1 MiB."""
    with small_disk_at(tmp_path / "small", 2**20) as path:
        yield path


def device_of(path):
    return Path(path).stat().st_dev


async def test_directories_on_one_filesystem_are_one_reading(tmp_path, small_disk):
    """Each filesystem comes once, with its directories, in the order in which they were asked for."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    asked = [str(first), str(small_disk), str(second)]
    measurement = await LocalFilesystems().measure(asked)
    assert [one.paths for one in measurement.readings] == [(asked[0], asked[2]), (asked[1],)]
    assert [one.name for one in measurement.readings] == [asked[0], asked[1]]
    assert [one.device for one in measurement.readings] == [device_of(one) for one in asked[:2]]
    assert measurement.problems == {}


async def test_free_space_is_what_files_leave(small_disk):
    """Written bytes are not free any more, to the block."""
    (before,) = (await LocalFilesystems().measure([str(small_disk)])).readings
    (small_disk / "file").write_bytes(bytes(2**18))
    (after,) = (await LocalFilesystems().measure([str(small_disk)])).readings
    assert before.total_bytes == after.total_bytes == 2**20
    assert before.free_bytes - after.free_bytes == 2**18


async def test_free_space_leaves_out_what_is_kept_for_the_superuser(tmp_path):
    """The broker cannot write there, so it counts as used."""
    with ext4_disk_at(tmp_path / "disk", 32 * 2**20, reserved_percent=25) as path:
        found = os.statvfs(path)
        (reading,) = (await LocalFilesystems().measure([str(path)])).readings
    assert reading.free_bytes == found.f_bavail * found.f_frsize
    assert (found.f_bfree - found.f_bavail) * found.f_frsize > 5 * 2**20


async def test_directory_that_is_not_there_is_a_problem_of_its_own(tmp_path):
    """The others are measured all the same, and the error names the directory."""
    gone = str(tmp_path / "gone")
    measurement = await LocalFilesystems().measure([gone, str(tmp_path)])
    assert [one.paths for one in measurement.readings] == [(str(tmp_path),)]
    error = measurement.problems[gone]
    assert isinstance(error, LocalFileError)
    assert error.path == gone
    assert "No such file or directory" in str(error)
