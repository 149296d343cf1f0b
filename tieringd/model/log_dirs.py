"""What the log directories of a cluster's brokers hold, as the brokers themselves tell it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieringd.model.partition import TopicPartition

NO_BROKER = -1
"""Stands for a broker's id where there is no broker, or no one knows which."""


@dataclass(frozen=True, slots=True)
class ReplicaSize:
    """The `.log` bytes of one partition in one log directory."""

    topic_partition: TopicPartition
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LogDirSizes:
    """One log directory of one broker."""

    broker: int
    path: str
    """Empty where the broker did not tell of its log directories at all."""
    replicas: tuple[ReplicaSize, ...] = ()
    error: str = ""
    """Why it is not known what is there; empty when it is."""
