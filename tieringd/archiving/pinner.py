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
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import structlog

from tieringd.broker.pins import PinDirectory
from tieringd.errors import LocalFileError
from tieringd.metrics import Metrics
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.manifest_parts import Gap
from tieringd.model.segment import LocalSegment
from tieringd.policies.pinning import (
    NO_PINS,
    Pin,
    PinnedLog,
    PinPlan,
    pins_over_budget,
    plan_pins,
    without_successor,
)

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


class _FindsPins(Protocol):
    """Finds the pins of a partition by a list, and by its own directory where the list is stale."""

    def __call__(self, partition: LocalPartition, *, is_stale: bool) -> PinnedLog:
        """Return the pins. Raises LocalFileError: The pin directory cannot be read."""


class ListedPins:
    """
    The pins of all partitions, as one listing of the pin directories found them.

    Nearly all of ten thousand partitions have no pin. A pin that is made later, also by a step of the pinner
    that has begun before, may be of a partition that is not listed: then each partition is asked for.
    """

    def __init__(self, found: _FindsPins, *, may_have: bool, is_stale: Callable[[], bool]) -> None:
        """
        Take what finds a partition's pins.

        *may_have* says whether the listing found any pin, or could not read a directory. *is_stale* says
        whether pins were made since.
        """
        self._found = found
        self._may_have = may_have
        self._is_stale = is_stale

    @property
    def is_empty(self) -> bool:
        """Say whether no partition has a pin."""
        return not (self._may_have or self._is_stale())

    def __call__(self, partition: LocalPartition) -> PinnedLog:
        """Do what `Pinner.pins_of` does."""
        is_stale = self._is_stale()
        return self._found(partition, is_stale=is_stale) if self._may_have or is_stale else NO_PINS


class Pinner:
    """
    Keep the pins of one daemon. One task at a time calls `step`.

    A crash at any point leaves links that the next step finds, and keeps or removes. A broker may move a
    partition to another of its log directories. Its pins stay where they are until they are durable: a hard
    link cannot follow it to another filesystem.
    """

    def __init__(
        self,
        directories: Mapping[str, PinDirectory],
        *,
        budget_bytes: int,
        metrics: Metrics,
        left: Sequence[PinDirectory] = (),
    ) -> None:
        """
        Take the pin directory of each log directory; a log directory without one is not pinned.

        In the directories *left* by an earlier configuration no pin is made.
        """
        self._directories = directories
        self._all = (*directories.values(), *left)
        self._budget_bytes = budget_bytes
        self._metrics = metrics
        self._unknown: set[str] = set()
        self._idle: set[LocalPartition] = set()
        """Partitions with pins that are not archived, at the last step."""
        self._durable: set[Pin] = set()
        """Pins that an outdated plan of the last step would have released."""
        self._made = 0
        """How often pins were made, or are being made."""
        self._busy = threading.Lock()
        """
        Serializes reads and changes, so a read sees a partition's pins either before a change or after it.
        """

    @property
    def is_used(self) -> bool:
        """Say whether there is any directory for pins."""
        return bool(self._all)

    def pins_of(self, partition: LocalPartition) -> PinnedLog:
        """
        Return the pins of one partition; a later read of its log must judge them. Blocks.

        Raises:
            LocalFileError: Its pin directory cannot be read.
        """
        return self._found(partition, self._all)

    def _found(self, partition: LocalPartition, directories: Iterable[PinDirectory]) -> PinnedLog:
        """Return the pins of one partition in *directories*; see `pins_of`."""
        own, found, elsewhere = self._directories.get(partition.log_dir), NO_PINS, list[PinnedLog]()
        with self._busy:
            for directory in directories:
                there = directory.found(partition)
                if directory is own:
                    found = there
                elif there.pins:
                    elsewhere.append(replace(there, is_elsewhere=True))
        return replace(found, elsewhere=tuple(elsewhere)) if elsewhere else found

    def listed(self) -> ListedPins:
        """List the pin directories, for a scan of many partitions; see `ListedPins`. Blocks."""
        with self._busy:
            made, listed = self._made, list[tuple[PinDirectory, frozenset[str]]]()
            unread: list[PinDirectory] = []
            for directory in self._all:
                # A root that cannot be read is a problem of each of its partitions.
                try:
                    listed.append((directory, directory.listed()))
                except LocalFileError:
                    unread.append(directory)
        pinned = [(directory, paths) for directory, paths in listed if paths]

        def found(partition: LocalPartition, *, is_stale: bool) -> PinnedLog:
            own = self._directories.get(partition.log_dir)
            there = [directory for directory, paths in pinned if directory.is_listed(paths, partition)]
            if own is not None and own not in there and (own in unread or is_stale):
                there.append(own)
            return self._found(partition, there) if there else NO_PINS

        return ListedPins(found, may_have=bool(pinned or unread), is_stale=lambda: self._made != made)

    async def step(
        self,
        partitions: Sequence[PinFacts],
        *,
        others: Sequence[LocalPartition] = (),
        idle: Sequence[LocalPartition] = (),
        is_complete: bool,
    ) -> None:
        """
        Make and release pins, and keep those that hold bytes within the budget.

        Args:
            partitions: What is known of each partition.
            others: Partitions on disk whose pins stay as they are: the cluster does not list them, or
                they have no pin and need none.
            idle: Partitions of topics that are not archived. They get no pins. The setting may be a mistake,
                so those that they have stay, within the budget.
            is_complete: Whether the three have every partition on disk. Only then do the pins of all others
                count as those of deleted partitions.
        """
        clock = asyncio.get_running_loop().time
        held = await asyncio.to_thread(
            self._step, partitions, others, idle, is_complete=is_complete, clock=clock
        )
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
        idle: Sequence[LocalPartition],
        *,
        is_complete: bool,
        clock: Callable[[], float],
    ) -> list[Pin]:
        self._durable = set()
        homes = [(facts, self._directories.get(facts.log.partition.log_dir)) for facts in partitions]
        stay = [*self._adjusted([facts for facts, home in homes if home is None], clock), *self._kept(idle)]
        for directory in self._all:
            stay += self._adjusted([facts for facts, home in homes if home is directory], clock)
            if is_complete:
                # Read only where there are pins. Those of a partition may be in any directory.
                known = chain((facts.log.partition for facts in partitions), others, idle)
                self._forget_deleted(directory, known)
        held: list[Pin] = []
        for directory in self._all:
            kept = self._within_budget(directory, [one for one in stay if directory.has(one[1])])
            held.extend(pin for _, pin in kept if pin.is_held)
        return held

    def _kept(self, idle: Sequence[LocalPartition]) -> list[tuple[LocalPartition, Pin]]:
        """Return the pins of partitions that are not archived; log which partitions newly have such pins."""
        kept: list[tuple[LocalPartition, Pin]] = []
        for directory in self._all if idle else ():
            try:
                with self._busy:
                    listed = directory.listed()
                    kept += [
                        (partition, pin)
                        for partition in idle
                        if directory.is_listed(listed, partition)
                        for pin in directory.found(partition).pins
                    ]
            except LocalFileError as error:
                self._count_failure(error)
        pinned = {partition for partition, _ in kept}
        for partition in sorted(pinned - self._idle, key=lambda one: one.path):
            segments = [pin.segment for one, pin in kept if one == partition]
            log.warning(
                "pins stay while their topic is not archived: archive it again, or remove the directory",
                partition=str(partition.topic_partition),
                path=segments[0].path.rpartition("/")[0],
                segments=len(segments),
                size_bytes=sum(segment.size_bytes for segment in segments),
            )
        self._idle = pinned
        return kept

    def _adjusted(
        self, partitions: Iterable[PinFacts], clock: Callable[[], float]
    ) -> list[tuple[LocalPartition, Pin]]:
        """Carry out the plans of some partitions; return the pins that stay."""
        stay: list[tuple[LocalPartition, Pin]] = []
        for facts in partitions:
            with self._busy:
                stay.extend((facts.log.partition, pin) for pin in self._adjust(facts, clock))
        return stay

    def _adjust(self, facts: PinFacts, clock: Callable[[], float]) -> list[Pin]:
        """
        Carry out one partition's plan; return the pins that stay.

        An outdated plan releases nothing: when this process was stopped and goes on, offsets that were
        durable may have been cut off the archive, and the broker may have deleted its own file.
        """
        local_log = facts.log
        directory = self._directories.get(local_log.partition.log_dir)
        plan = plan_pins(
            local_log,
            facts.pins,
            next_offset=facts.next_offset,
            expiring_end=facts.expiring_end,
            gaps=facts.gaps,
        )
        if directory is None:
            plan = replace(plan, make=())
        if plan.make:
            self._made += 1
        if clock() > facts.good_until:
            self._make_only(directory, facts, plan)
            self._durable.update(plan.release)
            return list(facts.pins)
        gone = {*plan.release, *plan.replaced, *plan.stray}
        kept = [pin for pin in facts.pins if pin not in gone]
        try:
            # Stray pins go before the log is noted as the one that the pins belong to.
            for place in self._all:
                kept += self._set_aside(place, local_log.partition, _in(place, plan.stray))
            self._release(local_log.partition, plan.release)
            if directory is None:
                self._release(local_log.partition, plan.replaced)
            else:
                kept += self._make(directory, local_log, plan, kept)
        except LocalFileError as error:
            self._count_failure(error)
        return kept

    def _release(self, partition: LocalPartition, pins: Sequence[Pin]) -> None:
        for place in self._all:
            if release := _in(place, pins):
                place.release(partition, release)

    def _make(
        self, directory: PinDirectory, local_log: LocalLog, plan: PinPlan, kept: Sequence[Pin]
    ) -> Sequence[Pin]:
        """
        Note the log that the pins in *directory* belong to, and make and replace those of *plan*.

        The broker may delete a segment at any time. So what is replaced goes when all that replaces it is
        pinned. Pins of other files than the log's are stray until then: the note is not about them, even if
        this process ends in between. A pin of the same file is what the new one is made of, if need be.

        Returns the replaced pins that stay.
        """
        partition, replaced = local_log.partition, _in(directory, plan.replaced)
        inodes = {segment.inode for segment in local_log.segments}
        others = [pin for pin in replaced if pin.segment.inode not in inodes]
        same = [pin for pin in replaced if pin.segment.inode in inodes]
        elsewhere = [pin for pin in plan.replaced if pin not in replaced]
        aside = [replace(pin, is_stray=True) for pin in directory.set_aside(partition, others)]
        is_pinned_here = any(not pin.is_stray for pin in (*_in(directory, kept), *same))
        if local_log.segments and (plan.make or is_pinned_here):
            self._note(directory, local_log)
        unmade: list[LocalSegment] = []
        failures: list[LocalFileError] = []
        for segment in plan.make:
            try:
                is_made = _make_pin(directory, local_log, segment, same)
            except LocalFileError as error:
                failures.append(error)
                is_made = False
            if not is_made:
                unmade.append(segment)
        if failures:
            # Once for all: on a full disk each of many segments fails alike.
            self._count_failure(failures[0])
        before = (*same, *aside, *elsewhere)
        stay = without_successor(before, unmade)
        for pin in aside:
            if pin in stay:
                _report_aside(partition, pin)
        self._release(partition, [pin for pin in before if pin not in stay])
        if plan.make and not failures:
            # The broker may have deleted all of these since the scan: then there is nothing to note.
            directory.tidy(partition)
        return stay

    def _make_only(self, directory: PinDirectory | None, facts: PinFacts, plan: PinPlan) -> None:
        """
        Pin what has no pin yet, as an outdated plan may; all pins stay.

        The log is not noted as the one that they belong to, and nothing is pinned beside stray pins.
        """
        if plan.release or plan.replaced or plan.stray:
            log.info(
                "pins stay as they are: the last look at the log is too long ago",
                partition=str(facts.log.partition.topic_partition),
            )
        pinned = {pin.segment.base_offset for pin in facts.pins}
        try:
            for segment in () if plan.stray else plan.make:
                if directory is not None and segment.base_offset not in pinned:
                    _make_pin(directory, facts.log, segment)
        except LocalFileError as error:
            self._count_failure(error)

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
                _report_aside(partition, pin)
        return aside

    def _count_failure(self, error: LocalFileError) -> None:
        self._metrics.pin_failures.inc()
        log.error("pin failed: the broker may delete what is not durable", error=str(error))

    def _within_budget(
        self, directory: PinDirectory, kept: list[tuple[LocalPartition, Pin]]
    ) -> list[tuple[LocalPartition, Pin]]:
        """Remove pins over the budget; what an older look at the log shows to be durable goes first."""
        over_budget = pins_over_budget(
            [pin for _, pin in kept], budget_bytes=self._budget_bytes, durable=self._durable
        )
        given_up: list[Pin] = []
        for partition, pin in kept:
            if pin in over_budget:
                try:
                    directory.release(partition, [pin])
                except LocalFileError as error:
                    self._count_failure(error)
                    continue
                given_up.append(pin)
                if pin in self._durable:
                    log.info(
                        "pinned segment removed at the limit of the pins: an earlier look showed it durable",
                        partition=str(partition.topic_partition),
                        base_offset=pin.segment.base_offset,
                    )
                    continue
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
        try:
            unknown = directory.others(partitions)
            for path in sorted(unknown & self._unknown):
                held = [pin.segment for pin in directory.found_in(path).pins if pin.is_held]
                directory.remove(path)
                if not held:
                    log.info("pins of a partition that is gone are removed", path=path)
                    continue
                self._metrics.pins_given_up.inc(len(held))
                log.error(
                    "pins of a partition that is gone are removed, and what they alone held is lost",
                    path=path,
                    base_offsets=[segment.base_offset for segment in held],
                    size_bytes=sum(segment.size_bytes for segment in held),
                )
        except LocalFileError as error:
            self._count_failure(error)
            return
        self._unknown -= self._unknown_in(directory)
        self._unknown |= unknown

    def _unknown_in(self, directory: PinDirectory) -> set[str]:
        return {path for path in self._unknown if path.startswith(f"{directory.root}/")}


def _make_pin(
    directory: PinDirectory, local_log: LocalLog, segment: LocalSegment, pins: Sequence[Pin] = ()
) -> bool:
    """Pin a segment of *local_log*, or else what one of *pins* has of the same file; return whether it is."""
    is_open = segment.base_offset == local_log.segments[-1].base_offset
    paths = [segment.path, *(pin.segment.path for pin in pins if pin.segment.inode == segment.inode)]
    return any(
        directory.make(local_log.partition, replace(segment, path=path), is_open=is_open) for path in paths
    )


def _report_aside(partition: LocalPartition, pin: Pin) -> None:
    log.error(
        "pinned segment set aside: nothing shows that it is of the log that is there now",
        partition=str(partition.topic_partition),
        base_offset=pin.segment.base_offset,
        size_bytes=pin.segment.size_bytes,
        path=pin.segment.path,
    )


def _in(directory: PinDirectory, pins: Sequence[Pin]) -> list[Pin]:
    """Return those of *pins* that are in *directory*."""
    return [pin for pin in pins if directory.has(pin)]
