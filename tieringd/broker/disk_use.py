"""
Disk use: what the files of a log directory take of their filesystem.

Counted are allocated blocks, as a preallocated index takes no space before it is filled. Files
that the broker has marked for deletion are not counted: they go by themselves.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from tieringd.policies.disk_areas import DirectoryUse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BLOCK_BYTES = 512  # What `st_blocks` counts, whatever the filesystem's own blocks are.
_LEAVING_SUFFIXES = (".deleted", "-delete")


def directory_uses(paths: Sequence[str]) -> tuple[DirectoryUse, ...]:
    """
    Measure directories; this blocks.

    Raises:
        OSError: One of them is not there or cannot be read.
    """
    found = []
    for path in paths:
        device, filesystem = os.stat(path).st_dev, os.statvfs(path)  # noqa: PTH116 - paths are text here
        total_bytes = filesystem.f_blocks * filesystem.f_frsize
        found.append(DirectoryUse(path, device, total_bytes, sum(_file_bytes(path, device))))
    return tuple(found)


def _file_bytes(path: str, device: int) -> Iterable[int]:
    """Yield the size of each file below *path* on the same filesystem; what vanishes meanwhile has none."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(_LEAVING_SUFFIXES):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _file_bytes(entry.path, device)
                continue
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if found.st_dev == device:
                    yield found.st_blocks * _BLOCK_BYTES
