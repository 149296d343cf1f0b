"""
Whether the archive belongs to this daemon's cluster, and the identity under which a daemon claims archives.

The check is made once in each process and for each cluster that the broker tells, before anything is written:
at the start, or as soon as the store answers and the cluster's id is known. Until then the store refuses
every write. Commands and jobs on Spark work on what is there and are not checked; `tieringd archive claim`
and recoveries record an owner.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

from tieringd.archive.owner_record import OwnerRecord
from tieringd.broker.log_dir import cluster_of
from tieringd.config import Config
from tieringd.daemon.archive import Archive
from tieringd.daemon.local_broker import known_cluster_id, opened_broker
from tieringd.errors import ConfigError, CorruptDataError, StorageError
from tieringd.formats.archive_owners import ARCHIVE_OWNERS_KEY, BROKER
from tieringd.formats.json_document import decode_document
from tieringd.policies.archive_ownership import Claimant
from tieringd.storage.checked_puts import PROBE_PREFIX
from tieringd.storage.known_roots import LOST_AND_FOUND, ROOTS_FILE, write_note
from tieringd.storage.store_opening import place_of

log = structlog.get_logger(__name__)

HOST_VERSION: Final = 1
_FILE: Final = "host.json"
_NOT_A_RUN = frozenset({ROOTS_FILE, LOST_AND_FOUND})
"""What a state directory may have before a daemon has run."""


@dataclass(frozen=True, slots=True)
class _Host:
    host_id: str
    is_first_start: bool
    archives: tuple[str, ...] = ()
    """The places of the archives that this host has claimed."""


def note_host(config: Config) -> None:
    """
    Give this host an id in its state directory, unless it has one. Only without a broker. Blocks.

    Must be called before anything else is stored there, other than the note of a file store's directory.

    Raises:
        ConfigError: The state directory cannot be used.
    """
    if config.broker.kind == "none":
        _host(config)


def claimant_of(config: Config, cluster: str) -> Claimant:
    """
    Return the identity under which a daemon with *config* claims archives. Blocks.

    *cluster* is the id of its cluster.

    Raises:
        ConfigError: The state directory cannot be used.
    """
    log_dirs = [str(path) for path in config.broker.log_dirs]
    # Files that a broker has left behind continue its archive, so they are the broker's cluster.
    if config.broker.kind != "none" or cluster_of(log_dirs) == cluster:
        return Claimant(cluster, BROKER)
    host = _host(config)
    # The record of an archive may be lost. A host that has claimed that archive does not begin anew then.
    is_first_start = host.is_first_start and place_of(config) not in host.archives
    return Claimant(cluster, host.host_id, is_first_start=is_first_start)


def cluster_on_disk(config: Config) -> str | None:
    """
    Return the cluster's id as far as no broker is needed to tell it; None otherwise. Blocks.

    A configuration that only opens the bucket is for no cluster.
    """
    if not config.has_broker_section:
        return None
    return known_cluster_id(config, cluster_of([str(path) for path in config.broker.log_dirs]))


async def own_cluster(config: Config) -> str:
    """
    Return the id of the cluster that *config* is for. The broker is asked only where its files do not tell.

    Raises:
        BrokerUnavailable: The broker has to be asked, and does not answer.
        BrokerDenied: The broker refuses the question.
    """
    on_disk = await asyncio.to_thread(cluster_on_disk, config)
    if on_disk is not None:
        return on_disk
    async with opened_broker(config) as broker:
        return await broker.cluster_id()


class ArchiveCheck:
    """Find out once for a cluster whether the store is fit for use, and the archive that of the cluster."""

    def __init__(self, config: Config, archive: Archive) -> None:
        """Let the store refuse every write until the check has passed."""
        self._config = config
        self._archive = archive
        self._passed_for: str | None = None
        self._hold()

    def _hold(self) -> None:
        self._archive.store.hold_writes(
            "it is not known yet whether this archive is that of this daemon's cluster",
            allowed=(PROBE_PREFIX, ARCHIVE_OWNERS_KEY),
        )

    async def __call__(self, cluster: str) -> None:
        """
        Return when this daemon, of *cluster*, may write.

        A broker may be formatted anew while the daemon runs. The check is then made for its new cluster.

        Raises:
            ConfigError: The store is not fit for use, or the archive is that of another cluster or host.
            CorruptDataError: The record of the archive's owners cannot be read.
            StorageError: An operator must act.
            StorageUnavailable: The store does not answer, so nothing is known.
        """
        if cluster == self._passed_for:
            return
        if self._passed_for is not None:
            self._passed_for = None
            self._hold()
        claimant = await asyncio.to_thread(claimant_of, self._config, cluster)
        record = owner_record(self._archive, self._config)
        await record.require(claimant)
        # Only then the store is tried with writes, and only a store that passes can keep two claims apart.
        await self._archive.check_store()
        await record.claim(claimant)
        if claimant.is_first_start:
            await asyncio.to_thread(_note_claimed, self._config)
        self._archive.store.release_writes()
        self._passed_for = cluster


def owner_record(archive: Archive, config: Config) -> OwnerRecord:
    """Return the record of the owners of *archive*, which *config* opened."""
    return OwnerRecord(archive.store, place=place_of(config))


async def admit_restored(archive: Archive, config: Config, cluster: str) -> None:
    """
    Record *cluster*, into which topics of *archive* are restored, as an owner: it archives there as well.

    A store that cannot be written to stays as it is.

    Raises:
        StorageUnavailable: The store does not answer.
    """
    try:
        await owner_record(archive, config).admit(Claimant(cluster, BROKER))
    except (ConfigError, StorageError) as error:
        log.warning(
            "the new cluster could not be recorded as an owner of the archive; before its daemons archive "
            "there, run: tieringd archive claim --config FILE",
            cluster=cluster,
            reason=str(error),
        )


def _host(config: Config) -> _Host:
    """Return this host as its state directory notes it, and make the note where it is missing."""
    directory = config.state_directory
    path = directory / _FILE
    with _usable(path):
        directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with os.scandir(directory) as entries:
                is_empty = all(entry.name in _NOT_A_RUN for entry in entries)
            with suppress(FileExistsError):
                _write(path, _Host(secrets.token_hex(16), is_first_start=is_empty), replaces=False)
        return decode_document(path.read_bytes(), _noted, kind="id of this host", versions=(HOST_VERSION,))


def _note_claimed(config: Config) -> None:
    """Note that this host has claimed the archive that *config* names."""
    host, path = _host(config), config.state_directory / _FILE
    with _usable(path):
        _write(path, replace(host, archives=(*host.archives, place_of(config))), replaces=True)


def _write(path: Path, host: _Host, *, replaces: bool) -> None:
    note = {
        "version": HOST_VERSION,
        "id": host.host_id,
        "is_first_start": host.is_first_start,
        "archives": list(host.archives),
    }
    write_note(path, note, replaces=replaces)


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    """
    Say in an error what an operator is to do about the note of this host.

    Raises:
        ConfigError: The note at *path* cannot be read or written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be used: {error.strerror}",
            hint="Allow the daemon's user to read it, and to write in its directory",
        ) from error
    except CorruptDataError as error:
        raise ConfigError(
            f"{path}: {error}",
            hint="Restore it, or remove it and run: tieringd archive claim --config FILE",
        ) from error


def _noted(document: dict[str, Any]) -> _Host:
    archives = tuple(str(place) for place in document.get("archives", ()))
    return _Host(str(document["id"]), is_first_start=bool(document["is_first_start"]), archives=archives)
