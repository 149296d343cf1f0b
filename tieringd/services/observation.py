"""One look at a partition: what the reconciler hands to the partition's archiver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieringd.config import TopicConfig
    from tieringd.model.local_log import LocalLog
    from tieringd.model.partition import LogBounds


@dataclass(frozen=True, slots=True)
class Observation:
    """A partition's files, bounds and configuration, all read in one round."""

    log: LocalLog
    bounds: LogBounds
    topic: TopicConfig
