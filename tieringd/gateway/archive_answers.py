"""
The interface between the gateway and the archive: what the gateway asks, and what the archive may answer.

The gateway asks only about partitions for which the broker has just given a response that the client may
see. So no authorization is decided here. For offsets that the archive does not have it returns nothing,
and the broker's own response goes to the client, byte for byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol
from uuid import UUID

from kio.schema.errors import ErrorCode

from tieringd.archive.record_reader import RecordReader
from tieringd.errors import TieringError
from tieringd.formats.kafka_wire.fetch import AskedPartition, PartitionData
from tieringd.model.manifest import PartitionManifest
from tieringd.policies.epoch_history import epoch_at
from tieringd.reading.partition_reader import release_nothing

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
LATEST_TIERED: Final = -5
EARLIEST_PENDING_UPLOAD: Final = -6
"""Special timestamps of ListOffsets. Only the broker answers -4, the earliest local offset."""

TRY_AGAIN: Final = ErrorCode.kafka_storage_error
"""The error that a client gets when the archive cannot answer now. Clients retry after it."""

LONGEST_WAIT_SECONDS: Final = 5.0
"""
How long a Fetch waits for the archive at most, whatever maximum wait the client names.

Other requests of the connection wait behind it.
"""
NOT_READ_YET: Final = PartitionData(-1, -1, -1)
"""The answer for a partition that is not read in time: no records, and unknown bounds."""

PartitionKey = tuple[str | UUID, int]
"""A topic's name, or its id in newer versions of Fetch, and a partition number."""


@dataclass(frozen=True, slots=True)
class FetchQuestion:
    """Partitions whose fetch offset the broker found out of range."""

    partitions: Mapping[PartitionKey, AskedPartition]
    """The partitions to read, in the order of the broker's response."""
    max_bytes: int
    """How many bytes the client's limit leaves for all of them together, besides the broker's records."""
    needs_a_batch: bool
    """True when the broker sends no records: then the first batch is sent whatever its size."""
    read_committed: bool
    wait_seconds: float = LONGEST_WAIT_SECONDS
    """How long the client waits. Partitions that are not read by then have an answer without records."""
    due: asyncio.Future[None] | None = None
    """A future that ends the client's wait when it is done, whatever *wait_seconds* is."""


@dataclass(frozen=True, slots=True)
class NextFetch:
    """The offset of a client's next Fetch of a partition, if the archive serves it again."""

    next_offset: int
    """The next offset to fetch."""
    last_offset: int
    """The last archived offset before the broker's own log. It is at least *next_offset*."""


@dataclass(frozen=True, slots=True)
class ArchivedFetch:
    """Answers for some of the partitions. *release* is called once, after sending or on failure."""

    partitions: Mapping[PartitionKey, PartitionData] = field(default_factory=dict)
    release: Callable[[], None] = release_nothing
    next_fetches: Mapping[PartitionKey, NextFetch] = field(default_factory=dict)
    """Only partitions that the archive is expected to serve again."""
    has_unread: bool = False
    """Whether a partition was not read in time."""
    waited_for: tuple[str, ...] = ()
    """The chunks that were awaited from the object store."""
    on_sent: Callable[[], None] = release_nothing
    """A function to call when the answers go to a client. Prepared ones may go to none."""


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """An offset that the archive found for a timestamp, or for one of Kafka's special timestamps."""

    offset: int
    timestamp_ms: int = -1
    leader_epoch: int = -1


def listed_in(manifest: PartitionManifest, offset: int, timestamp_ms: int = -1) -> ListedOffset:
    """Return an offset of an archive with its leader epoch; -1 where the archive knows none."""
    epoch = epoch_at(manifest.epochs, offset)
    return ListedOffset(offset, timestamp_ms, -1 if epoch is None else epoch)


async def listed_at(
    records: RecordReader, archives: Sequence[PartitionManifest], timestamp: int
) -> ListedOffset | None:
    """
    Return the first record of *archives*, oldest first, with *timestamp* or a later one; None without one.

    *timestamp* is in milliseconds, or `MAX_TIMESTAMP`, which stands for the latest one in *archives*.

    Raises:
        ObjectNotFound: An object was deleted. Read the manifests again.
        StorageUnavailable: The store does not answer.
        CorruptDataError: Stored bytes are damaged.
    """
    if timestamp == MAX_TIMESTAMP:
        latest: ListedOffset | None = None
        for archive in archives:
            record = await records.latest_record(archive)
            if record is not None and (latest is None or record.timestamp_ms > latest.timestamp_ms):
                latest = listed_in(archive, record.offset, record.timestamp_ms)
        return latest
    for archive in archives if timestamp >= 0 else ():
        record = await records.first_record_at(archive, timestamp)
        if record is not None:
            return listed_in(archive, record.offset, record.timestamp_ms)
    return None


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The end of the largest leader epoch that is not above the requested one."""

    leader_epoch: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class RemoteLogDir:
    """The archive's content, presented as a log directory."""

    name: str
    """`remote://` and the bucket's name."""
    partition_bytes: Mapping[tuple[str, int], int]


class ArchiveAnswers(Protocol):
    """
    What the archive knows and the broker does not.

    A `TieringError`, raised by a method or returned for one partition, means that the archive cannot
    answer now. The client then gets a retriable error. It never gets the broker's answer, which would
    make it skip archived records.
    """

    def may_produce(self) -> bool:
        """Say whether clients may write now. Called for every Produce request."""

    def may_have(self, topic: str | UUID, partition: int) -> bool:
        """Say, without waiting, whether there can be an answer for this partition at all."""

    def log_start(self, topic: str | UUID, partition: int, broker_offset: int) -> int:
        """
        Return, without waiting, where the whole log of a partition begins.

        *broker_offset* is where the broker's own log begins. -1 is returned while the start of the
        archive is unknown: a client takes that for unknown, and asks with ListOffsets, which waits.
        """

    def deleted_before(self, topic: str | UUID, partition: int) -> int:
        """Return, without waiting, before which offset clients deleted the records; 0 if none is known."""

    async def fetch(self, question: FetchQuestion) -> ArchivedFetch:
        """
        Return records, or errors, for those partitions whose fetch offset is archived.

        Reads that take longer than the question's wait go on, for the client's next Fetch.
        """

    async def list_offsets(
        self, asked: Mapping[PartitionKey, int], *, read_committed: bool
    ) -> Mapping[PartitionKey, ListedOffset | TieringError]:
        """
        Return offsets for timestamps; nothing for a partition without a record of that time or later.

        A partition that cannot be read now has an error, and the others have their offsets.
        """

    async def offset_for_leader_epoch(
        self, asked: Mapping[PartitionKey, int]
    ) -> Mapping[PartitionKey, EpochEnd | TieringError]:
        """Return the ends of leader epochs, or errors; nothing where the archive does not know that end."""

    async def leader_epochs(
        self, asked: Collection[PartitionKey]
    ) -> Mapping[PartitionKey, int | TieringError]:
        """
        Return for each partition a leader epoch that has begun, or an error; nothing without an archive.

        A request that the broker carries out after this returns is carried out in that epoch or a later one.
        """

    async def delete_records(
        self, before: Mapping[PartitionKey, int], leader_epochs: Mapping[PartitionKey, int | TieringError]
    ) -> Mapping[PartitionKey, int | TieringError]:
        """
        Delete archived records before these offsets, because the broker has deleted them for a user.

        *leader_epochs* are those that `leader_epochs` returned before the broker got the request. Records of
        later epochs stay.

        Where an error is returned, the deletion may not be recorded: the client has to try again.

        Returns where each archive begins from now on, or errors; nothing for a partition without an archive.
        """

    async def describe_log_dirs(self) -> Sequence[RemoteLogDir]:
        """Return the archive's content. The gateway leaves out partitions that the client did not ask for."""


class NoArchive:
    """An archive without any data: every answer is the broker's."""

    def may_produce(self) -> bool:
        """Return True: clients may write."""
        return True

    def may_have(self, topic: str | UUID, partition: int) -> bool:  # noqa: ARG002  (the seam has them)
        """Return False: no partition has an archive."""
        return False

    def log_start(self, topic: str | UUID, partition: int, broker_offset: int) -> int:  # noqa: ARG002
        """Return the broker's log start."""
        return broker_offset

    def deleted_before(self, topic: str | UUID, partition: int) -> int:  # noqa: ARG002
        """Return 0: there are no records to delete."""
        return 0

    async def fetch(self, question: FetchQuestion) -> ArchivedFetch:  # noqa: ARG002
        """Return no records."""
        return ArchivedFetch()

    async def list_offsets(
        self,
        asked: Mapping[PartitionKey, int],  # noqa: ARG002
        *,
        read_committed: bool,  # noqa: ARG002
    ) -> Mapping[PartitionKey, ListedOffset | TieringError]:
        """Return no offsets."""
        return {}

    async def offset_for_leader_epoch(
        self,
        asked: Mapping[PartitionKey, int],  # noqa: ARG002
    ) -> Mapping[PartitionKey, EpochEnd | TieringError]:
        """Return no epochs."""
        return {}

    async def leader_epochs(
        self,
        asked: Collection[PartitionKey],  # noqa: ARG002
    ) -> Mapping[PartitionKey, int | TieringError]:
        """Return no epochs."""
        return {}

    async def delete_records(
        self,
        before: Mapping[PartitionKey, int],  # noqa: ARG002
        leader_epochs: Mapping[PartitionKey, int | TieringError],  # noqa: ARG002
    ) -> Mapping[PartitionKey, int | TieringError]:
        """Return nothing: there are no records to hide."""
        return {}

    async def describe_log_dirs(self) -> Sequence[RemoteLogDir]:
        """Return no directory."""
        return ()
