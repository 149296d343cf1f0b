"""
The link between the daemon and one worker: questions with answers, and notes without, in both directions.

A link is one socket pair, which the worker inherits. No other process can reach it, so messages are pickled,
as `multiprocessing` does. Messages arrive in the order in which they were sent. The end of a process ends
the link at once, whichever way the process ends.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Callable, Coroutine, Mapping
from enum import IntEnum
from inspect import iscoroutine
from itertools import count
from struct import Struct
from typing import Any, Final

import structlog

from tieringd import errors
from tieringd.errors import RetryableError, TieringError
from tieringd.storage.at_once import cancelled

log = structlog.get_logger(__name__)

_SIZE: Final = Struct("<Q")
PULSE: Final = "pulse"
"""The question whether a side is alive. It is answered at any time."""
_NOTE: Final = 0
"""The number of messages without an answer."""
Handlers = Mapping[str, Callable[..., Any]]
"""Functions of one side for messages, by name. A coroutine function may wait before its answer."""


class _Kind(IntEnum):
    QUESTION = 0
    ANSWER = 1
    ERROR = 2
    NOTE = 3


class Link:
    """One side of a link. Belongs to one event loop."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: Handlers,
        *,
        other_side: str,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._handlers = handlers
        self._other_side = other_side
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._held: list[tuple[Any, ...]] | None = None
        """While messages are held: those that have arrived."""

    @classmethod
    async def over(cls, sock: socket.socket, handlers: Handlers, *, other_side: str) -> Link:
        """Return a link over *sock*, which it closes. *other_side* names the peer in errors."""
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        return cls(reader, writer, handlers, other_side=other_side)

    async def ask(self, name: str, *arguments: Any) -> Any:
        """
        Return the other side's answer.

        Raises:
            TieringError: The other side raised it.
            RetryableError: The other side has ended.
        """
        if self._is_over:
            raise self._lost()
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._send((_Kind.QUESTION, number, name, arguments))
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    def tell(self, name: str, *arguments: Any) -> None:
        """Send a note. It is dropped if the other side has ended."""
        if not self._is_over:
            self._send((_Kind.NOTE, _NOTE, name, arguments))

    async def drained(self) -> None:
        """Wait until the system has taken all that was sent."""
        await self._writer.drain()

    def hold(self) -> None:
        """Keep further messages until `resume`, except the question whether this side is alive."""
        self._held = []

    def resume(self) -> None:
        """Take the messages that were kept, in their order, and all others from now on."""
        held, self._held = self._held or [], None
        for message in held:
            self._take(*message)

    async def run(self) -> None:
        """Take messages until the other side ends the link, or until cancelled."""
        try:
            while True:
                (size,) = _SIZE.unpack(await self._reader.readexactly(_SIZE.size))
                # Only the process at the other end of the socket pair can have written this.
                message = pickle.loads(await self._reader.readexactly(size))  # noqa: S301
                if self._held is None or message[2] == PULSE:
                    self._take(*message)
                else:
                    self._held.append(message)
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            self._is_over = True
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(self._lost())
            await cancelled(tuple(self._tasks))
            self._writer.close()

    def _take(self, kind: _Kind, number: int, name: str, content: Any) -> None:
        if kind in {_Kind.ANSWER, _Kind.ERROR}:
            answer = self._waiting.get(number)
            if answer is None or answer.done():
                return
            if kind == _Kind.ANSWER:
                answer.set_result(content)
            else:
                answer.set_exception(error_of(*content))
            return
        try:
            found = self._handlers[name](*content)
        except Exception as error:  # noqa: BLE001 the other side gets it
            self._fail(number, name, error)
            return
        if iscoroutine(found):
            task = asyncio.get_running_loop().create_task(self._finish(number, name, found))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._answer(number, name, found)

    async def _finish(self, number: int, name: str, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self._answer(number, name, await work)
        except Exception as error:  # noqa: BLE001 the other side gets it, also of what cannot be sent
            self._fail(number, name, error)

    def _answer(self, number: int, name: str, found: Any) -> None:
        if number != _NOTE:
            self._send((_Kind.ANSWER, number, name, found))

    def _fail(self, number: int, name: str, error: Exception) -> None:
        if not isinstance(error, TieringError):
            log.error(
                "a message between the daemon and a worker failed by a defect", name=name, exc_info=error
            )
            error = RetryableError(f"{name} failed by a defect: {error!r}")
        if number != _NOTE:
            self._send((_Kind.ERROR, number, name, error_parts(error)))

    def _send(self, message: tuple[Any, ...]) -> None:
        if self._writer.is_closing():
            return
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._writer.write(_SIZE.pack(len(data)) + data)

    def _lost(self) -> RetryableError:
        return RetryableError(f"{self._other_side} has ended")


def error_parts(error: Exception) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """
    Return an error of our tree as values that can be sent; `error_of` reverses it.

    An error that a module has made for itself is sent as the nearest one of the tree.
    """
    kind = next(one for one in type(error).__mro__ if getattr(errors, one.__name__, None) is one)
    return kind.__name__, error.args, vars(error)


def error_of(name: str, arguments: tuple[Any, ...], state: dict[str, Any]) -> TieringError:
    """Return an error of our tree as the other side raised it. Constructors differ, so none is called."""
    kind = getattr(errors, name)
    error: TieringError = kind.__new__(kind, *arguments)
    error.args = arguments
    vars(error).update(state)
    return error
