"""
Pipes through which records go from the broker's socket to the client's without being copied.

There are only so many: a slow client keeps one, and once all are taken records are received
and sent like everything else.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from typing import Final

PIPE_BYTES: Final = 1 << 20
_MAX_PIPES: Final = 32
_FLAGS: Final = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE


@dataclass(slots=True)
class Pipe:
    """A pipe and how many bytes are in it."""

    reading: int
    writing: int
    capacity: int
    held_bytes: int = 0

    def fill_from(self, descriptor: int, size: int) -> int:
        """
        Move at most *size* bytes from a socket into the empty pipe; 0 is the socket's end.

        Raises:
            BlockingIOError: The socket has nothing now.
        """
        moved = os.splice(descriptor, self.writing, min(size, self.capacity), flags=_FLAGS)
        self.held_bytes += moved
        return moved

    def empty_into(self, descriptor: int) -> int:
        """
        Move bytes on to a socket.

        Raises:
            BlockingIOError: The socket takes nothing now.
        """
        moved = os.splice(self.reading, descriptor, self.held_bytes, flags=_FLAGS)
        self.held_bytes -= moved
        return moved

    def close(self) -> None:
        """Close both ends."""
        os.close(self.reading)
        os.close(self.writing)


class PipePool:
    """The pipes of one gateway."""

    def __init__(self) -> None:
        self._idle: list[Pipe] = []
        self._made = 0

    def take(self) -> Pipe | None:
        """Return an empty pipe, or None when all are in use."""
        if self._idle:
            return self._idle.pop()
        if self._made >= _MAX_PIPES:
            return None
        try:
            reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            # No descriptors left: copying needs none.
            return None
        try:
            capacity = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            # The system allows this user no more; a small pipe works too.
            capacity = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
        self._made += 1
        return Pipe(reading, writing, capacity)

    def give(self, pipe: Pipe) -> None:
        """Take a pipe back; what is still in it is lost."""
        if pipe.held_bytes:
            self._made -= 1
            pipe.close()
        else:
            self._idle.append(pipe)

    def close(self) -> None:
        """Close the pipes that nobody uses."""
        while self._idle:
            self._made -= 1
            self._idle.pop().close()
