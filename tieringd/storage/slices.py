"""What can be wrong with a slice of a local file, in one wording for every store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tieringd.errors import LocalFileError

if TYPE_CHECKING:
    from tieringd.storage.base import FileSlice


def truncated(file_slice: FileSlice, position: int) -> LocalFileError:
    """Return the error of a file that ends at *position*, inside the slice."""
    path = _path_of(file_slice.fd)
    end = file_slice.position + file_slice.size_bytes
    return LocalFileError(
        f"{path} ends at byte {position}, but was to be stored up to byte {end}",
        path=path,
        hint="it was truncated meanwhile; nothing was stored",
    )


def unreadable(fd: int, error: OSError) -> LocalFileError:
    """Return the error of a file that the kernel does not read."""
    path = _path_of(fd)
    return LocalFileError(f"{path} cannot be read: {error.strerror}", path=path)


def _path_of(fd: int) -> str:
    """Return the path under which the kernel knows an open file now."""
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return f"descriptor {fd}"
