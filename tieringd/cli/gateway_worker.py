"""
`python -m tieringd.cli.gateway_worker`: one worker of a gateway, started by its daemon.

This is no command for people: its arguments are the daemon's version, and descriptors that it inherits. The
version matters where the package was upgraded under a running daemon: they would not understand each other.
"""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from tieringd import __version__
from tieringd.daemon.workers.end_with_daemon import end_with_daemon

if TYPE_CHECKING:
    from tieringd.daemon.workers.worker import Part, WorkerParts

WORKER_COMMAND = (sys.executable, "-m", "tieringd.cli.gateway_worker", __version__)
"""Starts a worker; the descriptors follow."""
_OTHER_VERSION = 4


def main() -> int:
    """Serve until the daemon drains this worker, and return the exit code."""
    version = sys.argv[1]
    if version != __version__:
        sys.stderr.write(
            f"a worker of the gateway cannot serve: tieringd {__version__} is installed, and the daemon is "
            f"{version}. Restart the daemon\n"
        )
        return _OTHER_VERSION
    link, port, counts = map(int, sys.argv[2:])
    end_with_daemon(link)
    return _served((link, port, counts))


def _served(descriptors: tuple[int, int, int]) -> int:
    # These imports take seconds, and the worker must end with its daemon before.
    import asyncio  # noqa: PLC0415

    import uvloop  # noqa: PLC0415

    from tieringd.cli.logging import configure_logging, set_level  # noqa: PLC0415
    from tieringd.daemon.workers.worker import ENDPOINT, GATEWAY, run_worker  # noqa: PLC0415

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(
            run_worker(
                descriptors,
                kinds={ENDPOINT: _endpoint, GATEWAY: _gateway},
                configure_log=lambda config: configure_logging(config.log),
                change_log=lambda config: set_level(config.log),
            )
        )


def _endpoint(parts: WorkerParts) -> AbstractAsyncContextManager[Part]:
    # A worker is of one kind, and the other one's imports would cost it time and memory.
    from tieringd.daemon.workers.endpoint_workers import endpoint_worker  # noqa: PLC0415

    return endpoint_worker(parts)


def _gateway(parts: WorkerParts) -> AbstractAsyncContextManager[Part]:
    from tieringd.daemon.workers.gateway_workers import gateway_worker  # noqa: PLC0415

    return gateway_worker(parts)


if __name__ == "__main__":
    sys.exit(main())
