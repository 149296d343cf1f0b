"""A directory in memory, for tests that store and sync thousands of small objects."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMORY = Path("/dev/shm")
_NEEDED_BYTES = 32 << 20


@contextmanager
def memory_directory() -> Iterator[Path]:
    """Yield a temporary directory in memory; on disk if the file system in memory is missing or full."""
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _NEEDED_BYTES
    with tempfile.TemporaryDirectory(prefix="tieringd-", dir=_MEMORY if has_room else None) as directory:
        yield Path(directory)
