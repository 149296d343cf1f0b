"""
`python -m tieringd.cli.gateway_worker`: one worker of a gateway, started by its daemon.

This is no command for people: its arguments are descriptors that it inherits.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from tieringd.cli.logging import configure_logging, set_level
from tieringd.daemon.workers.endpoint_workers import ENDPOINT, endpoint_worker
from tieringd.daemon.workers.gateway_workers import GATEWAY, gateway_worker
from tieringd.daemon.workers.worker import run_worker

WORKER_COMMAND = (sys.executable, "-m", __name__ if __name__ != "__main__" else "tieringd.cli.gateway_worker")


def main() -> int:
    """Serve until the daemon drains this worker, and return the exit code."""
    link, port, counts = map(int, sys.argv[1:])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(
            run_worker(
                (link, port, counts),
                kinds={ENDPOINT: endpoint_worker, GATEWAY: gateway_worker},
                configure_log=lambda config: configure_logging(config.log),
                change_log=lambda config: set_level(config.log),
            )
        )


if __name__ == "__main__":
    sys.exit(main())
