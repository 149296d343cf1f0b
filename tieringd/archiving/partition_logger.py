"""
The loggers of an archiver's parts: their events name the partition.

A bound logger takes 400 bytes, and an archiver has eleven parts that may log. Ten thousand archivers would
keep forty megabytes of loggers, so a logger is bound when there is something to log.
"""

from __future__ import annotations

from typing import Any

import structlog

from tieringd.model.partition import Leadership, TopicIdPartition

log = structlog.get_logger(__name__)


class PartitionLogger:
    """Gives a part of an archiver the logger `_log`, by its `_partition`."""

    __slots__ = ()

    _partition: TopicIdPartition

    @property
    def _log(self) -> Any:
        return log.bind(topic=self._partition.topic, partition=self._partition.partition)


class LeadershipLogger:
    """Gives a part of an archiver the logger `_log`, by its `_leadership`, with the leader epoch."""

    __slots__ = ()

    _leadership: Leadership

    @property
    def _log(self) -> Any:
        partition = self._leadership.partition
        return log.bind(
            topic=partition.topic, partition=partition.partition, leader_epoch=self._leadership.leader_epoch
        )
