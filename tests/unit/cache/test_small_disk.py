"""The cache directory on a disk that is full, read-only, or not for us."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager

import pytest

from tests.support.small_disks import small_disk_at
from tests.support.unprivileged import unprivileged
from tests.unit.cache.cached import a_chunk, data_in, files_in, put, started
from tieringd.cache.faults import reason_of
from tieringd.errors import LocalFileError

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path):
    with small_disk_at(tmp_path / "disk", 8 * MIB) as root:
        yield root


@contextmanager
def read_only(disk):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


def test_full_disk_refuses_before_a_byte_is_fetched(disk):
    """A part takes its room when it begins; one that gets none leaves nothing."""
    directory = started(disk / "cache")
    put(directory, a_chunk(0), b"x" * (5 * MIB))
    with pytest.raises(LocalFileError, match="its disk is full") as caught:
        directory.part(a_chunk(1), 5 * MIB)
    assert reason_of(caught.value) == "enospc"
    assert set(files_in(disk)) == {"cache/" + a_chunk(0)}
    directory.evict([a_chunk(0)])
    put(directory, a_chunk(1), b"y" * (5 * MIB))
    assert directory.free_bytes() <= 3 * MIB


def test_full_disk_keeps_the_old_access_times(disk):
    """Access times are only advice, and are written when there is room again."""
    directory = started(disk / "cache")
    put(directory, a_chunk(0), b"x")
    directory.save_access_times()
    before = (disk / "cache/access_times").read_bytes()
    filler = disk / "filler"
    found = os.statvfs(disk)
    filler.write_bytes(b"x" * found.f_bavail * found.f_frsize)
    directory.accounts.touch(a_chunk(0), accessed_ms=1)
    with pytest.raises(LocalFileError, match="access_times cannot be written"):
        directory.save_access_times()
    assert (disk / "cache/access_times").read_bytes() == before
    filler.unlink()
    directory.save_access_times()
    assert (disk / "cache/access_times").read_bytes() != before


def test_read_only_disk_serves_what_it_holds(disk):
    """A read-only disk takes nothing new, lets nothing go, and counts what is there."""
    put(started(disk / "cache"), a_chunk(0), b"abc")
    with read_only(disk):
        directory = started(disk / "cache")
        assert data_in(directory, a_chunk(0), 3) == b"abc"
        with pytest.raises(LocalFileError, match="mounted read-only") as caught:
            directory.part(a_chunk(1), 3)
        assert reason_of(caught.value) == "erofs"
        assert directory.evict([a_chunk(0)]) == 0
        assert directory.accounts.use().objects == 1
        with pytest.raises(LocalFileError):
            directory.save_access_times()
    put(directory, a_chunk(1), b"abc")
    assert directory.evict([a_chunk(0), a_chunk(1)]) == 6


def test_disk_that_becomes_read_only_during_a_download_leaves_no_file(disk):
    """The part has no name yet; it is removed at the next start."""
    directory = started(disk / "cache")
    part = directory.part(a_chunk(0), 3)
    part.write(0, b"abc")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=False, capture_output=True)
    # A disk on which a file is open for writing is not remounted; then the kernel protects the part.
    part.abandon()
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    started(disk / "cache")
    assert files_in(disk) == {}


def test_directory_of_another_user_is_an_error_with_advice(tmp_path):
    """Nothing is taken for an empty cache that only may not be read."""
    path = tmp_path / "cache"
    directory = started(path)
    with unprivileged():
        with pytest.raises(LocalFileError, match="let the daemon's user read and write it") as caught:
            directory.part(a_chunk(), 3)
        assert reason_of(caught.value) == "eacces"
        with pytest.raises(LocalFileError, match="Permission denied"):
            directory.open(a_chunk(), 3)
        with pytest.raises(LocalFileError, match="Permission denied"):
            started(path)


def test_directory_that_cannot_be_made_says_so(tmp_path):
    """A file is in its place."""
    (tmp_path / "cache").write_text("x")
    with pytest.raises(LocalFileError, match="cannot be used as the cache: File exists"):
        started(tmp_path / "cache")
