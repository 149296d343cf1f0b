"""
A mend of asyncio's timeouts for Python 3.11.0 to 3.11.2, which is Debian 12's. Python 3.11.3 has it itself.

In these versions a timeout that runs out can raise CancelledError in place of TimeoutError: it does so in a
task that was asked to cancel earlier. A task group that fails leaves such a request behind, so a retry after
one would end its caller. Libraries use the same class, so this module changes the class, when asyncio is
imported. A command that needs no asyncio starts sooner without it.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType

_MODULE = "asyncio.timeouts"


def mend_timeouts() -> None:
    """
    Have a timeout that runs out raise TimeoutError, unless its task was asked to cancel since it began.

    asyncio is not imported for it: its timeouts are mended when something imports them.
    """
    if _MODULE in sys.modules:
        _mend(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _MendingFinder())


class _MendingFinder:
    """Finds `asyncio.timeouts` once, and mends it as soon as it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, whose loader also mends; None for every other module."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_mend(module: ModuleType) -> None:
                execute(module)
                _mend(module)

            loader.exec_module = execute_and_mend
        return spec


def _mend(timeouts: Any) -> None:
    mended = timeouts.Timeout
    enter, leave = mended.__aenter__, mended.__aexit__

    async def enter_and_count(self: Any) -> Any:
        task = timeouts.tasks.current_task()
        self.requests_before = task.cancelling() if task is not None else 0
        return await enter(self)

    async def leave_by_count(
        self: Any,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> Any:
        ran_out = self.expired()
        # asyncio's own method takes back the timeout's request, and raises TimeoutError if no other is left.
        left = await leave(self, exc_type, exc_val, exc_tb)
        task = timeouts.tasks.current_task()
        is_cut_off = ran_out and exc_type is timeouts.exceptions.CancelledError
        if is_cut_off and task is not None and task.cancelling() <= self.requests_before:
            raise TimeoutError from exc_val
        return left

    mended.__aenter__, mended.__aexit__ = enter_and_count, leave_by_count
