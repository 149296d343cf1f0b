"""
The topic manifest: a topic's name, id, partition count and state, as JSON in the bucket.

It makes a bucket self-describing: the list of topic manifests, with the partition count in each, leads
to every partition manifest without any other knowledge.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tieringd.formats.json_document import decode_document, encode_document
from tieringd.formats.object_keys import TopicKey
from tieringd.model.partition import TopicIdPartition
from tieringd.model.topic_lifecycle import Deletion, Lease, Lifecycle

VERSION = 5
_READ_VERSIONS = (1, 2, 3, 4, VERSION)
_FIELDS_SINCE: dict[int, dict[str, Any]] = {
    2: {"archiving": "on", "original_retention": None, "retention_released": False},
    3: {"defaults": None},
    5: {"remote_delete": None, "deletion": None, "moved_to": ""},
}
"""The values of the fields that documents of older versions lack."""


class Archiving(StrEnum):
    """The operators' decision about a topic, independent of the configuration."""

    ON = "on"
    PAUSED = "paused"
    """The topic is neither uploaded nor trimmed until an operator resumes it."""


@dataclass(frozen=True, slots=True)
class OriginalRetention:
    """
    The topic's own retention settings before tieringd took over its retention.

    The values are the broker's text; None where the topic itself had no setting.
    """

    retention_ms: str | None
    retention_bytes: str | None
    effective_ms: int | None = None
    """
    The topic's effective retention then, from whatever source; -1 is without limit.

    It is the topic's total retention while tieringd manages it. None in a document before version 4.
    """
    effective_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TieringDefaults:
    """The values for a topic without settings of its own: the cluster's values at some time."""

    remote_write: bool
    remote_read: bool
    local_target_ms: int | None = None
    """The local target at the topic's creation, -1 without limit; None means the cluster's current value."""
    local_target_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TopicManifest:
    """One incarnation of a topic in one cluster."""

    key: TopicKey
    partition_count: int
    """One more than the highest partition that any daemon has archived."""
    created_at_ms: int
    lifecycle: Lifecycle = Lifecycle.LIVE
    archiving: Archiving = Archiving.ON
    original_retention: OriginalRetention | None = None
    """Set while tieringd manages the topic's retention on the broker."""
    retention_released: bool = False
    """Whether an operator gave the retention back. The configuration alone does not take it again."""
    defaults: TieringDefaults | None = None
    """The defaults when the topic was first seen; None before they were recorded."""
    remote_delete: bool | None = None
    """
    Whether deleting the topic deletes its objects, as last seen on the living topic.

    A deleted topic has no configuration that could be read. None before it was recorded.
    """
    deletion: Deletion | None = None
    """The note of its deletion; None while it is live."""
    moved_to: str = ""
    """The bucket in which this archive continues; empty while it continues in this one."""

    def partitions(self) -> tuple[TopicIdPartition, ...]:
        """Return the partitions 0 to `partition_count` - 1; some may have no manifest."""
        key = self.key
        return tuple(
            TopicIdPartition(key.cluster, key.topic, key.topic_id, number)
            for number in range(self.partition_count)
        )


def encode_topic_manifest(manifest: TopicManifest) -> bytes:
    """Return *manifest* as indented JSON, for people to read in the bucket."""
    document = {
        "version": VERSION,
        "cluster": manifest.key.cluster,
        "topic": manifest.key.topic,
        "topic_id": manifest.key.topic_id,
        "partition_count": manifest.partition_count,
        "created_at_ms": manifest.created_at_ms,
        "lifecycle": manifest.lifecycle,
        "archiving": manifest.archiving,
        "retention_released": manifest.retention_released,
        "original_retention": asdict(manifest.original_retention) if manifest.original_retention else None,
        "defaults": asdict(manifest.defaults) if manifest.defaults else None,
        "remote_delete": manifest.remote_delete,
        "deletion": asdict(manifest.deletion) if manifest.deletion else None,
        "moved_to": manifest.moved_to,
    }
    return encode_document(document)


def decode_topic_manifest(data: bytes) -> TopicManifest:
    """
    Return the manifest in *data*.

    Raises:
        CorruptDataError: The bytes are not a topic manifest of a known version.
    """
    return decode_document(data, _manifest, kind="topic manifest", versions=_READ_VERSIONS)


def _manifest(document: dict[str, Any]) -> TopicManifest:
    for later, fields in _FIELDS_SINCE.items():
        if document["version"] < later:
            document = {**fields, **document}
    original, defaults = document["original_retention"], document["defaults"]
    return TopicManifest(
        TopicKey(document["cluster"], document["topic"], document["topic_id"]),
        partition_count=int(document["partition_count"]),
        created_at_ms=int(document["created_at_ms"]),
        lifecycle=Lifecycle(document["lifecycle"]),
        archiving=Archiving(document["archiving"]),
        retention_released=bool(document["retention_released"]),
        original_retention=None if original is None else OriginalRetention(**original),
        defaults=None if defaults is None else TieringDefaults(**defaults),
        remote_delete=None if document["remote_delete"] is None else bool(document["remote_delete"]),
        deletion=_deletion(document["deletion"]),
        moved_to=str(document["moved_to"]),
    )


def _deletion(document: dict[str, Any] | None) -> Deletion | None:
    if document is None:
        return None
    lease = document["lease"]
    return Deletion(**{**document, "lease": None if lease is None else Lease(**lease)})
