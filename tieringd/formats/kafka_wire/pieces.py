"""The pieces of a response that replace a broker's bytes: bytes of our own, and parts of files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FileRegion:
    """Bytes of an open file, which go from the page cache to the socket without being read."""

    descriptor: int
    """The descriptor belongs to the creator of the slice, and stays open until the bytes are sent."""
    position: int
    length: int
    on_unreadable: Callable[[], None] | None = field(default=None, compare=False)
    """Called when the file cannot be read or ends too early, before the sender reports the error."""


Piece = bytes | memoryview | FileRegion


def size_of(pieces: Iterable[Piece]) -> int:
    """Return the size of several pieces."""
    return sum(piece_bytes(piece) for piece in pieces)


def piece_bytes(piece: Piece) -> int:
    """Return the size of a piece."""
    return piece.length if isinstance(piece, FileRegion) else len(piece)
