"""
The history link: which archived topic a restored one goes on from, and at which offset.

A shallow restore begins a log where an archive ends, and leaves the archive where it is. The link is all
that joins the two: it is written once, beside the new topic's manifest, and never changes.
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
    """A topic, and the one that holds what came before it."""

    topic: TopicKey
    history: TopicKey
    starts: tuple[tuple[int, int], ...]
    """Each partition that was restored, ascending, and where its new log begins: the rest is history."""

    def start_of(self, partition: int) -> int | None:
        """Return where a partition's new log begins; None for one that was not restored."""
        return dict(self.starts).get(partition)


def encode_history_link(link: HistoryLink) -> bytes:
    """Return the document; the same link is the same bytes."""
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
    Return the link that *data* holds.

    Raises:
        CorruptDataError: The bytes are not a history link of a version we know.
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
