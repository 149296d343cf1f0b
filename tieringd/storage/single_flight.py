"""
Single flight: callers that want the same thing at the same time share one piece of work.

- A *flight* is one task. It belongs to no caller: a caller that is cancelled leaves the flight to the others,
  or to the next caller. Only `close` cancels a flight, or the limit on flights that no caller waits for.
- Every caller that waits gets the same result, or the same error.
- A caller that comes after the end begins a new flight. Nothing is kept: caching is the owner's task.
- A `TieringError` that no caller waits for is dropped, because the next caller meets it again. Any other
  error is a fault of the program: the loop's exception handler reports it, besides the callers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tieringd.errors import StorageUnavailable, TieringError
from tieringd.storage.at_once import cancelled

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Flight(Generic[K, T]):
    """One task that several callers may wait for."""

    key: K
    task: asyncio.Task[T]
    waiters: int = field(default=0, init=False)
    """How many callers wait in `SingleFlight.arrived` or `arrived_or`."""


class SingleFlight(Generic[K, T]):
    """The flights of one owner, one for each key. Belongs to one event loop."""

    def __init__(self, when_closed: Callable[[K], str], *, unwaited_above: int | None = None) -> None:
        """
        Keep the arguments.

        Args:
            when_closed: Gives the message for callers whose flight was cancelled by `close`.
            unwaited_above: While more flights than this run, a flight is cancelled when its last caller
                is. Callers that leave early then cannot fill a queue with work that no caller waits for.
        """
        self._when_closed = when_closed
        self._unwaited_above = unwaited_above
        self._flights: dict[K, Flight[K, T]] = {}
        self._tasks: set[asyncio.Task[T]] = set()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Say whether `close` was called."""
        return self._is_closed

    def get(self, key: K) -> Flight[K, T] | None:
        """Return the flight of *key*, or None if none is running."""
        return self._flights.get(key)

    def __contains__(self, key: K) -> bool:
        """Say whether a flight of *key* is running."""
        return key in self._flights

    def join(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> Flight[K, T]:
        """
        Return the running flight of *key*, or begin one that does *work*.

        Raises:
            StorageUnavailable: No flight is running, and none begins after `close`.
        """
        return self._flights.get(key) or self.begin(key, work)

    def begin(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> Flight[K, T]:
        """
        Begin a flight that later callers of `join` share, also where another flight of *key* is running.

        Raises:
            StorageUnavailable: `close` was called.
        """
        if self._is_closed:
            raise StorageUnavailable(self._when_closed(key))
        flight = Flight(key, asyncio.get_running_loop().create_task(work()))
        self._flights[key] = flight
        self._tasks.add(flight.task)
        flight.task.add_done_callback(lambda _: self._land(flight))
        return flight

    async def arrived(self, flight: Flight[K, T]) -> T:
        """
        Wait for a flight and return its result.

        Raises:
            StorageUnavailable: The flight was cancelled by `close`.
            Exception: The error that the flight ended with.
        """
        with self._waiting(flight):
            await asyncio.wait({flight.task})
        if flight.task.cancelled():
            raise StorageUnavailable(self._when_closed(flight.key))
        return flight.task.result()

    async def arrived_or(self, flight: Flight[K, T], sooner: asyncio.Future[None]) -> None:
        """Wait until a flight has ended, or until *sooner* is done. *sooner* is cancelled at the end."""
        with self._waiting(flight):
            try:
                waited: set[asyncio.Future[Any]] = {flight.task, sooner}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            finally:
                sooner.cancel()

    async def close(self) -> None:
        """Cancel all flights, and wait until they have ended. No flight can begin afterwards."""
        self._is_closed = True
        await cancelled(tuple(self._tasks))

    @contextmanager
    def _waiting(self, flight: Flight[K, T]) -> Iterator[None]:
        """Count a caller that waits for *flight*."""
        flight.waiters += 1
        is_left = True
        try:
            yield
            is_left = False
        finally:
            flight.waiters -= 1
            if is_left and not flight.task.done() and not flight.waiters and self._is_crowded():
                self._forget(flight)
                flight.task.cancel()

    def _is_crowded(self) -> bool:
        return self._unwaited_above is not None and len(self._flights) > self._unwaited_above

    def _forget(self, flight: Flight[K, T]) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def _land(self, flight: Flight[K, T]) -> None:
        self._forget(flight)
        self._tasks.discard(flight.task)
        # Reading the exception also keeps asyncio from logging it as never retrieved.
        error = None if flight.task.cancelled() else flight.task.exception()
        if error is not None and not isinstance(error, TieringError):
            flight.task.result()
