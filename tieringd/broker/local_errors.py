"""The operating system's errors about local files, as errors that name the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from tieringd.errors import LocalFileError

T = TypeVar("T")

_ATTEMPTS: Final = 3


class ChangedError(LocalFileError):
    """A directory changed while it was listed."""


def unchanged(listing: Callable[[], T]) -> T:
    """
    Return what *listing* returns, which is tried three times while the directory changes.

    Raises:
        LocalFileError: The directory changed each time, or *listing* raises it.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return listing()
        except ChangedError:
            continue
    return listing()


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
