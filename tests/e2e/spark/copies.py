"""A copy of an archive in a directory, for tests that take it apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.daemon import write_config
from tieringd.storage.file_root import make_marker

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.archives import Objects


def copied_archive(objects: Objects, directory: Path) -> tuple[Path, Path]:
    """Copy all objects to a marked root; return the copy's configuration, and the directory of its bucket."""
    root = directory / "copy"
    for key in objects.keys():  # noqa: SIM118 a method, not a mapping's
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(objects.read(key))
    properties = {
        "broker": {"kind": "none", "log_dirs": [str(directory / "no logs")]},
        "state_directory": str(directory / "state"),
        "cloud_storage_enabled": True,
        "cloud_storage_enable_remote_read": True,
        "log_retention_ms": -1,
        "cloud_storage_backend": "file",
        "cloud_storage_file_root": str(root),
    }
    (directory / "no logs").mkdir()
    make_marker(root)
    return write_config(directory / "copy.yaml", properties), root
