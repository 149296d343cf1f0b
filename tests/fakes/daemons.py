"""A daemon's reconciler with its broker, store and metrics, for tests of its rounds."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

from tests.fakes.archive import Clock, archive_in, reconciler_of, tiered_config
from tests.fakes.broker import FakeBroker
from tests.fakes.manifests import bases
from tieringd.archiving.archiver import Archiver
from tieringd.broker.pins import PinDirectory
from tieringd.metrics import Metrics
from tieringd.model.partition import Leadership

if TYPE_CHECKING:
    from tests.fakes.log_writer import LogWriter
    from tieringd.archiving.partition_status import PartitionStatus

INTERVAL_SECONDS = 10


class Daemon:
    """A reconciler over three partitions, with its broker, store and metrics."""

    def __init__(self, log_dir, store, writers, *, pin_root=None, **config) -> None:
        self.writers = writers
        self.store = store
        self.broker = FakeBroker(*writers)
        self.metrics = Metrics()
        self.clock = Clock()
        self.archive = archive_in(store)
        self.config = tiered_config(log_dir, interval_ms=INTERVAL_SECONDS * 1000, **config)
        self.pins = PinDirectory(str(pin_root)) if pin_root else None
        self.reconciler = reconciler_of(
            self.config,
            self.archive,
            self.broker,
            metrics=self.metrics,
            now_ms=self.clock,
            pins={str(log_dir): self.pins} if self.pins else None,
        )

    @asynccontextmanager
    async def running(self):
        """Run the reconciler in the context, then stop it and wait for its end."""
        task = asyncio.create_task(self.reconciler.run())
        await asyncio.sleep(1)
        try:
            yield
        finally:
            self.reconciler.stop()
            await task

    async def round(self) -> None:
        """Wait for the next regular round, and for its work."""
        await asyncio.sleep(INTERVAL_SECONDS)

    def archived(self) -> dict[str, list[int]]:
        """Return the base offsets in each partition's stored manifest; empty ones are left out."""
        found = {str(each.name): bases(self.store, each) for each in self.writers}
        return {name: named for name, named in found.items() if named}

    def pinned(self, writer: LogWriter) -> list[int]:
        """Return the base offsets of a partition's pins."""
        assert self.pins, "made with a pin_root"
        return [pin.segment.base_offset for pin in self.pins.found(writer.partition).pins]

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    def status(self, writer: LogWriter, epoch: int = 0) -> PartitionStatus:
        return self.reconciler.statuses()[Leadership(writer.identified, epoch)]


@contextmanager
def stepped():
    """Give the partitions whose archivers do a step, in order."""
    partitions, step = [], Archiver.step

    async def noting(self, seen, **options):
        partitions.append(seen.log.partition.topic_partition.partition)
        return await step(self, seen, **options)

    with patch.object(Archiver, "step", noting):
        yield partitions
