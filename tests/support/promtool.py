"""
Prometheus and promtool, which tests alert rules on made-up series; both from Debian's package.

They are installed outside the source tree, in `~/.cache/tieringd` or in `$TIERINGD_CACHE`, in a directory
that exists only when it is complete. `python -m tests.support.promtool` fetches them.
"""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

from tests.support.components import used
from tests.support.debian_packages import fetch_package
from tests.support.kafka_jars import MissingPartError, cache_directory, tell_where

if TYPE_CHECKING:
    from pathlib import Path

_PACKAGE = "prometheus"
_ELSEWHERE = "install promtool so that it is on the PATH"


def require_promtool() -> str:
    """
    Return the path of promtool: the program in PATH, or the one that was fetched.

    Raises:
        MissingPartError: There is neither.
    """
    return _required("promtool")


def require_prometheus() -> str:
    """
    Return the path of Prometheus, which is in the same package.

    Raises:
        MissingPartError: Prometheus is not in PATH, and was not fetched.
    """
    return _required("prometheus")


def _required(name: str) -> str:
    fetched = _fetched(name)
    found = shutil.which(name) or (str(fetched) if fetched.is_file() else None)
    if found is None:
        raise MissingPartError(f"{fetched} is missing; run `python -m tests.support.promtool`")
    used(name)
    return found


def fetch_promtool() -> str:
    """
    Fetch promtool unless it is installed, and return its path.

    Raises:
        MissingPartError: This is not Debian, or its package cannot be fetched.
    """
    try:
        return require_promtool()
    except MissingPartError:
        fetch_package(_PACKAGE, _fetched("promtool").parents[2], elsewhere=_ELSEWHERE)
    return require_promtool()


def _fetched(name: str) -> Path:
    return cache_directory() / "prometheus" / "usr" / "bin" / name


if __name__ == "__main__":
    sys.exit(tell_where(fetch_promtool))
