"""
The machine code that daemons of one benchmark compile, kept from one to the next.

Each begins with an empty state directory. Compiling the walk over batches anew takes seconds of CPU, which a
daemon has behind it after its first start.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_VARIABLE = "NUMBA_CACHE_DIR"


@contextmanager
def kept_machine_code(directory: Path) -> Iterator[None]:
    """Let the daemons that are started in the context keep in *directory* what they compile."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
