"""
The machine code that daemons of one benchmark compile, kept from one to the next.

Each begins with an empty state directory. Compiling the walk over batches anew takes seconds of CPU, which a
daemon has behind it after its first start.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NAME = "machine-code"
"""The directory in a daemon's state directory."""


@contextmanager
def kept_machine_code(kept: Path, state_directory: Path) -> Iterator[None]:
    """Put what is in *kept* into *state_directory*. Keep there what was compiled, where it is the first."""
    place = state_directory / _NAME
    if kept.exists():
        shutil.copytree(kept, place)
    try:
        yield
    finally:
        if place.exists() and not kept.exists():
            shutil.copytree(place, kept)
