"""One look at a partition: what the reconciler hands to the partition's archiver."""

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
    uploadable: LocalLog = field(init=False)
    """The broker's files, and before them those that only pins hold."""

    def __post_init__(self) -> None:
        log = replace(self.log, segments=with_pins(self.log, self.pins)) if self.pins else self.log
        object.__setattr__(self, "uploadable", log)
