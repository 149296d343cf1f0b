"""
Recent warnings and errors of the daemon's log, folded for the status page.

A full store makes the same error for each partition at each step. The page shows one line for it: what it
says, how often it came in the last minutes, the last example, and what to do about it.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict

WINDOW_SECONDS: Final = 300
_BUCKET_SECONDS: Final = 10
_MOST_EVENTS: Final = 100
_LEVELS: Final = {"warning": "warning", "error": "error", "exception": "error", "critical": "error"}
_EXAMPLES: Final = ("error", "reason", "problems", "change", "warning", "path")
_PLACES: Final = ("partition", "topic", "path", "log_dirs")

_REMEDIES: Final = {
    "archiver step failed": "tieringd explain TOPIC PARTITION says what holds a partition back",
    "reconciliation round failed": "check that the broker answers, and that each log directory can be read",
    "left out of this round": "allow the daemon's user to read the path, or grant DESCRIBE on the topic",
    "object store does not answer yet": "check endpoint, network and credentials of the object store",
    "segment is corrupt: the partition is neither uploaded nor trimmed from here on": (
        "let another broker lead the partition, and wait until tieringd_pinned_bytes is 0; then delete the "
        "replica on this broker: Kafka copies it again"
    ),
    "the partition waits for an operator": "see 'When a partition waits for an operator' in operating.md",
    "archiver stopped": (
        "run one tieringd for each broker: stop the other daemon, put a manifest that was deleted back, and "
        "then restart this one"
    ),
    "segments are not pinned: the broker may delete what is not durable": (
        "put broker.pin_directory on the file system of the log directory"
    ),
    "pin failed: the broker may delete what is not durable": (
        "put broker.pin_directory on the file system of the log directory, writable for the daemon's user"
    ),
    "gap recorded in the archive": "tieringd archive describe TOPIC shows the offsets; lengthen retention",
    "trim refused": "grant tieringd's user the ACL DELETE on the topic",
    "configuration is not reloaded: the new one is wrong": "tieringd config check names the fault",
    "configuration change waits for a restart": "restart tieringd when it suits",
    "the logs are over their area, and not enough of them may go; see `tieringd space plan`": (
        "tieringd space plan says why each partition stays; tier more topics, or add space"
    ),
    "archive fault": "tieringd archive scrub names the object, and what to do",
}
_OTHER_REMEDY: Final = "see 'What an error asks of you' in operating.md"


@dataclass(frozen=True, slots=True)
class FoldedError:
    """All recent events of one text."""

    event: str
    level: str
    example: str
    """What the last one said."""
    where: str
    """The partition, topic or path of the last one; empty without one."""
    times: int
    """How often it came in the last `WINDOW_SECONDS`."""
    seconds_ago: float
    """Seconds since the last one."""
    remedy: str


@dataclass(slots=True)
class _Seen:
    level: str
    last_at: float = 0.0
    example: str = ""
    where: str = ""
    hint: str = ""
    buckets: deque[list[float]] = field(default_factory=deque)
    """The start of each bucket in monotonic seconds, and how many events it has."""

    def times(self, now: float) -> int:
        return int(sum(count for began, count in self.buckets.copy() if began > now - WINDOW_SECONDS))


class RecentErrors:
    """A processor of structlog that remembers warnings and errors; any thread may read them."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    def __call__(self, _logger: object, name: str, event: EventDict) -> EventDict:
        """Remember *event* if it is a warning or an error, and pass it on."""
        self.note(name, event)
        return event

    def note(self, name: str, event: Mapping[str, Any]) -> None:
        """Remember *event* of the level *name* if it is a warning or an error."""
        if (level := _LEVELS.get(name)) is None:
            return
        now, text = self._now(), str(event.get("event", ""))
        seen = self._seen.pop(text, None) or _Seen(level)
        self._seen[text] = seen
        if len(self._seen) > _MOST_EVENTS:
            self._seen.popitem(last=False)
        seen.level, seen.last_at = level, now
        seen.example = next((str(event[one]) for one in _EXAMPLES if event.get(one)), "")
        seen.where = _place(event)
        seen.hint = str(event.get("hint", ""))
        if not seen.buckets or seen.buckets[-1][0] <= now - _BUCKET_SECONDS:
            seen.buckets.append([now, 0])
            while seen.buckets[0][0] <= now - WINDOW_SECONDS:
                seen.buckets.popleft()
        seen.buckets[-1][1] += 1

    def folded(self) -> list[FoldedError]:
        """Return the events of the last minutes, the newest first."""
        now = self._now()
        found = [
            FoldedError(
                text,
                seen.level,
                seen.example,
                seen.where,
                times,
                now - seen.last_at,
                seen.hint or _REMEDIES.get(text, _OTHER_REMEDY),
            )
            for text, seen in self._seen.copy().items()
            if (times := seen.times(now))
        ]
        return sorted(found, key=lambda one: one.seconds_ago)


def _place(event: Mapping[str, Any]) -> str:
    topic, partition = event.get("topic"), event.get("partition")
    if topic is not None and partition is not None:
        return f"{topic}-{partition}"
    return next((str(event[one]) for one in _PLACES if event.get(one)), "")


@contextmanager
def remembering(errors: RecentErrors) -> Iterator[None]:
    """Let *errors* see every event of the log for the time of the context."""
    # Loggers that are bound already share this list, so it is changed in place.
    processors: Any = structlog.get_config()["processors"]
    processors.insert(0, errors)
    try:
        yield
    finally:
        processors.remove(errors)
