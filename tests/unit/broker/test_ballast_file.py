"""The ballast file: made, sized and deleted. Other files are never touched."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.small_disks import small_disk_at
from tieringd.broker.ballast_file import BallastFile, find_ballast_path
from tieringd.errors import ConfigError, LocalFileError

MIB = 2**20


@pytest.fixture
def ballast(tmp_path):
    return BallastFile(str(tmp_path / "made" / "ballast"), 3 * MIB)


@pytest.fixture
def small_disk(tmp_path):
    """Give a directory on a filesystem of its own, of 2 MiB."""
    with small_disk_at(tmp_path / "small", 2 * MIB) as path:
        yield path


def unsupported(number):
    def allocate(_descriptor, _position, _size):
        raise OSError(number, os.strerror(number))

    return allocate


def test_ballast_takes_the_space_that_it_is_to_hold(ballast):
    """The blocks are taken, not only promised, and its directory is made."""
    assert ballast.held_bytes() == 0
    assert ballast.grow() == 3 * MIB
    found = Path(ballast.path).stat()
    assert (found.st_size, ballast.held_bytes()) == (3 * MIB, 3 * MIB)
    assert found.st_blocks * 512 >= 3 * MIB
    assert found.st_mode & 0o077 == 0


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_filesystem_that_cannot_reserve_gets_zeros_part_by_part(ballast, number):
    """Each call writes no more than its limit, so callers wait only briefly. The last part may be smaller."""
    sizes = [ballast.grow(allocate=unsupported(number), at_once_bytes=2 * MIB) for _ in range(3)]
    assert sizes == [2 * MIB, 3 * MIB, 3 * MIB]
    assert Path(ballast.path).stat().st_blocks * 512 >= 3 * MIB


def test_ballast_is_brought_to_another_size(ballast):
    """A new size in the configuration grows or cuts the file that is there."""
    ballast.grow()
    larger, smaller = BallastFile(ballast.path, 4 * MIB), BallastFile(ballast.path, MIB)
    assert larger.grow() == 4 * MIB
    assert smaller.grow() == MIB
    assert ballast.held_bytes() == MIB


def test_released_ballast_is_gone_and_can_be_released_again(ballast):
    """A release returns the bytes that are free again, and 0 if there is no ballast."""
    ballast.grow()
    assert ballast.release() == 3 * MIB
    assert not Path(ballast.path).exists()
    assert ballast.release() == 0


def test_ballast_that_does_not_fit_leaves_nothing_behind(small_disk):
    """A disk is not filled to the brim by an attempt: what was begun is deleted, and the error says so."""
    ballast = BallastFile(str(small_disk / "ballast"), 3 * MIB)
    for options in ({}, {"allocate": unsupported(errno.EOPNOTSUPP)}):
        with pytest.raises(
            LocalFileError, match=r"ballast cannot be made: No space left on device\. Free some disk space"
        ):
            ballast.grow(**options)
        assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("content", [b"x", bytes(4095) + b"x"])
def test_file_that_holds_anything_is_neither_changed_nor_deleted(ballast, tmp_path, content):
    """A mistyped path deletes no file."""
    path = tmp_path / "precious"
    path.write_bytes(content)
    wrong = BallastFile(str(path), MIB)
    for call in (wrong.held_bytes, wrong.grow, wrong.release):
        with pytest.raises(ConfigError, match="is not a ballast file"):
            call()
    assert path.read_bytes() == content


def test_links_and_directories_are_no_ballast(tmp_path):
    """A link could lead to any file, and a directory is no file."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(bytes(10))
    link.symlink_to(target)
    for path in (link, tmp_path):
        wrong = BallastFile(str(path), MIB)
        for call in (wrong.held_bytes, wrong.grow, wrong.release):
            with pytest.raises((ConfigError, LocalFileError)):
                call()
    assert target.read_bytes() == bytes(10)
    assert link.is_symlink()


def test_pipe_is_no_ballast_and_its_other_end_is_not_waited_for(tmp_path):
    """A pipe is refused at once, because it is no plain file."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a ballast file"):
        BallastFile(str(tmp_path / "pipe"), MIB).held_bytes()


def test_place_is_the_first_that_is_beside_a_log_directory(tmp_path, small_disk):
    """Another filesystem would free nothing, and what is not there yet counts by where it would be."""
    log_dir, other_log_dir = tmp_path / "logs", small_disk / "logs"
    log_dir.mkdir()
    other_log_dir.mkdir()
    elsewhere, beside = str(small_disk / "ballast"), str(tmp_path / "not" / "yet" / "ballast")
    assert find_ballast_path([elsewhere, beside], [str(log_dir)]) == beside
    assert find_ballast_path([elsewhere, beside], [str(log_dir), str(other_log_dir)]) == elsewhere


def test_place_inside_a_log_directory_is_refused(tmp_path):
    """Kafka does not start with it there: also by a link, and by a name that only begins the same."""
    log_dir, link = tmp_path / "logs", tmp_path / "link"
    log_dir.mkdir()
    link.symlink_to(log_dir)
    for inside in (log_dir / "ballast", link / "ballast", log_dir):
        with pytest.raises(ConfigError, match="is inside the log directory") as caught:
            find_ballast_path([str(inside)], [str(log_dir)])
        assert "Set ballast_file_path" in str(caught.value)
    assert find_ballast_path([f"{log_dir}-ballast"], [str(log_dir)])


def test_no_place_says_why_not_for_each(tmp_path, small_disk):
    """An operator sees every path that was tried."""
    log_dir = tmp_path / "logs"
    log_dir.mkdir()
    with pytest.raises(ConfigError) as caught:
        find_ballast_path([str(small_disk / "b"), str(log_dir / "b")], [str(log_dir)])
    assert f"{small_disk / 'b'} is on another filesystem than the log directories" in str(caught.value)
    assert f"{log_dir / 'b'} is inside the log directory {log_dir}" in str(caught.value)


def test_ballast_on_another_disk_than_the_failed_one_is_found(tmp_path, small_disk):
    """A ballast that exists can be released; none is made while it may be on the disk that failed."""
    log_dir, gone = tmp_path / "logs", small_disk / "gone"
    log_dir.mkdir()
    candidates, log_dirs = [str(small_disk / "ballast"), str(tmp_path / "ballast")], [str(log_dir), str(gone)]
    with pytest.raises(LocalFileError, match="gone cannot be inspected: No such file"):
        find_ballast_path(candidates, log_dirs)
    BallastFile(candidates[1], MIB).grow()
    assert find_ballast_path(candidates, log_dirs) == candidates[1]


def test_log_directory_that_is_not_there_is_said(tmp_path):
    """A log directory may come later, so its absence is no fault of the configuration."""
    with pytest.raises(LocalFileError, match="gone cannot be inspected: No such file"):
        find_ballast_path([str(tmp_path / "b")], [str(tmp_path / "gone")])
