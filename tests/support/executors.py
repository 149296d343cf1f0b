"""An executor that reports whether anything is still running."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class RecordingExecutor(ThreadPoolExecutor):
    """A thread pool that keeps the futures of all submitted calls."""

    def __init__(self, threads: int = 4) -> None:
        super().__init__(threads)
        self.submitted: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Submit a call, and keep its future."""
        future = super().submit(function, *arguments, **options)
        self.submitted.append(future)
        return future

    def is_idle(self) -> bool:
        """Return whether all submitted calls have ended."""
        return all(future.done() for future in self.submitted)
