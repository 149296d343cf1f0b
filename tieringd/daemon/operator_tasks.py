"""
The tasks for an operator: the part of an overview that says what to do.

Each task says what is wrong, with its consequence, and has the command to type first. What keeps the daemon
from being ready comes first, then data that is about to be lost, full disks, partitions, and the rest. The
limits are those of the alert rules, so the page and the alerts ask for the same; a rule waits for the time in
its `for`, and the page does not.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from tieringd.archiving.partition_status import PartitionFault
from tieringd.metrics.partition_figures import by_labels
from tieringd.model.human_units import duration, size

if TYPE_CHECKING:
    from tieringd.metrics import Metrics
    from tieringd.metrics.partition_figures import PartitionFigures, Sums
    from tieringd.model.partition import TopicPartition

LOSS_IS_NEAR_SECONDS: Final = 3600
NOT_UPLOADING_SECONDS: Final = 900
UPLOAD_HANGS_SECONDS: Final = 600
HELD_BY_TRANSACTION_SECONDS: Final = 3600
LOOP_STALLED_SECONDS: Final = 900
SETTLED_SECONDS: Final = 300
"""For how long after its start a daemon may still be busy with starting."""
_MOST_OF_A_KIND: Final = 5
_LOG: Final = "journalctl -u tieringd --since -1h"
_LOW, _DEGRADED = 1, 2
_FAULTS: Final = {
    PartitionFault.CORRUPT: (
        "corrupt local data: the partition is not archived from there on",
        "tieringd explain {topic} {partition}   # another broker has to lead before this replica is deleted",
    ),
    PartitionFault.FENCED: (
        "another daemon archives the partition under the same leader epoch",
        "systemctl stop tieringd   # on the host that should not run it; then restart it here",
    ),
    PartitionFault.OPERATOR: (
        "the partition waits for a decision about its records",
        "tieringd explain {topic} {partition}",
    ),
    PartitionFault.OTHER: (
        "the archiver's last step failed, and the partition is not archived until one succeeds",
        f"{_LOG}   # says why",
    ),
}
_REASONS: Final = {
    "store": (
        "the object store takes nothing, and what is written waits on the broker's disk",
        "tieringd doctor   # tries the store, and says how to mend it",
    ),
    "round": (
        "nothing new is uploaded or trimmed",
        "tieringd doctor   # tries broker and log directories, and says how to mend them",
    ),
    "bookkeeping": ("work between rounds fails", _LOG),
    "log_directory": (
        "nothing in this log directory is uploaded or trimmed",
        "tieringd doctor   # tries the log directories, and says how to mend them",
    ),
}


@dataclass(frozen=True, slots=True)
class Task:
    """Something that only a person can do."""

    what: str
    command: str


class FaultyPartition(Protocol):
    """A partition of an overview, with the kind of its fault."""

    @property
    def topic(self) -> str:
        """The topic's name."""

    @property
    def partition(self) -> int:
        """The partition's number."""

    @property
    def fault(self) -> str:
        """The kind of its fault; empty without one."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of the daemon from which the tasks follow, all of one moment."""

    uptime_seconds: float
    reasons: Mapping[str, str]
    """The reasons why archiving is not ready: the text of each by its name. Empty when it is ready."""
    partitions: Sequence[FaultyPartition]
    figures: Mapping[TopicPartition, PartitionFigures]
    sums: Sums
    problems: Mapping[str, str]
    """Why a path or topic was left out of the last round, by its name."""
    paused_topics: Sequence[str]
    oldest_upload_seconds: float
    gateway_fault: str = ""
    """Why no worker of the gateway serves clients; empty while one does, and without workers."""


def tasks(seen: Seen, metrics: Metrics) -> Iterator[Task]:
    """Yield the tasks for an operator, the most urgent first."""
    yield from _why_not_ready(seen)
    yield from _near_losses(seen, metrics)
    yield from _full_disks(metrics, is_settled=seen.uptime_seconds >= SETTLED_SECONDS)
    yield from _partitions(seen.partitions)
    yield from _losses(seen)
    yield from _late_uploads(seen)
    yield from _left_out(seen)
    yield from _archive(metrics)
    yield from _host(metrics)


def _why_not_ready(seen: Seen) -> Iterator[Task]:
    for reason, (effect, command) in _REASONS.items():
        if why := seen.reasons.get(reason):
            yield Task(f"{effect}: {why}", command)
    if seen.gateway_fault and seen.uptime_seconds >= SETTLED_SECONDS:
        # Workers take seconds to start, with the daemon.
        yield Task(f"the gateway's clients are not served: {seen.gateway_fault}", _LOG)
    if seen.reasons.keys() == {"starting"} and seen.uptime_seconds >= SETTLED_SECONDS:
        yield Task(f"the start does not end: {seen.reasons['starting']}", _LOG)


def _near_losses(seen: Seen, metrics: Metrics) -> Iterator[Task]:
    if seen.sums.seconds_to_loss < LOSS_IS_NEAR_SECONDS:
        name = _least(seen.figures, lambda one: one.seconds_to_closed_loss)
        yield Task(
            f"in {duration(seen.sums.seconds_to_loss)} the broker deletes data of {name} that is not durable",
            "kafka-configs.sh --alter --entity-type topics --add-config retention.ms=...   # a longer one",
        )
    unknown = int(metrics.unknown_loss_partitions._value.get())  # noqa: SLF001
    if unknown and seen.uptime_seconds >= SETTLED_SECONDS:
        yield Task(
            f"the manifests of {unknown} partitions could not be read, so it is unknown when the broker "
            "deletes data of theirs that is not durable",
            "kafka-configs.sh --alter --entity-type topics --add-config retention.ms=...   # a longer one",
        )
    pinned = metrics.pinned_bytes._value.get()  # noqa: SLF001
    if pinned and (seen.reasons or seen.sums.lag_seconds > NOT_UPLOADING_SECONDS):
        yield Task(
            f"only pins hold {size(pinned)} that the broker has deleted; at pin_max_bytes the oldest go",
            "tieringd space plan   # make room, and raise pin_max_bytes until the uploads go on",
        )


def _full_disks(metrics: Metrics, *, is_settled: bool) -> Iterator[Task]:
    free = by_labels(metrics.disk.free_bytes[1])
    states = {place: int(state) for place, state in by_labels(metrics.disk.alert[1]).items()}
    ballast = metrics.ballast
    ballast_bytes, wanted_bytes = (
        gauge._value.get()  # noqa: SLF001
        for gauge in (ballast.size_bytes, ballast.wanted_bytes)
    )
    for place, state in states.items():
        left = f"{size(free.get(place, 0))} free"
        if state == _DEGRADED:
            first = "tieringd space ballast release" if ballast_bytes else "tieringd space plan"
            yield Task(
                f"the disk of {place[0]} is out of space, {left}: the broker stops when it is full",
                f"{first}   # then lower local.retention.ms, or add space",
            )
        elif state == _LOW:
            yield Task(
                f"the disk of {place[0]} is low on space, {left}",
                "tieringd space plan   # then lower local.retention.ms, or add space",
            )
    is_degraded = _DEGRADED in states.values()
    yield from _held_back(metrics, is_degraded=is_degraded)
    for (log_dir,), short in by_labels(metrics.space.short_bytes).items():
        if short:
            yield Task(
                f"the logs in {log_dir} are {size(short)} over their area, and no more of them may go",
                "tieringd space plan   # why each partition stays; tier more topics, or add space",
            )
    if ballast_bytes < wanted_bytes and not is_degraded and is_settled:
        yield Task("the ballast file is missing or too small", "tieringd space ballast show")


def _held_back(metrics: Metrics, *, is_degraded: bool) -> Iterator[Task]:
    if not metrics.producers_held_back._value.get() or is_degraded:  # noqa: SLF001
        return
    if metrics.degraded_brokers._value.get():  # noqa: SLF001
        yield Task(
            "clients' writes are held back, because another broker is out of disk space",
            "tieringd status   # on the other brokers: one of them names its disk",
        )
    else:
        yield Task(
            "clients' writes are still held back, although no broker is out of disk space",
            f"{_LOG}   # why the quotas cannot be put back",
        )


def _partitions(partitions: Sequence[FaultyPartition]) -> Iterator[Task]:
    for kind, (what, command) in _FAULTS.items():
        found = [one for one in partitions if one.fault == kind.value]
        for one in found[:_MOST_OF_A_KIND]:
            name = f"{one.topic}-{one.partition}"
            yield Task(f"{name}: {what}", command.format(topic=one.topic, partition=one.partition))
        left = len(found) - _MOST_OF_A_KIND
        if left > 0:
            yield Task(f"{left} more partitions: {what}", "curl -s localhost:9640/status")


def _losses(seen: Seen) -> Iterator[Task]:
    if lost := seen.sums.gap_offsets:
        most = heapq.nlargest(3, seen.figures, key=lambda one: seen.figures[one].gap_offsets)
        names = ", ".join(_name(one) for one in most if seen.figures[one].gap_offsets)
        yield Task(
            f"{lost} offsets were lost before they could be copied: {names}",
            "tieringd archive describe TOPIC",
        )


def _late_uploads(seen: Seen) -> Iterator[Task]:
    sums = seen.sums
    if sums.held_seconds > HELD_BY_TRANSACTION_SECONDS:
        name = _least(seen.figures, lambda one: -one.held_seconds)
        yield Task(
            f"an open transaction has held {name} back for {duration(sums.held_seconds)}",
            "kafka-transactions.sh find-hanging   # and abort it",
        )
    if seen.reasons:
        return  # The reason is why uploads are late.
    if sums.lag_seconds > NOT_UPLOADING_SECONDS:
        late = min(seen.figures, key=lambda one: -seen.figures[one].lag_seconds, default=None)
        if late is not None:
            yield Task(
                f"a closed segment of {_name(late)} has waited for {duration(sums.lag_seconds)}",
                f"tieringd explain {late.topic} {late.partition}",
            )
    if seen.oldest_upload_seconds > UPLOAD_HANGS_SECONDS:
        yield Task(
            f"an upload has been under way for {duration(seen.oldest_upload_seconds)}",
            "tieringd doctor   # the store or the link to it is slow",
        )


def _left_out(seen: Seen) -> Iterator[Task]:
    # A log directory as a whole is a reason why the daemon is not ready, with a task of its own.
    whole = seen.reasons.get("log_directory")
    found = [(place, why) for place, why in seen.problems.items() if why != whole]
    for place, why in found[:_MOST_OF_A_KIND]:
        if place.startswith("topic "):
            # Its settings are hidden, or its archive is closed; all other places are paths.
            yield Task(f"{place} is left out: {why}", "tieringd doctor")
        else:
            yield Task(f"{place} cannot be read: {why}", f"ls -ld {place}")
    if seen.paused_topics:
        names = ", ".join(seen.paused_topics[:_MOST_OF_A_KIND])
        yield Task(f"paused topics: {names}", f"tieringd topic resume {seen.paused_topics[0]}")


def _archive(metrics: Metrics) -> Iterator[Task]:
    if scrubbed := int(sum(by_labels(metrics.scrub.faults).values())):
        yield Task(f"{scrubbed} faults in the archive that scrubbing cannot mend", "tieringd archive scrub")
    if stray := int(metrics.stray.pins._value.get()):  # noqa: SLF001
        yield Task(
            f"{stray} pinned segments may be of a log that was given up, and are never uploaded",
            f"{_LOG}   # names the .stray files: copy those that you need, then delete them",
        )


def _host(metrics: Metrics) -> Iterator[Task]:
    health, now = metrics.health, time.time()
    if not health.reload_succeeded._value.get():  # noqa: SLF001
        yield Task(
            "the last reload found a fault; the configuration before it is in use",
            "tieringd config check",
        )
    for (log_dir,), available in by_labels(health.pins_available).items():
        if not available:
            yield Task(
                f"segments in {log_dir} are not pinned: the broker may delete what is not durable",
                "set broker.pin_directory to a directory on the same file system",
            )
    if health.share_groups_unknown._value.get():  # noqa: SLF001
        yield Task(
            "trims wait, because the brokers do not tell what share groups still need", "tieringd doctor"
        )
    if metrics.clock.is_doubted._value.get():  # noqa: SLF001
        yield Task(
            "the time is not certain, and nothing is deleted by age",
            "timedatectl   # set the clock that is wrong: this host's or the store's",
        )
    for (loop,), succeeded_at in by_labels(health.succeeded_at).items():
        if now - succeeded_at > LOOP_STALLED_SECONDS:
            yield Task(f"the loop {loop} has not done its work for {duration(now - succeeded_at)}", _LOG)


def _least(
    figures: Mapping[TopicPartition, PartitionFigures], key: Callable[[PartitionFigures], float]
) -> str:
    """Return the name of the partition with the least *key*."""
    least = min(figures, key=lambda one: key(figures[one]), default=None)
    return "a partition" if least is None else _name(least)


def _name(one: TopicPartition) -> str:
    return f"{one.topic}-{one.partition}"
