"""The checker of a swarm: what was promised to producers and readers, and whether it held."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiokafka import AIOKafkaConsumer, TopicPartition

from tests.support.daemon import run_json
from tests.swarm.ending import in_thread
from tests.swarm.workload import PARTITIONS, TOPIC, Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.cluster import DaemonsBeside
    from tests.support.writers import Writer, Writers

_STANDSTILL_SECONDS = 300
"""A reader, or a share group, that has not gone on for so long does not go on at all."""
_SCRUB_SECONDS = 3600
"""A deep scrub reads the whole archive, which has gigabytes after an hour."""
_SETTLE_SECONDS = 120
_DESCRIPTORS_MORE, _MEMORY_MORE_BYTES = 48, 128 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def broken_log(writer: Writer, numbers: dict[int, int]) -> list[str]:
    """
    Return what is wrong with a partition as it was read, from offset 0; empty if nothing is.

    *numbers* has the number of the value at each offset. Values have ascending numbers, and each was sent
    once.
    """
    name = f"{writer.topic}-{writer.partition}"
    broken = []
    if sorted(numbers) != list(range(len(numbers))):
        broken.append(f"{name}: offsets are missing among {len(numbers)}")
    in_order = [numbers[offset] for offset in sorted(numbers)]
    if len(set(in_order)) != len(in_order):
        broken.append(f"{name}: values are there twice")
    elif in_order != sorted(in_order):
        broken.append(f"{name}: values are out of order")
    lost = [one for one in writer.acknowledged if numbers.get(one.offset) != one.number]
    if lost:
        broken.append(f"{name}: {len(lost)} acknowledged records are lost, the first {lost[0]}")
    return broken


def broken_reader(reader: Reader, end_offsets: dict[int, int]) -> list[str]:
    """Return what is wrong with what a reader saw while the faults came."""
    late = [
        f"{reader.name}: {TOPIC}-{number} was read to {reader.positions[number]} of {end}"
        for number, end in end_offsets.items()
        if reader.positions[number] < end
    ]
    return [*reader.broken, *late]


async def end_offsets(bootstrap: str) -> dict[int, int]:
    """Return the end of each partition's log on the brokers."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap)
    await consumer.start()
    try:
        found = await consumer.end_offsets([TopicPartition(TOPIC, number) for number in range(PARTITIONS)])
        return {partition.partition: offset for partition, offset in found.items()}
    finally:
        await consumer.stop()


class Progress:
    """Tells slowness from a standstill: whether what is waited for has moved within some minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: object = None
        self._moved = clock()

    def goes_on(self, now: object) -> bool:
        """Return whether *now* is not what it was, or was another value a while ago."""
        if now != self._before:
            self._before, self._moved = now, self._clock()
        return self._clock() - self._moved < _STANDSTILL_SECONDS


async def until_read(readers: Sequence[Reader], ends: dict[int, int]) -> None:
    """Return when the readers have come to the ends, or when the late ones do not go on any more."""
    progress = Progress()
    late = list(readers)
    while late and progress.goes_on([dict(one.positions) for one in late]):
        await asyncio.sleep(0.2)
        late = [one for one in late if any(one.positions[number] < end for number, end in ends.items())]


async def all_broken(
    writers: Writers, readers: Sequence[Reader], gateways: str, brokers: str, config: Path
) -> list[str]:
    """
    Return each broken promise, after the producers have stopped and all faults are healed.

    Both tiers are read once more from offset 0 by a reader of its own, and a deep scrub runs.
    """
    ends = await end_offsets(brokers)
    last = Reader("the last reader", gateways, writers, reads_archive=True)
    reading = asyncio.create_task(last.run())
    await until_read([*readers, last], ends)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    broken = [one for reader in [*readers, last] for one in broken_reader(reader, ends)]
    for reader in readers:
        for number, numbers in reader.numbers.items():
            differs = [offset for offset in numbers if numbers[offset] != last.numbers[number].get(offset)]
            if differs:
                broken.append(f"{reader.name}: {TOPIC}-{number} had another value at {differs[:3]}")
    for writer in writers.writers:
        broken += broken_log(writer, last.numbers[writer.partition])
    report = await in_thread(
        run_json, "archive", "verify", "--deep", "--config", str(config), timeout_seconds=_SCRUB_SECONDS
    )
    return [*broken, *([f"the deep scrub finds {report['faults']} faults"] if report["faults"] else [])]


@dataclass(frozen=True)
class Resources:
    """The resources of a daemon."""

    descriptors: Counter[str]
    """The number of open descriptors, by what they are: `socket`, or a file's suffix."""
    resident_bytes: int

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.descriptors.items()))
        return f"{self.descriptors.total()} descriptors ({kinds}) and {self.resident_bytes >> 20} MiB"


def _kind_of(descriptor: Path) -> str:
    try:
        target = str(descriptor.readlink())
    except OSError:
        return "closed meanwhile"
    if not target.startswith("/"):
        return target.partition(":")[0]
    deleted = " (deleted)" if target.endswith(" (deleted)") else ""
    return f"{Path(target).suffix or Path(target).name.partition(' ')[0]}{deleted}"


def resources(daemons: DaemonsBeside) -> dict[int, Resources]:
    """Return the open descriptors and the resident bytes of each daemon, by node."""
    found = {}
    for node_id in (1, 2, 3):
        process = Path(f"/proc/{daemons[node_id].server.pid}")
        pages = int((process / "statm").read_text().split()[1])
        kinds = Counter(_kind_of(one) for one in (process / "fd").iterdir())
        found[node_id] = Resources(kinds, pages * _PAGE_BYTES)
    return found


def grown(before: dict[int, Resources], after: dict[int, Resources]) -> list[str]:
    """Return what grew by more than a daemon's work explains."""
    return [
        f"the daemon of node {node_id} grew from {before[node_id]} to {now}"
        for node_id, now in after.items()
        if now.descriptors.total() - before[node_id].descriptors.total() > _DESCRIPTORS_MORE
        or now.resident_bytes - before[node_id].resident_bytes > _MEMORY_MORE_BYTES
    ]


async def until_settled(daemons: DaemonsBeside, before: dict[int, Resources]) -> dict[int, Resources]:
    """
    Return what the daemons hold, once that has not grown, or after two minutes.

    A full read has just opened cached chunks and connections to the store, and the daemons close idle ones
    after a while.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        after = await in_thread(resources, daemons)
        if not grown(before, after) or time.monotonic() > deadline:
            return after
        await asyncio.sleep(1)
