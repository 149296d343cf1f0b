"""Counts the calls of asynchronous methods of real objects that a test cannot replace."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


@dataclass(slots=True)
class CountedCalls:
    """The calls of some methods, in their order, and how many ran at once."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """Method name, arguments after `self`, and keyword arguments."""
    most_at_once: int = 0
    _running: int = 0

    @classmethod
    def of(cls, monkeypatch: pytest.MonkeyPatch, owner: type, *names: str) -> CountedCalls:
        """
        Count the calls of the methods *names* of the class *owner* from now on.

        The methods do their real work. Jobs and readers of Spark open their store from the configuration,
        so a test cannot give them one that counts: the class is the only place where all calls arrive.
        """
        counted = cls()
        for name in names:
            # The reason is above: these objects are made by the code under test.
            monkeypatch.setattr(owner, name, counted._counting(name, getattr(owner, name)))
        return counted

    def _counting(self, name: str, real: Any) -> Any:
        @wraps(real)
        async def call(itself: Any, *arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments, options))
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            try:
                # Other calls that may run at the same time begin here.
                await asyncio.sleep(0)
                return await real(itself, *arguments, **options)
            finally:
                self._running -= 1

        return call
