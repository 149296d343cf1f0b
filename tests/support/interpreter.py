"""
The interpreter for `.venv`, chosen by how it was built.

Distributions and python.org build CPython with profile-guided optimization. pyenv and a plain `configure` do
not, and the same work takes a tenth more CPU there. So `python3` is taken if it was built with it, or else
the distribution's own, if that one is recent enough and can make virtual environments.

This module imports only the standard library. `make` runs it before anything is installed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from typing import Final

DISTRIBUTIONS: Final = "/usr/bin/python3"
OLDEST: Final = (3, 11)
_CAN_SERVE: Final = f"import sys, ensurepip, venv, ssl, sqlite3; sys.exit(sys.version_info < {OLDEST})"


def chosen(own: str, *, is_optimized: bool, distributions: str = DISTRIBUTIONS) -> str:
    """Return the path of the interpreter to use: *own*, or the distribution's."""
    return own if is_optimized or not _can_serve(distributions) else distributions


def is_optimized() -> bool:
    """Say whether this interpreter was built with profile-guided optimization."""
    return "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")


def _can_serve(interpreter: str) -> bool:
    try:
        done = subprocess.run([interpreter, "-c", _CAN_SERVE], check=False, capture_output=True, timeout=60)
    except OSError:
        return False
    return done.returncode == 0


if __name__ == "__main__":
    sys.stdout.write(chosen(sys.executable, is_optimized=is_optimized()) + "\n")
