"""
Assembly: the one place where a daemon's parts are built and given to each other.

Everything is a context manager, so that whatever was opened is closed in the reverse order,
whichever way the daemon ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.broker.directory import DirectoryBroker
from tieringd.broker.kafka import KafkaBroker, KafkaSettings
from tieringd.broker.log_dir import scan_log_dirs
from tieringd.errors import ConfigError
from tieringd.policies.upload import UploadLimits
from tieringd.services.archive_reader import ArchiveReader
from tieringd.services.archiver import Archiver
from tieringd.services.catalog import Catalog
from tieringd.services.manifest_store import ManifestStore
from tieringd.services.reconciler import Reconciler
from tieringd.services.record_reader import RecordReader
from tieringd.services.remote_log import RemoteLog
from tieringd.services.verifier import Verifier
from tieringd.storage.opening import create_file_root, opened_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tieringd.broker.base import Broker
    from tieringd.config import Config
    from tieringd.metrics import Metrics
    from tieringd.model.partition import Leadership
    from tieringd.storage.resilient import ResilientStore


@dataclass(frozen=True, slots=True)
class Archive:
    """The parts that need only the bucket."""

    store: ResilientStore
    manifests: ManifestStore
    remote_log: RemoteLog
    catalog: Catalog
    reader: ArchiveReader
    records: RecordReader
    verifier: Verifier


@dataclass(frozen=True, slots=True)
class DaemonParts:
    """The parts of a running daemon."""

    archive: Archive
    broker: Broker
    reconciler: Reconciler
    writer_id: str


def wall_clock_ms() -> int:
    """Return the time in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


@asynccontextmanager
async def opened_archive(config: Config, metrics: Metrics, *, writer_id: str = "0") -> AsyncIterator[Archive]:
    """Open the bucket for the time of the context; *writer_id* matters only to those who write."""
    async with opened_store(config, metrics) as store:
        manifests = ManifestStore(store, writer_id=writer_id, now_ms=wall_clock_ms)
        remote_log = RemoteLog(
            store,
            manifests,
            writer_id=writer_id,
            now_ms=wall_clock_ms,
            # A copy holds one connection and one thread; the threads are what runs out first.
            concurrent_copies=min(config.cloud_storage_max_connections, 4 * (os.cpu_count() or 1)),
        )
        reader = ArchiveReader(store)
        yield Archive(
            store=store,
            manifests=manifests,
            remote_log=remote_log,
            catalog=Catalog(store, manifests),
            reader=reader,
            records=RecordReader(remote_log, reader),
            verifier=Verifier(store, remote_log),
        )


@asynccontextmanager
async def assembled(config: Config, metrics: Metrics) -> AsyncIterator[DaemonParts]:
    """Build a daemon's parts; nothing runs yet."""
    # A new id for each process: what a killed daemon left behind is never written over.
    writer_id = secrets.token_hex(8)
    with _sole_owner(config):
        create_file_root(config)
        async with opened_archive(config, metrics, writer_id=writer_id) as archive:
            broker = await _broker(config)
            try:
                yield DaemonParts(archive, broker, _reconciler(config, metrics, archive, broker), writer_id)
            finally:
                await broker.close()


def _reconciler(config: Config, metrics: Metrics, archive: Archive, broker: Broker) -> Reconciler:
    def make_archiver(leadership: Leadership) -> Archiver:
        return Archiver(
            leadership,
            broker=broker,
            remote_log=archive.remote_log,
            manifests=archive.manifests,
            metrics=metrics,
            limits=UploadLimits(),
            now_ms=wall_clock_ms,
        )

    return Reconciler(
        config,
        broker=broker,
        manifests=archive.manifests,
        metrics=metrics,
        make_archiver=make_archiver,
    )


async def _broker(config: Config) -> Broker:
    log_dirs = [str(path) for path in config.broker.log_dirs]
    scan = await asyncio.to_thread(scan_log_dirs, log_dirs)
    if config.broker.kind == "none":
        named = "cluster_id" in config.model_fields_set
        # Files that a broker left keep the cluster's own id, so that its archive goes on.
        return DirectoryBroker(
            log_dirs, cluster_id=config.cluster_id if named else scan.cluster_id or config.cluster_id
        )
    security = config.broker.security
    password = security.sasl_password
    return KafkaBroker(
        KafkaSettings(
            bootstrap=config.broker.bootstrap,
            node_id=config.broker.node_id if config.broker.node_id is not None else scan.node_id,
            security_protocol=security.protocol,
            sasl_mechanism=security.sasl_mechanism,
            sasl_username=security.sasl_username,
            sasl_password=password.get_secret_value() if password else None,
            ssl_ca_file=_text(security.ssl_ca_file),
            ssl_cert_file=_text(security.ssl_cert_file),
            ssl_key_file=_text(security.ssl_key_file),
        )
    )


def _text(path: os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)


@contextmanager
def _sole_owner(config: Config) -> Iterator[None]:
    """
    Hold the state directory's lock, so that no second daemon starts on the same configuration.

    The kernel lets go of it when the process ends, however it ends.
    """
    path = config.state_directory / "lock"
    try:
        config.state_directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise ConfigError(
            f"state_directory {config.state_directory} cannot be used: {error.strerror}",
            hint="Let the daemon's user create and write it",
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another tieringd runs with state_directory {config.state_directory}",
                hint="Stop it first, or give this one a state_directory and log directories of its own",
            ) from error
        yield
