"""
Find a user's DeleteRecords in the log of one partition.

The policy (`policies.total_retention`) decides from bounds and segments. Where the log begins inside a
segment, this module also looks into the file, because a start inside a batch is certainly a user's. The
headers of that file are read once for each new start of the log.
"""

from __future__ import annotations

import structlog

from tieringd.archiving.observer import Observation
from tieringd.archiving.partition_logger import PartitionLogger
from tieringd.broker.segment_file import is_inside_batch
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import LocalSegment
from tieringd.policies.total_retention import users_start
from tieringd.storage.threads import in_thread

log = structlog.get_logger(__name__)


class UserDeletions(PartitionLogger):
    """Find the deletions of one partition. Owned by its archiver, and used within its step."""

    __slots__ = ("_failed", "_is_inside_batch", "_looked_up", "_partition")

    def __init__(self, partition: TopicIdPartition) -> None:
        self._partition = partition
        self._looked_up: tuple[str, int] | None = None
        """The file and the log start offset that were looked up last."""
        self._is_inside_batch = False
        self._failed: tuple[str, int] | None = None
        """The file and the log start offset of the last look-up that failed."""

    async def start(self, manifest: PartitionManifest, seen: Observation) -> int | None:
        """
        Return the offset before which a user deleted the records; None where none did, or it is uncertain.

        A file that cannot be read gives no evidence.
        """
        log_start_offset = seen.bounds.log_start_offset
        segment = None if seen.log.is_reframed else _holding(seen, log_start_offset)
        is_inside = False
        if segment is not None and log_start_offset > manifest.start_offset:
            is_inside = await self._inside_batch(segment, log_start_offset)
        return users_start(seen.log, manifest, log_start_offset=log_start_offset, is_inside_batch=is_inside)

    async def _inside_batch(self, segment: LocalSegment, offset: int) -> bool:
        if self._looked_up != (segment.path, offset):
            try:
                self._is_inside_batch = await in_thread(is_inside_batch, segment, offset)
            except (CorruptDataError, LocalFileError) as error:
                if self._failed != (segment.path, offset):
                    # Each step tries again, so the same failure is logged once.
                    self._failed = segment.path, offset
                    self._log.warning(
                        "whether a user deleted records cannot be read from the log",
                        log_start_offset=offset,
                        error=str(error),
                    )
                return False
            self._looked_up = segment.path, offset
        return self._is_inside_batch


def _holding(seen: Observation, offset: int) -> LocalSegment | None:
    """Return the local segment that *offset* is inside of, and does not begin; None without one."""
    return next(
        (one for one in seen.log.segments if one.base_offset < offset < (one.next_offset or offset + 1)),
        None,
    )
