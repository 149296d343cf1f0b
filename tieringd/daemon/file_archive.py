"""
Whether the directory that replaces a bucket holds the archive of this daemon.

The check is made once, at the start, and noted in the state directory. From then on the file store itself
compares the directory's marker with the note, at each operation (`storage.file_root`).
"""

from __future__ import annotations

from pathlib import Path

import structlog

from tieringd.config import Config
from tieringd.daemon.local_broker import known_cluster_id, layout_of
from tieringd.errors import BucketNotFound, ConfigError, StorageUnavailable
from tieringd.formats.object_keys import TOPIC_MANIFESTS_PREFIX, parse_topic_manifest_key
from tieringd.storage.file_root import (
    DamagedMarkerError,
    create_root,
    make_marker,
    marker_of,
    wrong_root,
)
from tieringd.storage.known_roots import KnownRoots

log = structlog.get_logger(__name__)


def note_first_start(config: Config) -> None:
    """
    Note that this is the first start, if the state directory is empty. Blocks.

    Must be called before anything else is stored there, including the daemon's lock.

    Raises:
        ConfigError: The state directory cannot be used.
    """
    if config.backend == "file":
        KnownRoots(config.state_directory).note_first_start()


def claim_file_root(config: Config, *, only_reads: bool = False) -> None:
    """
    Check that the file store's directory is the archive of this daemon, and note its id. Blocks.

    Only a daemon's first start begins an archive. An archive from a release without markers is adopted,
    if one of its manifests belongs to this cluster. With *only_reads* neither happens, and a directory
    without a marker is accepted, unless there was a marker before.

    Raises:
        BucketNotFound: It is not the archive: the disk is not mounted, or the archive was never begun.
        StorageDenied: The directory may not be read, or a new archive cannot be begun there.
        StorageUnavailable: The filesystem does not answer, and nothing is known of the archive yet.
        ConfigError: The state directory cannot be used.
    """
    root = config.cloud_storage_file_root
    if config.backend != "file" or root is None:
        return
    known = KnownRoots(config.state_directory)
    expected, is_first_start = known.id_of(root), known.is_first_start()
    if is_first_start and not only_reads:
        create_root(root)
    try:
        found = marker_of(root)
    except StorageUnavailable as error:
        if expected is None:
            raise
        # The filesystem may come back. Until then no operation of the store gets past the marker.
        log.warning("the archive's marker cannot be read yet", root=str(root), error=str(error))
        return
    if expected is not None:
        if found != expected:
            raise wrong_root(root, expected=expected, found=found)
        return
    if found is None and not only_reads:
        found = make_marker(root) if is_first_start else _adopted(config, root)
    if found is not None:
        known.remember(root, found)
        log.info("archive's root is known from now on", root=str(root), id=found)


def init_file_root(config: Config) -> tuple[str, str | None]:
    """
    Begin an archive in the file store's directory, or accept the one that is there. Blocks.

    The directory is created if its parent exists. Where this host has a state directory, the archive's id
    is noted there; a running daemon reads the note at its next start.

    Returns:
        The archive's id, and the one that was noted before.

    Raises:
        ConfigError: The configuration names no directory; or the state directory cannot be used.
        StorageError: The directory cannot be created or written to.
    """
    root = _required_root(config)
    create_root(root)
    try:
        root_id = make_marker(root)
    except DamagedMarkerError:
        root_id = make_marker(root, replaces=True)
    known = KnownRoots(config.state_directory)
    before = known.id_of(root)
    if root_id != before and config.state_directory.is_dir():
        known.remember(root, root_id)
    return root_id, before


def found_file_root(config: Config) -> str | None:
    """
    Return the id of the archive in the file store's directory. Blocks.

    Returns:
        None if there is no archive there, or its marker is damaged.

    Raises:
        ConfigError: The configuration names no directory.
        StorageError: The directory cannot be read.
    """
    root = _required_root(config)
    try:
        return marker_of(root) if root.is_dir() else None
    except DamagedMarkerError:
        return None


def _required_root(config: Config) -> Path:
    root = config.cloud_storage_file_root
    if config.backend != "file" or root is None:
        raise ConfigError(
            f"cloud_storage_backend is {config.backend}: this command is only for the directory of a file "
            "store",
            hint="Create the bucket with the tools of its provider",
        )
    return root


def _adopted(config: Config, root: Path) -> str:
    """
    Give the archive at *root* a marker, and return its id.

    Raises:
        BucketNotFound: No manifest there belongs to this daemon's cluster.
        StorageDenied: It may only be read.
    """
    if not _holds_our_manifests(config, root):
        raise BucketNotFound(
            f"{root} has no archive marker, and no manifest there belongs to this daemon's cluster; but "
            f"{config.state_directory} shows that a daemon ran here before",
            hint="Mount the disk of the archive. To begin a new archive there: tieringd archive init "
            "--config FILE",
        )
    return make_marker(root)


def _holds_our_manifests(config: Config, root: Path) -> bool:
    """
    Say whether a topic's manifest belongs to this cluster.

    Redpanda's files do not name the cluster; for them it is enough that a manifest is of a topic on this
    host.
    """
    scan = layout_of(config).scan([str(path) for path in config.broker.log_dirs])
    cluster = known_cluster_id(config, scan.cluster_id)
    topics = {one.topic_partition.topic for one in scan.partitions}
    base = root / config.cloud_storage_prefix
    try:
        paths = list((base / TOPIC_MANIFESTS_PREFIX).glob("*/topics/*/topic_manifest.json"))
    except OSError as error:
        raise StorageUnavailable(f"{base} cannot be listed: {error.strerror}") from error
    keys = [parse_topic_manifest_key(path.relative_to(base).as_posix()) for path in paths]
    return any(key and (key.cluster == cluster if cluster else key.topic in topics) for key in keys)
