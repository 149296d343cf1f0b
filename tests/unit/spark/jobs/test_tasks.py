"""The message of Spark's errors: a line that says what to look at."""

from __future__ import annotations

import pytest

from tieringd.spark.jobs.tasks import cause_of

CALLED = "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.\n: "
ABORTED = "org.apache.spark.SparkException: Job aborted due to stage failure: Task 3 failed 4 times"
PYTHON = """, most recent failure: Lost task 3.3 (TID 9): org.apache.spark.api.python.PythonException: \
Traceback (most recent call last):
  File "worker.py", line 7, in main
    process()
    ^^^^^^^^^
{raised}

\tat org.apache.spark.api.python.BasePythonRunner.hasNext(PythonRunner.scala:1)
Caused by: java.io.IOException: something else
"""
CHAINED = """KeyError: 'orders'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "store.py", line 8, in get
    raise StorageDenied(message)
tieringd.errors.StorageDenied: the store refuses the key. Look at the policy"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (CALLED + ABORTED + PYTHON.format(raised=CHAINED), "the store refuses the key. Look at the policy"),
        (
            CALLED + ABORTED + PYTHON.format(raised="OSError: [Errno 28] No space left on device"),
            "OSError: [Errno 28] No space left on device",
        ),
        (CALLED + ABORTED + PYTHON.format(raised="MemoryError"), "MemoryError"),
        (
            CALLED + ABORTED + ": ExecutorLostFailure\n\nDriver stacktrace:\n\tat x.y",
            ABORTED + ": ExecutorLostFailure",
        ),
        (
            CALLED + ABORTED + ": org.apache.spark.SparkException: \nError from python worker:\n"
            "  /usr/bin/python3: No module named tieringd\nPYTHONPATH was:\n  a.zip:b.zip\n\tat x.y",
            "/usr/bin/python3: No module named tieringd",
        ),
        ("[JAVA_GATEWAY_EXITED] Java has gone.", "[JAVA_GATEWAY_EXITED] Java has gone."),
        ("", "RuntimeError"),
    ],
    ids=[
        "our own",
        "the system's",
        "without words",
        "a lost executor",
        "another Python",
        "Spark's",
        "nothing",
    ],
)
def test_cause_is_a_line(text, cause):
    """The cause is what the task raised, or else what Spark says. It is one line, without what was called."""
    assert cause_of(RuntimeError(text)) == cause
