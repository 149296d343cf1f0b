"""
What every target does for the export of one topic, and what its tasks bring back.

A run asks where the export stands, begins a round of portions, has them written, and commits the round.
Whatever happens in between, and whoever else runs: a portion counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tieringd.spark.jobs.export.plan import Lost, Portion

if TYPE_CHECKING:
    # An ordinary import would load pyarrow and xxhash into processes that do not need them.
    from tieringd.spark.jobs.export.row_files import Sink
    from tieringd.spark.jobs.export.state import ExportState


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a task has put into the target."""

    location: str
    records: int
    size_bytes: int
    entry: Any = None
    """What the target needs to know of it for the commit."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a task has written of its portion."""

    portion: Portion
    files: tuple[StoredFile, ...]
    clipped_times: int = 0
    """Timestamps that no calendar names, stored as the nearest one that it does."""
    lost: tuple[Lost, ...] = ()
    """What the archive has let go since the portion was planned."""

    @property
    def records(self) -> int:
        """Return how many records it holds."""
        return sum(file.records for file in self.files)

    @property
    def size_bytes(self) -> int:
        """Return the size of its files."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where an export stands."""

    state: ExportState | None
    """None where nothing was ever exported."""
    pending: tuple[Portion, ...] = ()
    """What a run that did not end has begun, and what has to be done first."""
    version: Any = None
    """What the target knows this state by."""


class SinkOpener(Protocol):
    """Opens a task's sink, on an executor."""

    def __call__(self, portion: Portion, /) -> Sink[Any, StoredFile]:
        """Return where the records of *portion* go."""


class TopicTarget(Protocol):
    """The place that one topic is exported to."""

    @property
    def hides_uncommitted(self) -> bool:
        """Say whether nothing is seen of a round before its commit: it may be dropped and done anew."""

    @property
    def place(self) -> str:
        """Return where it is, for people."""

    def standing(self) -> Standing:
        """Return where the export stands now."""

    def begin(self, standing: Standing, state: ExportState, portions: tuple[Portion, ...]) -> Standing | None:
        """
        Note that *portions* are about to be written, which go on from *state*; None where that changed.

        Nothing of them is written before.
        """

    def opener(self) -> SinkOpener:
        """Return what opens the sinks of the tasks; it is sent to executors."""

    def commit(self, begun: Standing, state: ExportState, written: Sequence[Written]) -> bool:
        """
        Make *written* count, and *state* the state; False where another run was faster.

        Raises:
            RetryableError: Whether it took effect is not known; the next run finds out.
        """
