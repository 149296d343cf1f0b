"""
The root of a file store, and the marker that identifies the archive it holds.

The mount point of a disk that is not mounted is an ordinary directory, mostly an empty one. A store that
took it for the archive would report that nothing is archived, and would store new objects where the
mounted disk hides them later. So the root of an archive carries a marker: a small file with a random id.

Every operation opens the root, reads the marker through that descriptor, and then works relative to the
descriptor. An unmount between the two cannot redirect the operation: the descriptor still refers to the
disk. The descriptor is closed after the operation, so an idle disk can be unmounted.

Writers are kept apart by locks, and by the status of a freshly opened file. Neither works between hosts
on a network file system, so nothing is written to one unless there is a single writer.

`filesystem_type` returns the type of a file system. `is_network_filesystem` returns whether several
hosts may have such a file system mounted without seeing each other. Linux reports the mount that a
descriptor is on, and the type of each mount. On other systems the type is unknown.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tieringd.errors import BucketNotFound, ConfigError, StorageDenied, StorageUnavailable
from tieringd.storage.file_tree import ROOT_MARKER, WORK_DIRECTORY

_PROC: Final = Path("/proc/self")
_NETWORK_TYPES: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "9p", "virtiofs", "fuse"}
)
"""`ceph` is absent, because its caches and locks are those of its cluster. `fuseblk` is a local disk."""
_DISK_TYPES: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})
"""File systems on a disk of this host that write past the page cache when they are asked to."""

MARKER_VERSION: Final = 1
_MAX_MARKER_BYTES: Final = 4096
# Only Linux has O_PATH, which needs no right to list. Jobs also run on other systems.
_ROOT_FLAGS: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_INIT_HINT: Final = "to begin a new archive there: tieringd archive init --config FILE"


def filesystem_type(fd: int, *, proc: Path = _PROC) -> str:
    """
    Return the type of the file system that *fd* is open on, as `mount` names it; empty where unknown.

    *proc* is the directory where the system describes this process.
    """
    try:
        info = (proc / "fdinfo" / str(fd)).read_text()
        mounts = (proc / "mountinfo").read_text()
    except OSError:
        return ""
    mount_id = next((line.split()[1] for line in info.splitlines() if line.startswith("mnt_id:")), None)
    for line in mounts.splitlines():
        # The number of optional fields varies; the type comes after the separator.
        fields, _, rest = line.partition(" - ")
        if fields.split()[0] == mount_id:
            return rest.split()[0]
    return ""


def is_network_filesystem(type_name: str) -> bool:
    """Return whether other hosts may write to such a file system, unseen by this host's caches and locks."""
    return type_name in _NETWORK_TYPES or type_name.startswith("fuse.")


class DamagedMarkerError(BucketNotFound):
    """A marker exists and cannot be read, so it is unknown which archive this is."""


class FileRoot:
    """
    The directory *path* as the root of an archive.

    With *root_id* no other archive is accepted. Without it, reads accept any directory, and writes
    accept any directory that carries a marker. Once a marker was seen, only that marker is accepted.
    *filesystem_of* returns the file system type of a descriptor.
    """

    def __init__(
        self,
        path: Path,
        *,
        root_id: str | None = None,
        has_single_writer: bool = False,
        filesystem_of: Callable[[int], str] = filesystem_type,
    ) -> None:
        self.path = path
        self._root_id = root_id
        self._has_single_writer = has_single_writer
        self._filesystem_of = filesystem_of
        self._known_type: tuple[int, str] | None = None
        """The device and the file system type of what was asked for last."""

    @contextmanager
    def opened(self, *, to_write: bool) -> Iterator[int]:
        """
        Yield a descriptor of the root for one operation, whose paths are relative to it.

        Raises:
            BucketNotFound: The directory is missing, or does not hold the expected archive.
            ConfigError: The operation writes, and the file system cannot keep writers apart.
            OSError: The filesystem does not answer, or denies access.
        """
        with opened_root(self.path) as root:
            self._require_marker(root, to_write=to_write)
            if to_write and not self._has_single_writer:
                self._require_coherent(root)
            yield root

    def is_on_own_disk(self, fd: int) -> bool:
        """Return whether the root or a file below it, open as *fd*, is known to be on a disk of this host."""
        return self._type_of(fd) in _DISK_TYPES

    def _type_of(self, fd: int) -> str:
        device = os.fstat(fd).st_dev
        known = self._known_type
        if known is None or known[0] != device:
            known = self._known_type = (device, self._filesystem_of(fd))
        return known[1]

    def _require_coherent(self, root: int) -> None:
        found = self._type_of(root)
        if is_network_filesystem(found):
            raise ConfigError(
                f"{self.path} is on a file system of the type {found}, where tieringd cannot keep two "
                "writers from overwriting each other",
                hint="If only one daemon, and no job besides it, will ever write there, set "
                "cloud_storage_single_writer: true; otherwise use an object store. See "
                "docs/file_store.md",
            )

    def _require_marker(self, root: int, *, to_write: bool) -> None:
        found = read_marker(root, self.path)
        if self._root_id is not None and found != self._root_id:
            raise wrong_root(self.path, expected=self._root_id, found=found)
        if found is None and to_write:
            raise BucketNotFound(
                f"{self.path} has no archive marker, so nothing is written there",
                hint=f"Mount the disk of the archive; {_INIT_HINT}",
            )
        self._root_id = found


def wrong_root(path: Path, *, expected: str, found: str | None) -> BucketNotFound:
    """Return the error for a root that lacks the *expected* marker; *found* is the one it has."""
    what = "no marker of an archive" if found is None else f"the marker {found} of another archive"
    return BucketNotFound(
        f"{path} has {what}; the archive that belongs there has the marker {expected}",
        hint="Mount the disk of the archive. To accept the directory as it is: tieringd archive init "
        "--config FILE, then restart tieringd",
    )


@contextmanager
def opened_root(path: Path) -> Iterator[int]:
    """
    Yield a descriptor of the directory *path*.

    Raises:
        BucketNotFound: There is no such directory.
        OSError: The filesystem does not answer, or denies access.
    """
    try:
        root = os.open(path, _ROOT_FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        raise BucketNotFound(
            f"{path} is not a directory", hint=f"Mount the disk of the archive; {_INIT_HINT}"
        ) from None
    try:
        yield root
    finally:
        os.close(root)


def read_marker(root: int, path: Path) -> str | None:
    """
    Return the id in the marker of the root that *root* is open on; None without a marker.

    Raises:
        DamagedMarkerError: The marker cannot be read. The message names *path*, the root.
        OSError: The filesystem does not answer, or denies access.
    """
    try:
        fd = os.open(ROOT_MARKER, os.O_RDONLY | os.O_CLOEXEC, dir_fd=root)
    except FileNotFoundError:
        return None
    try:
        data = os.pread(fd, _MAX_MARKER_BYTES, 0)
    finally:
        os.close(fd)
    try:
        document = json.loads(data)
        version, root_id = document["version"], document["id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(path, "is not an archive marker") from None
    if version != MARKER_VERSION:
        raise _damaged(path, f"has version {version!r}, but this release supports {MARKER_VERSION}")
    if not isinstance(root_id, str) or not root_id:
        raise _damaged(path, "has no id")
    return root_id


def write_marker(root: int, root_id: str, *, replaces: bool = False) -> bool:
    """
    Put a marker into the root that *root* is open on, durably. Return whether it was written.

    An existing marker stays, unless *replaces* is set.

    Raises:
        OSError: The marker cannot be written.
    """
    data = json.dumps({"version": MARKER_VERSION, "id": root_id}).encode() + b"\n"
    temporary = f"{WORK_DIRECTORY}/{root_id}.marker"
    make_work_directory(root)
    fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o666, dir_fd=root)
    try:
        try:
            os.write(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        # The root may be new itself. Its name is durable before anything in it counts.
        _flush_name_of(root)
        if replaces:
            os.replace(temporary, ROOT_MARKER, src_dir_fd=root, dst_dir_fd=root)
        else:
            try:
                os.link(temporary, ROOT_MARKER, src_dir_fd=root, dst_dir_fd=root)
            except FileExistsError:
                return False
        sync_directory(".", dir_fd=root)
    finally:
        _unlink_if_there(temporary, root)
    return True


def create_root(path: Path) -> None:
    """
    Create the directory *path* if its parent exists. Any error shows when the root is opened.

    The parent is never created: if it is missing, a disk is not mounted or the path is mistyped.
    """
    with suppress(OSError):
        path.mkdir(exist_ok=True)


def marker_of(path: Path) -> str | None:
    """
    Return the id in the marker of the directory *path*; None without a marker.

    Raises:
        BucketNotFound: There is no such directory, or its marker is damaged.
        StorageDenied: The marker may not be read.
        StorageUnavailable: The filesystem does not answer.
    """
    with _translated(path), opened_root(path) as root:
        return read_marker(root, path)


def make_marker(path: Path, *, replaces: bool = False) -> str:
    """
    Make the directory *path* the root of an archive, and return its id.

    An existing marker stays, unless *replaces* is set.

    Raises:
        BucketNotFound: There is no such directory, or its marker is damaged.
        StorageDenied: The marker may not be read or written.
        StorageUnavailable: The filesystem does not answer, or has no room.
    """
    with _translated(path), opened_root(path) as root:
        found = None if replaces else read_marker(root, path)
        if found is not None:
            return found
        root_id = secrets.token_hex(16)
        if not write_marker(root, root_id, replaces=replaces):
            # Another process made one at the same time.
            found = read_marker(root, path)
        return found or root_id


def make_work_directory(root: int) -> None:
    """Make the directory for temporary files, where it is missing."""
    try:
        os.mkdir(WORK_DIRECTORY, dir_fd=root)
    except FileExistsError:
        return


def sync_directory(path: str | Path, *, dir_fd: int | None = None) -> int:
    """Flush a directory, and return its inode; *path* may be relative to the directory of *dir_fd*."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.fsync(fd)
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)


def _flush_name_of(root: int) -> None:
    """Flush the directory above the root that *root* is open on."""
    try:
        sync_directory("..", dir_fd=root)
    except PermissionError:
        # The daemon may not open that directory. All filesystems are flushed instead.
        os.sync()


def _unlink_if_there(name: str, root: int) -> None:
    try:
        os.unlink(name, dir_fd=root)
    except FileNotFoundError:
        return


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Raise errors of the filesystem as errors of our tree."""
    try:
        yield
    except PermissionError as error:
        raise StorageDenied(
            f"no permission to read or write the marker in {path}: {error.strerror}",
            hint="Allow the user that runs tieringd to write there",
        ) from error
    except OSError as error:
        text = f"the marker in {path} cannot be read or written: {error.strerror}"
        if error.errno == errno.EROFS:
            raise StorageDenied(text, hint="Mount the disk for writing") from error
        raise StorageUnavailable(text) from error


def _damaged(path: Path, what: str) -> DamagedMarkerError:
    return DamagedMarkerError(
        f"{path / ROOT_MARKER} {what}",
        hint="Restore the right marker, or create a new one: tieringd archive init --config FILE",
    )
