"""
Which archived partitions have changed: for work that goes over all partitions once, and then over these.

A partition has changed when there is a new observation of it, when its archiver has done a step, and when
its archiver begins or ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tieringd.model.partition import Leadership


class ChangeFeed:
    """Tell several readers, each at its own pace, what has changed. Used on one event loop."""

    def __init__(self) -> None:
        self._unread: list[set[Leadership]] = []

    def note(self, leadership: Leadership) -> None:
        """Note that a partition has changed."""
        for unread in self._unread:
            unread.add(leadership)

    def reader(self) -> Callable[[], Collection[Leadership]]:
        """Return what gives, at each call, the partitions that have changed since the call before it."""
        unread: set[Leadership] = set()
        self._unread.append(unread)

        def read() -> Collection[Leadership]:
            changed = tuple(unread)
            unread.clear()
            return changed

        return read
