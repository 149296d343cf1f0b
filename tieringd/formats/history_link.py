"""
The history link: the archived topic that a restored one continues, and from which offsets.

A shallow restore begins a log where an archive ends, and leaves the archive in its place. The link is
all that joins the two: it is written once, beside the new topic's manifest, and never changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tieringd.errors import CorruptDataError
from tieringd.formats.envelope import seal, unseal
from tieringd.formats.object_keys import TopicKey

_MAGIC = b"TRDH"
VERSION = 1


@dataclass(frozen=True, slots=True)
class HistoryLink:
    """A topic, and the topic that holds its earlier records."""

    topic: TopicKey
    history: TopicKey
    starts: tuple[tuple[int, int], ...]
    """The restored partitions, ascending, each with the first offset of its new log; the rest is history."""

    def start_of(self, partition: int) -> int | None:
        """Return the first offset of a partition's new log; None for a partition that was not restored."""
        return dict(self.starts).get(partition)


def encode_history_link(link: HistoryLink) -> bytes:
    """Return the document. Equal links give equal bytes."""
    body = {
        "cluster": link.topic.cluster,
        "topic": link.topic.topic,
        "topic_id": link.topic.topic_id,
        "history_cluster": link.history.cluster,
        "history_topic": link.history.topic,
        "history_topic_id": link.history.topic_id,
        "starts": [list(one) for one in link.starts],
    }
    return seal(_MAGIC, VERSION, json.dumps(body, sort_keys=True).encode())


def decode_history_link(data: bytes) -> HistoryLink:
    """
    Return the link in *data*.

    Raises:
        CorruptDataError: The bytes are not a history link of a known version.
    """
    _, body = unseal(data, _MAGIC, newest_version=VERSION, kind="history link")
    try:
        return _link(json.loads(body))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptDataError(f"history link cannot be read: {error}") from error


def _link(body: dict[str, Any]) -> HistoryLink:
    starts = tuple((int(partition), int(offset)) for partition, offset in body["starts"])
    if list(starts) != sorted(set(starts)) or any(
        partition < 0 or offset < 0 for partition, offset in starts
    ):
        raise CorruptDataError(f"history link has impossible partitions: {starts}")
    return HistoryLink(
        TopicKey(body["cluster"], body["topic"], body["topic_id"]),
        TopicKey(body["history_cluster"], body["history_topic"], body["history_topic_id"]),
        starts,
    )
