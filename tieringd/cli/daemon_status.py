"""What the daemon of a configuration says of itself, for commands that otherwise need only the bucket."""

from __future__ import annotations

from tieringd.config import Config

_WAIT_SECONDS = 2.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what it listens on, and how to get there


async def waiting(config: Config, topic: str) -> dict[int, str]:
    """
    Return what each partition of *topic* waits for, as far as the daemon of *config* says.

    A partition that waits for nothing, or that this daemon does not archive, is not among them. A
    daemon that does not answer is no error: the archive can be looked at without one.
    """
    if not config.admin.enabled or config.admin.port == 0:
        return {}
    from aiohttp import ClientError, ClientSession, ClientTimeout  # noqa: PLC0415 a tenth of a second

    host = _ANY_ADDRESS.get(config.admin.host, config.admin.host)
    host = f"[{host}]" if ":" in host else host
    try:
        async with (
            ClientSession(timeout=ClientTimeout(total=_WAIT_SECONDS)) as session,
            session.get(f"http://{host}:{config.admin.port}/status") as response,
        ):
            response.raise_for_status()
            found = await response.json()
        return {
            one["partition"]: one["fault"] or one["waits_because"]
            for one in found["partitions"]
            if one["topic"] == topic and (one["fault"] or one["waits_because"])
        }
    except (TimeoutError, ClientError, ValueError, KeyError, TypeError):
        return {}  # Nobody is there, or somebody else.
