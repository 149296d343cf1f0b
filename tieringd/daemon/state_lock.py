"""The lock of a state directory: one daemon or archive endpoint has it at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from tieringd.config import Config
from tieringd.errors import ConfigError


@contextmanager
def sole_owner(config: Config) -> Iterator[None]:
    """
    Hold the state directory's lock, so that no second daemon starts with the same configuration.

    The kernel releases the lock when the process ends, however it ends.

    Raises:
        ConfigError: Another daemon holds the lock, or the state directory cannot be used.
    """
    path = config.state_directory / "lock"
    try:
        config.state_directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise ConfigError(
            f"state_directory {config.state_directory} cannot be used: {error.strerror}",
            hint="Allow the daemon's user to create it and write in it",
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another tieringd runs with state_directory {config.state_directory}",
                hint="Stop that daemon first, or give this one its own state_directory and log directories",
            ) from error
        yield
