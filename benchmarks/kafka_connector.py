"""
Spark's own Kafka source, for `benchmarks.spark`: fetched through Maven, beside the jars of tests and demo.

The registry has no `spark-token-provider-kafka`, which the connector needs for delegation tokens. So that
part is compiled from `token_provider/`, and gives none: what reads records is the connector as it is.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pyspark

from tests.support.kafka_jars import QUICK_JAVA, MissingPartError, cache_directory, program, run_maven

CONNECTOR_VERSION = "4.2.0"
CLIENT_VERSION = "3.9.2"
_PARTS = (
    f"org.apache.spark:spark-sql-kafka-0-10_2.13:{CONNECTOR_VERSION}",
    f"org.apache.kafka:kafka-clients:{CLIENT_VERSION}",
    "org.apache.commons:commons-pool2:2.12.1",
)
_STUB = Path(__file__).with_name("token_provider")


def connector_jars() -> str:
    """
    Return the jars for `spark.jars`, and fetch them where they are not there yet.

    Raises:
        MissingPartError: Java or Maven is not installed, or one of them failed.
    """
    directory = cache_directory() / f"spark-kafka-{CONNECTOR_VERSION}"
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Renamed as the last step: a directory that exists is complete.
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix="fetching-") as temporary:
            fetched = Path(temporary) / "jars"
            fetched.mkdir()
            for part in _PARTS:
                run_maven("dependency:copy", f"-Dartifact={part}", f"-DoutputDirectory={fetched}")
            _compile(fetched, Path(temporary) / "classes")
            fetched.rename(directory)
    return ",".join(str(path) for path in sorted(directory.glob("*.jar")))


def _compile(jars: Path, classes: Path) -> None:
    java = Path(program("java")).resolve().parent
    spark_jars = Path(pyspark.__file__).parent / "jars"
    sources = [str(path) for path in sorted(_STUB.glob("*.java"))]
    quick = [f"-J{option}" for option in QUICK_JAVA]
    _run(str(java / "javac"), *quick, "-cp", f"{spark_jars}/*", "-d", str(classes), *sources)
    _run(str(java / "jar"), "cf", str(jars / "token-provider.jar"), "-C", str(classes), ".")


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise MissingPartError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
