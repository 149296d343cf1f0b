"""
Whether a record names each segment that a job rewrote.

A manifest says what took the place of what. Where it is lost, only the records of rewritings say it: without
them a rebuild takes the objects that were there before, with what the job had removed.

A record is stored before a manifest names its segments, and is not deleted while a manifest names one of
them. So a segment that is in a manifest has its record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tieringd.archive.segment_swap import load_rewriting
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import data_key, parse_rewriting_key, rewriting_prefix
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment, SegmentIdentity
from tieringd.policies.scrub import FaultKind, Finding
from tieringd.storage.at_once import at_once
from tieringd.storage.base import ObjectInfo, ObjectStore
from tieringd.storage.listing import list_objects

_RECORDS_AT_ONCE: Final = 8
_NOT_NAMED: Final = "no record names this rewritten segment, so a rebuild would bring back what was removed"


async def unrecorded_findings(
    store: ObjectStore, partition: TopicIdPartition, segments: Iterable[RemoteSegment]
) -> tuple[Sequence[Finding], int]:
    """
    Return a finding for each rewritten one of *segments* that no readable record names, and the requests.

    Raises:
        StorageUnavailable: The store does not answer; the records are unknown.
    """
    rewritten = [one for one in segments if one.is_rewritten]
    if not rewritten:
        return (), 0
    writers = {one.writer_id for one in rewritten}

    async def named_by(info: ObjectInfo) -> tuple[SegmentIdentity, ...]:
        try:
            return (await load_rewriting(store, partition, info.key, size_bytes=info.size_bytes)).stored
        except (CorruptDataError, ObjectNotFound):
            return ()

    listed = [
        info
        async for info in list_objects(store, rewriting_prefix(partition))
        if parse_rewriting_key(partition, info.key) in writers
    ]
    loads = await at_once(listed, named_by, count=_RECORDS_AT_ONCE)
    named = {identity for some in loads for identity in some}
    findings = [
        Finding(FaultKind.REWRITING_MISSING, data_key(partition, one), _NOT_NAMED, partition, one)
        for one in rewritten
        if SegmentIdentity.of(one) not in named
    ]
    return findings, 1 + len(listed)
