"""
Fetch the jars of the Kafka broker that tests, demo and benchmarks start.

The jars are outside the source tree, in `~/.cache/tieringd` or in `$TIERINGD_CACHE`. Each version has a
directory, which exists only when it is complete. `python -m tests.support.kafka_jars` fetches them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

KAFKA_VERSION = "4.1.0"
POM = Path(__file__).with_name("kafka-pom.xml")
QUICK_JAVA: Final = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""Options for a JVM that ends soon: the C1 compiler alone compiles fast."""
_PACKAGES = {"java": "a Java runtime, 17 or newer (Debian: default-jre-headless)", "mvn": "Debian: maven"}


class MissingPartError(RuntimeError):
    """A program or a jar that the tests need is missing; the message says how to get it."""


def tell_where(fetch: Callable[[], object]) -> int:
    """Fetch a component, and print where it is. Return the exit code: 1 where something is missing for it."""
    try:
        place = fetch()
    except MissingPartError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{place}\n")
    return 0


def cache_directory() -> Path:
    """Return the directory of fetched components."""
    configured = os.environ.get("TIERINGD_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "tieringd"


def jar_directory() -> Path:
    """Return the directory of the jars, which may not exist yet."""
    return cache_directory() / f"kafka-{KAFKA_VERSION}" / "lib"


def program(name: str) -> str:
    """
    Return the path of an installed program.

    Raises:
        MissingPartError: The program is not installed; the message names the package.
    """
    path = shutil.which(name)
    if path is None:
        raise MissingPartError(f"{name} is not installed; install it ({_PACKAGES[name]})")
    return path


def run_maven(*arguments: str) -> None:
    """
    Run Maven with *arguments*.

    Raises:
        MissingPartError: Java or Maven is not installed, or Maven failed.
    """
    program("java")
    options = " ".join([os.environ.get("MAVEN_OPTS", ""), *QUICK_JAVA])
    command = [program("mvn"), "-q", "-B", *arguments]
    environment = os.environ | {"MAVEN_OPTS": options}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise MissingPartError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def require_jars() -> Path:
    """
    Return the directory of the jars.

    Raises:
        MissingPartError: The jars have not been fetched.
    """
    directory = jar_directory()
    if not directory.is_dir():
        raise MissingPartError(f"{directory} is missing; run `python -m tests.support.kafka_jars`")
    return directory


def fetch_jars() -> Path:
    """
    Fetch the jars unless they are there, and return their directory.

    Raises:
        MissingPartError: Java or Maven is not installed, or Maven failed.
    """
    directory = jar_directory()
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / "fetching.lock").open("w") as lock:
        # Two Mavens would fetch into one repository. The second process finds what the first one fetched.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if directory.is_dir():
            return directory
        # The rename is the last step, so that an existing directory is always complete.
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix="fetching-") as temporary:
            fetched = Path(temporary) / "lib"
            run_maven("-f", str(POM), "dependency:copy-dependencies", f"-DoutputDirectory={fetched}")
            fetched.rename(directory)
    return directory


if __name__ == "__main__":
    sys.exit(tell_where(fetch_jars))
