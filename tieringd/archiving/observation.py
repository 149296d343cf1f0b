"""
One look at a partition: what the reconciler hands to the partition's archiver.

Looks are numbered, because an archiver may act on one look several times: for each batch of uploads, for each
change that is offered to it, and when the disk needs room. What takes two looks takes two numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tieringd.policies.pinning import with_pins

if TYPE_CHECKING:
    from tieringd.config import TopicConfig
    from tieringd.model.local_log import LocalLog
    from tieringd.model.partition import LogBounds
    from tieringd.policies.pinning import Pin


@dataclass(frozen=True, slots=True)
class Observation:
    """A partition's files, bounds and configuration, all read in one round."""

    log: LocalLog
    """The broker's own files."""
    bounds: LogBounds
    topic: TopicConfig
    pins: tuple[Pin, ...] = ()
    looked_at: float = field(default=math.inf, compare=False)
    """When the look began, in loop time: what was done later may not show in it."""
    look: int = field(kw_only=True, compare=False)
    """The number of the look; a later look has a higher one."""
    uploadable: LocalLog = field(init=False)
    """The broker's files, and before them those that only pins hold."""

    def __post_init__(self) -> None:
        log = replace(self.log, segments=with_pins(self.log, self.pins)) if self.pins else self.log
        object.__setattr__(self, "uploadable", log)

    def renumbered(self, look: int, *, looked_at: float = math.inf) -> Observation:
        """Return this observation as a later look made it again: look number *look* found nothing new."""
        return replace(self, look=look, looked_at=looked_at)

    def shows_same(self, other: Observation | None) -> bool:
        """Say whether no look found a change between this observation and *other*; compares no files."""
        return other is not None and (
            self.log is other.log
            and self.bounds is other.bounds
            and self.topic is other.topic
            and self.pins is other.pins
        )
