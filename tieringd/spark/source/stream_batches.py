"""
What the next batch of a streaming query takes: pure, from where the query is and what the archive has.

Partitions and topics that were not there before begin at their earliest offset. What a limit lets through is
shared among partitions by what waits in them, as in Spark's own Kafka source.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor
from typing import TYPE_CHECKING

from tieringd.spark.source.data_loss import Loss
from tieringd.spark.source.stream_offsets import StreamOffsets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieringd.model.partition import TopicPartition
    from tieringd.spark.source.data_loss import LossRule
    from tieringd.spark.source.topics import Archived


def goes_on_from(start: StreamOffsets, archived: Archived, *, rule: LossRule) -> StreamOffsets:
    """
    Return where a batch begins after *start*, given what is archived now: `begins` has what is new.

    Raises:
        DataLossError: Something that the query was reading has gone, and that is not all right.
    """
    ids = archived.topic_ids
    offsets = dict(start.offsets)
    begins = dict(start.offsets) if start.is_initial else {}
    recreated = {
        topic for topic, topic_id in start.topic_ids.items() if topic in ids and ids[topic] != topic_id
    }
    for partition, offset in start.offsets.items():
        manifest = archived.manifests.get(partition)
        reason = ""
        if partition.topic in recreated:
            reason = "the topic was deleted and created again; what the old one had after this was not read"
            offsets.pop(partition)
        elif partition not in archived.partitions:
            reason = "the bucket has nothing of this partition any more"
        elif manifest is not None and manifest.next_offset < offset:
            reason = f"the archive was cut back and ends at offset {manifest.next_offset} now"
            offsets[partition] = manifest.next_offset
        if reason:
            rule.meet(Loss(partition, offset, offset, reason))
    for partition, manifest in archived.manifests.items():
        if partition not in offsets:
            offsets[partition] = begins[partition] = manifest.start_offset
    kept_ids = {topic: topic_id for topic, topic_id in start.topic_ids.items() if topic not in ids}
    return replace(start, offsets=offsets, topic_ids=kept_ids | ids, begins=begins)


def ends_of(
    begin: StreamOffsets, archived: Archived, *, until: Mapping[TopicPartition, int] | None
) -> dict[TopicPartition, int]:
    """
    Return where each partition ends that has something to read after *begin*.

    With *until* nothing is read past these offsets, nor of partitions that are not among them.
    """
    ends: dict[TopicPartition, int] = {}
    for partition, manifest in archived.manifests.items():
        end = manifest.next_offset
        if until is not None:
            end = min(end, until.get(partition, 0))
        if end > begin.offsets[partition]:
            ends[partition] = end
    return ends


def waiting_offsets(
    begin: StreamOffsets, ends: Mapping[TopicPartition, int], archived: Archived
) -> dict[TopicPartition, int]:
    """Return how many offsets each partition has to read; what has expired is none of them."""
    return {
        partition: max(0, end - max(begin.offsets[partition], archived.manifests[partition].start_offset))
        for partition, end in ends.items()
    }


def limited(
    ends: Mapping[TopicPartition, int], waiting: Mapping[TopicPartition, int], max_offsets: int
) -> dict[TopicPartition, int]:
    """
    Return *ends* brought forward, so that about *max_offsets* are read.

    Every partition where something waits gets one offset at the least.
    """
    total = sum(waiting.values())
    if total <= max_offsets:
        return dict(ends)
    found: dict[TopicPartition, int] = {}
    for partition, end in ends.items():
        share = max_offsets * waiting[partition] / total
        taken = min(waiting[partition], ceil(share) if share < 1 else floor(share))
        found[partition] = end - waiting[partition] + taken
    return found


def batch_end(begin: StreamOffsets, ends: Mapping[TopicPartition, int]) -> StreamOffsets:
    """Return the end of a batch that reads from *begin* to *ends*; new partitions without records wait."""
    offsets = {
        partition: ends.get(partition, offset)
        for partition, offset in begin.offsets.items()
        if partition in ends or partition not in begin.begins or begin.is_initial
    }
    begins = {partition: offset for partition, offset in begin.begins.items() if partition in offsets}
    topics = {partition.topic for partition in offsets}
    ids = {topic: topic_id for topic, topic_id in begin.topic_ids.items() if topic in topics}
    return StreamOffsets(offsets, ids, begins)
