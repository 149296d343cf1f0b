"""
Spark's Python workers in tests, which import nothing that their daemon has imported.

PySpark's daemon imports nothing before it forks a worker, and `pyspark.zip`, which is first on its path, has
no compiled modules. So each worker compiles and imports PySpark, Numba and the SDKs, and collects their
objects after each task. That was half of the processor time of Spark's workers in tests. The script
`spark-python` beside this module is the interpreter that Spark starts (`PYSPARK_PYTHON`). It imports once
what the workers need, from the installed packages, and then runs the daemon that Spark wants.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Final

_READER: Final = ("tieringd.spark.source.batch", "tieringd.storage.s3.store")
_IMPORTED: Final = {
    "pyspark.worker": ("tieringd.spark.source.task_reader", *_READER),
    "pyspark.sql.worker.create_data_source": ("tieringd.spark.source.data_source",),
    "pyspark.sql.worker.plan_data_source_read": _READER,
    "pyspark.sql.streaming.python_streaming_source_runner": ("tieringd.spark.source.stream", *_READER),
}
"""What nearly all workers of a module import beside it."""


def interpreter() -> dict[str, str]:
    """Return the environment variables that have Spark start its workers in this way."""
    script = Path(__file__).with_name("spark-python")
    return {"PYSPARK_PYTHON": str(script), "TIERINGD_TESTS_PYTHON": sys.executable}


def main() -> None:
    """Do what an interpreter does with these arguments; a daemon of Spark gets its imports first."""
    arguments = sys.argv[1:]
    if arguments[:1] != ["-m"] or not arguments[1].endswith("daemon"):
        os.execv(sys.executable, [sys.executable, *arguments])
    daemon, *workers = arguments[1:]
    sys.path[:] = [path for path in sys.path if not path.endswith("pyspark.zip")]
    for worker in workers:
        for name in (worker, *_IMPORTED.get(worker, ())):
            import_module(name)
    # Workers reach these objects for all of their life: a collection would visit them in vain.
    gc.collect()
    gc.freeze()
    sys.argv = [daemon, *workers]
    runpy.run_module(daemon, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
