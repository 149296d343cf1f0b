"""
The positions at which reading begins and ends: an end of the archive, offsets, or times.

As in Spark's Kafka source, the most general of a side's options wins: one time for all partitions, then a
time for each, then offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from tieringd.model.partition import TopicPartition
from tieringd.spark.source.option_values import OptionValues, fault

LATEST_OFFSET: Final = -1
EARLIEST_OFFSET: Final = -2
"""The offsets with which Kafka's clients name the two ends of a log."""


class Edge(Enum):
    """An end of the archive."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """An offset for each partition; LATEST_OFFSET and EARLIEST_OFFSET mean the archive's ends."""

    offsets: Mapping[TopicPartition, int]
    option: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class AtTimes:
    """The first record of each partition at its own time or later."""

    times_ms: Mapping[TopicPartition, int]
    option: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first record of every partition at *timestamp_ms* or later."""

    timestamp_ms: int
    option: str = field(compare=False)


Position: TypeAlias = Edge | AtOffsets | AtTimes | AtTime


def read_start(values: OptionValues, *, is_streaming: bool) -> Position:
    """
    Return the position at which to begin.

    Raises:
        ConfigError: An option is wrong, or a batch would begin at the archive's end.
    """
    default = Edge.LATEST if is_streaming else Edge.EARLIEST
    position = _read(values, "starting", default)
    if not is_streaming and Edge.LATEST in _edges(position):
        raise fault(
            "startingOffsets", "a batch cannot begin at the latest offset: there are no records after it"
        )
    return position


def read_end(values: OptionValues) -> Position:
    """
    Return the position at which a batch ends.

    Raises:
        ConfigError: An option is wrong, or the batch would end at the archive's beginning.
    """
    position = _read(values, "ending", Edge.LATEST)
    if Edge.EARLIEST in _edges(position):
        raise fault(
            "endingOffsets", "a batch cannot end at the earliest offset: there are no records before it"
        )
    return position


def _read(values: OptionValues, side: str, default: Edge) -> Position:
    time_ms = values.timestamp_ms(f"{side}Timestamp")
    if time_ms is not None:
        return AtTime(time_ms, f"{side}Timestamp")
    by_time = f"{side}OffsetsByTimestamp"
    times = values.by_partition(by_time, _time_ms)
    if times is not None:
        return AtTimes(times, by_time)
    name = f"{side}Offsets"
    edge = (values.text(name) or default.value).lower()
    if edge in {one.value for one in Edge}:
        return Edge(edge)
    if not edge.startswith("{"):
        raise fault(
            name, f'must be earliest, latest, or JSON such as {{"orders": {{"0": 23}}}}, not {edge!r}'
        )
    return AtOffsets(values.by_partition(name, _offset) or {}, name)


def _edges(position: Position) -> set[Edge]:
    """Return the ends of the archive that a position names for some partition."""
    if isinstance(position, Edge):
        return {position}
    if not isinstance(position, AtOffsets):
        return set()
    edges = {LATEST_OFFSET: Edge.LATEST, EARLIEST_OFFSET: Edge.EARLIEST}
    return {edges[offset] for offset in position.offsets.values() if offset in edges}


def _offset(value: object) -> int:
    if type(value) is not int or value < EARLIEST_OFFSET:
        raise ValueError(f"{value!r} is not an offset; -2 is the earliest one, -1 the latest")
    return value


def _time_ms(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not milliseconds since the epoch")
    return value
