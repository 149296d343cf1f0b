"""
PySpark's daemon with another worker function. It forks the Python workers of Spark on this machine.

In PySpark's own daemon a waiting worker treats the end of the session as a failed task: it tries to report to
Spark, which is gone already, and prints a stack trace. An operator would find the trace below the report of a
successful job. Workers of this daemon just end.

Spark runs this as a program, with the module of the workers as its argument (`spark.python.daemon.module`).
"""

from __future__ import annotations

import signal
import socket

from pyspark import daemon

_ENDED = 1
"""The return code of a worker without a next task."""

_work = daemon.worker


def work_while_connected(sock: socket.socket, authenticated: bool) -> int:  # noqa: FBT001 - a signature of PySpark
    """Run the next task that arrives at *sock*, as PySpark's `worker` does; return if the session ended."""
    return _work(sock, authenticated) if _is_connected(sock) else _ENDED


def _is_connected(sock: socket.socket) -> bool:
    """Wait for the next task; return whether there is one."""
    # PySpark's worker resets these signals when it begins. Until then a forked worker has the daemon's
    # handlers, which would end the daemon.
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except ConnectionError:
        return False


if __name__ == "__main__":
    daemon.worker = work_while_connected
    daemon.manager()
