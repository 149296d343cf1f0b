"""
Topics that are brought into a live cluster: their names there, their settings, and what would lose them.

A broker deletes by the times of the records, and those are as old as the archive. A topic with the
cluster's ordinary retention would lose what was written to it within minutes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

KEEPING: Mapping[str, str] = {
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "message.timestamp.type": "CreateTime",
}
"""What a topic is created with: all that is written to it stays, and keeps its times."""

_UNLIMITED = -1
_LEGAL_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@dataclass(frozen=True, slots=True)
class Renaming:
    """What a topic is named in the target cluster."""

    pattern: str | None = None
    """A regular expression that the whole name matches; others keep their name."""
    replacement: str = ""
    r"""May refer to groups of the pattern: `\1`."""
    prefix: str = ""
    suffix: str = ""

    def name_of(self, topic: str) -> str:
        """
        Return the name in the target cluster.

        Raises:
            ValueError: It is no name that a topic may have, or the replacement names no group.
        """
        name = topic
        if self.pattern is not None:
            found = re.fullmatch(self.pattern, topic)
            try:
                name = topic if found is None else found.expand(self.replacement)
            except (re.error, IndexError) as error:
                raise ValueError(f"{self.replacement!r} cannot replace {self.pattern!r}: {error}") from error
        name = f"{self.prefix}{name}{self.suffix}"
        if not _LEGAL_NAME.fullmatch(name) or name in {".", ".."}:
            raise ValueError(f"topic {topic} would be named {name!r}, which no topic may be")
        return name


@dataclass(frozen=True, slots=True)
class TargetFault:
    """Why a topic would not keep what is written to it, and what to do."""

    reason: str
    hint: str


def target_fault(
    settings: Mapping[str, str], *, oldest_ms: int, size_bytes: int, now_ms: int
) -> TargetFault | None:
    """
    Say why a topic with these *settings* would not keep what is written to it; None where it would.

    *oldest_ms* is the time of its oldest record, -1 where none has a time; *size_bytes* what its largest
    partition has.
    """
    if settings.get("message.timestamp.type") == "LogAppendTime":
        return TargetFault(
            "message.timestamp.type=LogAppendTime: the records would lose their times",
            "Set it to CreateTime for the time of the recovery",
        )
    if "delete" not in settings.get("cleanup.policy", "delete"):
        return None
    kept_ms = int(settings.get("retention.ms", _UNLIMITED))
    if kept_ms >= 0 and 0 <= oldest_ms < now_ms - kept_ms:
        return TargetFault(
            f"retention.ms={kept_ms}, and the oldest record is {now_ms - oldest_ms} ms old: the broker would "
            "delete it within minutes",
            "Set retention.ms=-1 for it, or bring back less with --last-ms",
        )
    kept_bytes = int(settings.get("retention.bytes", _UNLIMITED))
    if 0 <= kept_bytes < size_bytes:
        return TargetFault(
            f"retention.bytes={kept_bytes}, and {size_bytes} bytes of a partition come: the broker would "
            "delete the oldest within minutes",
            "Set retention.bytes=-1 for it, or bring back less with --last-bytes",
        )
    return None
