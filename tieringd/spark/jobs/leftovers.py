"""
List the bucket for data that a search for keys does not reach by manifests.

Objects of the chosen topics are of three kinds. Objects that a manifest names were processed by the job.
Objects that no manifest names are in quarantine, or were left by a crash, a lost election or a merge under
way; executors search them for the keys. Objects of partitions that the job did not process make each of these
partitions a fault. No listing shows the parts of an unfinished upload: each such upload is a fault as well.
Nothing is changed here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from tieringd.archive.archive_reader import checked_batches
from tieringd.archive.scrub.orphan_search import NamedObjects, OwnerLookup
from tieringd.archive.scrub.survey import PREFIXES
from tieringd.errors import CorruptDataError, ObjectNotFound, StorageError
from tieringd.formats.object_keys import (
    QUARANTINED_PREFIX,
    DataKey,
    parse_data_key,
    parse_joined_part_key,
    parse_quarantined_key,
)
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.scrub import Owner, TopicState, is_named
from tieringd.spark.bucket import Bucket, bucket_of
from tieringd.spark.jobs.chosen import TASK_BYTES
from tieringd.spark.jobs.job_progress import Progress
from tieringd.spark.jobs.tasks import run_tasks
from tieringd.spark.jobs.topic_choice import matches
from tieringd.spark.key_eraser import holds_any
from tieringd.storage.at_once import at_once
from tieringd.storage.listing import list_objects
from tieringd.storage.threads import in_thread

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import SparkSession

    # An ordinary import would load pydantic into processes that do not need it.
    from tieringd.config import Config

PARTITIONS_AT_ONCE = 16
SUSPECTS_TOLD_MAX = 20
"""Suspects that a report names; a crash may leave thousands. The record of an erasure names all of them."""
HAS_A_KEY = "the object has a record with one of the keys"


@dataclass(frozen=True, slots=True)
class StoredData:
    """A data object or a part of one, from a listing of the bucket."""

    key: str
    size_bytes: int
    partition: TopicIdPartition


@dataclass(slots=True)
class Leftovers:
    """The data of the chosen topics that a listing of the bucket found outside of manifests."""

    unnamed: list[StoredData] = field(default_factory=list)
    """Objects of processed partitions that no manifest names."""
    quarantined: list[StoredData] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Messages on partitions that were not processed, or only in part, and on unfinished uploads."""
    replaced_from: dict[TopicIdPartition, int] = field(default_factory=dict)
    """The offset, by partition, from which another leader's records have replaced the processed ones."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """An object outside of manifests that has one of the keys, or that cannot be read."""

    stored: StoredData
    reason: str

    def __str__(self) -> str:
        return f"{self.stored.partition}: no manifest names {self.stored.key}, and {self.reason}"


def suspect_faults(suspects: Sequence[Suspect]) -> list[str]:
    """Return a fault for each suspect, up to SUSPECTS_TOLD_MAX, and one with advice; empty without any."""
    if not suspects:
        return []
    faults = [str(one) for one in suspects[:SUSPECTS_TOLD_MAX]]
    more = len(suspects) - len(faults)
    if more:
        faults.append(f"{more} more objects that no manifest names have one of the keys, or cannot be read")
    advice = (
        "To erase these objects, let `tieringd archive scrub --fix` move orphans into quarantine, purge "
        "the quarantine (`tieringd archive quarantine purge`), and run the job again"
    )
    return [*faults, advice]


async def find_leftovers(
    bucket: Bucket,
    topics: Sequence[str],
    gone_over: Mapping[TopicIdPartition, PartitionManifest],
    *,
    told: Collection[TopicIdPartition] = (),
) -> Leftovers:
    """
    List the bucket, and return the data of *topics* that the job did not process.

    Args:
        bucket: An open bucket.
        topics: The job's names or patterns.
        gone_over: The partitions that the job processed, with their manifests of that time.
        told: Unprocessed partitions that have a fault already.

    Raises:
        StorageUnavailable: The store does not answer.
    """
    owners = OwnerLookup(bucket.store, bucket.manifests)
    found = Leftovers()
    # Before the objects: an upload that ends meanwhile is an object by the time of their listing.
    uploads = await _unfinished_uploads(bucket, topics, gone_over)
    named = NamedObjects()
    for owner in await at_once(list(gone_over), owners.owner, count=PARTITIONS_AT_ONCE):
        await in_thread(named.add, owner)
        _note_replaced(found, owner, gone_over[owner.partition])
    await in_thread(named.seal)
    suspects: defaultdict[TopicIdPartition, list[StoredData]] = defaultdict(list)
    strangers: defaultdict[TopicIdPartition, int] = defaultdict(int)

    async def list_prefix(prefix: str) -> None:
        async for one in _listed(bucket, prefix, topics):
            if one.partition not in gone_over:
                strangers[one.partition] += 1
            elif one.key not in named:
                suspects[one.partition].append(one)

    await at_once(PREFIXES, list_prefix, count=len(PREFIXES))
    # Manifests are read again: one that was committed since may name some of these objects.
    for owner in await at_once(list(suspects), owners.owner, count=PARTITIONS_AT_ONCE):
        found.unnamed += [one for one in suspects[owner.partition] if not is_named(owner, one.key)]
    for owner in await at_once(list(strangers), owners.owner, count=PARTITIONS_AT_ONCE):
        if owner.partition not in told:
            found.faults.append(_not_gone_over(owner, strangers[owner.partition]))
    found.quarantined += [one async for one in _listed(bucket, QUARANTINED_PREFIX, topics)]
    found.faults += uploads
    return found


def search(
    spark: SparkSession,
    config: Config,
    objects: Sequence[StoredData],
    keys: Broadcast[frozenset[bytes]],
    *,
    progress: Progress,
) -> list[Suspect]:
    """
    Read *objects* on executors, and return those that have one of *keys*, or that cannot be read.

    Raises:
        TaskFailed: An executor failed.
    """
    what, tasks = "searching what no manifest names", list(_shares(objects))
    found = run_tasks(spark, what, tasks, _Searcher(config, keys), progress=progress)
    return list(chain.from_iterable(found))


@dataclass(frozen=True, slots=True)
class _Searcher:
    """Searches objects for keys. Runs on an executor."""

    config: Config
    keys: Broadcast[frozenset[bytes]]

    def __call__(self, objects: Sequence[StoredData]) -> list[Suspect]:
        """Return the objects that have a key or cannot be read. Objects that are gone are left out."""
        bucket = bucket_of(self.config)
        found: list[Suspect] = []
        for one in objects:
            try:
                if self._has_any(bucket, one):
                    found.append(Suspect(one, HAS_A_KEY))
            except ObjectNotFound:
                continue
            except CorruptDataError as error:
                found.append(
                    Suspect(one, f"the object cannot be read, and may have one of the keys: {error}")
                )
        return found

    def _has_any(self, bucket: Bucket, one: StoredData) -> bool:
        with closing(bucket.runs(one.key, position=0, end=one.size_bytes)) as runs:
            return any(
                holds_any(batch, self.keys.value)
                for run, position in runs
                for batch in checked_batches(run, position, one.key)
            )


async def _listed(bucket: Bucket, prefix: str, topics: Sequence[str]) -> AsyncIterator[StoredData]:
    """Yield the objects under *prefix* that may hold records of *topics*."""
    async for info in list_objects(bucket.store, prefix):
        data = _data_of(info.key, topics)
        if data is not None:
            yield StoredData(info.key, info.size_bytes, data.partition)


def _data_of(key: str, topics: Sequence[str]) -> DataKey | None:
    """Return what *key* says of data of *topics*, in its place or in quarantine; None for any other key."""
    place = parse_quarantined_key(key) or key
    data = parse_data_key(place) or parse_joined_part_key(place)
    return data if data is not None and matches(data.partition.topic, topics) else None


async def _unfinished_uploads(
    bucket: Bucket, topics: Sequence[str], gone_over: Mapping[TopicIdPartition, PartitionManifest]
) -> list[str]:
    """Return a fault for each unfinished upload whose parts may have one of the keys, and one with advice."""
    try:
        keys = await bucket.store.unfinished_uploads()
    except StorageError as error:
        return [f"it is not known whether unfinished uploads have one of the keys: {error}"]
    found: list[str] = []
    for key in keys:
        data = _data_of(key, topics)
        if data is None:
            continue
        processed = gone_over.get(data.partition)
        is_of_later = processed is not None and data.base_offset >= processed.next_offset
        # A daemon is archiving these records. They came after what the job was to search.
        if is_of_later and parse_quarantined_key(key) is None:
            continue
        found.append(f"{data.partition}: the unfinished upload of {key} may have one of the keys")
    if not found:
        return []
    more = len(found) - SUSPECTS_TOLD_MAX
    rest = [f"{more} more unfinished uploads may have one of the keys"] if more > 0 else []
    advice = (
        "These uploads are under way, or the processes that began them were killed. A daemon aborts uploads "
        "that are a day old; without one, abort them in the store (`aws s3api abort-multipart-upload`). Then "
        "run the job again"
    )
    return [*found[:SUSPECTS_TOLD_MAX], *rest, advice]


def _note_replaced(found: Leftovers, owner: Owner, before: PartitionManifest) -> None:
    """
    Note a fault if another leader's records replaced processed ones since *before*.

    That happens at an unclean election. The manifests alone decide, and no clock.
    """
    after = () if owner.manifest is None else owner.manifest.replacements
    bases = [one.base_offset for one in after if one not in before.replacements]
    if bases and min(bases) < before.next_offset:
        found.replaced_from[owner.partition] = min(bases)
        found.faults.append(
            f"{owner.partition}: records of another leader replaced those from offset {min(bases)} on while "
            "the job ran, and were not searched. Run the job again"
        )


def _not_gone_over(owner: Owner, objects: int) -> str:
    return (
        f"{owner.partition} (topic id {owner.partition.topic_id}): its {objects} objects were not searched, "
        f"and may have one of the keys: {_why(owner)}"
    )


def _why(owner: Owner) -> str:
    if owner.uncertain:
        return owner.uncertain
    if owner.topic is TopicState.LEAVING:
        return "its topic is being purged. Run the job again when the purge has finished"
    if owner.manifest is None:
        return "its manifest is missing. Follow the advice of `tieringd archive scrub`, and run the job again"
    if owner.manifest.is_closed:
        return (
            "its archive is closed, because it was moved. Purge the archive here, and run the job on the "
            "bucket that it was moved to"
        )
    if owner.topic is TopicState.UNKNOWN:
        return (
            "no topic manifest names it. Follow the advice of `tieringd archive scrub`, and run the job again"
        )
    return "it was created while the job ran. Run the job again"


def _shares(objects: Iterable[StoredData]) -> Iterator[tuple[StoredData, ...]]:
    """Yield *objects* in shares. Each share but the last has at least `TASK_BYTES`."""
    share: list[StoredData] = []
    size_bytes = 0
    for one in objects:
        share.append(one)
        size_bytes += one.size_bytes
        if size_bytes >= TASK_BYTES:
            yield tuple(share)
            share, size_bytes = [], 0
    if share:
        yield tuple(share)
