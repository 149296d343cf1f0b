"""As much of Spark as a job needs that spreads tasks: it does them in this process, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True)
class Broadcast:
    """What every task may see."""

    value: Any


@dataclass
class Tasks:
    """Items, and what is made of them when they are collected; *then* is called at the end of that."""

    items: Iterable[Any]
    then: Callable[[], None]

    def map(self, work: Callable[[Any], Any]) -> Tasks:
        """Make one of each."""
        return Tasks(map(work, self.items), self.then)

    def flatMap(self, work: Callable[[Any], Iterable[Any]]) -> Tasks:  # noqa: N802 - Spark's names
        """Make some of each."""
        return Tasks(chain.from_iterable(map(work, self.items)), self.then)

    def collect(self) -> list[Any]:
        """Do it."""
        found = list(self.items)
        self.then()
        return found


@dataclass
class LocalSpark:
    """A session, and its context. *then* is called at the end of each job."""

    then: Callable[[], None] = lambda: None
    defaultParallelism: int = 2  # noqa: N815
    properties: dict[str, Any] = field(default_factory=dict)

    @property
    def sparkContext(self) -> LocalSpark:  # noqa: N802
        """Return the context."""
        return self

    def parallelize(self, items: Iterable[Any], _count: int) -> Tasks:
        """Return tasks for some items."""
        return Tasks(items, self.then)

    def broadcast(self, value: Any) -> Broadcast:
        """Return what carries a value to tasks."""
        return Broadcast(value)

    def statusTracker(self) -> LocalSpark:  # noqa: N802
        """Return what tells of jobs."""
        return self

    def getJobIdsForGroup(self, _group: str) -> list[int]:  # noqa: N802
        """Return none: they are over as soon as they have begun."""
        return []

    def getLocalProperty(self, name: str) -> Any:  # noqa: N802
        """Return a property of this thread's."""
        return self.properties.get(name)

    def setLocalProperty(self, name: str, value: Any) -> None:  # noqa: N802
        """Set a property of this thread's."""
        self.properties[name] = value

    def setJobGroup(self, group: str, _what: str, *, interruptOnCancel: bool) -> None:  # noqa: N802, N803
        """Begin a group of jobs."""
        self.properties["spark.jobGroup.id"] = (group, interruptOnCancel)

    def cancelJobGroup(self, _group: str) -> None:  # noqa: N802
        """Do nothing: no job is under way."""
