"""
The pinner: holds closed segments that are not durable yet against the broker's own retention.

It works on every partition that this broker holds, led or not: when leadership moves while the
object store is away, whoever leads next has its own pins. Policies decide (`policies.pinning`);
`broker.pins` makes and removes the links.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from tieringd.errors import LocalFileError
from tieringd.policies.pinning import Pin, pins_over_budget, plan_pins

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tieringd.broker.pins import PinDirectory
    from tieringd.metrics import Metrics
    from tieringd.model.local_log import LocalLog, LocalPartition

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PinLook:
    """What the pinner needs to know of one partition."""

    log: LocalLog
    pins: tuple[Pin, ...]
    next_offset: int | None
    """Everything of this log below is durable; None while nothing is known to be."""
    expiring_end: int | None = None
    """Where the active segment ends, if the broker may soon close and delete it in one go."""


class Pinner:
    """
    Keep the pins of one daemon. `step` is called by one task at a time.

    A crash at any point leaves links that the next step finds, and keeps or removes.
    """

    def __init__(
        self, directories: Mapping[str, PinDirectory], *, budget_bytes: int, metrics: Metrics
    ) -> None:
        """Take the pin directory of each log directory; one that has none is not pinned."""
        self._directories = directories
        self._budget_bytes = budget_bytes
        self._metrics = metrics
        self._unknown: set[str] = set()

    @property
    def is_used(self) -> bool:
        """Say whether any log directory has pins."""
        return bool(self._directories)

    def pins_of(self, partition: LocalPartition) -> tuple[Pin, ...]:
        """
        Return the pins of one partition. Blocks.

        Raises:
            LocalFileError: Its pin directory cannot be read.
        """
        directory = self._directories.get(partition.log_dir)
        return directory.pins(partition) if directory else ()

    async def step(
        self, looks: Sequence[PinLook], *, unnamed: Sequence[LocalPartition] = (), is_complete: bool
    ) -> None:
        """
        Make and release pins, and keep those that hold bytes within the budget.

        *unnamed* are partitions on disk that the cluster did not tell of: their pins stay as they are.
        *is_complete* says that every other partition to be archived is in *looks*: only then are the
        pins of others taken for those of deleted ones.
        """
        held = await asyncio.to_thread(self._step, looks, unnamed, is_complete=is_complete)
        self._metrics.pinned_bytes.set(sum(pin.segment.size_bytes for pin in held))
        self._metrics.pinned_segments.set(len(held))

    def _step(
        self, looks: Sequence[PinLook], unnamed: Sequence[LocalPartition], *, is_complete: bool
    ) -> list[Pin]:
        held: list[Pin] = []
        for root, directory in self._directories.items():
            ours = [look for look in looks if look.log.partition.log_dir == root]
            kept: list[tuple[LocalPartition, Pin]] = []
            for look in ours:
                kept.extend((look.log.partition, pin) for pin in self._adjust(directory, look))
            try:
                kept = self._within_budget(directory, kept)
                if is_complete:
                    known = [look.log.partition for look in ours]
                    known += [one for one in unnamed if one.log_dir == root]
                    self._forget_deleted(directory, known)
            except LocalFileError as error:
                self._count_failure(error)
            held.extend(pin for _, pin in kept if pin.is_held)
        return held

    def _adjust(self, directory: PinDirectory, look: PinLook) -> list[Pin]:
        """Carry out one partition's plan; return the pins that stay."""
        plan = plan_pins(look.log, look.pins, next_offset=look.next_offset, expiring_end=look.expiring_end)
        try:
            # In this order: a segment in another's place may have the same bounds, and so the same names.
            if plan.release:
                directory.release(look.log.partition, plan.release)
            for segment in plan.make:
                directory.make(look.log.partition, segment)
        except LocalFileError as error:
            self._count_failure(error)
        return [pin for pin in look.pins if pin not in plan.release]

    def _count_failure(self, error: LocalFileError) -> None:
        self._metrics.pin_failures.inc()
        log.error("pin failed: the broker may delete what is not durable", error=str(error))

    def _within_budget(
        self, directory: PinDirectory, kept: list[tuple[LocalPartition, Pin]]
    ) -> list[tuple[LocalPartition, Pin]]:
        given_up = pins_over_budget([pin for _, pin in kept], budget_bytes=self._budget_bytes)
        for partition, pin in kept:
            if pin in given_up:
                directory.release(partition, [pin])
                self._metrics.pins_given_up.inc()
                log.error(
                    "pinned segment given up: the pins are at their limit, and the data is lost",
                    partition=str(partition.topic_partition),
                    base_offset=pin.segment.base_offset,
                    size_bytes=pin.segment.size_bytes,
                    limit_bytes=self._budget_bytes,
                )
        return [(partition, pin) for partition, pin in kept if pin not in given_up]

    def _forget_deleted(self, directory: PinDirectory, partitions: Sequence[LocalPartition]) -> None:
        """Remove the pins of partitions that are gone; it takes two looks, since one may be mistaken."""
        unknown = directory.others(partitions)
        for path in sorted(unknown & self._unknown):
            log.info("pins of a partition that is gone are removed", path=path)
            directory.remove(path)
        self._unknown -= self._unknown_in(directory)
        self._unknown |= unknown

    def _unknown_in(self, directory: PinDirectory) -> set[str]:
        return {path for path in self._unknown if path.startswith(f"{directory.root}/")}
