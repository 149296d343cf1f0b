"""
The daemon's life, readable from top to bottom: open, serve, run until told to stop, close.

SIGTERM and SIGINT ask it to stop: the uploads under way are finished and committed, within
`shutdown_timeout_ms`. A second signal cuts them off, which leaves at most objects that no manifest names.
SIGHUP, or POST /reload with the admin token, reads the configuration again (`Reloader`).
"""

from __future__ import annotations

import asyncio
import platform
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

import structlog

from tieringd import __version__
from tieringd.archiving.partition_status import PassResult
from tieringd.archiving.reconciler import Reconciler
from tieringd.broker.watch import DirectoryWatch
from tieringd.compiled.loading import keep_machine_code_in
from tieringd.config import Config
from tieringd.config.describe import config_hash
from tieringd.config.units import format_duration
from tieringd.daemon.admin import serving
from tieringd.daemon.assembly import DaemonParts, WorkerWay, apply_config, assembled
from tieringd.daemon.certificates import certificate_files
from tieringd.daemon.garbage_collection import long_lived_objects_spared
from tieringd.daemon.heaps import keep_arenas_few
from tieringd.daemon.loop_lag import measure_loop
from tieringd.daemon.overview import DaemonFacts, OverviewMaker
from tieringd.daemon.ownership_check import cluster_on_disk
from tieringd.daemon.recent_errors import RecentErrors, remembering
from tieringd.daemon.reloading import Reloader, on_hangup
from tieringd.daemon.service_manager import ServiceManager
from tieringd.daemon.workers.gateway_workers import GatewayWorkers
from tieringd.daemon.workers.worker_pool import WorkerPool, done_before
from tieringd.errors import BucketNotFound, ConfigError, CorruptDataError, StorageDenied, StorageUnavailable
from tieringd.metrics import Metrics
from tieringd.metrics.restarts import restarted
from tieringd.policies.prices import LIST_PRICES
from tieringd.storage.at_once import cancelled
from tieringd.storage.store_opening import bucket_name

log = structlog.get_logger(__name__)

_RETENTION_NAMES = {"log_retention_ms", "delete_retention_ms", "kafka_log_retention_ms"}

_HINT_PAUSE_SECONDS = 0.2
"""Directory events come in bursts: a roll makes four files. One round handles all of them."""


async def run_daemon(
    config: Config,
    *,
    load: Callable[[], Config] | None = None,
    on_change: Callable[[Config], None] = lambda _: None,
    worker_command: Sequence[str] = (),
) -> None:
    """
    Run until a signal asks to stop. *worker_command* starts a worker of the gateway, where it has some.

    On SIGHUP *load* reads the configuration again, and *on_change* gets the one in use after that.

    The gateway listens before the store is asked for anything: clients are served while the store is away.

    Raises:
        ConfigError: The configuration cannot be used on this host, the bucket does not exist, or the store
            refuses the keys: another try does not help.
        StorageError: The disk of a file store is not mounted.
    """
    keep_arenas_few()
    keep_machine_code_in(str(config.state_directory / "machine-code"))
    metrics, errors = Metrics(), RecentErrors()
    facts = DaemonFacts(
        f"{config.backend} {bucket_name(config)}" if config.backend else "none", config.broker.kind
    )
    manager = ServiceManager()
    stop, hurry, hangup = asyncio.Event(), asyncio.Event(), asyncio.Event()
    # The start takes long where a store does not answer, and SIGHUP ends a process that has no handler
    # for it.
    async with (
        on_hangup(hangup.set),
        _remembering(errors),
        assembled(config, metrics, workers=WorkerWay(worker_command, errors.note)) as parts,
        serving(
            config.admin,
            metrics,
            parts.reconciler,
            parts.archive.gate,
            OverviewMaker(
                facts,
                metrics=metrics,
                reconciler=parts.reconciler,
                store=parts.archive.store,
                space=parts.disks.space,
                errors=errors,
                workers=_workers_of(parts),
            ),
            reload=hangup.set,
            workers=_workers_of(parts),
        ),
    ):
        _report_start(config, parts)
        _publish_facts(config, metrics)
        _measure_oldest_upload(metrics, parts)
        metrics.watch_certificates(lambda: certificate_files(config))

        def apply(changed: Config) -> None:
            metrics.max_topics = changed.admin.metrics_topics
            on_change(changed)
            apply_config(changed, parts)
            parts.reconciler.hint()

        reloader = Reloader(
            config, load=load or (lambda: config), apply=apply, health=metrics.health, manager=manager
        )
        with _stopped_by_signals(stop, hurry):
            async with _serving_clients(parts, metrics, stop) as gateway, _fed(manager):
                manager.ready("running")
                if await _store_allows_start(config, parts, stop, gateway):
                    with long_lived_objects_spared():
                        await _run_until_stopped(
                            reloader,
                            parts,
                            metrics,
                            stop,
                            hurry=hurry,
                            hangup=hangup,
                            gateway=gateway,
                            manager=manager,
                        )
    log.info("stopped")


def _workers_of(parts: DaemonParts) -> WorkerPool | None:
    return parts.gateway.pool if isinstance(parts.gateway, GatewayWorkers) else None


async def run_once(config: Config) -> PassResult:
    """
    Upload all that is eligible, trim what may be trimmed, and return the status of each partition.

    A signal ends the work after the uploads under way. Raises as `run_daemon` does, and the error of a
    round that could not read the broker or the log directories.
    """
    metrics = Metrics()
    # A pass ends soon and uses the configuration of its start, so SIGHUP does nothing.
    async with on_hangup(lambda: None), assembled(config, metrics) as parts:
        _report_start(config, parts)
        with _permanent_faults_named(config):
            await parts.archive.store.list_page("meta/", limit=1)
            await parts.check(await parts.broker.cluster_id())
        stop, hurry = asyncio.Event(), asyncio.Event()
        with _stopped_by_signals(stop, hurry):
            work = asyncio.create_task(parts.reconciler.run_once())
            stopper = asyncio.create_task(_stop_on(stop, parts))
            try:
                return await work
            finally:
                stopper.cancel()
                with suppress(asyncio.CancelledError):
                    await stopper


@asynccontextmanager
async def _serving_clients(
    parts: DaemonParts, metrics: Metrics, stop: asyncio.Event
) -> AsyncIterator[tuple[asyncio.Task[None], ...]]:
    """
    Let the gateway listen and serve for the time of the context; yield its task, if it is enabled.

    Workers take seconds to start. The daemon may be asked to stop meanwhile.
    """
    if parts.gateway is None or not await done_before(stop, parts.gateway.listen()):
        yield ()
        return
    serving_task = asyncio.create_task(
        restarted("gateway", parts.gateway.run, on_failure=metrics.health.task_failed)
    )
    try:
        yield (serving_task,)
    finally:
        await cancelled((serving_task,))


@asynccontextmanager
async def _fed(manager: ServiceManager) -> AsyncIterator[None]:
    """Feed the watchdog for the time of the context: also while the store is awaited at the start."""
    feeding = asyncio.create_task(manager.feed_watchdog())
    try:
        yield
    finally:
        await cancelled((feeding,))


async def _store_allows_start(
    config: Config, parts: DaemonParts, stop: asyncio.Event, gateway: tuple[asyncio.Task[None], ...]
) -> bool:
    """Check the store. Return False when the daemon was asked to stop meanwhile."""
    checking = asyncio.create_task(_check_store(config, parts))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({checking, stopping, *gateway}, return_when=asyncio.FIRST_COMPLETED)
        for one in gateway:
            if one.done():
                await one
        if checking.done():
            await checking
            return True
        return False
    finally:
        await cancelled((checking, stopping))


async def _run_until_stopped(
    reloader: Reloader,
    parts: DaemonParts,
    metrics: Metrics,
    stop: asyncio.Event,
    *,
    hurry: asyncio.Event,
    hangup: asyncio.Event,
    gateway: tuple[asyncio.Task[None], ...],
    manager: ServiceManager,
) -> None:
    reconciling = asyncio.create_task(parts.reconciler.run())
    helpers: list[asyncio.Task[object]] = [
        asyncio.create_task(_stop_on(stop, parts)),
        *(
            asyncio.create_task(restarted(name, run, on_failure=metrics.health.task_failed))
            for name, run in _parts_to_run(reloader, parts, metrics, hangup).items()
        ),
        *gateway,
    ]
    try:
        stopping = asyncio.create_task(stop.wait())
        helpers.append(stopping)
        await asyncio.wait({reconciling, *helpers}, return_when=asyncio.FIRST_COMPLETED)
        for helper in helpers:
            if helper.done():
                # An error that an operator must act on ends the daemon: without the helper the daemon would
                # only look alive.
                await helper
        if not reconciling.done():
            manager.stopping()
            await _finish(reloader.config, reconciling, hurry)
        if not reconciling.cancelled():
            await reconciling
    finally:
        await cancelled((reconciling, *helpers))


def _parts_to_run(
    reloader: Reloader, parts: DaemonParts, metrics: Metrics, hangup: asyncio.Event
) -> dict[str, Callable[[], Awaitable[None]]]:
    """Return what runs beside the reconciler until the daemon stops, by the names of metrics and logs."""
    interval_seconds = reloader.config.cloud_storage_upload_ctrl_update_interval_ms / 1000
    return {
        "reload": lambda: reloader.run(hangup),
        "directory_watch": lambda: _follow(parts.watch, parts.reconciler),
        "loop_measurement": lambda: measure_loop(metrics),
        "hints": lambda: _pass_hints(parts.watch, parts.reconciler),
        "upload_controller": lambda: parts.controller.run(interval_seconds=interval_seconds),
        "housekeeping": parts.housekeeping.service.run,
        **parts.disks.tasks(),
    }


async def _finish(config: Config, reconciling: asyncio.Task[None], hurry: asyncio.Event) -> None:
    """Give the uploads under way their time; then, or on a second signal, cut them off."""
    log.info("stopping: finishing the uploads in hand", deadline_ms=config.shutdown_timeout_ms)
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait(
        {reconciling, hurrying},
        timeout=config.shutdown_timeout_ms / 1000,
        return_when=asyncio.FIRST_COMPLETED,
    )
    hurrying.cancel()
    if not reconciling.done():
        log.warning("stopping without finishing: what was not committed is uploaded again next time")
        reconciling.cancel()
        with suppress(asyncio.CancelledError):
            await reconciling


async def _stop_on(stop: asyncio.Event, parts: DaemonParts) -> None:
    await stop.wait()
    parts.reconciler.stop()


async def _pass_hints(watch: DirectoryWatch, reconciler: Reconciler) -> None:
    """Bring the next round forward when something changes in a watched directory."""
    while True:
        hint = await watch.changes()
        await asyncio.sleep(_HINT_PAUSE_SECONDS)
        if not hint.rescan and await reconciler.rescan_partitions(hint.paths):
            continue
        reconciler.hint()
        # Where topics come and go all the time, rounds would follow each other without end. After one
        # scan the broker gets the machine for twice that time.
        await asyncio.sleep(2 * reconciler.scan_seconds)


async def _follow(watch: DirectoryWatch, reconciler: Reconciler) -> None:
    """Watch the directories of archived partitions, updated after each scan."""
    while True:
        await reconciler.next_scan()
        if watch.follow(reconciler.paths()):
            # No event reports a segment that was closed since the scan.
            reconciler.hint()


async def _check_store(config: Config, parts: DaemonParts) -> None:
    """
    Fail at once where an operator must act; a store that is unavailable now may come back.

    Where only the broker knows the cluster's id, the archive's owner is checked in the first round.
    """
    with _permanent_faults_named(config):
        try:
            await parts.archive.store.list_page("meta/", limit=1)
            cluster = await asyncio.to_thread(cluster_on_disk, config)
            await (parts.archive.check_store() if cluster is None else parts.check(cluster))
        except StorageUnavailable as error:
            log.warning("object store does not answer yet", error=str(error))
        except StorageDenied as error:
            if not error.may_pass:
                raise
            log.warning("object store cannot be used yet", error=str(error))
        except CorruptDataError as error:
            # The unit would start the daemon again at once, and each end cuts the gateway's clients off. The
            # store refuses writes until the record can be read.
            reason = str(error)
            log.error("the record of the archive's owners cannot be read", error=reason)  # noqa: TRY400 its text is enough


@contextmanager
def _permanent_faults_named(config: Config) -> Iterator[None]:
    """
    Turn a store's refusal at the start into a fault of the configuration, which ends the unit's restarts.

    The directory of a file store is left out: it comes back when its disk is mounted. So is a refusal that
    may pass: the clock of a host is set, and its role has credentials, some seconds after its boot.
    """
    try:
        yield
    except (BucketNotFound, StorageDenied) as error:
        if config.backend == "file" or (isinstance(error, StorageDenied) and error.may_pass):
            raise
        raise ConfigError(error.message, hint=error.hint) from error


def _report_start(config: Config, parts: DaemonParts) -> None:
    for warning in config.warnings:
        log.warning("configuration", warning=warning)
    for note in config.notes:
        log.info("configuration", note=note)
    log.info(
        "starting",
        broker=config.broker.kind,
        log_dirs=[str(path) for path in config.broker.log_dirs],
        backend=config.backend,
        writer_id=parts.writer_id,
    )
    if config.broker.kind == "none" and config.cloud_storage_enabled:
        _report_retention(config)


def _report_retention(config: Config) -> None:
    limit_ms = config.retention_without_broker_ms
    if _RETENTION_NAMES & config.model_fields_set or limit_ms is None:
        log.info("no broker tells the retention; the file has it", log_retention_ms=limit_ms)
        return
    log.warning(
        "no broker tells the retention, nor does the file: records older than the default of "
        "log_retention_ms are deleted from both tiers; set it to -1 to keep everything",
        log_retention_ms=limit_ms,
        retention=format_duration(limit_ms),
    )


def _publish_facts(config: Config, metrics: Metrics) -> None:
    """Show what is known from the start: versions, configuration, and prices where there are any."""
    metrics.health.build.labels(__version__, platform.python_version()).set(1)
    metrics.health.show_config(config_hash(config))
    prices = LIST_PRICES.get(config.backend or "")
    if prices is not None:
        metrics.watch_cost(prices)


def _measure_oldest_upload(metrics: Metrics, parts: DaemonParts) -> None:
    loop = asyncio.get_running_loop()

    def age_seconds() -> float:
        started = parts.archive.store.oldest_put_started
        return 0.0 if started is None else loop.time() - started

    metrics.oldest_upload_seconds.set_function(age_seconds)


@asynccontextmanager
async def _remembering(errors: RecentErrors) -> AsyncIterator[None]:
    """Remember warnings and errors for the time of the context."""
    with remembering(errors):
        yield


@contextmanager
def _stopped_by_signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """Let SIGTERM and SIGINT set *stop*, and a later one *hurry*, for the time of the context."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
