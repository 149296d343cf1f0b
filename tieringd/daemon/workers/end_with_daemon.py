"""
The kernel ends a worker when its daemon ends, also while the worker is still starting.

A worker's imports take seconds. Until then it has no link that it could find closed, and it keeps the port: a
daemon that was killed and started again at once would find the address in use. This module imports little, so
that it can be called first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
from typing import Final

ORPHANED: Final = 3
"""The exit code of a worker whose daemon has ended."""
_PR_SET_PDEATHSIG: Final = 1
_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group of the process that made a socket pair."""


def end_with_daemon(link_fd: int) -> None:
    """
    Have the kernel kill this process when its daemon ends; end at once if that has happened already.

    *link_fd* is a socket of the pair that the daemon has made. On systems other than Linux nothing is done:
    a worker that has started sees the end of its link.
    """
    if sys.platform != "linux":
        return
    # glibc and musl have it. The signal is for the end of the thread that started this process, which is the
    # main thread of the daemon.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(fileno=os.dup(link_fd)) as link:
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    daemon, *_ = _CREDENTIALS.unpack(credentials)
    if os.getppid() != daemon:
        # It ended before the kernel was asked, and another process has taken its children over.
        os._exit(ORPHANED)
