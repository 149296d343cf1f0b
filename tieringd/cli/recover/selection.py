"""Select the archived topics that a recovery asks for, and list what the archive has of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tieringd.archive.catalog import ArchivedTopic, OnFault, OnPartitionFault, raised
from tieringd.cli.options import counted, names_noted
from tieringd.daemon.archive import Archive
from tieringd.errors import ConfigError, ObjectNotFound
from tieringd.formats.object_keys import TopicKey
from tieringd.policies.topic_lifecycle import BEYOND_RETURN

LISTED = (
    "cluster",
    "topic",
    "topic_id",
    "partitions",
    "segments",
    "size_bytes",
    "gap_offsets",
    "first_record",
    "last_record",
)
"""The columns of a listing."""


@dataclass(frozen=True, slots=True)
class TopicSelection:
    """Which archived topics to select, by name, cluster and topic id. None selects any."""

    patterns: Mapping[str, str]
    """The regular expressions of the names, by what an operator wrote. An empty one selects all names."""
    cluster: str | None = None
    topic_id: str | None = None

    def includes(self, key: TopicKey) -> bool:
        """Return whether a topic is selected. Its whole name must match one of the patterns."""
        return (
            (not self.patterns or any(re.fullmatch(one, key.topic) for one in self.patterns.values()))
            and self.cluster in {None, key.cluster}
            and self.topic_id in {None, key.topic_id}
        )

    def require_matched(self, names: Collection[str]) -> None:
        """
        Check that each pattern matches one of *names*. One that matches none is most likely mistyped.

        Raises:
            ObjectNotFound: Some match none; the message has them as the operator wrote them.
        """
        missing = [
            written
            for written, pattern in self.patterns.items()
            if not any(re.fullmatch(pattern, name) for name in names)
        ]
        if missing:
            raise ObjectNotFound(
                f"no archived topic that can be read matches {', '.join(missing)}",
                hint="`tieringd recover list` lists the archived topics",
            )


async def matching(
    archive: Archive,
    wanted: TopicSelection,
    *,
    on_fault: OnFault,
    on_partition_fault: OnPartitionFault = raised,
) -> list[ArchivedTopic]:
    """
    Return the selected archived topics with their partitions, by cluster and name.

    Manifests include their spilled segments. Topics whose archive is being purged or is gone are left out.
    A selected topic that cannot be read is given to *on_fault*. Other topics are not read. With
    *on_partition_fault* only a partition that cannot be read is left out, and given to it.
    """
    selected = archive.catalog.archived_topics(
        wanted.includes, with_history=True, on_fault=on_fault, on_partition_fault=on_partition_fault
    )
    return [one async for one in counted(selected, "topics") if one.topic.lifecycle not in BEYOND_RETURN]


async def matching_once(
    archive: Archive,
    wanted: TopicSelection,
    *,
    on_fault: OnFault,
    on_partition_fault: OnPartitionFault = raised,
) -> list[ArchivedTopic]:
    """
    Return the selected topics as `matching` does, at least one for each pattern, and each name only once.

    A topic that is given to *on_fault* counts as matched where another one can be read.

    Raises:
        ObjectNotFound: No archived topic matches one of the patterns, or none that can be read is selected.
        ConfigError: Two or more of the selected topics have the same name.
    """
    unread: set[str] = set()
    found = await matching(
        archive, wanted, on_fault=names_noted(on_fault, unread), on_partition_fault=on_partition_fault
    )
    wanted.require_matched({one.topic.key.topic for one in found} | (unread if found else set()))
    twice = repeated([one.topic.key.topic for one in found])
    if twice:
        raise ConfigError(
            f"the bucket holds more than one topic named {', '.join(twice)}",
            hint="Choose one with --from-cluster, or with --topic-id if the topic was created more than once",
        )
    return found


def repeated(names: Sequence[str]) -> list[str]:
    """Return the names that occur more than once, sorted."""
    return sorted({name for name in names if names.count(name) > 1})


def listing(found: ArchivedTopic) -> dict[str, Any]:
    """Return a topic's row of the listing, by column."""
    segments = [segment for one in found.partitions for segment in one.segments]
    times = [segment.max_timestamp_ms for segment in segments if segment.max_timestamp_ms >= 0]
    starts = [segment.base_timestamp_ms for segment in segments if segment.base_timestamp_ms >= 0]
    return {
        "cluster": found.topic.key.cluster,
        "topic": found.topic.key.topic,
        "topic_id": found.topic.key.topic_id,
        "partitions": found.topic.partition_count,
        "segments": len(segments),
        "size_bytes": sum(segment.size_bytes for segment in segments),
        "gap_offsets": sum(gap.next_offset - gap.base_offset for one in found.partitions for gap in one.gaps),
        "first_record": _time(min(starts, default=None)),
        "last_record": _time(max(times, default=None)),
    }


def _time(timestamp_ms: int | None) -> str:
    if timestamp_ms is None:
        return "-"
    try:
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)
