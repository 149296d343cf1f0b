"""A filesystem of a fixed size for the time of a test. Mounting takes the superuser."""

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
    """Mount an empty filesystem in memory at *path*, which is made."""
    assert os.geteuid() == 0, "this test mounts a filesystem: run it as the superuser"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@contextmanager
def ext4_disk_at(path: Path, size_bytes: int, *, reserved_percent: int) -> Iterator[Path]:
    """Mount an empty ext4 of which a part is kept for the superuser; its image lies beside *path*."""
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
    """Mount *directory* at *path* as well, which is made: the same filesystem, and no rename between them."""
    assert os.geteuid() == 0, "this test mounts a filesystem: run it as the superuser"
    path.mkdir()
    subprocess.run(["mount", "--bind", directory, path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)
