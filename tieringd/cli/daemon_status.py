"""Ask the running daemon for its status, for commands that otherwise need only the bucket."""

from __future__ import annotations

from typing import Any

from tieringd import __version__
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
    try:
        return {
            one["partition"]: one["fault"] or one["waits_because"]
            for one in await _partitions(config) or ()
            if one["topic"] == topic and (one["fault"] or one["waits_because"])
        }
    except (KeyError, TypeError):
        return {}  # Another program listens there.


async def partition_status(config: Config, topic: str, number: int) -> dict[str, Any] | None:
    """
    Return what the daemon of *config* tells of a partition; empty if it does not archive it.

    None if no daemon answers.
    """
    try:
        partitions = await _partitions(config)
        if partitions is None:
            return None
        return next((one for one in partitions if (one["topic"], one["partition"]) == (topic, number)), {})
    except (KeyError, TypeError):
        return None  # Another program listens there.


async def _partitions(config: Config) -> list[dict[str, Any]] | None:
    """Return what the daemon tells of its partitions; None if no daemon answers."""
    found = await asked(config, "/status")
    return None if found is None else list(found["partitions"])


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


def why_silent(config: Config) -> str:
    """Return why `asked` had no answer, and what to do."""
    if not config.admin.enabled:
        return "the daemon has no admin page to ask: admin.enabled is false"
    if config.admin.port == 0:
        return "admin.port is 0, so only the daemon's log tells its port: give admin.port a number"
    where = f"{config.admin.host}:{config.admin.port}"
    return f"no daemon answers on {where}: is it running, and with this configuration?"


def why_unknown(config: Config) -> str:
    """Return why an answer to `asked` is not what this version expects, and what to do."""
    return (
        f"what answers on {config.admin.host}:{config.admin.port} is another program, or a daemon of another "
        f"version than this command's, {__version__}: restart a daemon that was upgraded"
    )
