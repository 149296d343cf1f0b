"""
The share group of a swarm (KIP-932): Kafka's own share consumers, through the gateways and past them.

A share group reads from the brokers alone, which skip what was trimmed. So a trim must leave what the group
has not taken: each acknowledged record reaches one of the consumers.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from tests.support.processes import Server
from tests.swarm.checker import Progress
from tests.swarm.ending import in_thread

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.support.kafka import KafkaCluster
    from tests.support.writers import Writer

SHARED = "swarm-shared"
SHARE_GROUP = "swarm-sharing"
SHARE_PROPERTIES = {
    # Share groups are a preview in this broker.
    "unstable.feature.versions.enable": "true",
    "unstable.api.versions.enable": "true",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
    "share.coordinator.state.topic.num.partitions": "1",
    # A record that was given out this often without an acknowledgement is given up by the broker.
    "group.share.delivery.count.limit": "10",
}
_CONSUMER = "org.apache.kafka.tools.consumer.ConsoleShareConsumer"
_HEAP_MIB = 96
_OFFSET = re.compile(rb"Offset:(\d+)")
_LOG_LINE = re.compile(rb"\d\d:\d\d:\d\d\.\d{3} \[[^\n]*\n")
"""A line of the client's log, which another thread may print in the middle of a record's line."""
_COMMAND_SECONDS = 120
_LOOK_SECONDS = 1.0


@dataclass
class ShareGroup:
    """Two share consumers of one group, which run in an `async with` block."""

    cluster: KafkaCluster
    directory: Path
    addresses: tuple[str, ...]
    """Where each consumer begins to connect."""
    ends: int = 0
    """How often a consumer has ended by itself, and was started again."""
    _consumers: list[Server] = field(default_factory=list)
    _watching: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """Switch share groups on, and let the group begin with the first record."""
        at = ("--bootstrap-server", self.cluster.bootstrap)
        await in_thread(
            self._run,
            "org.apache.kafka.tools.FeatureCommand",
            *(*at, "upgrade", "--feature", "share.version=1"),
        )
        to_group = ("--alter", "--entity-type", "groups", "--entity-name", SHARE_GROUP)
        begins = ("--add-config", "share.auto.offset.reset=earliest")
        await in_thread(self._run, "kafka.admin.ConfigCommand", *at, *to_group, *begins)

    def _run(self, main_class: str, *arguments: str) -> None:
        done = subprocess.run(
            self.cluster.broker.command(main_class, *arguments),
            capture_output=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr).decode()

    async def __aenter__(self) -> Self:
        client = replace(self.cluster.broker, heap_mib=_HEAP_MIB)
        for number, address in enumerate(self.addresses):
            told = ("--property", "print.value=false", "--property", "print.offset=true")
            reads = ("--bootstrap-server", address, "--topic", SHARED, "--group", SHARE_GROUP)
            output = self.directory / f"share-consumer-{number}.log"
            self._consumers.append(Server(client.command(_CONSUMER, *reads, *told), output=output))
            self._consumers[-1].launch()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for one in self._consumers:
            one.kill()

    async def _watch(self) -> None:
        """Start a consumer again that has ended: a broker that is away may end it."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for one in self._consumers:
                if not one.is_running:
                    one.wait(0)
                    one.launch()
                    self.ends += 1

    def pause(self) -> None:
        """Stop the execution of all consumers: the group lags behind."""
        for one in self._consumers:
            one.pause()

    def resume(self) -> None:
        """Let them go on."""
        for one in self._consumers:
            one.resume()

    def offsets(self) -> set[int]:
        """Return the offsets of the records that the consumers have printed."""
        found: set[int] = set()
        for one in self._consumers:
            found |= printed_offsets(one.output.read_bytes())
        return found

    async def until_read(self, writer: Writer) -> list[str]:
        """Wait until the group has read what was acknowledged; return what it lacks if it goes on no more."""
        progress = Progress()
        while lost := lacks(writer, await in_thread(self.offsets)):
            if not progress.goes_on(lost):
                return lost
            await asyncio.sleep(_LOOK_SECONDS)
        return []


def printed_offsets(output: bytes) -> set[int]:
    """Return the offsets that a console consumer has printed, without the lines of its log."""
    return {int(at) for at in _OFFSET.findall(_LOG_LINE.sub(b"", output))}


def lacks(writer: Writer, offsets: Iterable[int]) -> list[str]:
    """Return what a share group was not given of the acknowledged records of a writer."""
    seen = set(offsets)
    lost = [one for one in writer.acknowledged if one.offset not in seen]
    if not lost:
        return []
    first = lost[0]
    return [
        f"the share group lacks {len(lost)} records of {writer.topic}-{writer.partition}, the first {first}"
    ]
