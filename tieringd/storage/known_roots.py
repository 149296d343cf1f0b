"""
Which archive belongs to each file store root: a note in the state directory of a daemon.

`file_roots.json` maps a root's path to the id in its marker (`storage.file_root`). A daemon with an
empty state directory starts for the first time. It writes a note without any root before it does
anything else, so that a restart after an interrupted first start still counts as the first start.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from tieringd.errors import ConfigError
from tieringd.storage.file_root import sync_directory

KNOWN_ROOTS_VERSION: Final = 1
ROOTS_FILE: Final = "file_roots.json"
LOST_AND_FOUND: Final = "lost+found"
"""A new ext4 has this directory, and counts as empty all the same."""


class KnownRoots:
    """The note in *state_directory*. Calls block."""

    def __init__(self, state_directory: Path) -> None:
        self._directory = state_directory
        self._path = state_directory / ROOTS_FILE

    def note_first_start(self) -> None:
        """
        Write an empty note if the state directory is empty. The directory is created where it is missing.

        Raises:
            ConfigError: The state directory cannot be used.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if self._is_empty():
                with suppress(FileExistsError):
                    self._write({}, replaces=False)
        except OSError as error:
            raise self._unusable(error) from error

    def begins_at_next_start(self) -> bool:
        """
        Return whether the next start of a daemon is the first one. Nothing is written.

        Raises:
            ConfigError: The state directory, or the note in it, cannot be read.
        """
        try:
            return not self._directory.is_dir() or self._is_empty() or self.is_first_start()
        except OSError as error:
            raise self._unusable(error) from error

    def is_first_start(self) -> bool:
        """
        Return whether no daemon with this state directory has ever used a file store.

        Raises:
            ConfigError: The note cannot be read.
        """
        return self._read() == {}

    def _is_empty(self) -> bool:
        with os.scandir(self._directory) as entries:
            return all(entry.name == LOST_AND_FOUND for entry in entries)

    def id_of(self, root: Path) -> str | None:
        """
        Return the id of the archive that belongs at *root*; None if the note has no id for it.

        A note that this user may not read counts as missing: commands and jobs run as other users.

        Raises:
            ConfigError: The note cannot be read.
        """
        return (self._read() or {}).get(str(root))

    def remember(self, root: Path, root_id: str) -> None:
        """
        Note that the archive at *root* is *root_id*, durably.

        Raises:
            ConfigError: The note cannot be read or written.
        """
        known = self._read() or {}
        try:
            self._write(known | {str(root): root_id})
        except OSError as error:
            raise self._unusable(error) from error

    def _read(self) -> dict[str, str] | None:
        """Return the note; None without a note that this user may read."""
        try:
            data = self._path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None
        except OSError as error:
            raise self._unreadable(error.strerror or str(error)) from error
        try:
            document = json.loads(data)
            version, roots = document["version"], dict(document["roots"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._unreadable("it is damaged") from error
        if version != KNOWN_ROOTS_VERSION:
            raise self._unreadable(
                f"it has version {version!r}, but this release supports {KNOWN_ROOTS_VERSION}"
            )
        return {str(path): str(root_id) for path, root_id in roots.items()}

    def _write(self, roots: dict[str, str], *, replaces: bool = True) -> None:
        write_note(self._path, {"version": KNOWN_ROOTS_VERSION, "roots": roots}, replaces=replaces)

    def _unreadable(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self._path} records which archive is at cloud_storage_file_root, but cannot be read: {reason}",
            hint="Mount the right disk, remove the file, and run: tieringd archive init --config FILE",
        )

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"state_directory {self._directory} cannot be used: {error.strerror}",
            hint="Allow the daemon's user to create it and write in it",
        )


def write_note(path: Path, document: Mapping[str, object], *, replaces: bool) -> None:
    """
    Write *document* as JSON to *path*, durably and whole.

    Raises:
        FileExistsError: There is such a file, and it is not to be replaced.
        OSError: It cannot be written.
    """
    temporary = path.with_suffix(f".{secrets.token_hex(8)}.part")
    try:
        with temporary.open("x") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            temporary.replace(path)
        else:
            path.hardlink_to(temporary)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
