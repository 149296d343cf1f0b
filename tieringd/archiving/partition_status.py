"""
The state of one partition's archiver, as the status page, `run --once` and the metrics tell it.

`PartitionFault` is what they count by, so that all three agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from tieringd.archiving.good_part import OperatorWait
from tieringd.model.partition import Leadership

_WAITING_TOPICS: Final = 50
_OTHER_TOPICS: Final = "(others)"


class PartitionFault(Enum):
    """What is wrong with a partition, as metrics and the status page name it."""

    CORRUPT = "corrupt"
    """Its local data is damaged."""
    FENCED = "fenced"
    """Another daemon archives it under the same leader epoch."""
    OPERATOR = "operator"
    """It waits because only an operator can decide."""
    STORE = "store"
    """The object store failed."""
    OTHER = "other"
    """A step failed in another way, and is tried again."""


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """The state of one archiver, for the admin page and for `--once`."""

    uploaded: int = 0
    trimmed: int = 0
    pending_segments: int = 0
    fault: str = ""
    waits_because: str = field(default="", compare=False)
    """Why the first segment that is not eligible waits."""
    is_store_fault: bool = False
    """Whether the object store caused the fault, so that other partitions suffer from it as well."""
    operator_wait: OperatorWait | None = field(default=None, compare=False)
    """The case that only an operator can decide; None without one."""
    fault_kind: PartitionFault | None = field(default=None, compare=False)
    """The kind of the fault; None without one."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of one pass over all partitions."""

    statuses: Mapping[Leadership, PartitionStatus]
    problems: Mapping[str, str]
    """What was left out, and why: the pass is incomplete unless this is empty."""


def bounded_waits(waiting: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Return *waiting* with its first topics by name, and the others as one: metrics must stay few."""
    topics = sorted({topic for topic, _ in waiting})[:_WAITING_TOPICS]
    found: Counter[tuple[str, str]] = Counter()
    for (topic, reason), partitions in waiting.items():
        found[topic if topic in topics else _OTHER_TOPICS, reason] += partitions
    return found
