"""The report of a rebuild."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from tieringd.archive.rebuild.manifest_writer import ManifestState, PartitionState
from tieringd.formats.object_keys import TopicKey, data_key, manifest_key
from tieringd.model.manifest import PartitionManifest
from tieringd.policies.manifest_rebuild import RebuildPlan, StoredSegment
from tieringd.spark.jobs.report import Report, Table, Value

if TYPE_CHECKING:
    # An ordinary import would load the code of the rebuild into processes that do not need it.
    from tieringd.archive.rebuild.stored_segments import Unusable


@dataclass(frozen=True, slots=True)
class RebuiltPartition:
    """The outcome of one partition's rebuild."""

    before: PartitionState
    manifest: PartitionManifest | None = None
    """The rebuilt manifest; None if the partition was left alone, or has no usable object."""
    plan: RebuildPlan | None = None
    unusable: tuple[Unusable, ...] = ()
    damaged_records: tuple[str, ...] = ()
    """Why records of rewritings cannot be read, one message for each."""
    unsearched_by: tuple[str, ...] = ()
    """Job ids of erasures that were to go over the partition, and have not searched all that is rebuilt."""
    is_written: bool = False
    error: str = ""
    """Why the manifest was not written; empty without an error."""

    @property
    def outcome(self) -> str:
        """Return the outcome in words, for the report."""
        if self.error:
            return "not written"
        if self.is_written:
            return "written"
        if self.manifest is not None:
            return "would be written"
        return "left alone" if self.plan is None else "nothing to write"

    def faults(self) -> Iterator[str]:
        """Yield messages on what an operator has to look at."""
        name = self.before.partition
        yield from self._faults_of_manifest()
        for fault in self.damaged_records:
            yield f"{name}: the rewriting record of a job cannot be read: {fault}"
        for stored in self.plan.unfinished if self.plan else ():
            segment = stored.segment
            yield (
                f"{name}: offsets {segment.base_offset} to {segment.last_offset} were stored by a job that "
                "removed records, but no record shows that the job finished: older values may be back. No "
                f"other object has these offsets: {data_key(name, segment)}"
            )
        # Where a record cannot be read it may be the one, and nothing is written.
        unrecorded = self.plan.unrecorded if self.plan and not self.damaged_records else ()
        for job, of_job in _by_job(unrecorded):
            yield (
                f"{name}: {len(of_job)} objects of offsets {of_job[0].segment.base_offset} to "
                f"{of_job[-1].segment.last_offset} were stored by {job}, a job that removed records or a "
                "merge after one, but no record shows that it finished: older objects are used in their "
                "places. Erased records or older values may be back: run the compactions and erasures of "
                "this topic again"
            )
        for job in self.unsearched_by:
            yield (
                f"{name}: erasure {job} has not searched this partition, or not all of it, and objects from "
                "before it are back: records with the erased keys may be among them. Run that erasure again"
            )
        for job, some in self.plan.brought_back if self.plan else ():
            yield (
                f"{name}: {len(some)} objects of offsets {some[0].segment.base_offset} to "
                f"{some[-1].segment.last_offset} are older than job {job}, which removed records: the "
                "objects of that job are incomplete, or others were stored later. Erased records or older "
                "values may be back: run that job again"
            )
        for one in self.unusable:
            if self._is_missed(one):
                yield (
                    f"{name}: offsets {one.base_offset} to {one.last_offset} are no longer all in the "
                    f"archive: {one.key}: {one.reason}"
                )

    def _faults_of_manifest(self) -> Iterator[str]:
        name = self.before.partition
        if self.error:
            yield f"{name}: {self.error}"
        if self.manifest is None and self.before.state is ManifestState.BROKEN:
            yield f"{name}: {self.before.detail}. The manifest can be read: give --replace to rebuild it"
        if self.plan is None and self.before.state is ManifestState.DAMAGED:
            yield (
                f"{name}: {self.before.detail}. The partition has no data object to rebuild it from. Bring "
                f"back an older version of {manifest_key(name)}, or move it out of the bucket: the leader's "
                "daemon then begins the archive with what is in its log"
            )

    def _is_missed(self, one: Unusable) -> bool:
        """Return whether some offsets of an unusable object are in no other object of the manifest."""
        manifest = self.manifest
        if manifest is None:
            return True
        if one.base_offset < manifest.start_offset or one.last_offset >= manifest.next_offset:
            return True
        return any(
            gap.base_offset <= one.last_offset and one.base_offset <= gap.last_offset for gap in manifest.gaps
        )


def _by_job(segments: Sequence[StoredSegment]) -> list[tuple[str, list[StoredSegment]]]:
    """Return segments that jobs stored, ascending, by the writer id of the job."""
    found: defaultdict[str, list[StoredSegment]] = defaultdict(list)
    for one in sorted(segments, key=attrgetter("segment.base_offset")):
        found[one.segment.writer_id].append(one)
    return sorted(found.items())


@dataclass(frozen=True, slots=True)
class RebuiltTopic:
    """The outcome of one topic manifest's rebuild."""

    key: TopicKey
    partition_count: int
    is_needed: bool
    """Whether the topic manifest was missing or damaged, or did not cover all partitions."""
    is_written: bool
    error: str = ""


def rebuild_report(
    partitions: Sequence[RebuiltPartition],
    topics: Sequence[RebuiltTopic],
    *,
    damaged_erasures: Sequence[str] = (),
    is_written: bool,
    seconds: float,
) -> Report:
    """
    Return the report of what was written, or in a dry run of what would be.

    *damaged_erasures* has a message for each record of an erasure that cannot be read.
    """
    states = Counter(one.before.state for one in partitions)
    outcomes = Counter(one.outcome for one in partitions)
    manifests = [one.manifest for one in partitions if one.manifest is not None]
    figures: dict[str, Value] = {
        "mode": "write" if is_written else "dry run: nothing is changed without --write",
        "partitions": len(partitions),
        **{f"manifests_{one.value}": states[one] for one in ManifestState},
        "partitions_to_write": outcomes["would be written"],
        "partitions_written": outcomes["written"],
        "partitions_failed": outcomes["not written"],
        "topic_manifests_to_write": sum(one.is_needed and not one.is_written for one in topics),
        "topic_manifests_written": sum(one.is_written for one in topics),
        "segments": sum(one.segment_count for one in manifests),
        "size_bytes": sum(one.size_bytes for one in manifests),
        "gap_offsets": sum(one.gap_offsets for one in manifests),
        "objects_left_out": sum(len(one.plan.left_out) for one in partitions if one.plan),
        "objects_unrecorded": sum(len(one.plan.unrecorded) for one in partitions if one.plan),
        "objects_unfinished": sum(len(one.plan.unfinished) for one in partitions if one.plan),
        "objects_brought_back": sum(
            len(some) for one in partitions if one.plan for _, some in one.plan.brought_back
        ),
        "objects_unusable": sum(len(one.unusable) for one in partitions),
        "seconds": seconds,
    }
    faults = chain.from_iterable(one.faults() for one in partitions)
    of_erasures = (
        f"the record of an erasure cannot be read: {fault}. If it was to go over a rebuilt partition, run "
        "that erasure again"
        for fault in damaged_erasures
    )
    of_topics = (f"topic {one.key.topic}: {one.error}" for one in topics if one.error)
    return Report(
        "rebuild",
        figures,
        (_partitions(partitions), _topics(topics), _gaps(partitions), _left_out(partitions)),
        (*faults, *of_erasures, *of_topics),
    )


def _partitions(partitions: Sequence[RebuiltPartition]) -> Table:
    return Table(
        "partitions",
        (
            "topic",
            "partition",
            "topic_id",
            "manifest",
            "outcome",
            "start_offset",
            "next_offset",
            "segments",
            "size_bytes",
            "gap_offsets",
            "left_out",
            "unusable",
        ),
        tuple(
            (
                one.before.partition.topic,
                one.before.partition.partition,
                one.before.partition.topic_id,
                one.before.state.value,
                one.outcome,
                one.manifest.start_offset if one.manifest else None,
                one.manifest.next_offset if one.manifest else None,
                one.manifest.segment_count if one.manifest else None,
                one.manifest.size_bytes if one.manifest else None,
                one.manifest.gap_offsets if one.manifest else None,
                len(one.plan.left_out) if one.plan else None,
                len(one.unusable),
            )
            for one in sorted(partitions, key=lambda one: one.before.partition)
        ),
    )


def _topics(topics: Sequence[RebuiltTopic]) -> Table:
    return Table(
        "topics",
        ("topic", "topic_id", "partitions", "outcome"),
        tuple(
            (one.key.topic, one.key.topic_id, one.partition_count, _outcome(one))
            for one in topics
            if one.is_needed
        ),
    )


def _outcome(topic: RebuiltTopic) -> str:
    if topic.error:
        return "not written"
    return "written" if topic.is_written else "would be written"


def _gaps(partitions: Sequence[RebuiltPartition]) -> Table:
    return Table(
        "gaps",
        ("topic", "partition", "base_offset", "last_offset", "reason"),
        tuple(
            (
                manifest.partition.topic,
                manifest.partition.partition,
                gap.base_offset,
                gap.last_offset,
                gap.reason,
            )
            for manifest in (one.manifest for one in partitions)
            if manifest is not None
            for gap in manifest.gaps
        ),
    )


def _left_out(partitions: Sequence[RebuiltPartition]) -> Table:
    chosen_else = (
        (data_key(one.before.partition, stored.segment), reason)
        for one in partitions
        if one.plan
        for stored, reason in one.plan.left_out
    )
    unusable = ((each.key, each.reason) for one in partitions for each in one.unusable)
    return Table("left_out", ("key", "reason"), (*chosen_else, *unusable), is_detail=True)
