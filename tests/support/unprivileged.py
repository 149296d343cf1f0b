"""Code that runs without the rights of root."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOBODY = 65534
"""The number of the user that owns no file."""


@contextmanager
def unprivileged() -> Iterator[None]:
    """Run as another user where the tests run as root, because root may read and link every file."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
