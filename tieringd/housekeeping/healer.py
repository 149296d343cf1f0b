"""
Mending what a scrub found broken, where the right bytes are still somewhere.

They are looked for in the bucket's quarantine, in this broker's own log, and for an index in the data that
it belongs to. Only bytes of the very size and CRC32C that the manifest names are stored, under the very
name that it has: whoever else does the same stores the same, so this races with nothing. Should the
segment leave the manifest meanwhile, an object is left that nobody names.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import structlog
from crc32c import crc32c

from tieringd.archive.object_joiner import ObjectJoiner
from tieringd.archive.scrub.data_index import is_index_of, renamed_by
from tieringd.errors import ChecksumRejected, CorruptDataError, LocalFileError, ObjectNotFound
from tieringd.formats.object_keys import data_key, index_key
from tieringd.housekeeping.index_rebuild import IndexChange, IndexRebuilder
from tieringd.housekeeping.local_bytes import local_bytes
from tieringd.model.segment import NO_CRC
from tieringd.policies.scrub import DATA_FAULTS, INDEX_FAULTS
from tieringd.storage.base import JoinSource
from tieringd.storage.blocking import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tieringd.archive.archive_reader import ArchiveReader
    from tieringd.archive.manifest_store import ManifestStore
    from tieringd.archiving.claim import ManifestChange
    from tieringd.broker.layout import Layout
    from tieringd.housekeeping.object_quarantine import ObjectQuarantine
    from tieringd.model.local_log import LocalLog
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.segment import RemoteSegment
    from tieringd.policies.scrub import Finding
    from tieringd.storage.base import ObjectStore

log = structlog.get_logger(__name__)

FROM_QUARANTINE = "from its copy in quarantine"
FROM_LOG = "from this broker's log"
FROM_DATA = "from its data object"
UNDER_NEW_NAME = "from its data object, under a new name"


class Healer:
    """
    Mend segments of one bucket.

    *offer* hands a change of a manifest to the archiver that owns it; without one, what needs a change
    of the manifest is not mended.
    """

    def __init__(
        self,
        store: ObjectStore,
        manifests: ManifestStore,
        reader: ArchiveReader,
        quarantine: ObjectQuarantine,
        *,
        layout: Layout,
        local_log: Callable[[TopicIdPartition], LocalLog | None],
        work_directory: Path,
        now_ms: Callable[[], int],
        offer: Callable[[TopicIdPartition, ManifestChange], Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self._manifests = manifests
        self._quarantine = quarantine
        self._rebuilder = IndexRebuilder(store, reader, manifests.spillovers, layout=layout)
        self._joiner = ObjectJoiner(store, work_directory=work_directory)
        self._layout = layout
        self._local_log = local_log
        self._work_directory = work_directory
        self._now_ms = now_ms
        self._offer = offer

    async def heal(self, finding: Finding) -> str:
        """
        Mend what *finding* says is broken; return how, in words, or "" where that was not possible.

        Raises:
            StorageUnavailable: The store does not answer; trying again is safe.
        """
        partition, segment = finding.partition, finding.segment
        how = ""
        if partition is not None and segment is not None:
            if finding.kind in DATA_FAULTS:
                how = await self._heal_data(partition, segment)
            elif finding.kind in INDEX_FAULTS:
                how = await self._heal_index(partition, segment)
        if how:
            log.warning("archived object mended", key=finding.key, fault=finding.detail, how=how)
        return how

    async def _heal_data(self, partition: TopicIdPartition, segment: RemoteSegment) -> str:
        key = data_key(partition, segment)
        if await self._copied_back(key, size_bytes=segment.size_bytes, crc32c=segment.crc32c):
            return FROM_QUARANTINE
        local = self._local_log(partition)
        if local is not None and await self._put_from(local, key, segment):
            return FROM_LOG
        return ""

    async def _copied_back(self, key: str, *, size_bytes: int, crc32c: int) -> bool:
        if crc32c == NO_CRC:
            return False
        try:
            return await self._quarantine.copy_back(key, size_bytes=size_bytes, crc32c=crc32c)
        except (ChecksumRejected, CorruptDataError) as error:
            log.warning("the copy in quarantine is damaged", key=key, error=str(error))
            return False

    async def _put_from(self, local: LocalLog, key: str, segment: RemoteSegment) -> bool:
        """Store the data again from the local log, if that has the same bytes; say so."""
        bytes_of = local_bytes(self._layout, local, segment, work_directory=self._work_directory)
        with_files = ExitStack()
        try:
            found = await in_thread(with_files.enter_context, bytes_of)
            if found is None:
                return False
            await self._store.put(key, found if found.size_bytes else b"", crc32c=segment.crc32c)
        except (LocalFileError, CorruptDataError, ChecksumRejected) as error:
            log.info("the local log does not have an archived segment's bytes", key=key, reason=str(error))
            return False
        finally:
            await in_thread(with_files.close)
        return True

    async def _heal_index(self, partition: TopicIdPartition, segment: RemoteSegment) -> str:
        key = index_key(partition, segment)
        if await self._copied_back(key, size_bytes=segment.index_size_bytes, crc32c=segment.index_crc32c):
            return FROM_QUARANTINE
        local = self._local_log(partition)
        sidecar = await self._rebuilder.from_log(partition, segment, local) if local else None
        if sidecar is not None:
            await self._store.put(key, sidecar, crc32c=crc32c(sidecar))
            return FROM_LOG
        manifest = (await self._manifests.load(partition)).manifest
        sidecar = await self._rebuilder.from_data(manifest, segment) if manifest else None
        if sidecar is None:
            return ""
        if is_index_of(sidecar, segment, partition):
            await self._store.put(key, sidecar, crc32c=crc32c(sidecar))
            return FROM_DATA
        return UNDER_NEW_NAME if await self._renamed(partition, segment, sidecar) else ""

    async def _renamed(self, partition: TopicIdPartition, segment: RemoteSegment, sidecar: bytes) -> bool:
        """Store data and index under the name that this index gives them, and have that committed; say so."""
        if self._offer is None:
            return False
        new = renamed_by(segment, sidecar)
        source = JoinSource(data_key(partition, segment), segment.size_bytes, segment.crc32c)
        try:
            await self._joiner.join(data_key(partition, new), [source], crc32c=segment.crc32c)
        except (ObjectNotFound, ChecksumRejected) as error:
            log.info("an index cannot be made anew: its data is gone", key=source.key, reason=str(error))
            return False
        await self._store.put(index_key(partition, new), sidecar, crc32c=crc32c(sidecar))
        await self._offer(partition, IndexChange(segment, new, self._now_ms))
        manifest = (await self._manifests.load(partition)).manifest
        return manifest is not None and manifest.segments.covering(new.base_offset) == new
