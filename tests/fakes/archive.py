"""
The daemon's services over any store and broker, assembled as the daemon does it.

Short functions do what tests need: observe a log, archive it, and read it back.
"""

from __future__ import annotations

import asyncio
from functools import cache, lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.broker import FakeBroker
from tests.fakes.topics import topic_config
from tieringd.archiving.archiver import Archiver
from tieringd.archiving.claim import is_old
from tieringd.archiving.first_claims import FirstClaims
from tieringd.archiving.manifest_upkeep import FollowedManifests, ManifestUpkeep
from tieringd.archiving.observer import Observation, Observer
from tieringd.archiving.pinner import Pinner
from tieringd.archiving.reconciler import Reconciler
from tieringd.archiving.share_groups import ShareGroups
from tieringd.archiving.upload_gate import UploadGate
from tieringd.broker.layout import KafkaLayout
from tieringd.config import parse_config
from tieringd.daemon.archive import Archive, archive_on
from tieringd.metrics import Metrics
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.policies.upload_control import UploadPace
from tieringd.policies.upload_plan import UploadLimits
from tieringd.storage.archive_clock import ArchiveClock
from tieringd.storage.resilient import ResilientStore
from tieringd.topics.retention_manager import RetentionManager
from tieringd.topics.topic_defaults import TopicDefaultsRecorder
from tieringd.topics.topic_registry import TopicRegistry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from tests.fakes.log_writer import LogWriter
    from tieringd.archive.manifest_store import StoredManifest
    from tieringd.broker.base import Broker
    from tieringd.broker.layout import Layout
    from tieringd.broker.log_dir import ChangeReports
    from tieringd.broker.pins import PinDirectory
    from tieringd.config import Config
    from tieringd.model.manifest import PartitionManifest
    from tieringd.storage.base import ObjectStore


SCAN_NUMBERS = count(1)
SHARE_GROUP_HOLD_MS = 86_400_000
"""Ascending numbers for observations."""


class Clock:
    """A wall clock in milliseconds that only a test moves."""

    def __init__(self, now_ms: int = DEFAULT_TIME_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        """Return the time in milliseconds since the epoch."""
        return self.now_ms


def archive_clock(wall_ms: Callable[[], int], store: object = None) -> ArchiveClock:
    """
    Return the archive's clock on a host whose wall clock shows *wall_ms* and never jumps.

    If *store* has a clock of its own, the archive's clock is compared with it. A store in a directory has the
    real clock.
    """
    clock = ArchiveClock(wall_ms=wall_ms, steady_seconds=lambda: wall_ms() / 1000)
    backend = store.backend if isinstance(store, ResilientStore) else store
    if getattr(backend, "has_own_clock", None) is True:
        clock.listen_to(backend)
    return clock


class _LoopTimers:
    """The running loop's timers, for a gate that is built before any loop runs."""

    def time(self) -> float:
        """Return the running loop's time; 0 without a running loop."""
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return 0.0

    def call_at(self, when: float, callback: Callable[[float], object], argument: float, /) -> Any:
        """Schedule a call on the running loop."""
        return asyncio.get_running_loop().call_at(when, callback, argument)


def tiered_config(
    log_dir: Path,
    *,
    target_bytes: int = -1,
    interval_ms: int = 500,
    retention_ms: int | None = None,
    retention_bytes: int | None = None,
    is_strict: bool = True,
    delete_delay: str = "1s",
    more: str = "",
) -> Config:
    """
    Return a configuration that archives all topics and keeps *target_bytes* of each partition locally.

    *retention_ms* and *retention_bytes* are total retention. Unless *is_strict*, local targets of topics
    that use Redpanda's names are only advisory. Objects are deleted *delete_delay* after their segment
    expired. *more* are further lines of YAML.
    """
    return _parsed(
        f"""\
broker:
  kind: none
  log_dirs: [{log_dir}]
state_directory: /nowhere/state
cloud_storage_enabled: true
cloud_storage_enable_remote_write: true
cloud_storage_enable_remote_read: true
retention_local_strict: {str(is_strict).lower()}
cloud_storage_backend: file
cloud_storage_file_root: /nowhere/archive
cloud_storage_reconciliation_interval_ms: {interval_ms}
retention_local_target_ms_default: -1
retention_local_target_bytes_default: {target_bytes}
log_retention_ms: {retention_ms or -1}
retention_bytes: {retention_bytes or "null"}
cloud_storage_housekeeping_interval_ms: {interval_ms}
archive_delete_delay_ms: {delete_delay}
{more}"""
    )


@lru_cache(maxsize=64)
def _parsed(text: str) -> Config:
    """Return the configuration of *text*. A simulation starts many daemons with the same one."""
    return parse_config(text, source="test", environ={})


def archive_in(
    store: ObjectStore,
    *,
    writer_id: str = "a1",
    now_ms: Callable[[], int] | None = None,
    clock: ArchiveClock | None = None,
    layout: Layout | None = None,
) -> Archive:
    """
    Return the services of one daemon process, or of one reader.

    *clock* replaces the clock made from *now_ms*, for tests in which the host's clock may be wrong.
    """
    return archive_on(
        store,
        check_store=_fit,
        gate=UploadGate(UploadPace(4, None), timers=_LoopTimers()),
        layout=layout or KafkaLayout(),
        writer_id=writer_id,
        clock=clock or archive_clock(now_ms or Clock(), store),
    )


async def _fit() -> None:
    """Check nothing: every store is good."""


@cache
def unread_metrics() -> Metrics:
    """Return the metrics of all services whose tests read none: thousands are made, each after a crash."""
    return Metrics()


def archiver_of(
    writer: LogWriter,
    archive: Archive,
    broker: Broker,
    *,
    leader_epoch: int | None = None,
    metrics: Metrics | None = None,
    now_ms: Callable[[], int] | None = None,
    limits: UploadLimits | None = None,
    first_claims: FirstClaims | None = None,
    known: StoredManifest | None = None,
) -> Archiver:
    """
    Return an archiver of *writer*'s partition, with *leader_epoch* or the newest epoch of its log.

    Without *now_ms* the archiver uses the archive's clock. *first_claims* is shared with others.
    *known* is what the daemon has read as a follower.
    """
    newest = writer.epochs[-1][0] if writer.epochs else 0
    return _archiver(
        Leadership(writer.identified, newest if leader_epoch is None else leader_epoch),
        archive,
        broker,
        metrics=metrics or unread_metrics(),
        clock=archive_clock(now_ms, archive.store) if now_ms else archive.clock,
        limits=limits or UploadLimits(),
        first_claims=first_claims or FirstClaims(),
        known=known,
    )


def reconciler_of(
    config: Config,
    archive: Archive,
    broker: Broker,
    *,
    metrics: Metrics | None = None,
    now_ms: Callable[[], int] | None = None,
    pins: Mapping[str, PinDirectory] | None = None,
    pinner: Pinner | None = None,
    max_interval_ms: int | None = None,
    reports: ChangeReports | None = None,
) -> Reconciler:
    """
    Return the reconciler of a daemon. *pins* are by log directory, with a budget too large to matter.

    *pinner* keeps them, where it is given. *reports* says what changed in the log directories. Without
    *now_ms* the reconciler uses the archive's clock.
    """
    metrics = metrics or unread_metrics()
    followed_manifests = FollowedManifests(archive.manifests, steady_ms=now_ms or archive.clock.steady_ms)
    first_claims = FirstClaims()
    registry = TopicRegistry(archive.store, archive.manifests)

    def make_archiver(leadership: Leadership) -> Archiver:
        return _archiver(
            leadership,
            archive,
            broker,
            metrics=metrics,
            clock=archive_clock(now_ms, archive.store) if now_ms else archive.clock,
            limits=UploadLimits(segments_per_step=3, max_interval_ms=max_interval_ms),
            first_claims=first_claims,
            known=followed_manifests.take(leadership.partition),
            is_new=registry.is_new,
        )

    pinner = pinner or Pinner(pins or {}, budget_bytes=10**12, metrics=metrics)
    interval_seconds = config.cloud_storage_reconciliation_interval_ms / 1000
    return Reconciler(
        interval_seconds=interval_seconds,
        observer=Observer(
            config,
            broker=broker,
            metrics=metrics,
            pinner=pinner,
            registry=registry,
            manifests=archive.manifests,
            layout=archive.layout,
            reports=reports,
        ),
        pinner=pinner,
        followed_manifests=followed_manifests,
        upkeep=ManifestUpkeep(
            registry=registry,
            followed_manifests=followed_manifests,
            defaults_recorder=TopicDefaultsRecorder(broker, registry),
            retention=RetentionManager(broker, registry),
            interval_seconds=interval_seconds,
        ),
        metrics=metrics,
        make_archiver=make_archiver,
        now_ms=now_ms or archive.clock.wall_ms,
        archive_ms=archive_clock(now_ms, archive.store) if now_ms else archive.clock,
    )


def _archiver(
    leadership: Leadership,
    archive: Archive,
    broker: Broker,
    *,
    metrics: Metrics,
    clock: ArchiveClock,
    limits: UploadLimits,
    first_claims: FirstClaims,
    known: StoredManifest | None = None,
    is_new: Callable[[TopicIdPartition], Awaitable[bool]] = is_old,
) -> Archiver:
    return Archiver(
        leadership,
        broker=broker,
        remote_log=archive.remote_log,
        manifests=archive.manifests,
        metrics=metrics,
        layout=archive.layout,
        limits=limits,
        clock=clock,
        share_groups=ShareGroups(
            broker, metrics=metrics, steady_ms=clock.steady_ms, hold_ms=SHARE_GROUP_HOLD_MS
        ),
        first_claims=first_claims,
        known=known,
        is_new=is_new,
    )


def observed(
    writer: LogWriter, *, target_ms: int | None = None, target_bytes: int | None = None, **changes: Any
) -> Observation:
    """Return an observation of *writer*'s current log. Without a target nothing is trimmed."""
    topic = topic_config(target_ms=target_ms, target_bytes=target_bytes, **changes)
    return Observation(writer.local_log(), writer.bounds(), topic, scan_number=next(SCAN_NUMBERS))


async def archived(writer: LogWriter, archive: Archive) -> PartitionManifest:
    """Archive all closed and stable segments of *writer*'s log, and return the manifest."""
    archiver = archiver_of(writer, archive, FakeBroker(writer))
    while (await archiver.step(observed(writer))).uploaded:
        pass
    assert archiver.manifest is not None
    return archiver.manifest


async def values_in(
    archive: Archive, manifest: PartitionManifest, *, from_offset: int = 0, read_committed: bool = False
) -> dict[int, bytes | None]:
    """Read the archive, and return each record's value by its offset."""
    found: dict[int, bytes | None] = {}
    async for record in archive.records.records(
        manifest, from_offset=from_offset, read_committed=read_committed, on_gap=lambda _: None
    ):
        assert record.offset not in found
        found[record.offset] = record.value
    return found


def written_below(writer: LogWriter, offset: int, *, read_committed: bool = False) -> dict[int, bytes]:
    """Return the values that a reader should find below *offset*, by offset."""
    return {
        each: value for each, value in writer.values(read_committed=read_committed).items() if each < offset
    }
