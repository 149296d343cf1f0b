"""
The real components of the tests: those that the machine must have, and those that a run has used.

This module imports only the standard library. `python3 -m tests.support.components` runs before anything is
installed, and lists everything that is missing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.support.kafka_jars import cache_directory, jar_directory

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_JAVA: Final = 17
USED: Final[set[str]] = set()
"""The components that this process has started, with their versions."""


def used(name: str) -> None:
    """Note that a real component was started; the summary of a run lists it."""
    USED.add(name)


@dataclass(frozen=True)
class Need:
    """A program that the tests need, or that fetches a component that is not there yet."""

    what: str
    is_there: Callable[[], bool]
    install: str


def _has_java() -> bool:
    java = shutil.which("java")
    if java is None:
        return False
    said = subprocess.run([java, "-version"], check=False, capture_output=True, text=True).stderr
    found = re.search(r'version "(\d+)', said)
    return found is not None and int(found[1]) >= MIN_JAVA


def _has_fetched(pattern: str) -> bool:
    return any(cache_directory().glob(pattern))


NEEDS: Final = (
    Need(
        f"Java {MIN_JAVA} or newer, for Kafka and Spark", _has_java, "apt-get install openjdk-17-jre-headless"
    ),
    Need(
        "Maven, to fetch Kafka",
        lambda: jar_directory().is_dir() or shutil.which("mvn") is not None,
        "apt-get install maven",
    ),
    Need(
        "Node with npm, for Azurite and a client",
        lambda: all(shutil.which(name) for name in ("node", "npm")),
        "apt-get install nodejs npm",
    ),
    Need(
        "Go, to build a client",
        lambda: shutil.which("go") is not None,
        "apt-get install golang",
    ),
    Need(
        "promtool, or Debian's apt-get and dpkg-deb to fetch it",
        lambda: (
            shutil.which("promtool") is not None
            or _has_fetched("prometheus")
            or all(shutil.which(name) for name in ("apt-get", "dpkg-deb"))
        ),
        "put Prometheus' promtool on the PATH",
    ),
    Need(
        "libfaketime, or Debian's apt-get and dpkg-deb to fetch it",
        lambda: (
            any(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
            or _has_fetched("libfaketime")
            or all(shutil.which(name) for name in ("apt-get", "dpkg-deb"))
        ),
        "apt-get install libfaketime",
    ),
    Need(
        "Chromium, or Debian's apt-get and dpkg-deb to fetch it",
        lambda: (
            any(map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome")))
            or _has_fetched("chromium")
            or all(shutil.which(name) for name in ("apt-get", "dpkg-deb"))
        ),
        "apt-get install chromium",
    ),
)


def main() -> int:
    """Print what is missing, with the command that installs it; return the exit code."""
    missing = [need for need in NEEDS if not need.is_there()]
    for need in missing:
        sys.stderr.write(f"missing: {need.what}\n    {need.install}\n")
    if missing:
        sys.stderr.write("Nothing was begun. The tests run on real components and skip none.\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
