"""An executor that can be asked what is still running."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class RecordingExecutor(ThreadPoolExecutor):
    """Keeps what was submitted."""

    def __init__(self, threads: int = 4) -> None:
        super().__init__(threads)
        self.submitted: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Submit, and remember."""
        future = super().submit(function, *arguments, **options)
        self.submitted.append(future)
        return future

    def is_idle(self) -> bool:
        """Say whether everything submitted has ended."""
        return all(future.done() for future in self.submitted)
