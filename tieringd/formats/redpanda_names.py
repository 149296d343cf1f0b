"""
The names that Redpanda gives to directories and files under its data directory.

    <data>/<namespace>/<topic>/<partition>_<revision>/<base>-<term>-v1.log

Numbers are not padded. The base is a raw offset (see `model.offset_translation`), the term is
Kafka's leader epoch, and the revision grows with every directory that the cluster ever made. Topics
of clients are in one namespace; the other namespaces are Redpanda's own.

A name that is not recognised parses as None: its file is foreign and is left alone. So are
`.log.staging`, `.log.compaction.staging` and the indexes beside it, which are work in progress
until Redpanda renames them over the segment, and the `.snapshot` files of its state machines.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from enum import Enum

CLIENTS_NAMESPACE = "kafka"
"""The only namespace whose offsets are translated, and the only one that is archived."""

KNOWN_VERSION = "v1"

_MAX_PARTITION = 2**31 - 1
_MAX_EPOCH = 2**31 - 1
_MAX_INT64 = 2**63 - 1
_TOPIC_ID_BYTES = 16

_NUMBER = r"0|[1-9][0-9]*"
_PARTITION_DIRECTORY = re.compile(rf"(?P<partition>{_NUMBER})_(?P<revision>{_NUMBER})")
_SEGMENT_FILE = re.compile(
    rf"(?P<base>{_NUMBER})-(?P<term>{_NUMBER})-(?P<version>[^.]+)\.(?P<kind>log|base_index|compaction_index)"
)
_SET_ASIDE_SUFFIX = ".cannotrecover"


class RawFileKind(Enum):
    """The files of a segment, by suffix."""

    LOG = "log"
    INDEX = "base_index"
    """
    Offsets and times (see `redpanda_index`).

    It may be late or missing, even after the segment is closed.
    """
    COMPACTION_INDEX = "compaction_index"
    """Keys. Only compacted topics have this file, and only their logs may have holes."""


@dataclass(frozen=True, slots=True)
class RawFileName:
    """The parts of a segment file's name."""

    raw_base_offset: int
    term: int
    kind: RawFileKind
    version: str = KNOWN_VERSION
    """A file of another version is a segment all the same, and must not be overlooked."""

    @property
    def leader_epoch(self) -> int:
        """Return the term as clients see it; -1 for one that is too large for Kafka."""
        return self.term if self.term <= _MAX_EPOCH else -1


def parse_partition_directory(name: str) -> tuple[int, int] | None:
    """Return the partition and revision of the directory *name*; None for any other directory."""
    match = _PARTITION_DIRECTORY.fullmatch(name)
    if match is None or int(match["partition"]) > _MAX_PARTITION or int(match["revision"]) > _MAX_INT64:
        return None
    return int(match["partition"]), int(match["revision"])


def parse_raw_file_name(name: str) -> RawFileName | None:
    """Return the parts of the file name *name*; None for anything else, work in progress included."""
    match = _SEGMENT_FILE.fullmatch(name)
    if match is None or int(match["base"]) > _MAX_INT64 or int(match["term"]) > _MAX_INT64:
        return None
    return RawFileName(int(match["base"]), int(match["term"]), RawFileKind(match["kind"]), match["version"])


def is_set_aside(name: str) -> bool:
    """Return whether Redpanda could not recover this segment: its offsets are missing from the log."""
    return name.endswith(_SET_ASIDE_SUFFIX)


def topic_id_of(revision: int) -> str:
    """
    Return *revision* in the form of a Kafka topic id.

    It distinguishes a topic that was created again from its earlier incarnation. It also changes when a
    partition moves to another broker, so the topic ids of Redpanda's Kafka API are better where they exist.
    """
    return base64.urlsafe_b64encode(revision.to_bytes(_TOPIC_ID_BYTES, "big")).decode().rstrip("=")
