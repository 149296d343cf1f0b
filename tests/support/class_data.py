"""
Java options for tests: a JVM that starts in half the time.

Most of a short JVM's life goes into loading classes and compiling them well. An archive of class data
has the classes of Kafka or Spark as they are in memory, and the C1 compiler alone compiles fast.
`python -m tests.support.make_class_data` makes the archives. Without them a JVM runs the same, and
starts more slowly.

Java checks that an archive belongs to its own version and to the jars. The digest in an archive's name
says the same: another Java or other jars look for another file.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tests.support.kafka_jars import jar_directory

QUICK: Final = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def kafka_archive() -> Path:
    """Return where the archive of Kafka's classes is, or would be: beside the jars."""
    return _archive_of(jar_directory(), jar_directory().parent)


def spark_archive() -> Path:
    """Return where the archive of Spark's classes is, or would be: in the virtual environment of PySpark."""
    found = find_spec("pyspark")
    assert found is not None, "PySpark is missing; run `make install-dev`"
    assert found.origin is not None
    return _archive_of(Path(found.origin).parent / "jars", Path(sys.prefix) / "class-data")


def options_with(archive: Path) -> list[str]:
    """Return the Java options for a quick start, with the classes of *archive* if it has been made."""
    if not archive.exists():
        return list(QUICK)
    # Java would print a line on standard output where it finds an archive unfit.
    return [*QUICK, f"-XX:SharedArchiveFile={archive}", "-Xshare:auto", "-Xlog:disable"]


def spark_environment() -> dict[str, str]:
    """Return the variables that give these options to the JVMs of PySpark's sessions and commands."""
    return {
        # The JVM that finds out the command line of the second one.
        "SPARK_LAUNCHER_OPTS": " ".join(QUICK),
        "SPARK_SUBMIT_OPTS": " ".join(options_with(spark_archive())),
    }


@cache
def _archive_of(jars: Path, place: Path) -> Path:
    java = Path(shutil.which("java") or "java").resolve()
    files = [java, *sorted(jars.glob("*.jar"))]
    told = [(str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in files if one.exists()]
    digest = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
    return place / f"class-data-{digest}.jsa"
