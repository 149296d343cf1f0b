"""File systems of a fixed size for a test. Mounting them requires root."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def small_disk_at(path: Path, size_bytes: int) -> Iterator[Path]:
    """Make *path*, and mount an empty file system in memory there."""
    assert os.geteuid() == 0, "this test mounts a filesystem: run it as the superuser"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@contextmanager
def ext4_disk_at(path: Path, size_bytes: int, *, reserved_percent: int) -> Iterator[Path]:
    """Mount an empty ext4 at *path* with a part reserved for root. Its image is a file beside *path*."""
    assert os.geteuid() == 0, "this test mounts a filesystem: run it as the superuser"
    path.mkdir()
    image = path.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run(["mkfs.ext4", "-q", "-m", str(reserved_percent), image], check=True)
    subprocess.run(["mount", "-o", "loop", image, path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@contextmanager
def second_mount_at(path: Path, directory: Path) -> Iterator[Path]:
    """
    Mount *directory* at *path* as well: one file system, but no rename between the two.

    *path* may be *directory* itself.
    """
    assert os.geteuid() == 0, "this test mounts a filesystem: run it as the superuser"
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", directory, path], check=True)
    try:
        yield path
    finally:
        # The daemon may have the directory open at this moment.
        subprocess.run(["umount", "--lazy", path], check=True)
