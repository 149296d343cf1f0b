"""A directory in memory, for tests that store thousands of small objects and sync each."""

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
    """Give a directory in memory for the time of the context; on disk where memory has no room for files."""
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _NEEDED_BYTES
    with tempfile.TemporaryDirectory(prefix="tieringd-", dir=_MEMORY if has_room else None) as directory:
        yield Path(directory)
