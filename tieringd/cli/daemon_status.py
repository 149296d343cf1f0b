"""Ask the running daemon for its status, for commands that otherwise need only the bucket."""

from __future__ import annotations

from typing import Any

from tieringd.config import Config

_WAIT_SECONDS = 2.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - from the listening address


async def waiting(config: Config, topic: str) -> dict[int, str]:
    """
    Return what each partition of *topic* waits for, by partition number, as the daemon of *config* reports.

    A fault of the partition takes the place of what it waits for. Partitions that wait for nothing, or that
    this daemon does not archive, are left out. If the daemon does not answer, the result is empty: commands
    show the archive without a daemon as well.
    """
    found = await asked(config, "/status")
    try:
        return {
            one["partition"]: one["fault"] or one["waits_because"]
            for one in (found or {"partitions": ()})["partitions"]
            if one["topic"] == topic and (one["fault"] or one["waits_because"])
        }
    except (KeyError, TypeError):
        return {}  # Another program listens there.


async def asked(config: Config, path: str) -> Any:
    """Return the JSON of a page of the daemon of *config*; None if no daemon answers."""
    if not config.admin.enabled or config.admin.port == 0:
        return None
    from aiohttp import ClientError, ClientSession, ClientTimeout  # noqa: PLC0415 a tenth of a second

    host = _ANY_ADDRESS.get(config.admin.host, config.admin.host)
    host = f"[{host}]" if ":" in host else host
    try:
        async with (
            ClientSession(timeout=ClientTimeout(total=_WAIT_SECONDS)) as session,
            session.get(f"http://{host}:{config.admin.port}{path}") as response,
        ):
            response.raise_for_status()
            return await response.json()
    except (TimeoutError, ClientError, ValueError):
        return None  # No daemon listens there, or another program does.
