"""
Of which type a file system is, and whether several hosts may have it mounted without seeing each other.

Linux tells the mount that a descriptor is on, and the type of each mount. Elsewhere nothing is known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc/self")
_NETWORK_TYPES: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "9p", "virtiofs", "fuse"}
)
"""Not among them: `ceph`, whose caches and locks are those of its cluster, and `fuseblk`, a local disk."""


def filesystem_type(fd: int, *, proc: Path = _PROC) -> str:
    """
    Return the type of the file system that *fd* is open on, as `mount` names it; empty where nothing tells.

    *proc* is where the system tells of this process.
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
    """Say whether other hosts may write to such a file system, unseen by this one's caches and locks."""
    return type_name in _NETWORK_TYPES or type_name.startswith("fuse.")
