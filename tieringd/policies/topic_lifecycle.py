"""
The lifecycle of a topic's archive: from the topic's deletion to the mark that is left.

    live -> deleted -> purging -> purged
    live -> kept, kept <-> deleted
    purged -> live, only of a topic without an id

A topic counts as deleted when the cluster says that its id is gone, in two observations with time in
between, and the cluster has one of the bucket's topics that is as old or older. Less certain evidence
changes nothing. Until the purge begins every step can be taken back, and a topic that is seen again is
live again. A topic without an id that was created again has the key of its purged archive: that begins anew
once the purge is over for good. An archive that `redpanda.remote.delete` does not allow to delete is kept.

`choose_topics` decides which of a bucket's topics are served under their names without a broker. A name can
stand for several topics: incarnations of one that was deleted and created again, and topics of other
clusters. The newest incarnation that is not purged is served. Between clusters an operator chooses; a cluster
that shows up later takes no name away from one that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from tieringd.errors import ConfigError
from tieringd.model.human_units import span
from tieringd.model.partition import NO_TOPIC_ID
from tieringd.model.topic_lifecycle import Deletion, Lease, Lifecycle
from tieringd.policies.retention_time import CLOCK_ERROR_MAX_MS, is_impossible

if TYPE_CHECKING:
    # An ordinary import would load xxhash into processes that do not need it.
    from tieringd.formats.object_keys import TopicKey
    from tieringd.formats.topic_manifest import TopicManifest


CONFIRM_AFTER_MS = 10_000
"""Minimum time between two observations that agree on a topic's absence."""
LEASE_MS = 300_000
"""A purging daemon that does not renew its lease for this long counts as dead."""
LATE_CHECK_MS = 3_600_000
"""How long after a purge the bucket is searched again, for objects that a hung process stored late."""

_ON_THE_WAY_OUT = (Lifecycle.DELETED, Lifecycle.KEPT)
BEYOND_RETURN = (Lifecycle.PURGING, Lifecycle.PURGED)
"""States in which an archive cannot be read or restored any more."""


@dataclass(frozen=True, slots=True)
class PresencePlan:
    """What one observation of the cluster shows of the topics in a bucket."""

    absent: frozenset[TopicKey] = frozenset()
    """Live in the bucket, but not in the cluster."""
    present: frozenset[TopicKey] = frozenset()
    """Not live in the bucket, but in the cluster."""
    gone: frozenset[TopicKey] = frozenset()
    """Not in the cluster, as all of its brokers say, in whatever state in the bucket: these may be purged."""
    again: frozenset[TopicKey] = frozenset()
    """Purged in the bucket and in the cluster, without an id: another topic of the same name."""
    nothing_known_because: str = ""
    """Why the absence of some live topics is no evidence; empty when there are no such topics."""


def plan_presence(
    manifests: Sequence[TopicManifest], ids: Mapping[str, frozenset[str]], *, now_ms: int
) -> PresencePlan:
    """
    Compare the bucket's topics of one cluster with the *ids* that its brokers have for their names.

    A name without an entry was not reported, so nothing follows; an empty set means that there is no such
    topic. A live topic is absent only where another of the bucket's topics that is no younger is in the
    cluster under its own id. A cluster that has lost its metadata, and was formatted again under its old
    id, has only younger ones: the archive is then the only copy of all that is older. A topic whose noted
    time can only come from a wrong clock does not count as older than any.

    A topic without an id is never absent: one that was created again would look the same.
    """
    has = {one.key for one in manifests if one.key.topic_id in ids.get(one.key.topic, ())}
    anchors = [one.created_at_ms for one in manifests if one.key in has and one.key.topic_id != NO_TOPIC_ID]
    dated = [created_at_ms for created_at_ms in anchors if not is_impossible(created_at_ms, now_ms=now_ms)]
    oldest_ms = min(dated, default=None)
    absent, present, gone, again, unsure = set(), set(), set(), set(), 0
    for manifest in manifests:
        key, is_live = manifest.key, manifest.lifecycle is Lifecycle.LIVE
        if key in has and may_begin_anew(manifest):
            again.add(key)
        elif key in has or (key.topic_id == NO_TOPIC_ID and ids.get(key.topic)):
            if not is_live:
                present.add(key)
        elif _is_gone(key, ids):
            gone.add(key)
            if not is_live or key.topic_id == NO_TOPIC_ID:
                continue
            if oldest_ms is not None and manifest.created_at_ms >= oldest_ms:
                absent.add(key)
            else:
                unsure += 1
    return PresencePlan(
        frozenset(absent),
        frozenset(present),
        frozenset(gone),
        frozenset(again),
        nothing_known_because=_why_unsure(unsure, has_anchors=bool(anchors), has_dated=bool(dated)),
    )


def _why_unsure(unsure: int, *, has_anchors: bool, has_dated: bool) -> str:
    """Return why the absence of *unsure* live topics is no evidence; empty for none."""
    if not unsure:
        return ""
    if not has_anchors:
        return f"the cluster has none of the bucket's topics, {unsure} of them live"
    if not has_dated:
        return (
            f"the cluster lacks {unsure} live topics, and a wrong clock dated all of the bucket's topics "
            "that it has"
        )
    return f"the cluster lacks {unsure} live topics that are older than all topics that it has"


def _is_gone(key: TopicKey, ids: Mapping[str, frozenset[str]]) -> bool:
    """Say whether all brokers reported a name, and none has this topic; a broker without ids may have it."""
    told = ids.get(key.topic)
    return told is not None and NO_TOPIC_ID not in told and key.topic_id not in told


def noted_as_gone(
    manifest: TopicManifest, *, now_ms: int, by: str, is_to_stay: bool = False
) -> TopicManifest:
    """
    Return the manifest of a topic that is certainly not in the cluster any more.

    With *is_to_stay* the current configuration keeps its archive, whatever was recorded.
    """
    if manifest.lifecycle is not Lifecycle.LIVE:
        return manifest
    reason, lifecycle = "the cluster has no topic with this id", Lifecycle.DELETED
    if is_to_stay:
        reason = f"{reason}; redpanda.remote.delete is false in the configuration"
        lifecycle = Lifecycle.KEPT
    elif not manifest.remote_delete:
        says = "was never seen" if manifest.remote_delete is None else "is false"
        reason, lifecycle = f"{reason}; redpanda.remote.delete {says}", Lifecycle.KEPT
    return replace(manifest, lifecycle=lifecycle, deletion=Deletion(now_ms, by, reason))


def seen_again(manifest: TopicManifest) -> TopicManifest:
    """Return the manifest of a topic that the cluster has: a pending deletion is cancelled."""
    if manifest.lifecycle not in _ON_THE_WAY_OUT:
        return manifest
    return replace(manifest, lifecycle=Lifecycle.LIVE, deletion=None)


def may_begin_anew(manifest: TopicManifest) -> bool:
    """
    Say whether a topic of this key that the cluster has is another one, whose archive may begin.

    That is a topic without an id, whose archive was purged and searched for late objects: a process that
    hung through the purge could mix its objects with the new ones. A moved archive continues elsewhere.
    """
    deletion = manifest.deletion
    return (
        manifest.key.topic_id == NO_TOPIC_ID
        and manifest.lifecycle is Lifecycle.PURGED
        and not manifest.moved_to
        and deletion is not None
        and deletion.checked_at_ms is not None
    )


def begun_anew(manifest: TopicManifest, *, now_ms: int) -> TopicManifest:
    """Return the manifest of a new topic where `may_begin_anew`: only the key is that of the purged one."""
    if not may_begin_anew(manifest):
        return manifest
    return type(manifest)(manifest.key, manifest.partition_count, created_at_ms=now_ms)


def ordered_to_go(manifest: TopicManifest, *, now_ms: int) -> TopicManifest:
    """
    Return the manifest of a topic whose archive an operator deletes; the grace begins now.

    Raises:
        ConfigError: It is being purged already, or has been.
    """
    if manifest.lifecycle in BEYOND_RETURN:
        raise ConfigError(f"{_named(manifest)} is already {manifest.lifecycle.value}")
    return replace(
        manifest,
        lifecycle=Lifecycle.DELETED,
        deletion=Deletion(now_ms, "operator", "an operator deleted the archive"),
    )


def taken_back(manifest: TopicManifest, *, now_ms: int) -> TopicManifest:
    """
    Return the manifest of a deleted topic whose archive an operator wants to keep.

    Raises:
        ConfigError: There is no deletion to take back, or it is too late.
    """
    if manifest.lifecycle is not Lifecycle.DELETED:
        raise ConfigError(f"{_named(manifest)} is {manifest.lifecycle.value}: there is no deletion to cancel")
    return kept(manifest, now_ms=now_ms, by="operator", reason="an operator took its deletion back")


def moved_away(manifest: TopicManifest, *, now_ms: int, by: str) -> TopicManifest:
    """
    Return the manifest of a moved topic whose archive *by* is about to purge.

    The purge concerns the bucket that the archive was moved from.

    Raises:
        ConfigError: It was not moved.
    """
    if not manifest.moved_to:
        raise ConfigError(f"{_named(manifest)} was not moved")
    if manifest.lifecycle in BEYOND_RETURN:
        return manifest
    lease = Lease(by, now_ms + LEASE_MS)
    deletion = Deletion(now_ms, "operator", f"moved to {manifest.moved_to}", lease=lease)
    return replace(manifest, lifecycle=Lifecycle.PURGING, deletion=deletion)


def purge_resumed(manifest: TopicManifest, *, now_ms: int, by: str, also_from: str) -> TopicManifest:
    """
    Return the manifest of a moved topic whose purge was interrupted, with the lease taken by *by*.

    A lease is taken when it has expired; the lease of an owner whose name begins with *also_from* at
    once. A topic that is not being purged stays as it is.

    Raises:
        ConfigError: Another owner has the lease.
    """
    if manifest.lifecycle is not Lifecycle.PURGING or manifest.deletion is None:
        return manifest
    lease = manifest.deletion.lease
    if lease is not None and now_ms < lease.until_ms and not lease.owner.startswith(also_from):
        raise ConfigError(
            f"{_named(manifest)} is being purged by {lease.owner}",
            hint="Wait until the purge is finished; nothing is left to do then",
        )
    taken = Lease(by, now_ms + LEASE_MS)
    return replace(manifest, deletion=replace(manifest.deletion, lease=taken))


def kept(manifest: TopicManifest, *, now_ms: int, by: str, reason: str) -> TopicManifest:
    """Return the manifest of a deleted topic whose archive stays."""
    return replace(manifest, lifecycle=Lifecycle.KEPT, deletion=Deletion(now_ms, by, reason))


def _named(manifest: TopicManifest) -> str:
    return f"the archive of topic {manifest.key.topic} ({manifest.key.topic_id})"


class PurgeStep(Enum):
    """The next step for a topic's archive."""

    NOTHING = "nothing"
    CLAIM = "claim"
    """Take the lease, and then work."""
    WORK = "work"
    """This owner holds the lease."""


@dataclass(frozen=True, slots=True)
class PurgePlan:
    """The next step, and why."""

    step: PurgeStep
    reason: str


def plan_purge(manifest: TopicManifest, *, now_ms: int, by: str, grace_ms: int) -> PurgePlan:
    """Return the next step of *by* for a topic's archive."""
    waits_because = _waits_because(manifest, now_ms=now_ms, grace_ms=grace_ms)
    if waits_because:
        return PurgePlan(PurgeStep.NOTHING, waits_because)
    lease = manifest.deletion.lease if manifest.deletion else None
    # No daemon takes a lease for longer, so a wrong clock noted one that ends later.
    if lease is None or not now_ms < lease.until_ms <= now_ms + LEASE_MS + CLOCK_ERROR_MAX_MS:
        return PurgePlan(PurgeStep.CLAIM, "no daemon has the lease")
    if lease.owner == by:
        return PurgePlan(PurgeStep.WORK, "this daemon has the lease")
    return PurgePlan(PurgeStep.NOTHING, f"{lease.owner} has the lease for {span(lease.until_ms - now_ms)}")


def _waits_because(manifest: TopicManifest, *, now_ms: int, grace_ms: int) -> str:
    """Return why nothing is to be deleted now; empty when something is."""
    deletion = manifest.deletion
    if manifest.lifecycle in (Lifecycle.LIVE, Lifecycle.KEPT) or deletion is None:
        return f"the topic is {manifest.lifecycle.value}"
    if manifest.lifecycle is Lifecycle.DELETED:
        # A clock that was set back lengthens the grace; it never shortens it.
        left_ms = deletion.noted_at_ms + grace_ms - now_ms
        return f"the grace period has {span(left_ms)} left" if left_ms > 0 else ""
    if manifest.lifecycle is Lifecycle.PURGED:
        if deletion.checked_at_ms is not None:
            return "the archive is purged, and was searched for late objects"
        if now_ms < (deletion.purged_at_ms or 0) + LATE_CHECK_MS:
            return "the archive is purged; it will be searched for late objects"
    return ""


def is_misdated(manifest: TopicManifest, *, now_ms: int) -> bool:
    """Say whether a wrong clock noted the time of deletion, so that the grace cannot be computed."""
    deletion = manifest.deletion
    return (
        manifest.lifecycle is Lifecycle.DELETED
        and deletion is not None
        and is_impossible(deletion.noted_at_ms, now_ms=now_ms)
    )


def redated(manifest: TopicManifest, *, now_ms: int) -> TopicManifest:
    """Return the manifest with the grace beginning now, where `is_misdated`; unchanged otherwise."""
    if not is_misdated(manifest, now_ms=now_ms) or manifest.deletion is None:
        return manifest
    return replace(manifest, deletion=replace(manifest.deletion, noted_at_ms=now_ms))


def claimed(manifest: TopicManifest, *, now_ms: int, by: str, grace_ms: int) -> TopicManifest:
    """Return the manifest with the lease taken or renewed by *by*; unchanged where that is not allowed."""
    plan = plan_purge(manifest, now_ms=now_ms, by=by, grace_ms=grace_ms)
    if plan.step is PurgeStep.NOTHING or manifest.deletion is None:
        return manifest
    lifecycle = Lifecycle.PURGED if manifest.lifecycle is Lifecycle.PURGED else Lifecycle.PURGING
    lease = Lease(by, now_ms + LEASE_MS)
    return replace(manifest, lifecycle=lifecycle, deletion=replace(manifest.deletion, lease=lease))


def holds_lease(manifest: TopicManifest, *, by: str) -> bool:
    """Say whether *by* holds the last lease, so that no other owner has taken it over."""
    lease = manifest.deletion.lease if manifest.deletion else None
    return lease is not None and lease.owner == by


def lease_is_short(manifest: TopicManifest, *, now_ms: int) -> bool:
    """Say whether it is time to renew the lease."""
    lease = manifest.deletion.lease if manifest.deletion else None
    return lease is None or lease.until_ms - now_ms < LEASE_MS // 2


def counted(manifest: TopicManifest, *, by: str, segments: int, size_bytes: int) -> TopicManifest:
    """Return the manifest with the size of the archive, noted once, before anything was deleted."""
    deletion = manifest.deletion
    if deletion is None or deletion.segments is not None or not holds_lease(manifest, by=by):
        return manifest
    return replace(manifest, deletion=replace(deletion, segments=segments, size_bytes=size_bytes))


def finished(manifest: TopicManifest, *, now_ms: int, by: str) -> TopicManifest:
    """Return the manifest after the lease owner *by* deleted everything, or searched for late objects."""
    deletion = manifest.deletion
    if deletion is None or not holds_lease(manifest, by=by):
        return manifest
    if manifest.lifecycle is Lifecycle.PURGED:
        return replace(manifest, deletion=replace(deletion, lease=None, checked_at_ms=now_ms))
    if manifest.lifecycle is Lifecycle.PURGING:
        return replace(
            manifest,
            lifecycle=Lifecycle.PURGED,
            deletion=replace(deletion, lease=None, purged_at_ms=now_ms),
        )
    return manifest


@dataclass(frozen=True, slots=True)
class NamedTopics:
    """The served topics, and the names that cannot be decided."""

    topics: Mapping[str, TopicManifest]
    """The served topics, by name."""
    contested: Mapping[str, tuple[str, ...]]
    """
    Contested names, each with the clusters that have a topic of that name. Such a name is in *topics* only if
    one cluster had it before.
    """


def choose_topics(
    found: Iterable[TopicManifest], *, cluster: str | None = None, before: Mapping[str, str] | None = None
) -> NamedTopics:
    """
    Return which topic each name stands for: of *cluster* alone, or of all where it is None.

    *before* maps each name to the cluster that it belonged to until now.
    """
    newest: dict[str, dict[str, TopicManifest]] = {}
    for manifest in found:
        key = manifest.key
        is_there = manifest.partition_count and manifest.lifecycle not in BEYOND_RETURN
        if is_there and cluster in {None, key.cluster}:
            of_name = newest.setdefault(key.topic, {})
            known = of_name.get(key.cluster)
            if known is None or _age(known) < _age(manifest):
                of_name[key.cluster] = manifest
    topics: dict[str, TopicManifest] = {}
    contested: dict[str, tuple[str, ...]] = {}
    for name, of_name in sorted(newest.items()):
        if len(of_name) > 1:
            contested[name] = tuple(sorted(of_name))
        owner = (before or {}).get(name)
        if len(of_name) == 1:
            topics[name] = next(iter(of_name.values()))
        elif owner in of_name:
            topics[name] = of_name[owner]
    return NamedTopics(topics, contested)


def _age(manifest: TopicManifest) -> tuple[int, str]:
    return manifest.created_at_ms, manifest.key.topic_id
