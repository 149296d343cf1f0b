"""The daemon's log on standard error: JSON lines, or readable text for a terminal."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict

    # An ordinary import would load pydantic and xxhash into processes that do not need them.
    from tieringd.config.model import LogConfig

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


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
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            tracebacks,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS["debug"]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    # These libraries log each lost connection. Our own errors report a loss once, and what to do.
    for chatty in ("aiokafka", "botocore", "aiobotocore"):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
