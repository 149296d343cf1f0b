"""
A worker without clients, for tests of the pool: `python -m tests.fakes.pool_worker KIND LINK PORT COUNTS`.

It serves at once, after a long start, when it is asked to, or never. It ends by a fault, or by an error that
it reports.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from tieringd.daemon.workers.link import Link, error_parts
from tieringd.errors import ConfigError


async def main(kind: str, link_fd: int) -> int:
    """Behave as *kind* says, until the daemon drains this worker or ends."""
    started: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    stop, asked = asyncio.Event(), asyncio.Event()
    pulses = asyncio.Semaphore(0)

    def begin(greeting: object) -> None:
        if kind == "slow":
            link.hold()
        started.set_result(greeting)

    handlers = {
        "start": begin,
        "pulse": pulses.release,
        "serve": asked.set,
        "drain": lambda _: stop.set(),
        "echo": lambda *values: values,
        "figures": dict,
    }
    if kind == "mute":
        await asyncio.get_running_loop().create_future()
    link = await Link.over(socket.socket(fileno=link_fd), handlers, other_side="the daemon")
    messages = asyncio.create_task(link.run())
    await started
    if kind == "faulty":
        link.tell("failed", *error_parts(ConfigError("no such file", hint="Name another")))
        await link.drained()
        return 1
    if kind == "slow":
        for _ in range(8):
            await pulses.acquire()
        link.resume()
    if kind == "asked":
        await asked.wait()
    await link.ask("serving")
    if kind == "ending":
        os._exit(7)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({messages, stopping}, return_when=asyncio.FIRST_COMPLETED)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], int(sys.argv[2]))))
