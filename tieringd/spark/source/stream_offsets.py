"""
How far a streaming query is, as a checkpoint has it: the JSON of Spark's own Kafka source, and a bit more.

    {"orders": {"0": 23, "1": 42},               the next offset of each partition
     "@topicIds": {"orders": "W1xNUlUlTfigw_K-dvdxsA"},
     "@begins": {"orders": {"1": 0}},            where a batch began that did not go on from the one before
     "@isInitial": true}                         before the first batch

A topic's name has no @ in it. The id tells a topic that was deleted and created again from its old self. A
batch that is done again after a crash has to be the same one: where it began is known from the end of the
batch before, and for new partitions, and in the first batch for all, from its own end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tieringd.errors import CorruptDataError
from tieringd.model.partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping

_TOPIC_IDS: Final = "@topicIds"
_BEGINS: Final = "@begins"
_IS_INITIAL: Final = "@isInitial"
_MARK: Final = "@"


@dataclass(frozen=True, slots=True)
class StreamOffsets:
    """The end of one batch, and so the beginning of the next."""

    offsets: Mapping[TopicPartition, int]
    """The next offset of each partition."""
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    begins: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Where this batch began in partitions that the one before did not have; in all if there was none."""
    is_initial: bool = False
    """Whether no batch has ended here: it is where the first one begins."""

    def to_json(self) -> dict[str, Any]:
        """Return it as Spark keeps it."""
        document: dict[str, Any] = by_topic(self.offsets)
        document[_TOPIC_IDS] = dict(sorted(self.topic_ids.items()))
        if self.begins:
            document[_BEGINS] = by_topic(self.begins)
        if self.is_initial:
            document[_IS_INITIAL] = True
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StreamOffsets:
        """
        Return what Spark kept.

        Raises:
            CorruptDataError: It is not of this data source.
        """
        try:
            return cls(
                _flat({topic: one for topic, one in document.items() if not topic.startswith(_MARK)}),
                dict(document[_TOPIC_IDS]),
                _flat(document.get(_BEGINS, {})),
                bool(document.get(_IS_INITIAL, False)),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(
                f"the checkpoint's offset is not of the data source tieringd: {error!r}",
                hint="A checkpoint of another source cannot be gone on from; use a new checkpoint location",
            ) from error


def by_topic(offsets: Mapping[TopicPartition, int]) -> dict[str, Any]:
    """Return offsets by topic and then by partition, as Spark's Kafka source writes them."""
    document: dict[str, dict[str, int]] = {}
    for partition in sorted(offsets):
        document.setdefault(partition.topic, {})[str(partition.partition)] = offsets[partition]
    return dict(document)


def _flat(document: Mapping[str, Mapping[str, int]]) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, int(number)): int(offset)
        for topic, partitions in document.items()
        for number, offset in partitions.items()
    }
