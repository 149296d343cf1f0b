"""The records of erasures in a bucket, read for the partitions whose manifests are rebuilt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.job_records import RecordedErasure, RewrittenPartition, decode_erasure
from tieringd.formats.object_keys import ERASURES_PREFIX
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.erasure_evidence import ErasureEvidence
from tieringd.storage.at_once import at_once
from tieringd.storage.base import ObjectStore
from tieringd.storage.listing import list_objects

RECORDS_AT_ONCE: Final = 8
"""A record names all partitions that the erasure went over, and may have a megabyte."""
_BEGUN, _DONE = "-begun.json", "-done.json"


@dataclass(slots=True)
class RecordedErasures:
    """What the records of erasures say of some partitions."""

    evidence: defaultdict[TopicIdPartition, ErasureEvidence] = field(
        default_factory=lambda: defaultdict(ErasureEvidence)
    )
    faults: list[str] = field(default_factory=list)
    """Why records cannot be read, one message for each."""


async def recorded_erasures(
    store: ObjectStore,
    partitions: Iterable[TopicIdPartition],
    *,
    matches: Callable[[str, Sequence[str]], bool],
) -> RecordedErasures:
    """
    Read the records of all erasures that were to go over one of *partitions*.

    Args:
        store: The bucket.
        partitions: The partitions whose manifests are rebuilt.
        matches: Says whether a topic is one of the topics that an erasure was given, names or patterns.

    Raises:
        StorageUnavailable: The store does not answer; the records are unknown.
    """

    async def loaded(key: str) -> RecordedErasure | str:
        try:
            data, _ = await store.get(key)
            return decode_erasure(data, source=key)
        except (CorruptDataError, ObjectNotFound) as error:
            return str(error)

    keys = {info.key async for info in list_objects(store, ERASURES_PREFIX)}
    # The outcome of an erasure says all that its request says.
    wanted = sorted(key for key in keys if key.endswith(_DONE) or _outcome_of(key) not in keys)
    found = RecordedErasures()
    by_topic: defaultdict[str, list[TopicIdPartition]] = defaultdict(list)
    for partition in partitions:
        by_topic[partition.topic].append(partition)
    for some in _batches(wanted):
        for one in await at_once(some, loaded, count=RECORDS_AT_ONCE):
            if isinstance(one, str):
                found.faults.append(one)
                continue
            share_of = _shares(one)
            for topic, named in by_topic.items():
                if matches(topic, one.topics):
                    for partition in named:
                        found.evidence[partition].take(share_of(partition), partition)
    return found


def _shares(erasure: RecordedErasure) -> Callable[[TopicIdPartition], RecordedErasure]:
    """Return a function that returns what *erasure* says of one partition; each may have thousands."""
    gone_over = {one.partition: (one,) for one in erasure.gone_over or ()}
    rewritten: defaultdict[TopicIdPartition, list[RewrittenPartition]] = defaultdict(list)
    for one in erasure.rewritten:
        rewritten[one.partition].append(one)

    def share_of(partition: TopicIdPartition) -> RecordedErasure:
        return replace(
            erasure,
            rewritten=tuple(rewritten.get(partition, ())),
            gone_over=None if erasure.gone_over is None else gone_over.get(partition, ()),
        )

    return share_of


def _outcome_of(key: str) -> str:
    return key.removesuffix(_BEGUN) + _DONE


def _batches(keys: Sequence[str]) -> Iterable[Sequence[str]]:
    """Yield *keys* in their order, some at a time, so that not all records are held at once."""
    return (keys[row : row + RECORDS_AT_ONCE] for row in range(0, len(keys), RECORDS_AT_ONCE))
