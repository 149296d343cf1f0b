"""An open archive: the parts that need the bucket and no broker; daemons and commands are built on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tieringd.archive.archive_reader import ArchiveReader
from tieringd.archive.catalog import Catalog
from tieringd.archive.manifest_store import ManifestStore
from tieringd.archive.record_reader import RecordReader
from tieringd.archive.scrub.segment_inspection import Verifier
from tieringd.archiving.remote_log import RemoteLog
from tieringd.archiving.upload_gate import UploadGate
from tieringd.broker.layout import Layout
from tieringd.config import Config
from tieringd.daemon.local_broker import layout_of
from tieringd.metrics import Metrics
from tieringd.metrics.restarts import restarted
from tieringd.policies.upload_control import UploadPace
from tieringd.processors import usable_processors
from tieringd.reading.history import History
from tieringd.storage.archive_clock import ArchiveClock
from tieringd.storage.at_once import cancelled
from tieringd.storage.kept_credentials import keep_credentials
from tieringd.storage.resilient import ResilientStore
from tieringd.storage.store_opening import StoreCheck, max_connections, opened_store


@dataclass(frozen=True, slots=True)
class Archive:
    """The parts that need only the bucket."""

    store: ResilientStore
    clock: ArchiveClock
    check_store: Callable[[], Awaitable[None]]
    manifests: ManifestStore
    remote_log: RemoteLog
    gate: UploadGate
    """The gate before uploads, at full pace until a controller sets another."""
    layout: Layout
    catalog: Catalog
    reader: ArchiveReader
    records: RecordReader
    verifier: Verifier
    history: History


def max_uploads(config: Config) -> int:
    """Return how many uploads may run at once: each holds a connection and a thread, which run out first."""
    return min(max_connections(config), 4 * usable_processors())


def _full_pace(config: Config) -> UploadPace:
    limit = config.cloud_storage_upload_bytes_per_second
    return UploadPace(max_uploads(config), None, limit_bytes_per_second=limit)


@asynccontextmanager
async def opened_archive(
    config: Config, metrics: Metrics | None = None, *, writer_id: str = "0"
) -> AsyncIterator[Archive]:
    """Open the bucket for the time of the context; *writer_id* matters only to writers."""
    metrics = metrics or Metrics()
    clock = ArchiveClock(metrics=metrics)
    async with opened_store(config, metrics) as store:
        clock.listen_to(store.backend)
        keeping = asyncio.create_task(
            restarted("credentials", lambda: keep_credentials(store), on_failure=metrics.health.task_failed)
        )
        try:
            yield archive_on(
                store,
                check_store=StoreCheck(config, store),
                gate=UploadGate(_full_pace(config), timers=asyncio.get_running_loop()),
                layout=layout_of(config),
                writer_id=writer_id,
                clock=clock,
            )
        finally:
            await cancelled((keeping,))


def archive_on(
    store: ResilientStore,
    *,
    check_store: Callable[[], Awaitable[None]],
    gate: UploadGate,
    layout: Layout,
    writer_id: str,
    clock: ArchiveClock,
) -> Archive:
    """Return the parts on an open store."""
    manifests = ManifestStore(store, writer_id=writer_id, now_ms=clock)
    remote_log = RemoteLog(
        store, manifests, writer_id=writer_id, now_ms=clock, wall_ms=clock.wall_ms, gate=gate, layout=layout
    )
    reader = ArchiveReader(store)
    return Archive(
        store=store,
        clock=clock,
        check_store=check_store,
        manifests=manifests,
        remote_log=remote_log,
        gate=gate,
        layout=layout,
        catalog=Catalog(store, manifests),
        reader=reader,
        records=RecordReader(remote_log, reader, manifests.spillovers),
        verifier=Verifier(store, manifests.spillovers),
        history=History(store, manifests, now_ms=clock),
    )
