"""
The interface of every target for the export of one topic, and the results of its tasks.

A run reads the export's checkpoint, begins a round of portions, has them written, and commits the round. A
portion counts exactly once, despite crashes and concurrent runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tieringd.spark.jobs.export.plan import LostOffsets, Portion

if TYPE_CHECKING:
    # An ordinary import would load pyarrow and xxhash into processes that do not need them.
    from tieringd.spark.jobs.export.row_files import Sink
    from tieringd.spark.jobs.export.state import ExportState


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a task has stored in the target."""

    location: str
    records: int
    size_bytes: int
    entry: Any = None
    """The target's own description of the file, for the commit."""


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The result of a task: the files of its portion."""

    portion: Portion
    files: tuple[StoredFile, ...]
    clipped_times: int = 0
    """Timestamps that were clipped to the years 1 to 9999."""
    lost: tuple[LostOffsets, ...] = ()
    """Offsets of the portion that the archive does not have."""

    @property
    def records(self) -> int:
        """Return the number of records in the files."""
        return sum(file.records for file in self.files)

    @property
    def size_bytes(self) -> int:
        """Return the total size of the files."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class ExportCheckpoint:
    """The stored progress of an export, to continue from."""

    state: ExportState | None
    """None if nothing was ever exported."""
    pending: tuple[Portion, ...] = ()
    """Portions that an earlier run began and did not commit. They have to be written first."""
    version: Any = None
    """The target's own version of this state, for the next change."""


class SinkOpener(Protocol):
    """Opens a task's sink, on an executor."""

    def __call__(self, portion: Portion, /) -> Sink[Any, StoredFile]:
        """Return the sink for the records of *portion*."""


class TopicTarget(Protocol):
    """The place that one topic is exported to."""

    @property
    def hides_uncommitted(self) -> bool:
        """Return whether a round is invisible before its commit, so that it may be dropped and repeated."""

    @property
    def place(self) -> str:
        """Return the place as text for people."""

    def checkpoint(self) -> ExportCheckpoint:
        """Return the current checkpoint of the export."""

    def begin(
        self, checkpoint: ExportCheckpoint, state: ExportState, portions: tuple[Portion, ...]
    ) -> ExportCheckpoint | None:
        """
        Note that *portions*, which continue *state*, will be written; return the new checkpoint.

        No file of *portions* is written before this. The result is None if another run changed it.
        """

    def opener(self) -> SinkOpener:
        """Return the function that opens the sinks of the tasks. It is sent to executors."""

    def commit(self, begun: ExportCheckpoint, state: ExportState, written: Sequence[WrittenFiles]) -> bool:
        """
        Commit *written* and *state*; return False if another run was faster.

        Raises:
            RetryableError: The commit may or may not have taken effect; the next run finds out.
        """
