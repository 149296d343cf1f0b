"""
The pinner: protects closed segments that are not durable yet from the broker's own retention.

It works on every partition that this broker holds, led or not: when leadership moves while the object store
is away, the next leader has its own pins. `policies.pinning` decides; `broker.pins` makes and removes the
links.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import structlog

from tieringd.broker.pins import PinDirectory
from tieringd.errors import LocalFileError
from tieringd.metrics import Metrics
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.manifest_parts import Gap
from tieringd.policies.pinning import NO_PINS, Pin, PinnedLog, PinPlan, pins_over_budget, plan_pins

log = structlog.get_logger(__name__)

PIN_UNKNOWN_AFTER_SECONDS = 5.0
"""
How long a partition's durable offset may be unknown before all its closed segments are pinned. The object
store needs time to answer: without this, each start would pin every segment on disk and release it again.
"""


@dataclass(frozen=True, slots=True)
class PinFacts:
    """What the pinner needs to know of one partition."""

    log: LocalLog
    pins: tuple[Pin, ...]
    """The pins, as `policies.pinning.judged` judged them by *log*."""
    next_offset: int | None
    """The log is durable below this offset; None while nothing is known to be durable."""
    expiring_end: int | None = None
    """Exclusive end of the active segment, if the broker may soon close and delete it in one go."""
    gaps: tuple[Gap, ...] = ()
    """Gaps of the archive: offsets below `next_offset` that are not durable."""
    good_until: float = math.inf
    """Loop time until which this may be acted on."""


class Pinner:
    """
    Keep the pins of one daemon. One task at a time calls `step`.

    A crash at any point leaves links that the next step finds, and keeps or removes.
    """

    def __init__(
        self, directories: Mapping[str, PinDirectory], *, budget_bytes: int, metrics: Metrics
    ) -> None:
        """Take the pin directory of each log directory; a log directory without one is not pinned."""
        self._directories = directories
        self._budget_bytes = budget_bytes
        self._metrics = metrics
        self._unknown: set[str] = set()
        self._made = 0
        """How often pins were made, or are being made."""
        self._busy = threading.Lock()
        """
        Serializes reads and changes, so a read sees a partition's pins either before a change or after it.
        """

    @property
    def is_used(self) -> bool:
        """Say whether any log directory has pins."""
        return bool(self._directories)

    def pins_of(self, partition: LocalPartition) -> PinnedLog:
        """
        Return the pins of one partition; a later read of its log must judge them. Blocks.

        Raises:
            LocalFileError: Its pin directory cannot be read.
        """
        directory = self._directories.get(partition.log_dir)
        if directory is None:
            return NO_PINS
        with self._busy:
            return directory.found(partition)

    def listed(self) -> Callable[[LocalPartition], PinnedLog]:
        """
        Return a function that does what `pins_of` does, for a scan of many partitions. Blocks.

        The pin directories are listed once, now: nearly all of ten thousand partitions have no pin. A pin
        that is made later, also by a step that has begun before, may be of a partition that is not listed:
        then the function asks for each partition.
        """
        with self._busy:
            made, found = self._made, dict[str, frozenset[str]]()
            for log_dir, directory in self._directories.items():
                # A root that cannot be read is a problem of each of its partitions.
                with suppress(LocalFileError):
                    found[log_dir] = directory.listed()

        def pins_of(partition: LocalPartition) -> PinnedLog:
            log_dir = partition.log_dir
            if (
                log_dir in found
                and self._made == made
                and not self._directories[log_dir].is_listed(found[log_dir], partition)
            ):
                return NO_PINS
            return self.pins_of(partition)

        return pins_of

    async def step(
        self, partitions: Sequence[PinFacts], *, others: Sequence[LocalPartition] = (), is_complete: bool
    ) -> None:
        """
        Make and release pins, and keep those that hold bytes within the budget.

        Args:
            partitions: What is known of each partition.
            others: Partitions on disk whose pins stay as they are: the cluster does not list them, or
                they have no pin and need none.
            is_complete: Whether *partitions* and *others* have every partition to be archived. Only then do
                the pins of all others count as those of deleted partitions.
        """
        clock = asyncio.get_running_loop().time
        held = await asyncio.to_thread(self._step, partitions, others, is_complete=is_complete, clock=clock)
        ours = [pin for pin in held if not pin.is_stray]
        strays = [pin for pin in held if pin.is_stray]
        self._metrics.pinned_bytes.set(sum(pin.segment.size_bytes for pin in ours))
        self._metrics.pinned_segments.set(len(ours))
        self._metrics.stray.size_bytes.set(sum(pin.segment.size_bytes for pin in strays))
        self._metrics.stray.pins.set(len(strays))

    def _step(
        self,
        partitions: Sequence[PinFacts],
        others: Sequence[LocalPartition],
        *,
        is_complete: bool,
        clock: Callable[[], float],
    ) -> list[Pin]:
        held: list[Pin] = []
        for root, directory in self._directories.items():
            ours = [facts for facts in partitions if facts.log.partition.log_dir == root]
            kept: list[tuple[LocalPartition, Pin]] = []
            for facts in ours:
                with self._busy:
                    kept.extend((facts.log.partition, pin) for pin in self._adjust(directory, facts, clock))
            try:
                kept = self._within_budget(directory, kept)
                if is_complete:
                    # Read only where there are pins.
                    known = (
                        one
                        for one in chain((facts.log.partition for facts in partitions), others)
                        if one.log_dir == root
                    )
                    self._forget_deleted(directory, known)
            except LocalFileError as error:
                self._count_failure(error)
            held.extend(pin for _, pin in kept if pin.is_held)
        return held

    def _adjust(self, directory: PinDirectory, facts: PinFacts, clock: Callable[[], float]) -> list[Pin]:
        """
        Carry out one partition's plan; return the pins that stay.

        An outdated plan releases nothing: when this process was stopped and goes on, offsets that were
        durable may have been cut off the archive, and the broker may have deleted its own file.
        """
        local_log = facts.log
        plan = plan_pins(
            local_log,
            facts.pins,
            next_offset=facts.next_offset,
            expiring_end=facts.expiring_end,
            gaps=facts.gaps,
        )
        if plan.make:
            self._made += 1
        if clock() > facts.good_until:
            return self._make_only(directory, facts, plan)
        gone = {*plan.release, *plan.stray}
        kept = [pin for pin in facts.pins if pin not in gone]
        try:
            # Stray pins go before the log is noted as the one that the pins belong to. Releases go before
            # new pins: a segment that replaced another may have the same bounds, and so the same names.
            kept += self._set_aside(directory, local_log.partition, plan.stray)
            if plan.release:
                directory.release(local_log.partition, plan.release)
            if local_log.segments and (plan.make or any(not pin.is_stray for pin in kept)):
                self._note(directory, local_log)
            for segment in plan.make:
                directory.make(local_log.partition, segment)
            if plan.make:
                # The broker may have deleted all of these since the scan: then there is nothing to note.
                directory.tidy(local_log.partition)
        except LocalFileError as error:
            self._count_failure(error)
        return kept

    def _make_only(self, directory: PinDirectory, facts: PinFacts, plan: PinPlan) -> list[Pin]:
        """
        Pin what has no pin yet, as an outdated plan may; return the pins that stay, which are all.

        The log is not noted as the one that they belong to, and nothing is pinned beside stray pins.
        """
        if plan.release or plan.stray:
            log.info(
                "pins stay as they are: the last look at the log is too long ago",
                partition=str(facts.log.partition.topic_partition),
            )
        pinned = {pin.segment.base_offset for pin in facts.pins}
        try:
            for segment in () if plan.stray else plan.make:
                if segment.base_offset not in pinned:
                    directory.make(facts.log.partition, segment)
        except LocalFileError as error:
            self._count_failure(error)
        return list(facts.pins)

    def _note(self, directory: PinDirectory, local_log: LocalLog) -> None:
        """Note the log's properties beside the pins; pins hold without a note, but may be judged stray."""
        try:
            directory.note(local_log)
        except LocalFileError as error:
            self._count_failure(error)

    def _set_aside(
        self, directory: PinDirectory, partition: LocalPartition, strays: Sequence[Pin]
    ) -> tuple[Pin, ...]:
        aside = directory.set_aside(partition, strays)
        for before, pin in zip(strays, aside, strict=True):
            if before != pin:
                log.error(
                    "pinned segment set aside: nothing shows that it is of the log that is there now",
                    partition=str(partition.topic_partition),
                    base_offset=pin.segment.base_offset,
                    size_bytes=pin.segment.size_bytes,
                    path=pin.segment.path,
                )
        return aside

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

    def _forget_deleted(self, directory: PinDirectory, partitions: Iterable[LocalPartition]) -> None:
        """Remove the pins of deleted partitions, after two scans that lack them: one scan may be mistaken."""
        unknown = directory.others(partitions)
        for path in sorted(unknown & self._unknown):
            log.info("pins of a partition that is gone are removed", path=path)
            directory.remove(path)
        self._unknown -= self._unknown_in(directory)
        self._unknown |= unknown

    def _unknown_in(self, directory: PinDirectory) -> set[str]:
        return {path for path in self._unknown if path.startswith(f"{directory.root}/")}
