"""The log directory of a stopped broker, which stays stopped while a command works in it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tieringd.errors import ConfigError, LocalFileError


@contextmanager
def kept_stopped(log_dir: Path) -> Iterator[None]:
    """
    Check that no broker runs on *log_dir*, and hold the lock of a running broker, so that none starts.

    Raises:
        ConfigError: A broker runs there, or this is no broker's log directory.
        LocalFileError: The lock's file cannot be opened.
    """
    if not (log_dir / "meta.properties").is_file():
        raise ConfigError(
            f"{log_dir} is not the log directory of a Kafka broker: it has no meta.properties",
            hint="Format it and start the broker once, create the topics, stop the broker, and run this "
            "again",
        )
    path = log_dir / ".lock"
    try:
        lock = path.open("a+b")
    except OSError as error:
        raise LocalFileError(
            f"{path}: {error.strerror}", path=str(path), hint="Run this command as the broker's user"
        ) from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"a broker is running on {log_dir}, or another restore: {path} is locked",
                hint="Stop the broker or the other restore first",
            ) from error
        yield
