"""The operating system's errors about local files, as errors that name the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tieringd.errors import LocalFileError


@contextmanager
def named_errors(path: str, tried: str = "be read", *, belongs_to: str = "") -> Iterator[None]:
    """
    Turn an `OSError` in the context into a `LocalFileError`. *tried* follows the word "cannot".

    If *belongs_to* names the directories of the file, a missing permission has a hint.

    Raises:
        LocalFileError: The operating system refused.
    """
    try:
        yield
    except OSError as error:
        hint = None
        if belongs_to and isinstance(error, PermissionError):
            hint = f"Allow the daemon's user to read {belongs_to}, for example through its group"
        text = f"{path} cannot {tried}: {error.strerror or error}"
        raise LocalFileError(text, path=path, hint=hint) from error
