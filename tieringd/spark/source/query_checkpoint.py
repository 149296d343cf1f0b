"""
Where a query ended, from its checkpoint, for a query of the other kind that goes on from there.

A query on an archive is followed by one on the broker. Where the broker trims past what a stopped query on it
has read, a query on the archive takes over in turn.

Spark writes a file for each batch under `offsets` before it, and one under `commits` after it. A file of
offsets has a version, a line about the query, and a line for each source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tieringd.errors import CorruptDataError, LocalFileError, TieringError
from tieringd.model.partition import TopicPartition
from tieringd.spark.source.stream import StreamOffsets, by_topic

_VERSION: Final = "v1"
_HEAD_LINES: Final = 2
"""The version, and the line about the query."""
_OURS: Final = "@topicIds"
"""A field of every offset of this data source, and of no other one."""


def ended_at(checkpoint: Path, *, partitions: int = 0, last_ended: bool = False) -> dict[str, Any]:
    """
    Return the next offset of each partition after the last batch, as both sources take `startingOffsets`.

    Args:
        checkpoint: The directory of the checkpoint of a query on an archive, or of one of Kafka's source.
        partitions: How many partitions each topic has. Those of which nothing is archived begin at offset 0,
            and not at the broker's earliest offset: that moves on when tieringd archives the partition and
            trims it before the query on the broker begins, and records would be lost in silence.
        last_ended: Whether to leave out a batch that has begun and not ended. That is right only if the sink
            has nothing of it.

    Raises:
        LocalFileError: The directory has no checkpoint, or it cannot be read.
        TieringError: The last batch has not ended, or the query has several sources of topics, or none.
        CorruptDataError: A file is not as Spark writes it.
    """
    try:
        begun, ended = (_batches(checkpoint / name) for name in ("offsets", "commits"))
        last = max(begun & ended if last_ended else begun, default=None)
        path = checkpoint / "offsets" / f"{last}"
        text = "" if last is None else path.read_text(encoding="utf-8")
    except OSError as error:
        raise LocalFileError(
            f"the checkpoint cannot be read: {error.strerror}",
            path=str(checkpoint),
            hint="Name the directory that checkpointLocation names; copy it first if it is in a bucket",
        ) from error
    except UnicodeDecodeError as error:
        raise CorruptDataError("the file of the last batch is not text", source=str(path)) from error
    if last is None:
        state = "ended" if last_ended else "begun"
        raise TieringError(f"no batch has {state} in the checkpoint {checkpoint}: let the query run first")
    if last not in ended:
        raise TieringError(
            f"batch {last} in the checkpoint {checkpoint} has not ended",
            hint="Start the query again with the trigger availableNow, and let it end. If the broker no "
            "longer has the records of the batch, and the sink has nothing of it, use --last-ended",
        )
    lines = text.splitlines()
    if lines[:1] != [_VERSION]:
        raise CorruptDataError(f"the file is not version {_VERSION} of Spark's offsets", source=str(path))
    found = _offsets_in(lines[_HEAD_LINES:], source=str(path))
    if len(found) != 1:
        raise TieringError(
            f"the query of the checkpoint {checkpoint} has {len(found)} sources tieringd or kafka, not one"
        )
    (offsets,) = found
    topics = {partition.topic for partition in offsets}
    unarchived = {TopicPartition(topic, number) for topic in topics for number in range(partitions)}
    return by_topic(dict.fromkeys(unarchived, 0) | dict(offsets))


def _batches(directory: Path) -> set[int]:
    """Return the numbers of the batches that have a file; none if the query has not made the directory."""
    if directory.name == "commits" and not directory.exists():
        return set()
    return {int(path.name) for path in directory.iterdir() if path.name.isdecimal()}


def _offsets_in(lines: Sequence[str], *, source: str) -> list[Mapping[TopicPartition, int]]:
    """Return the offsets of each source of this kind; of Kafka's sources if there is none."""
    ours = [line for line in lines if _OURS in line]
    try:
        documents = [json.loads(line) for line in ours]
    except json.JSONDecodeError as error:
        raise CorruptDataError(f"an offset is not JSON: {error}", source=source) from error
    if documents:
        return [StreamOffsets.from_json(one).offsets for one in documents]
    return [offsets for line in lines if (offsets := _of_kafka(line))]


def _of_kafka(line: str) -> dict[TopicPartition, int]:
    """Return the offsets of a line of Kafka's source; empty for any other line."""
    try:
        return {
            TopicPartition(topic, int(number)): int(offset)
            for topic, partitions in json.loads(line).items()
            for number, offset in partitions.items()
        }
    except (AttributeError, TypeError, ValueError):
        return {}
