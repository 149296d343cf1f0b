"""
Java options for tests: a JVM that starts in half the time.

A short-lived JVM spends most of its time on loading classes and on optimising compilation. An archive of
class data has the classes of Kafka or Spark in their form in memory, and the C1 compiler alone compiles
fast. `python -m tests.support.make_class_data` makes the archives. Without them a JVM works, but starts
more slowly.

Java checks that an archive belongs to its own version and to the jars. The archive's name has a digest of
both, so that another Java or other jars use another file.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.support.kafka_jars import QUICK_JAVA, jar_directory
from tests.support.spark_workers import interpreter


def kafka_archive() -> Path:
    """Return the path of the archive of Kafka's classes, beside the jars. It may not exist."""
    return _archive_of(jar_directory(), jar_directory().parent)


def spark_archive() -> Path:
    """Return the path of the archive of Spark's classes, in PySpark's environment. It may not exist."""
    found = find_spec("pyspark")
    assert found is not None, "PySpark is missing; run `make install-dev`"
    assert found.origin is not None
    return _archive_of(Path(found.origin).parent / "jars", Path(sys.prefix) / "class-data")


def options_with(archive: Path) -> list[str]:
    """Return the Java options for a quick start, with the classes of *archive* if it exists."""
    if not archive.exists():
        return list(QUICK_JAVA)
    # Without -Xlog:disable, Java prints a line on standard output if the archive does not fit.
    return [*QUICK_JAVA, f"-XX:SharedArchiveFile={archive}", "-Xshare:auto", "-Xlog:disable"]


def spark_java_options() -> str:
    """Return the Java options for a quick start of one of Spark's JVMs."""
    return " ".join(options_with(spark_archive()))


def spark_environment() -> dict[str, str]:
    """Return the environment variables for a quick start of PySpark's sessions and commands."""
    return interpreter() | {
        # For a first JVM, which computes the command line of the second one.
        "SPARK_LAUNCHER_OPTS": " ".join(QUICK_JAVA),
        "SPARK_SUBMIT_OPTS": spark_java_options(),
    }


@cache
def _archive_of(jars: Path, place: Path) -> Path:
    java = Path(shutil.which("java") or "java").resolve()
    files = [java, *sorted(jars.glob("*.jar"))]
    told = [(str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in files if one.exists()]
    digest = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
    return place / f"class-data-{digest}.jsa"
