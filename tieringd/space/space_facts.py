"""
Space facts: what a look at the world says of each partition, in the words of the space plan.

What nobody can let go of from here is named with the reason, so that a plan that falls short
can be explained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.policies.durability import durable_end
from tieringd.policies.local_retention import plan_trim
from tieringd.policies.space_plan import SpacePartition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tieringd.archiving.observer import Followed, Observation, World
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import Leadership, TopicPartition
    from tieringd.model.segment import LocalSegment

NOT_TIERED = "remote write is off for the topic: only the broker's own retention trims it"
FOLLOWED = "another broker leads it, and trims it for all replicas"
PAUSED = "its topic is paused"
NOT_KNOWN = "it is not known yet what of it is durable"


def space_partitions(
    world: World,
    *,
    log_dirs: tuple[str, ...],
    manifest_of: Callable[[Leadership], PartitionManifest | None],
    obstacle_of: Callable[[Leadership], str],
    now_ms: int,
) -> Iterator[SpacePartition]:
    """
    Yield a fact sheet for each partition that lies in one of *log_dirs*.

    *obstacle_of* says why an archiver lets nothing go just now; empty when it does.
    """
    for leadership, seen in world.wanted.items():
        if seen.log.partition.log_dir in log_dirs:
            manifest = manifest_of(leadership)
            if manifest is None:
                yield _kept(seen.log.partition.topic_partition, seen.log.segments, NOT_KNOWN)
            else:
                yield space_partition(seen, manifest, obstacle=obstacle_of(leadership), now_ms=now_ms)
    for one in world.followed:
        if one.log.partition.log_dir in log_dirs:
            yield _of_followed(one, PAUSED if _is_paused(world, one) else FOLLOWED)
    for one in world.held_back:
        if one.log.partition.log_dir in log_dirs:
            yield _of_followed(one, NOT_KNOWN)
    for partition in world.untiered:
        if partition.log_dir in log_dirs:
            yield _kept(partition.topic_partition, (), NOT_TIERED)


def space_partition(
    seen: Observation, manifest: PartitionManifest, *, obstacle: str, now_ms: int
) -> SpacePartition:
    """
    Return what holds for a partition that is archived from here.

    Where the local target is enforced, phase 1 takes what the published hint allows, and phase 2 what is
    past the target by now. Where it is only advice, phase 1 takes what is past the target: the log has
    grown over it because there was room.
    """
    topic, log_start_offset = seen.topic, seen.bounds.log_start_offset
    is_strict = topic.local_target.enforced == topic.local_target.advised
    past_retention = plan_trim(
        seen.log, manifest, topic.local_target.enforced, log_start_offset=log_start_offset, now_ms=now_ms
    ).start_offset
    past_advice = plan_trim(
        seen.log, manifest, topic.local_target.advised, log_start_offset=log_start_offset, now_ms=now_ms
    ).start_offset
    hint = manifest.allowed_local_start_offset
    return SpacePartition(
        seen.log.partition.topic_partition,
        seen.log.segments,
        log_start_offset=log_start_offset,
        durable_next_offset=durable_end(seen.log, manifest, log_start_offset=log_start_offset).offset,
        retention_next_offset=min(hint or log_start_offset, past_retention)
        if is_strict
        else max(past_retention, past_advice),
        local_retention_next_offset=past_advice,
        has_explicit_target=topic.local_target.is_explicit,
        not_reclaimable=topic.never_trimmed_because or obstacle,
    )


def _is_paused(world: World, one: Followed) -> bool:
    partition = one.partition
    return any((key.topic, key.topic_id) == (partition.topic, partition.topic_id) for key in world.paused)


def _of_followed(one: Followed, reason: str) -> SpacePartition:
    return _kept(one.log.partition.topic_partition, one.log.segments, reason)


def _kept(topic_partition: TopicPartition, segments: tuple[LocalSegment, ...], reason: str) -> SpacePartition:
    start_offset = segments[0].base_offset if segments else 0
    return SpacePartition(
        topic_partition,
        segments,
        log_start_offset=start_offset,
        durable_next_offset=start_offset,
        retention_next_offset=start_offset,
        local_retention_next_offset=start_offset,
        has_explicit_target=False,
        not_reclaimable=reason,
    )
