"""Looks at a log directory of which now and then one misses the first files, and the next one has them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tieringd.broker.layout import KafkaLayout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from tieringd.model.local_log import LocalLog, LocalPartition
    from tieringd.model.offset_translation import OffsetTranslation


class TornLayout(KafkaLayout):
    """
    Files are read one after the other, and what moves meanwhile may be missed once.

    Of two looks in a row at most one is torn, as nothing moves for so long.
    """

    def __init__(self, random: Random, *, rate: float) -> None:
        super().__init__()
        self._random = random
        self._rate = rate
        self._torn: set[str] = set()

    def read_log(self, partition: LocalPartition, known: Sequence[OffsetTranslation] = ()) -> LocalLog:
        """Return the log, or all but its first closed segments."""
        found = super().read_log(partition, known)
        if partition.path in self._torn or self._random.random() >= self._rate:
            self._torn.discard(partition.path)
            return found
        count = len(found.closed_segments)
        if not count:
            return found
        self._torn.add(partition.path)
        return replace(found, segments=found.segments[self._random.randint(1, count) :])
