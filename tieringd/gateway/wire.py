"""
One non-blocking socket of the gateway, plain or TLS.

Bytes are received into the caller's memory and sent from it. Only bytes that a slow peer does not take
at once are copied and kept. asyncio's transports are not used: they keep the bytes written to them, so
one buffer could not serve all connections. This module does not interpret the bytes.

`PipePool` gives out the pipes through which records go from the broker's socket to the client's without
a copy. The number of pipes is limited. When all pipes are taken, records are received and sent like
other bytes. `MemoryBudget` bounds the bytes that all connections of a gateway hold in memory.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import math
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tieringd.errors import LocalFileError
from tieringd.formats.kafka_wire.pieces import FileRegion, Piece, piece_bytes

PIPE_BYTES: Final = 1 << 20
_MAX_PIPES: Final = 32
_FLAGS: Final = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE

_WAITING_SECONDS: Final = 0.02
"""Seconds between two checks whether connections that wait for memory may go on."""
_OVERDRAWN_SECONDS: Final = 0.2
"""How long until one of them goes on although there is no room."""
_GRANTED_BYTES: Final = 64 << 10
"""How much room there has to be for each connection that goes on."""
_TURN_BYTES: Final = 1 << 20
"""How much one connection sends in a turn of the loop, so that the other connections get theirs."""
_TLS_PIECE_BYTES: Final = 256 << 10
_ESTABLISHED: Final = 1
"""The state of a TCP connection that neither side has closed, as the kernel numbers it."""
_FILE_ERRORS: Final = frozenset({errno.EIO, errno.EINVAL, errno.ESTALE})
"""Errors of `sendfile` that concern the file. All others concern the socket."""
NOTHING_NOW: Final = -1


@dataclass(slots=True)
class Pipe:
    """A pipe, and how many bytes are in it."""

    reading: int
    writing: int
    capacity: int
    held_bytes: int = 0

    def fill_from(self, descriptor: int, size: int) -> int:
        """
        Move at most *size* bytes from a socket into the empty pipe. 0 means the socket's end.

        Raises:
            BlockingIOError: The socket has no bytes now.
        """
        moved = os.splice(descriptor, self.writing, min(size, self.capacity), flags=_FLAGS)
        self.held_bytes += moved
        return moved

    def empty_into(self, descriptor: int) -> int:
        """
        Move the pipe's bytes on to a socket.

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
        """Return an empty pipe, or None if all are in use or no descriptor is left."""
        if self._idle:
            return self._idle.pop()
        if self._made >= _MAX_PIPES:
            return None
        try:
            reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            # No descriptors are left. Copying needs none.
            return None
        try:
            capacity = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            # The system allows this user no larger pipe. A small one works too.
            capacity = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
        self._made += 1
        return Pipe(reading, writing, capacity)

    def give(self, pipe: Pipe) -> None:
        """Take a pipe back. Bytes still in it are lost."""
        if pipe.held_bytes:
            self._made -= 1
            pipe.close()
        else:
            self._idle.append(pipe)

    def close(self) -> None:
        """Close the unused pipes."""
        while self._idle:
            self._made -= 1
            self._idle.pop().close()


class MemoryBudget:
    """
    Count bytes against a limit.

    Avoidable bytes ask first (`take`). Bytes that are already in memory are counted in any case (`add`). So a
    connection that holds something is not read while the budget is spent: it waits (`wait`). Others are read
    in small steps. No connection is cut because another one holds too much.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: dict[object, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._overdrawn_at = -math.inf

    @property
    def is_spent(self) -> bool:
        """Say whether nothing is left."""
        return self.used >= self.limit

    @property
    def left(self) -> int:
        """Return how many bytes are left; 0 or less if the budget is spent."""
        return self.limit - self.used

    def wait(self, owner: object, go_on: Callable[[], None]) -> None:
        """
        Call *go_on* once, when there is room again, or when *owner* has waited the longest of all.

        Of those that wait, one goes on in each interval although the budget is spent. Otherwise all could
        wait for each other: each holds the beginning of a message whose rest would let it go.
        """
        self._waiting[owner] = go_on
        if self._timer is None:
            self._start()

    def forget(self, owner: object) -> None:
        """Wait no more for *owner*."""
        self._waiting.pop(owner, None)

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_WAITING_SECONDS, self._let_go_on)

    def _let_go_on(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        count = self.left // _GRANTED_BYTES
        if count <= 0 and now >= self._overdrawn_at + _OVERDRAWN_SECONDS:
            count = 1
            self._overdrawn_at = now
        for owner in list(self._waiting)[: max(count, 0)]:
            # One that goes on may end another.
            go_on = self._waiting.pop(owner, None)
            if go_on is not None:
                go_on()
        if self._waiting and self._timer is None:
            self._start()

    def take(self, size: int) -> bool:
        """Count *size* bytes if they fit, and say whether they did."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def add(self, size: int) -> None:
        """Count *size* bytes, whether they fit or not."""
        self.used += size

    def give(self, size: int) -> None:
        """Give *size* bytes back."""
        self.used -= size


@dataclass(slots=True)
class _Kept:
    piece: Piece | Pipe
    """The unsent rest."""
    counted_bytes: int
    release: Callable[[], None] | None


class Wire:
    """
    A connected plain socket.

    *on_readable* is called while reading is on and there are bytes or an end, *on_drained* when the last
    kept byte was sent. If sending ends early, one callback follows once: *on_unreadable* if a file is
    the reason, *on_lost* if it is the peer.
    """

    is_encrypted = False

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        budget: MemoryBudget,
        *,
        on_readable: Callable[[], None],
        on_drained: Callable[[], None],
        on_lost: Callable[[], None],
        on_unreadable: Callable[[LocalFileError], None],
    ) -> None:
        self.sock = sock
        self.is_closed = False
        self.later_bytes = 0
        """How many bytes were sent after they had been kept."""
        self._loop = loop
        self._budget = budget
        self._descriptor = sock.fileno()
        self._on_readable = on_readable
        self._on_drained = on_drained
        self._on_lost = on_lost
        self._on_unreadable = on_unreadable
        self._kept: deque[_Kept] = deque()
        self._is_reading = False
        self._wake_at = 1

    @property
    def is_drained(self) -> bool:
        """Say whether all bytes were handed to the kernel."""
        return not self._kept

    @property
    def is_ended_by_peer(self) -> bool:
        """Say whether the peer has closed the connection, also while earlier bytes are still to be read."""
        if self.is_closed:
            return True
        try:
            state = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        except OSError:
            return True
        return state[0] != _ESTABLISHED

    @property
    def is_reading(self) -> bool:
        """Say whether *on_readable* is called when the peer sends."""
        return self._is_reading

    def resume_reading(self) -> None:
        """Call *on_readable* from now on."""
        if not self._is_reading and not self.is_closed:
            self._is_reading = True
            self._loop.add_reader(self._descriptor, self._on_readable)

    def pause_reading(self) -> None:
        """Stop calling *on_readable*. The peer's bytes stay in the kernel."""
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._descriptor)

    def receive(self, room: memoryview) -> int:
        """Receive into *room* and return how many bytes. 0 is the end; `NOTHING_NOW` means none yet."""
        if self.is_closed:
            return NOTHING_NOW
        try:
            return self._receive(room)
        except (BlockingIOError, InterruptedError):
            return NOTHING_NOW
        except OSError:
            # A reset counts as an end: no peer is left to report an error to.
            return 0

    def send(self, data: memoryview | bytes) -> None:
        """Send *data*, and keep a copy of the bytes that cannot be sent now."""
        if self.is_closed:
            return
        if not self._kept:
            try:
                sent = self._send(data)
            except OSError:
                self._lose()
                return
            if sent == len(data):
                return
            data = memoryview(data)[sent:]
        self._keep(bytes(data))
        self._loop.add_writer(self._descriptor, self._flush)

    def send_pieces(self, pieces: Sequence[Piece], release: Callable[[], None]) -> None:
        """Send *pieces* in turn, without copying them, and call *release* when the last one was sent."""
        if self.is_closed:
            release()
            return
        *first, last = pieces
        for piece in first:
            self._keep(piece)
        self._keep(last, release)
        self._send_kept()

    def wake_at(self, size: int) -> None:
        """Call *on_readable* only when *size* bytes have arrived, or the end. 1 is the default."""
        if self.is_encrypted or self.is_closed:
            return
        if size != self._wake_at:
            self._wake_at = size
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
        if size > 1:
            # A broker's kernel holds back the end of an answer until the rest is acknowledged. Ours would
            # acknowledge late, because it expects our next request to carry that: each wait takes 10 ms.
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def splice_to(self, other: Wire, size: int, pipes: PipePool) -> int | None:
        """
        Pass at most *size* bytes on to *other* inside the kernel, and return how many.

        0 is the end; `NOTHING_NOW` means none yet. None means that splicing is not possible now: *other*
        is not drained, no pipe is free, or one of the two encrypts.
        """
        if self.is_encrypted or other.is_encrypted or other._kept or (pipe := pipes.take()) is None:
            return None
        try:
            moved = pipe.fill_from(self._descriptor, size)
        except (BlockingIOError, InterruptedError):
            moved = NOTHING_NOW
        except OSError:
            moved = 0
        if moved <= 0:
            pipes.give(pipe)
            return moved
        other._kept.append(_Kept(pipe, 0, partial(pipes.give, pipe)))
        other._send_kept()
        return moved

    def close(self) -> None:
        """Close the socket and drop the kept bytes. Closing twice is allowed."""
        if self.is_closed:
            return
        self.is_closed = True
        self.pause_reading()
        self._loop.remove_writer(self._descriptor)
        while self._kept:
            self._forget_first()
        self.sock.close()

    def _receive(self, room: memoryview) -> int:
        return self.sock.recv_into(room)

    def _send(self, data: memoryview | bytes) -> int:
        """Return how many bytes were sent; 0 when the socket takes nothing now."""
        try:
            return self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    def _send_file(self, piece: FileRegion) -> int:
        size = min(piece.length, _TURN_BYTES)
        try:
            sent = os.sendfile(self._descriptor, piece.descriptor, piece.position, size)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            if error.errno in _FILE_ERRORS:
                raise _unreadable(piece, str(error)) from error
            raise
        if not sent:
            raise _unreadable(piece, "the file ends there")
        return sent

    def _keep(self, piece: Piece, release: Callable[[], None] | None = None) -> None:
        counted = 0 if isinstance(piece, FileRegion) else len(piece)
        self._budget.add(counted)
        self._kept.append(_Kept(piece, counted, release))

    def _forget_first(self) -> None:
        kept = self._kept.popleft()
        self._budget.give(kept.counted_bytes)
        if kept.release is not None:
            kept.release()

    def _flush(self) -> None:
        """Go on sending when the socket takes bytes again."""
        self._send_kept()
        if not self._kept and not self.is_closed:
            self._loop.remove_writer(self._descriptor)
            self._on_drained()

    def _send_kept(self) -> None:
        """Send kept bytes until the socket is full, or the turn's share is used up."""
        left = _TURN_BYTES
        while self._kept and left > 0:
            kept = self._kept[0]
            size = _size(kept.piece)
            try:
                sent = self._send_piece(kept.piece) if size else 0
            except LocalFileError as error:
                self._give_up(kept.piece, error)
                return
            except OSError:
                self._lose()
                return
            left -= sent
            self.later_bytes += sent
            if sent == size:
                self._forget_first()
                continue
            kept.piece = _rest(kept.piece, sent)
            if not sent or (sent < min(size, _TURN_BYTES) and not self.is_encrypted):
                # The socket is full: it would take nothing if it was asked again.
                break
        if self._kept:
            self._loop.add_writer(self._descriptor, self._flush)

    def _send_piece(self, piece: Piece | Pipe) -> int:
        if isinstance(piece, FileRegion):
            return self._send_file(piece)
        if isinstance(piece, Pipe):
            return self._send_pipe(piece)
        return self._send(piece)

    def _send_pipe(self, pipe: Pipe) -> int:
        try:
            return pipe.empty_into(self._descriptor)
        except (BlockingIOError, InterruptedError):
            return 0

    def _give_up(self, piece: Piece | Pipe, error: LocalFileError) -> None:
        if isinstance(piece, FileRegion) and piece.on_unreadable is not None:
            piece.on_unreadable()
        if not self.is_closed:
            self._on_unreadable(error)

    def _lose(self) -> None:
        if not self.is_closed:
            self._on_lost()


def _size(piece: Piece | Pipe) -> int:
    return piece.held_bytes if isinstance(piece, Pipe) else piece_bytes(piece)


def _rest(piece: Piece | Pipe, sent: int) -> Piece | Pipe:
    if isinstance(piece, Pipe):
        return piece
    if isinstance(piece, FileRegion):
        position, length = piece.position + sent, piece.length - sent
        return FileRegion(piece.descriptor, position, length, piece.on_unreadable)
    return memoryview(piece)[sent:]


def _unreadable(piece: FileRegion, reason: str) -> LocalFileError:
    path = str(Path(f"/proc/self/fd/{piece.descriptor}").resolve())
    return LocalFileError(
        f"{path} cannot be read at position {piece.position}: {reason}",
        path=path,
        hint="Check the disk of this file",
    )


class TlsWire(Wire):
    """A connected TLS socket whose handshake is over."""

    sock: ssl.SSLSocket
    is_encrypted = True

    def _receive(self, room: memoryview) -> int:
        # A TLS record has at most 16 KiB: many are collected in one turn.
        received = 0
        try:
            while received < len(room):
                size = self.sock.recv_into(room[received:])
                if not size:
                    return received
                received += size
        except ssl.SSLWantReadError:
            return received or NOTHING_NOW
        except OSError:
            if not received:
                raise
            return received
        return received

    def resume_reading(self) -> None:
        """Call *on_readable* from now on. Call this after each receive."""
        super().resume_reading()
        # Decrypted bytes that did not fit in *room* have left the socket, which is not readable for them.
        if self._is_reading and self.sock.pending():
            self._loop.call_soon(self._on_more)

    def _on_more(self) -> None:
        if self._is_reading:
            self._on_readable()

    def _send(self, data: memoryview | bytes) -> int:
        try:
            return self.sock.send(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0

    def _send_file(self, piece: FileRegion) -> int:
        try:
            data = os.pread(piece.descriptor, min(piece.length, _TLS_PIECE_BYTES), piece.position)
        except OSError as error:
            raise _unreadable(piece, str(error)) from error
        if not data:
            raise _unreadable(piece, "the file ends there")
        return self._send(data)


def wire_of(sock: socket.socket) -> type[Wire]:
    """Return the kind of wire for a connected socket. Its TLS handshake, if any, is over."""
    return TlsWire if isinstance(sock, ssl.SSLSocket) else Wire
