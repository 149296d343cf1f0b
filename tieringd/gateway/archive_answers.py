"""
The seam between the gateway and the archive: what is asked of it, and how it may answer.

The gateway asks only about partitions for which the broker has just given an answer that the
client may see, so none of this decides who may read what. The archive says nothing about what it
does not have; then the broker's own answer goes to the client, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

from kio.schema.errors import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tieringd.errors import TieringError
    from tieringd.formats.kafka_wire.fetch import AskedPartition, Replacement

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
LATEST_TIERED: Final = -5
EARLIEST_PENDING_UPLOAD: Final = -6
"""Special timestamps of ListOffsets; -4, the earliest local offset, is the broker's alone."""

TRY_AGAIN: Final = ErrorCode.kafka_storage_error
"""What a client is told when the archive cannot say now."""

PartitionKey = tuple[str | UUID, int]
"""A topic's name, or its id in newer versions of Fetch, and the number of a partition."""


def _nothing() -> None:
    """Release what needs no release."""


@dataclass(frozen=True, slots=True)
class FetchQuestion:
    """Partitions whose fetch offset the broker found out of range."""

    partitions: Mapping[PartitionKey, AskedPartition]
    """In the order of the broker's answer."""
    max_bytes: int
    """What the client's limit leaves for all of them together, beside what the broker sends."""
    needs_a_batch: bool
    """True when the broker sends no records: the first batch then comes whatever its size."""
    read_committed: bool


@dataclass(frozen=True, slots=True)
class Onward:
    """How reading goes on after an answer."""

    next_offset: int
    """Where it does."""
    last_offset: int
    """The last one that is archived and that the broker's own log begins after; not before the next one."""


@dataclass(frozen=True, slots=True)
class ArchivedFetch:
    """Answers for some of the partitions; *release* is called once, when they were sent or given up."""

    partitions: Mapping[PartitionKey, Replacement] = field(default_factory=dict)
    release: Callable[[], None] = _nothing
    onward: Mapping[PartitionKey, Onward] = field(default_factory=dict)
    """Of those partitions that will be read from the archive again, as far as is known."""


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """An offset that the archive found for a timestamp or for one of Kafka's special ones."""

    offset: int
    timestamp_ms: int = -1
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """Where the largest leader epoch that is not above the asked one ends."""

    leader_epoch: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class RemoteLogDir:
    """What the archive holds, as a log directory."""

    name: str
    """`remote://` and the bucket."""
    partition_bytes: Mapping[tuple[str, int], int]


class ArchiveAnswers(Protocol):
    """
    What the archive knows that the broker does not.

    A `TieringError`, of a method or for one partition, means that the archive cannot say now: the client gets
    an error on which it tries again, never the broker's answer, which would make it skip archived records.
    """

    def may_produce(self) -> bool:
        """Say whether clients may write now; asked for every Produce request."""

    def may_have(self, topic: str | UUID, partition: int) -> bool:
        """Say, without waiting, whether there can be an answer for this partition at all."""

    def log_start(self, topic: str | UUID, partition: int, broker_offset: int) -> int:
        """
        Return, without waiting, where the whole log of a partition begins.

        *broker_offset* is where the broker's own log begins. -1 is returned while the archive is not known
        yet: a client takes that for unknown, and asks with ListOffsets, which waits.
        """

    async def fetch(self, question: FetchQuestion) -> ArchivedFetch:
        """Return records, or errors, for those partitions whose fetch offset is archived."""

    async def list_offsets(
        self, asked: Mapping[PartitionKey, int], *, read_committed: bool
    ) -> Mapping[PartitionKey, ListedOffset | TieringError]:
        """
        Return offsets for timestamps; nothing where the archive holds no record of that time or later.

        A partition of which the archive cannot say now has an error, and the others have their offsets.
        """

    async def offset_for_leader_epoch(
        self, asked: Mapping[PartitionKey, int]
    ) -> Mapping[PartitionKey, EpochEnd | TieringError]:
        """Return the ends of leader epochs, or errors; nothing where the archive does not know that end."""

    async def delete_records(
        self, before: Mapping[PartitionKey, int]
    ) -> Mapping[PartitionKey, int | TieringError]:
        """
        Serve nothing before these offsets any more: a user has deleted those records.

        Returns where each archive begins from now on, or errors; nothing where a partition has no archive.
        """

    async def describe_log_dirs(self) -> Sequence[RemoteLogDir]:
        """Return what the archive holds; the gateway leaves out what the client did not ask for."""


class NoArchive:
    """An archive that knows nothing: every answer is the broker's."""

    def may_produce(self) -> bool:
        """Let clients write."""
        return True

    def may_have(self, topic: str | UUID, partition: int) -> bool:  # noqa: ARG002  (the seam has them)
        """Know no partition."""
        return False

    def log_start(self, topic: str | UUID, partition: int, broker_offset: int) -> int:  # noqa: ARG002
        """Return the broker's."""
        return broker_offset

    async def fetch(self, question: FetchQuestion) -> ArchivedFetch:  # noqa: ARG002
        """Have no records."""
        return ArchivedFetch()

    async def list_offsets(
        self,
        asked: Mapping[PartitionKey, int],  # noqa: ARG002
        *,
        read_committed: bool,  # noqa: ARG002
    ) -> Mapping[PartitionKey, ListedOffset | TieringError]:
        """Have no offsets."""
        return {}

    async def offset_for_leader_epoch(
        self,
        asked: Mapping[PartitionKey, int],  # noqa: ARG002
    ) -> Mapping[PartitionKey, EpochEnd | TieringError]:
        """Have no epochs."""
        return {}

    async def delete_records(
        self,
        before: Mapping[PartitionKey, int],  # noqa: ARG002
    ) -> Mapping[PartitionKey, int | TieringError]:
        """Have nothing to hide."""
        return {}

    async def describe_log_dirs(self) -> Sequence[RemoteLogDir]:
        """Hold nothing."""
        return ()
