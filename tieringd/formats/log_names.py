"""
The names that a Kafka broker gives to directories and files under a log directory.

A name that is not recognised parses as None: its file is foreign and is left alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final

from tieringd.model.partition import TopicPartition

MAX_TOPIC_LENGTH = 249
_MAX_PARTITION = 2**31 - 1
_MAX_OFFSET = 2**63 - 1

_TOPIC = re.compile(r"[A-Za-z0-9._-]+")
_PARTITION_DIRECTORY = re.compile(r"(?P<topic>.+)-(?P<partition>0|[1-9][0-9]*)")
_PASSING_DIRECTORY = re.compile(
    r"(?P<topic>.+)-(?P<partition>0|[1-9][0-9]*)\.[^.]+-(?P<kind>delete|stray|future)"
)
_LOG_FILE = re.compile(r"(?P<base>[0-9]{20})\.(?P<kind>log|index|timeindex|txnindex|snapshot)")
_REMEMBERED_NAMES: Final = 16_384
"""Every round parses the same names: those of a broker with ten thousand partitions."""


class DirectoryKind(Enum):
    """The purpose of a directory under a log directory."""

    PARTITION = "partition"
    METADATA = "metadata"
    """The controllers' own log, which is never archived."""
    DELETED = "delete"
    STRAY = "stray"
    """Not assigned to this broker any more."""
    FUTURE = "future"
    """An unfinished copy from another log directory."""
    REMOTE_INDEX_CACHE = "remote-index-cache"
    """Kafka's own tiered storage keeps indexes here."""


@dataclass(frozen=True, slots=True)
class DirectoryName:
    """The parts of a directory's name."""

    kind: DirectoryKind
    topic_partition: TopicPartition | None = None
    """None for the index cache. The topic of a deleted, stray or future one may be cut short."""


class LogFileKind(Enum):
    """The files of a segment, by suffix."""

    LOG = "log"
    OFFSET_INDEX = "index"
    TIME_INDEX = "timeindex"
    TRANSACTION_INDEX = "txnindex"
    PRODUCER_SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True)
class FileName:
    """The parts of a segment file's name."""

    base_offset: int
    """The segment's first offset, or for a producer snapshot the exclusive end of what it covers."""
    kind: LogFileKind


def is_topic_name(name: str) -> bool:
    """Return whether Kafka allows *name* for a topic."""
    return _TOPIC.fullmatch(name) is not None and len(name) <= MAX_TOPIC_LENGTH and name not in {".", ".."}


@lru_cache(maxsize=_REMEMBERED_NAMES)
def parse_directory_name(name: str) -> DirectoryName | None:
    """Return the parts of the directory name *name*; None when no broker gives such a name."""
    if name == "remote-log-index-cache":
        return DirectoryName(DirectoryKind.REMOTE_INDEX_CACHE)
    kind = DirectoryKind.METADATA if name == "__cluster_metadata-0" else DirectoryKind.PARTITION
    match = _PARTITION_DIRECTORY.fullmatch(name)
    if match is None:
        match = _PASSING_DIRECTORY.fullmatch(name)
        if match is None:
            return None
        kind = DirectoryKind(match["kind"])
    partition = int(match["partition"])
    if not is_topic_name(match["topic"]) or partition > _MAX_PARTITION:
        return None
    return DirectoryName(kind, TopicPartition(match["topic"], partition))


def parse_file_name(name: str) -> FileName | None:
    """Return the parts of the file name *name*; None for anything else, unsettled files included."""
    match = _LOG_FILE.fullmatch(name)
    if match is None or int(match["base"]) > _MAX_OFFSET:
        return None
    return FileName(int(match["base"]), LogFileKind(match["kind"]))


def encode_file_name(base_offset: int, kind: LogFileKind) -> str:
    """Return the name of a segment's file."""
    return f"{base_offset:020d}.{kind.value}"
