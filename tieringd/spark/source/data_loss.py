"""Requested records that are not in the archive, and the reaction to them: an error or a warning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import structlog

from tieringd.errors import DataLossError
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import TopicPartition

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Loss:
    """Requested offsets, both inclusive, that cannot be read, and the reason."""

    partition: TopicPartition
    base_offset: int
    last_offset: int
    reason: str

    def __str__(self) -> str:
        offsets = f"offsets {self.base_offset} to {self.last_offset} of {self.partition}"
        if self.base_offset == self.last_offset:
            offsets = f"offset {self.base_offset} of {self.partition}"
        return f"{offsets}: {self.reason}"

    @classmethod
    def of_gap(cls, partition: TopicPartition, gap: Gap, *, from_offset: int, next_offset: int) -> Loss:
        """Return the part of a recorded gap between *from_offset* and *next_offset*, exclusive, as a loss."""
        return cls(
            partition,
            max(gap.base_offset, from_offset),
            min(gap.last_offset, next_offset - 1),
            f"the archive has a recorded gap there: {gap.reason}",
        )


class OnLoss(Protocol):
    """The reaction to records that are not in the archive. The source and an export have different ones."""

    def meet(self, loss: Loss) -> None:
        """
        Note a loss, and return if reading may continue.

        Raises:
            TieringError: No records may be missing.
        """


@dataclass(slots=True)
class LossRule:
    """The option `failOnDataLoss`. One instance warns of each loss only once."""

    is_fatal: bool = True
    reported: set[Loss] = field(default_factory=set, repr=False, compare=False)

    def meet(self, loss: Loss) -> None:
        """
        Log a warning and return, or raise.

        Raises:
            DataLossError: `failOnDataLoss` is set.
        """
        if self.is_fatal:
            raise DataLossError(
                f"records are not in the archive: {loss}",
                hint="Set the option failOnDataLoss to false to read what there is",
            )
        if loss in self.reported:
            return
        self.reported.add(loss)
        log.warning(
            "records are not in the archive",
            partition=str(loss.partition),
            base_offset=loss.base_offset,
            last_offset=loss.last_offset,
            reason=loss.reason,
        )
