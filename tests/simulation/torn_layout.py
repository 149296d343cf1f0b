"""Scans of a log directory of which now and then one misses the first files, and the next one has them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tieringd.broker.layout import KafkaLayout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from tieringd.model.local_log import LocalLog, LocalPartition
    from tieringd.model.offset_translation import OffsetTranslation


WHOLE_READS = 6


class TornLayout(KafkaLayout):
    """
    Files are read one after the other, and what moves meanwhile may be missed once.

    The scans that follow a torn one are whole: nothing moves all the time.
    """

    def __init__(self, random: Random, *, rate: float, misses_middle: bool = False) -> None:
        super().__init__()
        self._misses_middle = misses_middle
        self._random = random
        self._rate = rate
        self._whole_reads: dict[str, int] = {}
        """How many scans of a partition are whole from now on."""

    def read_log(self, partition: LocalPartition, known: Sequence[OffsetTranslation] = ()) -> LocalLog:
        """Return the log, or all but its first closed segments, or all but one between others."""
        found = super().read_log(partition, known)
        whole = self._whole_reads.get(partition.path, 0)
        self._whole_reads[partition.path] = max(0, whole - 1)
        count = len(found.closed_segments)
        if whole or not count or self._random.random() >= self._rate:
            return found
        self._whole_reads[partition.path] = WHOLE_READS
        if self._misses_middle and count > 1 and self._random.random() < 0.8:
            place = self._random.randrange(1, count)
            segments = (*found.segments[:place], *found.segments[place + 1 :])
            return replace(found, segments=segments)
        return replace(found, segments=found.segments[self._random.randint(1, count) :])
