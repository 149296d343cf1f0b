"""
Spark's Python workers in tests, which import nothing that their daemon has imported.

PySpark's daemon imports nothing before it forks a worker, and `pyspark.zip`, which is first on its path, has
no compiled modules. So each worker compiles and imports PySpark, Numba and the SDKs, and collects their
objects after each task. That was half of the processor time of Spark's workers in tests. The script
`spark-python` beside this module is the interpreter that Spark starts (`PYSPARK_PYTHON`). It imports once
what the workers need, from the installed packages, and then runs the daemon that Spark wants.

The runner of a streaming source has no daemon: Spark starts an interpreter for each query. Here it asks a
stem (`tests.support.warm_start`) for a process that has everything imported, and lives as long as that
process. Where there is no stem, it is the interpreter.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.support.warm_start import STEM_OPTION, Stem, become, end, serve, started

if TYPE_CHECKING:
    from collections.abc import Iterator

_READER: Final = ("tieringd.spark.source.batch", "tieringd.storage.s3.store")
_RUNNER: Final = "pyspark.sql.streaming.python_streaming_source_runner"
_STEM: Final = "TIERINGD_TESTS_SPARK_STEM"
"""The variable with the address of the stem."""
_IMPORTED: Final = {
    "pyspark.worker": ("tieringd.spark.source.task_reader", *_READER),
    "pyspark.sql.worker.create_data_source": ("tieringd.spark.source.data_source",),
    "pyspark.sql.worker.plan_data_source_read": _READER,
    _RUNNER: ("tieringd.spark.source.stream", *_READER),
}
"""What nearly all workers of a module import beside it."""


def interpreter() -> dict[str, str]:
    """Return the environment variables that have Spark start its workers in this way."""
    script = Path(__file__).with_name("spark-python")
    return {"PYSPARK_PYTHON": str(script), "TIERINGD_TESTS_PYTHON": sys.executable}


@contextmanager
def warm_runners() -> Iterator[None]:
    """Have the runners of streaming sources start from a stem. Sessions have to start in the context."""
    stem = Stem(__name__)
    os.environ[_STEM] = stem.address
    try:
        yield
    finally:
        del os.environ[_STEM]
        stem.close()


def main() -> None:
    """Do what an interpreter does with these arguments; a daemon of Spark gets its imports first."""
    arguments = sys.argv[1:]
    if arguments[:1] == [STEM_OPTION]:
        _be_stem(arguments[1])
    elif arguments[:1] != ["-m"] or not arguments[1].endswith("daemon"):
        if arguments == ["-m", _RUNNER] and _STEM in os.environ:
            with suppress(OSError):
                how = {"environ": dict(os.environ), "directory": str(Path.cwd())}
                sys.exit(started(os.environ[_STEM], arguments, (0, 1, 2), **how).wait())
        os.execv(sys.executable, [sys.executable, *arguments])
    else:
        _be_daemon(*arguments[1:])


def _be_stem(address: str) -> None:
    """Fork runners of streaming sources."""
    _import_for(_RUNNER)
    request = serve(address)
    become(request)
    paths = request["environ"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path not in sys.path and not path.endswith("pyspark.zip")]
    sys.argv = [_RUNNER]
    try:
        runpy.run_module(_RUNNER, run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        if isinstance(ending.code, int):
            end(ending.code & 0xFF)
        raise
    end(0)


def _be_daemon(daemon: str, *workers: str) -> None:
    sys.path[:] = [path for path in sys.path if not path.endswith("pyspark.zip")]
    for worker in workers:
        _import_for(worker)
    sys.argv = [daemon, *workers]
    runpy.run_module(daemon, run_name="__main__", alter_sys=True)


def _import_for(worker: str) -> None:
    for name in (worker, *_IMPORTED.get(worker, ())):
        import_module(name)
    # Workers reach these objects for all of their life: a collection would visit them in vain.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
