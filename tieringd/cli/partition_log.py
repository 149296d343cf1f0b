"""
A partition as one log: the archived records, and after them the ones that only the broker has.

The archive is read first. Where it ends the cluster continues, if there is one and it answers. On a host
without a broker the reading ends with the archive; if a broker is configured, a message says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import typer

from tieringd.broker.kafka import KafkaBroker
from tieringd.broker.kafka_tail import KafkaTail
from tieringd.config import Config
from tieringd.daemon.archive import Archive
from tieringd.daemon.local_broker import kafka_settings
from tieringd.errors import BrokerDenied, BrokerUnavailable
from tieringd.formats.records import Record
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import TopicIdPartition
from tieringd.reading.history import LogReader

_NOT_COPIED = "the broker removed these offsets before they were copied"


class PartitionReading:
    """One reading of one partition, from an offset or a time, to its end or endlessly."""

    def __init__(
        self,
        config: Config,
        archive: Archive,
        partition: TopicIdPartition,
        *,
        read_committed: bool,
        on_gap: Callable[[Gap], None],
        archive_only: bool,
    ) -> None:
        """Prepare the reading. It never connects to the broker if *archive_only* is true."""
        self._config = config
        self._archive = archive
        self._partition = partition
        self._read_committed = read_committed
        self._on_gap = on_gap
        self._has_tail = config.broker.kind != "none" and not archive_only
        self._interval_seconds = config.cloud_storage_reconciliation_interval_ms / 1000
        self.next_offset = 0
        self.end_offset: int | None = None
        """The end of this reading, exclusive, as far as it is known."""

    async def records(
        self, *, offset: int | None, timestamp_ms: int | None, follow: bool
    ) -> AsyncGenerator[Record]:
        """
        Yield the records from *offset*, from *timestamp_ms*, or from the archive's start if both are None.

        With *follow* the reading does not end: it waits for new records, of the broker or of the archive.

        Raises:
            ObjectNotFound: An object is missing that has the records, or the manifest of an older archive.
            BrokerUnavailable: With *follow*, the broker does not answer. Without it, a message says so.
            BrokerDenied: With *follow*, the broker refuses the reading.
        """
        manifest = (await self._archive.manifests.load(self._partition)).existing
        self.end_offset = manifest.next_offset
        parts: Sequence[PartitionManifest] = ()
        if offset is None or timestamp_ms is not None:
            parts = await self._archive.history.parts(
                self._partition, start_offset=manifest.start_offset, deleted_before=manifest.deleted_before
            )
        is_later = False
        if timestamp_ms is not None:
            offset = await self._offset_for_time((*parts, manifest), timestamp_ms)
            is_later = offset == manifest.next_offset
        reader = LogReader(
            self._partition,
            manifests=self._archive.manifests,
            records=self._archive.records,
            from_offset=(*parts, manifest)[0].start_offset if offset is None else offset,
            on_gap=self._on_gap,
            history=self._archive.history,
        )
        while True:
            async with aclosing(reader.records(read_committed=self._read_committed)) as records:
                async for record in records:
                    self.next_offset = record.offset + 1
                    yield record
            if self._has_tail:
                tail = self._tail(reader.next_offset, timestamp_ms if is_later else None, follow=follow)
                async with aclosing(tail) as records:
                    async for record in records:
                        self.next_offset = record.offset + 1
                        yield record
                return
            if not follow:
                return
            await asyncio.sleep(self._interval_seconds)

    async def _offset_for_time(self, manifests: Sequence[PartitionManifest], timestamp_ms: int) -> int:
        """Return the offset of the first record at or after a time; the last one's end if none is as late."""
        for manifest in manifests:
            record = await self._archive.records.first_record_at(manifest, timestamp_ms)
            if record is not None:
                return record.offset
        return manifests[-1].next_offset

    async def _tail(
        self, from_offset: int, timestamp_ms: int | None, *, follow: bool
    ) -> AsyncGenerator[Record]:
        """
        Yield the cluster's records from *from_offset* on, or from *timestamp_ms* where that is later.

        A topic that was created again under the same name ends the reading, with a message.
        """
        name = self._partition.topic_partition
        try:
            if await self._is_another_topic():
                typer.echo(
                    f"the archive ends at offset {from_offset}: it belongs to an earlier topic "
                    f"{name.topic}, which was deleted, and not to the topic that the cluster has now",
                    err=True,
                )
                return
            async with KafkaTail(
                kafka_settings(self._config), name, read_committed=self._read_committed
            ) as tail:
                first_offset, end_offset = await tail.bounds()
                if timestamp_ms is not None:
                    later = await tail.offset_for_time(timestamp_ms)
                    from_offset = max(from_offset, end_offset if later is None else later)
                elif first_offset > from_offset:
                    self._on_gap(Gap(from_offset, first_offset - 1, _NOT_COPIED, 0))
                    from_offset = first_offset
                self.end_offset = max(end_offset, from_offset)
                reading = tail.records(from_offset=from_offset, end_offset=None if follow else end_offset)
                async with aclosing(reading) as records:
                    async for record in records:
                        yield record
        except (BrokerUnavailable, BrokerDenied) as error:
            if follow:
                raise
            typer.echo(f"the archive ends at offset {from_offset}, and {error}", err=True)

    async def _is_another_topic(self) -> bool:
        """Return whether the cluster's topic of this name is another one, created after the archived one."""
        broker = KafkaBroker(kafka_settings(self._config))
        try:
            found = await broker.topic_id(self._partition.topic)
        finally:
            await broker.close()
        return found is not None and found != self._partition.topic_id
