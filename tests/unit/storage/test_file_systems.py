"""The type of a file system, as the operating system gives it."""

from __future__ import annotations

import os

import pytest

from tests.support.small_disks import ext4_disk_at, small_disk_at
from tieringd.storage.file_root import filesystem_type, is_network_filesystem

MOUNTINFO = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
97 22 0:52 /export/a /mnt/archive rw,relatime shared:9 master:3 - nfs4 server:/export rw,vers=4.2
98 22 0:52 / /mnt/other rw - nfs server:/ rw
"""


def type_of(path) -> str:
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        return filesystem_type(fd)
    finally:
        os.close(fd)


def test_mounted_file_systems_are_told(tmp_path):
    """A mount in memory, an ext4, and a directory below one."""
    with small_disk_at(tmp_path / "memory", 1 << 20) as memory:
        (memory / "below").mkdir()
        assert type_of(memory / "below") == "tmpfs"
    with ext4_disk_at(tmp_path / "disk", 8 << 20, reserved_percent=0) as disk:
        assert type_of(disk) == "ext4"


@pytest.mark.parametrize(("mount_id", "found"), [(22, "ext4"), (97, "nfs4"), (98, "nfs"), (9, "")])
def test_type_is_of_the_mount_and_not_of_the_device(tmp_path, mount_id, found):
    """One device may be mounted several times; fields before the separator vary in number."""
    (tmp_path / "fdinfo").mkdir()
    (tmp_path / "fdinfo" / "7").write_text(f"pos:\t0\nflags:\t010000000\nmnt_id:\t{mount_id}\n")
    (tmp_path / "mountinfo").write_text(MOUNTINFO)
    assert filesystem_type(7, proc=tmp_path) == found


def test_system_that_tells_nothing(tmp_path):
    """The type is unknown on a system without /proc."""
    assert filesystem_type(7, proc=tmp_path) == ""


@pytest.mark.parametrize("name", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "fuse.sshfs"])
def test_types_of_the_network(name):
    """Other hosts may write to them."""
    assert is_network_filesystem(name)


@pytest.mark.parametrize("name", ["", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "ceph"])
def test_types_of_this_host(name):
    """Locks hold there for every process that may write."""
    assert not is_network_filesystem(name)
