"""
Assembly: the one place where a daemon's parts are built and given to each other.

Everything is a context manager, so that all opened parts are closed in the reverse order, whichever way
the daemon ends.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import structlog

from tieringd.archiving.archiver import Archiver
from tieringd.archiving.first_claims import FirstClaims
from tieringd.archiving.manifest_upkeep import FollowedManifests, ManifestUpkeep
from tieringd.archiving.observer import Observer
from tieringd.archiving.operator_desk import LeftDecisions
from tieringd.archiving.pinner import Pinner
from tieringd.archiving.reconciler import Reconciler
from tieringd.archiving.share_groups import GroupsNote, ShareGroups
from tieringd.archiving.upload_controller import UploadController
from tieringd.broker.base import Broker
from tieringd.broker.host_load import HostLoadReader
from tieringd.broker.pins import PinDirectory, pin_root
from tieringd.broker.watch import DirectoryWatch
from tieringd.clock import wall_clock_ms
from tieringd.config import Config
from tieringd.daemon.archive import Archive, max_uploads, opened_archive
from tieringd.daemon.disks import DiskParts, disk_parts
from tieringd.daemon.file_archive import claim_file_root, note_first_start
from tieringd.daemon.gateway_service import Gateway, gateway_of
from tieringd.daemon.housekeeping_jobs import HousekeepingParts, housekeeping_of
from tieringd.daemon.local_broker import opened_broker
from tieringd.daemon.ownership_check import ArchiveCheck, note_host
from tieringd.daemon.read_cache import ReadCache
from tieringd.daemon.state_lock import sole_owner
from tieringd.daemon.workers.gateway_workers import GatewayWorkers, gateway_with_workers
from tieringd.errors import ConfigError, LocalFileError
from tieringd.formats.object_keys import is_partition_object
from tieringd.metrics import Metrics
from tieringd.model.partition import Leadership
from tieringd.policies.upload_control import ControllerLimits, PaceLimits
from tieringd.policies.upload_plan import UploadLimits
from tieringd.storage.resilient import ResilientStore
from tieringd.storage.s3.store import S3Store
from tieringd.storage.store_opening import store_limits
from tieringd.topics.retention_manager import RetentionManager
from tieringd.topics.topic_defaults import TopicDefaultsRecorder
from tieringd.topics.topic_registry import TopicRegistry

log = structlog.get_logger(__name__)


class ArchiverFactory:
    """Make the archivers of one daemon, with the upload limits in force at the time."""

    def __init__(
        self,
        config: Config,
        metrics: Metrics,
        archive: Archive,
        broker: Broker,
        *,
        followed_manifests: FollowedManifests,
        registry: TopicRegistry,
    ) -> None:
        self.limits = upload_limits(config)
        self.share_groups = ShareGroups(
            broker,
            metrics=metrics,
            steady_ms=archive.clock.steady_ms,
            hold_ms=config.share_group_trim_hold_ms,
            note=GroupsNote(config.state_directory / "share_groups.json"),
        )
        self._metrics = metrics
        self._archive = archive
        self._broker = broker
        self._followed_manifests = followed_manifests
        self._registry = registry
        self._first_claims = FirstClaims()

    def __call__(self, leadership: Leadership) -> Archiver:
        """Return an archiver that starts with the last manifest that this daemon read as a follower."""
        return Archiver(
            leadership,
            broker=self._broker,
            remote_log=self._archive.remote_log,
            manifests=self._archive.manifests,
            metrics=self._metrics,
            limits=self.limits,
            clock=self._archive.clock,
            layout=self._archive.layout,
            share_groups=self.share_groups,
            first_claims=self._first_claims,
            known=self._followed_manifests.take(leadership.partition),
            is_new=self._registry.is_new,
        )


@dataclass(frozen=True, slots=True)
class DaemonParts:
    """The parts of a running daemon."""

    archive: Archive
    check: ArchiveCheck
    broker: Broker
    reconciler: Reconciler
    watch: DirectoryWatch
    """Watches the log directories once it follows the partitions that are archived."""
    controller: UploadController
    archivers: ArchiverFactory
    disks: DiskParts
    writer_id: str
    housekeeping: HousekeepingParts
    gateway: Gateway | GatewayWorkers | None = None
    """None unless it is enabled."""


@dataclass(frozen=True, slots=True)
class WorkerWay:
    """How workers of the gateway are started, and where their words go."""

    command: Sequence[str] = ()
    """Starts a worker."""
    on_logged: Callable[[str, Mapping[str, Any]], None] = lambda *_: None
    """Gets the level and the fields of each warning and error of a worker."""


@asynccontextmanager
async def assembled(
    config: Config, metrics: Metrics, *, workers: WorkerWay | None = None
) -> AsyncIterator[DaemonParts]:
    """Build a daemon's parts; nothing runs yet. Without *workers*, the gateway cannot have any."""
    # Each process has a new id, so objects that a killed daemon left behind are never overwritten.
    writer_id = secrets.token_hex(8)
    await asyncio.to_thread(note_first_start, config)
    await asyncio.to_thread(note_host, config)
    watched = DirectoryWatch([str(path) for path in config.broker.log_dirs])
    with sole_owner(config), _opened_load() as load, closing(watched) as watch:
        await asyncio.to_thread(claim_file_root, config)
        async with (
            opened_archive(config, metrics, writer_id=writer_id) as archive,
            opened_broker(config) as broker,
        ):
            check = ArchiveCheck(config, archive)
            followed_manifests = FollowedManifests(archive.manifests, steady_ms=archive.clock.steady_ms)
            registry = TopicRegistry(archive.store, archive.manifests)
            archivers = ArchiverFactory(
                config, metrics, archive, broker, followed_manifests=followed_manifests, registry=registry
            )
            reconciler = _reconciler(
                config,
                metrics,
                archive,
                broker,
                check=check,
                followed_manifests=followed_manifests,
                archivers=archivers,
                registry=registry,
                watch=watch,
            )
            controller = await asyncio.to_thread(_controller, config, metrics, archive, reconciler, load)
            cache = ReadCache(config, archive, metrics) if config.gateway.enabled else None
            disks = disk_parts(
                config,
                metrics,
                archive.store,
                broker,
                reconciler=reconciler,
                clock=archive.clock,
                tell_cache=cache.keeper.set_space if cache else lambda _: None,
            )
            housekeeping = housekeeping_of(
                config,
                metrics,
                archive,
                broker,
                reconciler=reconciler,
                writer_id=writer_id,
            )
            async with _gateway(
                config,
                archive,
                workers,
                broker=broker,
                reconciler=reconciler,
                cache=cache,
                disks=disks,
                metrics=metrics,
            ) as gateway:
                yield DaemonParts(
                    archive,
                    check,
                    broker,
                    reconciler,
                    watch,
                    controller,
                    archivers,
                    disks,
                    writer_id,
                    housekeeping,
                    gateway,
                )


@asynccontextmanager
async def _gateway(
    config: Config,
    archive: Archive,
    workers: WorkerWay | None,
    *,
    broker: Broker,
    reconciler: Reconciler,
    cache: ReadCache | None,
    disks: DiskParts,
    metrics: Metrics,
) -> AsyncIterator[Gateway | GatewayWorkers | None]:
    """Build the gateway where it is enabled, in this process or with workers."""

    def may_produce() -> bool:
        return disks.degraded is None or not disks.degraded.is_refusing

    if cache is None:
        yield None
    elif config.gateway.workers and workers is not None:
        async with gateway_with_workers(
            config,
            archive,
            workers.command,
            broker=broker,
            reconciler=reconciler,
            cache=cache,
            may_produce=may_produce,
            on_logged=workers.on_logged,
            metrics=metrics,
        ) as with_workers:
            yield with_workers
    else:
        async with gateway_of(
            config,
            archive,
            broker=broker,
            reconciler=reconciler,
            cache=cache,
            may_produce=may_produce,
            metrics=metrics,
        ) as gateway:
            yield gateway


def apply_config(config: Config, parts: DaemonParts) -> None:
    """Let running parts use *config*, as far as it can change while they run."""
    parts.archive.store.set_limits(store_limits(config))
    parts.archivers.limits = upload_limits(config)
    parts.archivers.share_groups.hold_ms = config.share_group_trim_hold_ms
    parts.reconciler.set_config(config, parts.archivers.limits)
    parts.controller.set_pace(_pace_limits(config))
    parts.disks.set_config(config)
    parts.housekeeping.set_config(config)
    if parts.gateway is not None:
        parts.gateway.set_config(config)


def upload_limits(config: Config) -> UploadLimits:
    """Return how much an archiver uploads at once, and how long a record may wait."""
    interval_sec = config.cloud_storage_segment_max_upload_interval_sec
    return UploadLimits(
        max_interval_ms=None if interval_sec is None else interval_sec * 1000,
        # Redpanda's segments are re-framed as a whole, so parts of one are not uploaded.
        cuts_segments=config.broker.kind != "redpanda",
    )


def _reconciler(
    config: Config,
    metrics: Metrics,
    archive: Archive,
    broker: Broker,
    *,
    check: ArchiveCheck,
    followed_manifests: FollowedManifests,
    archivers: ArchiverFactory,
    registry: TopicRegistry,
    watch: DirectoryWatch,
) -> Reconciler:
    directories = _pin_directories(config)
    if config.broker.kind == "kafka" and config.pin_segments:
        for log_dir in map(str, config.broker.log_dirs):
            metrics.health.pins_available.labels(log_dir).set(log_dir in directories)
    left = left_pin_directories(config, directories.values())
    for one in left:
        log.info("pins of an earlier configuration are archived, and go then", path=one.root)
    pinner = Pinner(directories, budget_bytes=config.pin_max_bytes, metrics=metrics, left=left)
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
            reports=watch,
        ),
        pinner=pinner,
        followed_manifests=followed_manifests,
        upkeep=ManifestUpkeep(
            registry=registry,
            followed_manifests=followed_manifests,
            defaults_recorder=TopicDefaultsRecorder(broker, registry),
            retention=RetentionManager(broker, registry),
            interval_seconds=interval_seconds,
            check_store=check,
            clean_up=_clean_up(archive.store),
            left_decisions=LeftDecisions(archive.manifests, metrics=metrics, now_ms=archive.clock),
        ),
        metrics=metrics,
        make_archiver=archivers,
        now_ms=wall_clock_ms,
        archive_ms=archive.clock,
    )


def _clean_up(store: ResilientStore) -> Callable[[], Awaitable[int]] | None:
    """Return a function that removes abandoned multipart uploads; None for stores that do so themselves."""
    backend = store.backend
    if not isinstance(backend, S3Store):
        return None
    return lambda: backend.discard_abandoned_uploads(is_partition_object)


@contextmanager
def _opened_load() -> Iterator[HostLoadReader]:
    """Open the reader of the machine's load, for the time of the context."""
    with closing(HostLoadReader()) as load:
        if not load.has_pressure:
            log.info(
                "the kernel gives no pressure stall information: of what others want of this machine only "
                "the processors' time is seen",
                hint="Boot with psi=1 to measure waits for disks and memory as well",
            )
        yield load


def _controller(
    config: Config, metrics: Metrics, archive: Archive, reconciler: Reconciler, load: HostLoadReader
) -> UploadController:
    now = archive.gate.time
    disks = {path.stat().st_dev: os.statvfs(path) for path in config.broker.log_dirs if path.is_dir()}
    return UploadController(
        archive.gate,
        control=ControllerLimits(
            p_coeff=config.cloud_storage_upload_ctrl_p_coeff,
            d_coeff=config.cloud_storage_upload_ctrl_d_coeff,
            min_shares=config.cloud_storage_upload_ctrl_min_shares,
            max_shares=config.cloud_storage_upload_ctrl_max_shares,
        ),
        pace=_pace_limits(config),
        free_bytes_at_start=sum(disk.f_bavail * disk.f_frsize for disk in disks.values()),
        backlog_bytes=lambda: reconciler.backlog_bytes,
        counters=lambda: load.counters(now()),
        metrics=metrics,
    )


def _pace_limits(config: Config) -> PaceLimits:
    interval_sec = config.cloud_storage_segment_max_upload_interval_sec
    return PaceLimits(
        max_uploads(config),
        upload_interval_seconds=interval_sec,
        bytes_per_second=config.cloud_storage_upload_bytes_per_second,
    )


def pin_candidates(config: Config, log_dir: Path) -> list[str]:
    """Return where the pins of a log directory may be, in the order of preference; none without pins."""
    # Without a broker no other process deletes segments.
    if config.broker.kind != "kafka" or not config.pin_segments:
        return []
    named = _named_pin_places(config, log_dir)
    return named or _usual_pin_places(config, log_dir)


def _named_pin_places(config: Config, log_dir: Path) -> list[str]:
    place = config.broker.pin_directory
    return [] if place is None else [str(place / quote(str(log_dir), safe=""))]


def _usual_pin_places(config: Config, log_dir: Path) -> list[str]:
    return [
        str(config.state_directory / "pins" / quote(str(log_dir), safe="")),
        str(log_dir.parent / f".{log_dir.name}.tieringd-pins"),
    ]


def left_pin_directories(config: Config, used: Collection[PinDirectory]) -> list[PinDirectory]:
    """
    Return the directories with pins that are not *used*: an earlier configuration had its pins there.

    They may hold what is not durable yet, and nothing else would ever remove them.
    """
    if config.broker.kind != "kafka":
        return []
    left: list[PinDirectory] = []
    for log_dir in config.broker.log_dirs:
        for place in (*_named_pin_places(config, log_dir), *_usual_pin_places(config, log_dir)):
            directory = PinDirectory(place)
            # A directory that cannot be read is none of ours.
            with suppress(LocalFileError):
                if directory not in used and directory.others(()):
                    left.append(directory)
    return left


def _pin_directories(config: Config) -> dict[str, PinDirectory]:
    """Return the pin directory of each log directory that has one."""
    directories: dict[str, PinDirectory] = {}
    for log_dir in config.broker.log_dirs:
        candidates = pin_candidates(config, log_dir)
        if not candidates:
            continue
        try:
            root = pin_root(str(log_dir), candidates)
        except ConfigError as error:
            if config.broker.pin_directory is not None:
                raise
            log.warning(
                "segments are not pinned: the broker may delete what is not durable", reason=str(error)
            )
        else:
            directories[str(log_dir)] = PinDirectory(root)
    return directories
