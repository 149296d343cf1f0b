"""
Where a query on an archive ended, from its checkpoint, for a query on the broker that goes on from there.

Spark writes a file for each batch under `offsets` before it, and one under `commits` after it. A file of
offsets has a version, a line about the query, and a line for each source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tieringd.errors import CorruptDataError, LocalFileError, TieringError
from tieringd.model.partition import TopicPartition
from tieringd.spark.source.positions import EARLIEST_OFFSET
from tieringd.spark.source.stream import StreamOffsets, by_topic

_VERSION: Final = "v1"
_HEAD_LINES: Final = 2
"""The version, and the line about the query."""
_OURS: Final = "@topicIds"
"""A field of every offset of this data source, and of no other one."""


def ended_at(checkpoint: Path, *, partitions: int = 0) -> dict[str, Any]:
    """
    Return the next offset of each partition after the last batch, as Kafka's source takes `startingOffsets`.

    Args:
        checkpoint: The directory of the query's checkpoint.
        partitions: How many partitions each topic has. Those of which nothing is archived begin at their
            earliest offset.

    Raises:
        LocalFileError: The directory has no checkpoint, or it cannot be read.
        TieringError: The last batch has not ended, or the query has several sources of this kind, or none.
        CorruptDataError: A file is not as Spark writes it.
    """
    try:
        names = [path.name for path in (checkpoint / "offsets").iterdir() if path.name.isdecimal()]
        last = max(map(int, names), default=None)
        path = checkpoint / "offsets" / f"{last}"
        text = "" if last is None else path.read_text(encoding="utf-8")
        has_ended = (checkpoint / "commits" / f"{last}").exists()
    except OSError as error:
        raise LocalFileError(
            f"the checkpoint cannot be read: {error.strerror}",
            path=str(checkpoint),
            hint="Name the directory that checkpointLocation names; copy it first if it is in a bucket",
        ) from error
    if last is None:
        raise TieringError(f"no batch has begun in the checkpoint {checkpoint}: let the query run first")
    if not has_ended:
        raise TieringError(
            f"batch {last} in the checkpoint {checkpoint} has not ended",
            hint="Start the query on the archive again with the trigger availableNow, and let it end",
        )
    lines = text.splitlines()
    if lines[:1] != [_VERSION]:
        raise CorruptDataError(f"the file is not version {_VERSION} of Spark's offsets", source=str(path))
    found = [line for line in lines[_HEAD_LINES:] if _OURS in line]
    if len(found) != 1:
        raise TieringError(
            f"the query of the checkpoint {checkpoint} has {len(found)} sources tieringd, not one"
        )
    try:
        document = json.loads(found[0])
    except json.JSONDecodeError as error:
        raise CorruptDataError(f"an offset is not JSON: {error}", source=str(path)) from error
    offsets = StreamOffsets.from_json(document).offsets
    topics = {partition.topic for partition in offsets}
    unarchived = {TopicPartition(topic, number) for topic in topics for number in range(partitions)}
    return by_topic(dict.fromkeys(unarchived, EARLIEST_OFFSET) | dict(offsets))
