"""
What Spark starts its Python workers from, for commands that run Spark on this machine: PySpark's daemon.

PySpark's own treats a session that ends like a failed task in each worker that waits for another one: such a
worker tries to tell Spark of it, and prints a stack where Spark is gone already. An operator would find that
below the report of a job that went well. Workers started from here just end.

Spark runs this as a program, with the module of the workers as its argument (`spark.python.daemon.module`).
"""

from __future__ import annotations

import signal
import socket

from pyspark import daemon

_ENDED = 1
"""What a worker returns that has no next task."""

_work = daemon.worker


def work_while_connected(sock: socket.socket, authenticated: bool) -> int:  # noqa: FBT001 - a signature of PySpark
    """Do one task of those that come by *sock*, as PySpark's `worker` does, if there is another one."""
    return _work(sock, authenticated) if _is_connected(sock) else _ENDED


def _is_connected(sock: socket.socket) -> bool:
    """Wait for a next task, and say whether there is one."""
    # As PySpark's worker does when it begins: these are the daemon's still, and would end that.
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except ConnectionError:
        return False


if __name__ == "__main__":
    daemon.worker = work_while_connected
    daemon.manager()
