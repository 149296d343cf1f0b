"""What the file may set for a topic: the properties below `topics`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tieringd.config.fields import AS_TOTAL, MAX_INT64, UNLIMITED, Choice, Flag, Number, Text, duration, size

_BUCKET = r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]"
_MAX_MINUTES = MAX_INT64 // 60_000

STRICT = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    hide_input_in_errors=True,
    use_attribute_docstrings=True,
)
"""How every section is read. Inputs stay out of errors: one of them may be a secret."""


class TopicProperties(BaseModel):
    """What the file sets for a topic, or for the topics that a pattern matches."""

    model_config = STRICT

    remote_write: Annotated[bool, Flag()] | None = Field(default=None, alias="redpanda.remote.write")
    """Upload this topic."""
    remote_read: Annotated[bool, Flag()] | None = Field(default=None, alias="redpanda.remote.read")
    """Serve reads of this topic from the archive."""
    remote_storage_enable: Annotated[bool, Flag()] | None = Field(default=None, alias="remote.storage.enable")
    """Kafka's name: both of the above."""
    remote_delete: Annotated[bool, Flag()] | None = Field(default=None, alias="redpanda.remote.delete")
    """Whether deleting the topic is to delete its objects. It takes write and read, and is true with both."""
    read_replica: Annotated[str, Text("text", _BUCKET, "must be a bucket's bare name")] | None = Field(
        default=None, alias="redpanda.remote.readreplica"
    )
    """The bucket that this topic is a read replica of: it is never uploaded, nor its objects deleted."""
    local_target_ms: Annotated[int, duration(1, MAX_INT64, UNLIMITED)] | None = Field(
        default=None, alias="retention.local.target.ms"
    )
    """Keep this much time on the broker; -1 is without limit."""
    local_target_bytes: Annotated[int, size(1, MAX_INT64, UNLIMITED)] | None = Field(
        default=None, alias="retention.local.target.bytes"
    )
    """Keep this many bytes of each partition on the broker; -1 is without limit."""
    local_retention_ms: Annotated[int, duration(0, MAX_INT64, UNLIMITED, AS_TOTAL)] | None = Field(
        default=None, alias="local.retention.ms"
    )
    """Kafka's name, which wins. -1 is without limit, -2 as long as total retention: no local limit."""
    storage_mode: Annotated[Literal["tiered_cloud", "cloud"], Choice()] | None = Field(
        default=None, alias="storage.mode"
    )
    """`tiered_cloud` keeps on the broker what local retention says; `cloud` only what is not durable yet."""
    managed_retention: Annotated[bool, Flag()] | None = Field(
        default=None, alias="tieringd.managed.retention"
    )
    """Set the broker's retention of the topic to unlimited, so that only tieringd deletes from it."""
    local_retention_bytes: Annotated[int, size(0, MAX_INT64, UNLIMITED, AS_TOTAL)] | None = Field(
        default=None, alias="local.retention.bytes"
    )
    """Kafka's name, which wins. -1 is without limit, -2 as much as total retention: no local limit."""
    retention_ms: Annotated[int, duration(1, MAX_INT64, UNLIMITED)] | None = Field(
        default=None, alias="retention.ms"
    )
    """Keep records this long in all, on the broker and in the archive; -1 is without limit."""
    retention_bytes: Annotated[int, size(1, MAX_INT64, UNLIMITED)] | None = Field(
        default=None, alias="retention.bytes"
    )
    """Keep this many bytes of each partition in all; -1 is without limit."""
    remote_log_retention_minutes: Annotated[int, Number(1, _MAX_MINUTES)] | None = Field(
        default=None, alias="remote.log.retention.minutes"
    )
    """KIP-405's first name of `retention.ms`, in minutes."""
    remote_log_retention_bytes: Annotated[int, size(1, MAX_INT64, UNLIMITED)] | None = Field(
        default=None, alias="remote.log.retention.bytes"
    )
    """KIP-405's first name of `retention.bytes`."""
    cleanup_policy: (
        Annotated[Literal["delete", "compact", "compact,delete", "delete,compact"], Choice()] | None
    ) = Field(default=None, alias="cleanup.policy")
    """Without `delete` total retention takes nothing. A broker's own setting need not be repeated."""
