"""
Rebuild lost or damaged manifests from the objects in the bucket.

The driver lists the bucket and decides. Executors read indexes, and the data if an index is missing.
Manifests are written only with `write`, and readable ones are replaced only with `replace`. Nothing is ever
deleted. A second run finds what the first one did.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from tieringd.archive.rebuild.erasure_records import RecordedErasures, recorded_erasures
from tieringd.archive.rebuild.manifest_writer import (
    ManifestState,
    ManifestWriter,
    PartitionState,
    partition_state_of,
)
from tieringd.archive.rebuild.object_listing import (
    ListedPartition,
    RecordedRewritings,
    list_partitions,
    recorded_rewritings,
)
from tieringd.archive.rebuild.stored_segments import Unusable
from tieringd.archive.scrub.orphan_search import OwnerLookup
from tieringd.errors import ObjectNotFound, TieringError
from tieringd.formats.object_keys import TopicKey, data_key, topic_key
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.policies.manifest_rebuild import (
    RebuildPlan,
    StoredSegment,
    kept_from,
    plan_rebuild,
    rebuilt_manifest,
)
from tieringd.spark.bucket import Bucket, bucket_of
from tieringd.spark.jobs.job_progress import Progress, silent
from tieringd.spark.jobs.rebuild_report import RebuiltPartition, RebuiltTopic, rebuild_report
from tieringd.spark.jobs.rebuild_tasks import (
    plan_index_tasks,
    plan_read_tasks,
    read_segments,
    remake_indexes,
)
from tieringd.spark.jobs.report import Report
from tieringd.spark.jobs.tasks import Spread, spread_over
from tieringd.spark.jobs.topic_choice import is_chosen_by, matches, unmatched
from tieringd.storage.at_once import at_once

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    # An ordinary import would load pydantic and PyYAML into processes that do not need them.
    from tieringd.config import Config

PARTITIONS_AT_ONCE: Final = 16
BATCH_OBJECTS: Final = 100_000
"""Data objects that are rebuilt together. The driver holds their descriptions in memory."""
GAP_REASON: Final = "no object of these offsets was in the bucket when the manifest was rebuilt"
UNREAD: Final = (
    "the manifest is not written while a rewriting record of a job cannot be read: erased records might "
    "come back. Restore that object, or move it out of the bucket to continue without it"
)
UNDECIDED: Final = "its index is missing, and the archive does not show how a transaction in it ended"


@dataclass(frozen=True, slots=True)
class RebuildOptions:
    """The options of a rebuild."""

    write: bool = False
    replace: bool = False
    """Replace manifests that can be read."""
    deep: bool = False
    """Read all data, and trust no index."""


def rebuild(
    spark: SparkSession,
    config: Config,
    *,
    topics: Sequence[str] = (),
    write: bool = False,
    replace: bool = False,
    deep: bool = False,
    progress: Progress = silent,
) -> Report:
    """
    Rebuild the manifests of *topics*, names or patterns, from the objects in the bucket; all without topics.

    Without *write* nothing is changed, and the report says what would be written. With *replace*, readable
    manifests are rebuilt too. *deep* reads every data object completely.

    Raises:
        ObjectNotFound: One of *topics* matches nothing.
        StorageUnavailable: The store does not answer. Written manifests stay, and the next run finds them.
        TaskFailed: An executor failed.
    """
    begun = time.monotonic()
    options = RebuildOptions(write, replace, deep)
    whole = Rebuild(config, bucket_of(config), options, spread_over(spark, progress))
    partitions, of_topics = whole.run(topics)
    return rebuild_report(
        partitions,
        of_topics,
        damaged_erasures=whole.erasures.faults,
        is_written=write,
        seconds=time.monotonic() - begun,
    )


class Rebuild:
    """One rebuild of a bucket. *spread* runs the tasks."""

    def __init__(self, config: Config, bucket: Bucket, options: RebuildOptions, spread: Spread) -> None:
        self._config = config
        self._bucket = bucket
        self._options = options
        self._spread = spread
        self._owners = OwnerLookup(bucket.store, bucket.manifests)
        self.erasures = RecordedErasures()
        """What the records of erasures say of the partitions that are rebuilt."""
        self._writer = ManifestWriter(
            bucket.store,
            bucket.manifests,
            now_ms=bucket.clock,
            target_bytes=config.cloud_storage_target_manifest_size_bytes,
        )

    def run(self, topics: Sequence[str]) -> tuple[list[RebuiltPartition], list[RebuiltTopic]]:
        """Rebuild the partitions of *topics*; see `rebuild`."""
        bucket = self._bucket
        listed = bucket.run(list_partitions(bucket.store, is_chosen_by(topics)))
        missing = unmatched(topics, {one.topic for one in listed})
        if missing:
            raise ObjectNotFound(f"the bucket holds no object of a topic that matches {', '.join(missing)}")
        states = bucket.run(at_once(sorted(listed), self._partition_state, count=PARTITIONS_AT_ONCE))
        if self._options.replace:
            # The listing is made again after the manifests were read. A later commit changes a manifest that
            # was read, and a changed manifest is not replaced.
            again = bucket.run(list_partitions(bucket.store, is_chosen_by(topics)))
            listed = {partition: again.get(partition, one) for partition, one in listed.items()}
        done: list[RebuiltPartition] = []
        wanted: list[PartitionState] = []
        for one in states:
            is_wanted = one.state.may_be_written(replace=self._options.replace)
            if is_wanted and listed[one.partition].data:
                wanted.append(one)
            else:
                done.append(RebuiltPartition(one))
        if wanted:
            named = [one.partition for one in wanted]
            self.erasures = bucket.run(recorded_erasures(bucket.store, named, matches=matches))
        for batch in _batches(wanted, listed):
            done += self._rebuild(batch, {one.partition: listed[one.partition] for one in batch})
        leaving = {topic_key(one.partition) for one in states if one.state is ManifestState.LEAVING}
        return done, bucket.run(self._topics(listed, leaving))

    async def _partition_state(self, partition: TopicIdPartition) -> PartitionState:
        return partition_state_of(await self._owners.owner(partition))

    def _rebuild(
        self, batch: Sequence[PartitionState], listed: Mapping[TopicIdPartition, ListedPartition]
    ) -> list[RebuiltPartition]:
        stored, unusable = self._read(listed)
        recorded = dict(
            self._bucket.run(at_once(list(listed.items()), self._recorded, count=PARTITIONS_AT_ONCE))
        )
        before = {one.partition: one for one in batch}
        plans: dict[TopicIdPartition, RebuildPlan] = {}
        waiting = set(before)
        while waiting:
            for partition in waiting:
                rewritings, evidence = recorded[partition].found, self.erasures.evidence[partition]
                plans[partition] = plan_rebuild(
                    stored[partition],
                    start_offset=kept_from(before[partition].known),
                    begins=evidence.begins,
                    recorded=(*rewritings, *evidence.unrecorded(rewritings)),
                )
            waiting = self._with_indexes(plans, before, stored, unusable)
        manifests = {
            partition: self._manifest(plan, before[partition])
            for partition, plan in plans.items()
            if plan.chosen
        }

        async def finished(one: PartitionState) -> RebuiltPartition:
            manifest = manifests.get(one.partition)
            error = UNREAD if manifest is not None and recorded[one.partition].faults else ""
            if manifest is not None and self._options.write and not error:
                try:
                    await self._writer.write(one, manifest, leader_epoch=_newest_epoch(stored[one.partition]))
                except TieringError as failed:
                    # The other partitions are written nevertheless.
                    error = str(failed)
            return RebuiltPartition(
                one,
                manifest,
                plans[one.partition],
                tuple(unusable[one.partition]),
                recorded[one.partition].faults,
                self._unsearched(plans[one.partition], one.partition),
                is_written=self._options.write and manifest is not None and not error,
                error=error,
            )

        return self._bucket.run(at_once(batch, finished, count=PARTITIONS_AT_ONCE))

    def _unsearched(self, plan: RebuildPlan, partition: TopicIdPartition) -> tuple[str, ...]:
        """Return the job ids of the erasures that have not searched all that the plan has chosen."""
        chosen = [one.segment for one in plan.chosen]
        return tuple(one.job_id for one in self.erasures.evidence[partition].unsearched(chosen))

    async def _recorded(
        self, one: tuple[TopicIdPartition, ListedPartition]
    ) -> tuple[TopicIdPartition, RecordedRewritings]:
        partition, listed = one
        return partition, await recorded_rewritings(self._bucket.store, partition, listed)

    def _read(
        self, listed: Mapping[TopicIdPartition, ListedPartition]
    ) -> tuple[
        defaultdict[TopicIdPartition, list[StoredSegment]], defaultdict[TopicIdPartition, list[Unusable]]
    ]:
        """Return the stored segments of each partition, and its unusable objects."""
        tasks = plan_read_tasks(
            {partition: one.segments() for partition, one in listed.items()}, deep=self._options.deep
        )
        work = partial(read_segments, self._config, deep=self._options.deep)
        stored: defaultdict[TopicIdPartition, list[StoredSegment]] = defaultdict(list)
        unusable: defaultdict[TopicIdPartition, list[Unusable]] = defaultdict(list)
        for partition, found in self._spread("read what is stored", tasks, work):
            for one in found:
                if isinstance(one, Unusable):
                    unusable[partition].append(one)
                else:
                    stored[partition].append(one)
        return stored, unusable

    def _with_indexes(
        self,
        plans: dict[TopicIdPartition, RebuildPlan],
        before: Mapping[TopicIdPartition, PartitionState],
        stored: dict[TopicIdPartition, list[StoredSegment]],
        unusable: Mapping[TopicIdPartition, list[Unusable]],
    ) -> set[TopicIdPartition]:
        """
        Make the lost indexes of chosen segments again, and return the partitions to plan anew.

        A segment whose index cannot be made moves from *stored* to *unusable*.
        """
        lost = {
            partition: [one.segment for one in plan.chosen if not one.has_index]
            for partition, plan in plans.items()
        }
        tasks = plan_index_tasks(
            (self._manifest(plans[partition], before[partition]), segments)
            for partition, segments in lost.items()
            if segments
        )
        work = partial(remake_indexes, self._config, write=self._options.write)
        remade: defaultdict[TopicIdPartition, dict[RemoteSegment, RemoteSegment | None]] = defaultdict(dict)
        for partition, some in self._spread("make lost indexes again", tasks, work):
            remade[partition].update(some)
        for partition, named in remade.items():
            kept: list[StoredSegment] = []
            for one in stored[partition]:
                segment = named.get(one.segment, one.segment)
                if segment is None:
                    key, old = data_key(partition, one.segment), one.segment
                    unusable[partition].append(Unusable(key, old.base_offset, old.last_offset, UNDECIDED))
                else:
                    kept.append(
                        replace(one, segment=segment, has_index=one.has_index or one.segment in named)
                    )
            stored[partition] = kept
        return set(remade)

    def _manifest(self, plan: RebuildPlan, before: PartitionState) -> PartitionManifest:
        return rebuilt_manifest(
            before.partition, plan, gap_reason=GAP_REASON, now_ms=self._bucket.clock(), known=before.known
        )

    async def _topics(
        self, listed: Mapping[TopicIdPartition, ListedPartition], leaving: set[TopicKey]
    ) -> list[RebuiltTopic]:
        """
        Write topic manifests that are missing, or do not cover all partitions; report each topic.

        The partitions' manifests are written before. Topics in *leaving* are left alone.
        """
        by_topic: defaultdict[TopicKey, list[TopicIdPartition]] = defaultdict(list)
        for partition, one in listed.items():
            if one.has_manifest or one.data:
                by_topic[topic_key(partition)].append(partition)

        async def ensured(key: TopicKey) -> RebuiltTopic:
            partitions = by_topic[key]
            count = 1 + max(one.partition for one in partitions)
            times = [listed[one].oldest_ms for one in partitions]
            created_at_ms = min((one for one in times if one is not None), default=self._bucket.clock())
            try:
                is_needed = await self._writer.ensure_topic(
                    key, partition_count=count, created_at_ms=created_at_ms, write=self._options.write
                )
            except TieringError as error:
                return RebuiltTopic(key, count, is_needed=True, is_written=False, error=str(error))
            return RebuiltTopic(key, count, is_needed=is_needed, is_written=is_needed and self._options.write)

        keys = sorted(by_topic.keys() - leaving, key=lambda one: (one.cluster, one.topic, one.topic_id))
        return await at_once(keys, ensured, count=PARTITIONS_AT_ONCE)


def _batches(
    wanted: Sequence[PartitionState], listed: Mapping[TopicIdPartition, ListedPartition]
) -> Iterator[list[PartitionState]]:
    batch: list[PartitionState] = []
    objects = 0
    for one in wanted:
        batch.append(one)
        objects += len(listed[one.partition].data)
        if objects >= BATCH_OBJECTS:
            yield batch
            batch, objects = [], 0
    if batch:
        yield batch


def _newest_epoch(stored: Sequence[StoredSegment]) -> int:
    """Return the newest leader epoch of the stored segments. No older leader may write the manifest."""
    return max(one.segment.leader_epoch for one in stored)
