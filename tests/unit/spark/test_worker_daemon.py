"""Workers of Spark's that have no next task, over the protocol that the JVM speaks with their daemon."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import tempfile

import pytest


def _read_int(read) -> int:
    return struct.unpack("!i", read(4))[0]


def _has_ended(pidfd: int) -> bool:
    """Say whether a process has ended within a minute."""
    return bool(select.select([pidfd], [], [], 60)[0])


@pytest.fixture
def socket_directory():
    """Give a directory whose path is short: a socket's may have 107 characters."""
    with tempfile.TemporaryDirectory() as directory:
        yield directory


@pytest.mark.parametrize(
    "worker", ["pyspark.worker", "pyspark.sql.worker.plan_data_source_read"], ids=["tasks", "planning"]
)
def test_worker_without_a_next_task_ends_without_a_word(socket_directory, worker):
    """PySpark's own daemon prints a stack here, which came below the report of a command now and then."""
    environ = os.environ | {
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": socket_directory,
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
        "SPARK_REUSE_WORKER": "1",
    }
    command = [sys.executable, "-m", "tieringd.spark.worker_daemon", worker]
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as daemon:
        path = daemon.stdout.read(_read_int(daemon.stdout.read)).decode()
        with socket.socket(socket.AF_UNIX) as jvm:
            jvm.connect(path)
            pid = _read_int(jvm.recv)
            worker_end = os.pidfd_open(pid)
        try:
            assert _has_ended(worker_end), "it waits for a task that cannot come"
        finally:
            os.close(worker_end)
            daemon.stdin.close()
        assert daemon.stderr.read() == b""
