"""The parts of Spark that a job with tasks needs. Tasks run in this process, one after another."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True)
class Broadcast:
    """A value for all tasks."""

    value: Any


@dataclass
class Tasks:
    """Items with a lazy transformation. `collect` runs it, and calls *then* at the end."""

    items: Iterable[Any]
    then: Callable[[], None]

    def map(self, work: Callable[[Any], Any]) -> Tasks:
        """Transform each item into one result."""
        return Tasks(map(work, self.items), self.then)

    def flatMap(self, work: Callable[[Any], Iterable[Any]]) -> Tasks:  # noqa: N802 - Spark's names
        """Transform each item into any number of results."""
        return Tasks(chain.from_iterable(map(work, self.items)), self.then)

    def collect(self) -> list[Any]:
        """Run the transformation, and return its results."""
        found = list(self.items)
        self.then()
        return found


@dataclass
class LocalSpark:
    """A session and its context in one. *then* is called at the end of each job."""

    then: Callable[[], None] = lambda: None
    defaultParallelism: int = 2  # noqa: N815
    properties: dict[str, Any] = field(default_factory=dict)

    @property
    def sparkContext(self) -> LocalSpark:  # noqa: N802
        """Return the context."""
        return self

    def parallelize(self, items: Iterable[Any], _count: int) -> Tasks:
        """Return a task for each item."""
        return Tasks(items, self.then)

    def broadcast(self, value: Any) -> Broadcast:
        """Return a value for all tasks."""
        return Broadcast(value)

    def statusTracker(self) -> LocalSpark:  # noqa: N802
        """Return the status tracker, which is this object."""
        return self

    def getJobIdsForGroup(self, _group: str) -> list[int]:  # noqa: N802
        """Return no jobs: a job ends as soon as it begins."""
        return []

    def getLocalProperty(self, name: str) -> Any:  # noqa: N802
        """Return a property of this thread."""
        return self.properties.get(name)

    def setLocalProperty(self, name: str, value: Any) -> None:  # noqa: N802
        """Set a property of this thread."""
        self.properties[name] = value

    def setJobGroup(self, group: str, _what: str, *, interruptOnCancel: bool) -> None:  # noqa: N802, N803
        """Begin a group of jobs."""
        self.properties["spark.jobGroup.id"] = (group, interruptOnCancel)

    def cancelJobGroup(self, _group: str) -> None:  # noqa: N802
        """Do nothing: no job is under way."""
