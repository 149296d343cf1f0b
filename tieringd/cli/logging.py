"""The daemon's log on standard error: JSON lines, or readable text for a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from tieringd.errors import ConfigError, TieringError

if TYPE_CHECKING:
    from structlog.typing import EventDict

    # An ordinary import would load pydantic and xxhash into processes that do not need them.
    from tieringd.config.model import LogConfig

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_WINDOW_SECONDS = 60.0
_PASSED_IN_WINDOW = 50
"""Enough to see which partitions suffer."""
_WINDOWS_MAX = 1000


class _Threshold:
    """
    Drop events below the current level.

    The level is here and not in the loggers: a bound logger would keep the level of the time it was bound,
    and miss a reload of the configuration.
    """

    def __init__(self) -> None:
        self.level = _LEVELS["info"]

    def __call__(self, _logger: object, name: str, event: EventDict) -> EventDict:
        if structlog.processors.NAME_TO_LEVEL[name] < self.level:
            raise structlog.DropEvent
        return event


_threshold = _Threshold()


def one_type_each(_logger: object, _name: str, event: EventDict) -> EventDict:
    """
    Give `partition` one type: its number, with the topic's name in `topic`.

    A store of logs takes a field's type from the first event that has it, and refuses events with another.
    """
    found = event.get("partition")
    if isinstance(found, str):
        topic, separator, number = found.rpartition("-")
        if separator and number.isdecimal():
            event.setdefault("topic", topic)
            event["partition"] = int(number)
        else:
            event["partition_name"] = event.pop("partition")
    return event


class RepeatFold:
    """
    Fold warnings and errors that come again and again, such as each step of each partition at a full store.

    In each window the first few of an event pass; the others are counted. The next one after the window has
    their number as `repeated`.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._windows: dict[tuple[object, object], list[float]] = {}

    def __call__(self, _logger: object, name: str, event: EventDict) -> EventDict:
        """Return *event*, or drop it and count it."""
        if structlog.processors.NAME_TO_LEVEL[name] < _LEVELS["warning"]:
            return event
        key = (event.get("event"), name)
        now = self._now()
        began, passed, folded = self._windows.get(key, [now, 0, 0])
        if now - began >= _WINDOW_SECONDS:
            if folded:
                event["repeated"] = int(folded)
            began, passed, folded = now, 0, 0
        is_folded = passed >= _PASSED_IN_WINDOW
        if key in self._windows or len(self._windows) < _WINDOWS_MAX:
            self._windows[key] = [began, passed + (not is_folded), folded + is_folded]
        if is_folded:
            raise structlog.DropEvent
        return event


def set_level(config: LogConfig) -> None:
    """Set the level below which events are dropped from now on."""
    _threshold.level = _LEVELS[config.level]


def configure_logging(config: LogConfig) -> None:
    """Send structured events, and the libraries' warnings, to standard error."""
    set_level(config)
    renderer: structlog.typing.Processor
    if config.format == "json":
        renderer = structlog.processors.JSONRenderer()
        # Tracebacks leave out local variables, which may hold a secret.
        tracebacks: structlog.typing.Processor = structlog.processors.ExceptionRenderer(
            structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        )
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        tracebacks = structlog.processors.ExceptionPrettyPrinter(file=sys.stderr)
    structlog.configure(
        processors=[
            _threshold,
            RepeatFold(),
            structlog.contextvars.merge_contextvars,
            one_type_each,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            tracebacks,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS["debug"]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    # These libraries log each lost connection. Our own errors report a loss once, and what to do.
    for chatty in ("aiokafka", "botocore", "aiobotocore"):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)


@contextmanager
def fatal_errors_logged(config: LogConfig) -> Iterator[None]:
    """
    Log the error that ends the process as an event `ended by an error`, where the log is JSON.

    The line of text for people follows all the same.
    """
    try:
        yield
    except TieringError as error:
        if config.format == "json":
            structlog.get_logger(__name__).critical(
                "ended by an error",
                error=error.message,
                kind=type(error).__name__,
                hint=error.hint,
                problems=list(error.problems) if isinstance(error, ConfigError) else [],
                exit_code=2 if isinstance(error, ConfigError) else 1,
            )
        raise
    except Exception:
        if config.format == "json":
            structlog.get_logger(__name__).critical("ended by a defect", exc_info=True, exit_code=1)
        raise
