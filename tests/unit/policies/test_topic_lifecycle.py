"""The lifecycle of a topic's archive: which state follows which, and what is certain enough for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tieringd.errors import ConfigError
from tieringd.formats.object_keys import TopicKey
from tieringd.formats.topic_manifest import TopicManifest
from tieringd.model.partition import NO_TOPIC_ID
from tieringd.model.topic_lifecycle import Deletion, Lease, Lifecycle
from tieringd.policies.topic_lifecycle import (
    LATE_CHECK_MS,
    LEASE_MS,
    PurgeStep,
    begun_anew,
    claimed,
    counted,
    finished,
    noted_as_gone,
    ordered_to_go,
    plan_purge,
    purge_resumed,
    seen_again,
    taken_back,
)
from tieringd.policies.topic_lifecycle import plan_presence as plan_presence_at

NOW_MS, GRACE_MS = 1_000_000_000, 30_000
CREATED_MS = 1_700_000_000_000
"""The time at which topics were created, unless a test says another."""
plan_presence = partial(plan_presence_at, now_ms=CREATED_MS + 1_000)
OURS, OTHER = "our-writer", "other-writer"
LIVE = TopicManifest(TopicKey("c", "orders", "id-1"), 1, 0, remote_delete=True)


def ended(lifecycle: Lifecycle, **deletion) -> TopicManifest:
    """Return a manifest in *lifecycle*, noted at `NOW_MS`."""
    return replace(LIVE, lifecycle=lifecycle, deletion=Deletion(NOW_MS, OTHER, "gone", **deletion))


DELETED, KEPT = ended(Lifecycle.DELETED), ended(Lifecycle.KEPT)
PURGING = ended(Lifecycle.PURGING, lease=Lease(OURS, NOW_MS + LEASE_MS))
PURGED = ended(Lifecycle.PURGED, segments=1, size_bytes=9, purged_at_ms=NOW_MS)
CHECKED = ended(Lifecycle.PURGED, segments=1, size_bytes=9, purged_at_ms=NOW_MS, checked_at_ms=NOW_MS)
STATES = {
    "live": LIVE,
    "deleted": DELETED,
    "kept": KEPT,
    "purging": PURGING,
    "purged": PURGED,
    "checked": CHECKED,
}


def topic(
    name: str, topic_id: str, lifecycle: Lifecycle = Lifecycle.LIVE, *, created_at_ms: int = CREATED_MS
) -> TopicManifest:
    return TopicManifest(TopicKey("c", name, topic_id), 1, created_at_ms, lifecycle=lifecycle)


@pytest.mark.parametrize(
    ("ids", "absent"),
    [
        pytest.param({"a": {"1"}, "b": {"2"}}, set(), id="both are there"),
        pytest.param({"a": {"1"}, "b": set()}, {"2"}, id="one is gone"),
        pytest.param({"a": {"1"}, "b": {"9"}}, {"2"}, id="one was created again"),
        pytest.param({"a": {"1"}, "b": {"9", "2"}}, set(), id="one broker still has it"),
        pytest.param({"a": {"1"}}, set(), id="nothing is told of one"),
        pytest.param({}, set(), id="nothing is told"),
        pytest.param({"a": set(), "b": set()}, set(), id="none is there"),
        pytest.param({"a": {"8"}, "b": {"9"}}, set(), id="all were created again"),
        pytest.param({"b": set()}, set(), id="nothing that is known is there"),
    ],
)
def test_topic_is_absent_only_where_the_cluster_is_known_to_be_the_same(ids, absent):
    """An id that no broker has is gone, as long as another of the bucket's ids is there."""
    found = [topic("a", "1"), topic("b", "2")]
    plan = plan_presence(found, {name: frozenset(ids_of) for name, ids_of in ids.items()})
    assert {key.topic_id for key in plan.absent} == absent
    assert plan.present == frozenset()
    is_told = any(told is not None and not told for told in ids.values()) or ids == {"a": {"8"}, "b": {"9"}}
    assert (plan.nothing_known_because != "") == (is_told and not absent)


def test_topic_without_an_id_is_never_absent():
    """A topic without an id is never called absent: a topic created again looks the same."""
    plan = plan_presence(
        [topic("a", "1"), topic("b", NO_TOPIC_ID)], {"a": frozenset({"1"}), "b": frozenset()}
    )
    assert plan.absent == frozenset()


def test_topic_is_absent_only_beside_one_that_is_no_younger():
    """A cluster that was formatted again under its old id has none but younger topics."""
    found = [
        topic("a", "1", created_at_ms=CREATED_MS + 5),
        topic("b", "2", created_at_ms=CREATED_MS + 6),
        topic("c", "3"),
    ]
    ids = {"a": frozenset({"1"}), "b": frozenset[str](), "c": frozenset[str]()}
    plan = plan_presence(found, ids)
    assert {key.topic_id for key in plan.absent} == {"2"}
    assert {key.topic_id for key in plan.gone} == {"2", "3"}
    assert (
        plan.nothing_known_because
        == "the cluster lacks 1 live topics that are older than all topics that it has"
    )


@pytest.mark.parametrize("created_at_ms", [0, 12_000, CREATED_MS + 10 * 86_400_000])
def test_topic_that_a_wrong_clock_dated_vouches_for_none(created_at_ms):
    """A cluster that was formatted again on a host without a clock has such a topic first."""
    found = [topic("a", "1", created_at_ms=created_at_ms), topic("b", "2")]
    found.append(topic("c", "3", created_at_ms=created_at_ms + 1))
    plan = plan_presence(found, {"a": frozenset({"1"}), "b": frozenset(), "c": frozenset()})
    assert plan.absent == frozenset()
    assert plan.nothing_known_because == (
        "the cluster lacks 2 live topics, and a wrong clock dated all of the bucket's topics that it has"
    )


def test_topic_without_an_id_vouches_for_none():
    """The topic may have been created again under the same name."""
    found = [topic("a", NO_TOPIC_ID), topic("b", "2", created_at_ms=CREATED_MS + 6)]
    plan = plan_presence(found, {"a": frozenset({NO_TOPIC_ID}), "b": frozenset()})
    assert plan.absent == frozenset()
    assert plan.nothing_known_because != ""


@pytest.mark.parametrize(
    ("topic_id", "told", "is_present", "is_gone"),
    [
        pytest.param("1", {"1"}, True, False, id="there"),
        pytest.param("1", {"2"}, False, True, id="created again"),
        pytest.param("1", set(), False, True, id="not there"),
        pytest.param("1", None, False, False, id="nothing is told"),
        pytest.param("1", {NO_TOPIC_ID}, False, False, id="one of unknown id is there"),
        pytest.param(NO_TOPIC_ID, {NO_TOPIC_ID}, True, False, id="there, without ids"),
        pytest.param(NO_TOPIC_ID, {"2"}, True, False, id="there, and has an id by now"),
        pytest.param(NO_TOPIC_ID, set(), False, True, id="not there, without ids"),
        pytest.param(NO_TOPIC_ID, None, False, False, id="nothing is told, without ids"),
    ],
)
def test_deleted_topic_is_gone_only_where_all_brokers_say_so(topic_id, told, is_present, is_gone):
    """A topic that an operator ordered to go may live all the same."""
    (found,) = manifests = [topic("a", topic_id, Lifecycle.DELETED)]
    plan = plan_presence(manifests, {} if told is None else {"a": frozenset(told)})
    assert plan.present == ({found.key} if is_present else frozenset())
    assert plan.gone == ({found.key} if is_gone else frozenset())


@pytest.mark.parametrize(
    ("changes", "told", "begins"),
    [
        pytest.param({}, {NO_TOPIC_ID}, True, id="purged and searched"),
        pytest.param({}, set(), False, id="not in the cluster"),
        pytest.param({}, {"2"}, False, id="has an id now, and so a key of its own"),
        pytest.param({"topic_id": "1"}, {"1"}, False, id="ids tell topics apart"),
        pytest.param({"lifecycle": Lifecycle.PURGING}, {NO_TOPIC_ID}, False, id="still being purged"),
        pytest.param({"checked_at_ms": None}, {NO_TOPIC_ID}, False, id="not searched for late objects"),
        pytest.param({"moved_to": "s3://b"}, {NO_TOPIC_ID}, False, id="continues elsewhere"),
    ],
)
def test_topic_without_an_id_begins_anew_after_its_purge(changes, told, begins):
    """The new topic has the key of the purged one, and nothing else of it."""
    changes = {
        "topic_id": NO_TOPIC_ID,
        "lifecycle": Lifecycle.PURGED,
        "checked_at_ms": 9,
        "moved_to": "",
    } | changes
    purged = replace(
        topic("a", changes["topic_id"], changes["lifecycle"]),
        deletion=Deletion(1, "d", "r", purged_at_ms=2, checked_at_ms=changes["checked_at_ms"]),
        moved_to=changes["moved_to"],
        partition_count=3,
        remote_delete=True,
    )
    plan = plan_presence([purged], {"a": frozenset(told)})
    assert plan.again == ({purged.key} if begins else frozenset())
    if begins:
        assert begun_anew(purged, now_ms=50) == TopicManifest(purged.key, 3, created_at_ms=50)
    elif told == {NO_TOPIC_ID}:
        assert begun_anew(purged, now_ms=50) == purged


@pytest.mark.parametrize("lifecycle", [one for one in Lifecycle if one is not Lifecycle.LIVE])
def test_topic_that_is_not_live_is_present_when_the_cluster_has_it(lifecycle):
    """A deletion that was noted wrongly shows; absence is no news of it."""
    found = [topic("a", "1", lifecycle)]
    assert plan_presence(found, {"a": frozenset({"1"})}).present == {found[0].key}
    plan = plan_presence(found, {"a": frozenset()})
    assert (plan.absent, plan.present, plan.nothing_known_because) == (frozenset(), frozenset(), "")


@pytest.mark.parametrize(
    ("remote_delete", "lifecycle", "reason"),
    [
        (True, Lifecycle.DELETED, "the cluster has no topic with this id"),
        (False, Lifecycle.KEPT, "redpanda.remote.delete is false"),
        (None, Lifecycle.KEPT, "redpanda.remote.delete was never seen"),
    ],
)
def test_archive_of_a_topic_that_is_gone_goes_only_with_remote_delete(remote_delete, lifecycle, reason):
    """A setting that was never seen of a living topic is not assumed."""
    found = noted_as_gone(replace(LIVE, remote_delete=remote_delete), now_ms=NOW_MS, by=OURS)
    assert found.lifecycle is lifecycle
    assert reason in found.deletion.reason
    assert (found.deletion.noted_at_ms, found.deletion.noted_by) == (NOW_MS, OURS)


def test_archive_stays_where_the_configuration_of_now_says_so():
    """The configuration of now counts before what was recorded while the topic was there."""
    found = noted_as_gone(LIVE, now_ms=NOW_MS, by=OURS, is_to_stay=True)
    assert found.lifecycle is Lifecycle.KEPT
    assert found.deletion.reason.endswith("redpanda.remote.delete is false in the configuration")


TRANSITIONS = {
    "gone": lambda found: noted_as_gone(found, now_ms=NOW_MS, by=OURS),
    "seen again": seen_again,
    "ordered to go": lambda found: ordered_to_go(found, now_ms=NOW_MS),
    "taken back": lambda found: taken_back(found, now_ms=NOW_MS),
    "claimed in the grace": lambda found: claimed(
        found, now_ms=NOW_MS + GRACE_MS - 1, by=OURS, grace_ms=GRACE_MS
    ),
    "claimed after it": lambda found: claimed(found, now_ms=NOW_MS + GRACE_MS, by=OURS, grace_ms=GRACE_MS),
    "finished": lambda found: finished(found, now_ms=NOW_MS, by=OURS),
    "finished by another": lambda found: finished(found, now_ms=NOW_MS, by=OTHER),
}
REFUSED = None
TABLE = {
    "gone": ("deleted", "deleted", "kept", "purging", "purged", "purged"),
    "seen again": ("live", "live", "live", "purging", "purged", "purged"),
    "ordered to go": ("deleted", "deleted", "deleted", REFUSED, REFUSED, REFUSED),
    "taken back": (REFUSED, "kept", REFUSED, REFUSED, REFUSED, REFUSED),
    "claimed in the grace": ("live", "deleted", "kept", "purging", "purged", "purged"),
    "claimed after it": ("live", "purging", "kept", "purging", "purged", "purged"),
    "finished": ("live", "deleted", "kept", "purged", "purged", "purged"),
    "finished by another": ("live", "deleted", "kept", "purging", "purged", "purged"),
}


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [(name, state, after) for name, row in TABLE.items() for state, after in zip(STATES, row, strict=True)],
)
def test_each_state_has_one_way_on(name, before, after):
    """Every state before the purge can be taken back. No state after it can."""
    change = TRANSITIONS[name]
    if after is REFUSED:
        with pytest.raises(ConfigError, match=r"the archive of topic orders \(id-1\) is "):
            change(STATES[before])
    else:
        found = change(STATES[before])
        assert found.lifecycle.value == after
        assert (found.deletion is None) == (found.lifecycle is Lifecycle.LIVE)


def step_of(manifest: TopicManifest, *, after_ms: int = 0) -> PurgeStep:
    return plan_purge(manifest, now_ms=NOW_MS + after_ms, by=OURS, grace_ms=GRACE_MS).step


def leased(owner: str, *, left_ms: int) -> TopicManifest:
    return ended(Lifecycle.PURGING, lease=Lease(owner, NOW_MS + left_ms))


@pytest.mark.parametrize(
    ("manifest", "after_ms", "step"),
    [
        pytest.param(LIVE, 10**12, PurgeStep.NOTHING, id="live"),
        pytest.param(KEPT, 10**12, PurgeStep.NOTHING, id="kept"),
        pytest.param(DELETED, GRACE_MS - 1, PurgeStep.NOTHING, id="grace"),
        pytest.param(DELETED, GRACE_MS, PurgeStep.CLAIM, id="grace is over"),
        pytest.param(DELETED, -(10**6), PurgeStep.NOTHING, id="clock set back"),
        pytest.param(leased(OURS, left_ms=1), 0, PurgeStep.WORK, id="our lease"),
        pytest.param(leased(OURS, left_ms=0), 0, PurgeStep.CLAIM, id="our lease is over"),
        pytest.param(leased(OTHER, left_ms=1), 0, PurgeStep.NOTHING, id="another's lease"),
        pytest.param(leased(OTHER, left_ms=0), 0, PurgeStep.CLAIM, id="another's lease is over"),
        pytest.param(PURGED, LATE_CHECK_MS - 1, PurgeStep.NOTHING, id="purged"),
        pytest.param(PURGED, LATE_CHECK_MS, PurgeStep.CLAIM, id="late check"),
        pytest.param(CHECKED, 10**12, PurgeStep.NOTHING, id="all done"),
    ],
)
def test_purge_waits_for_the_grace_and_for_the_lease(manifest, after_ms, step):
    """No daemon purges within the grace, or under another's lease; after the late check nothing is left."""
    assert step_of(manifest, after_ms=after_ms) is step


def test_what_the_archive_held_is_counted_once():
    """The first count was made before anything was deleted: a later one does not replace it."""
    first = counted(PURGING, by=OURS, segments=3, size_bytes=30)
    assert (first.deletion.segments, first.deletion.size_bytes) == (3, 30)
    assert counted(first, by=OURS, segments=0, size_bytes=0) == first
    assert counted(PURGING, by=OTHER, segments=3, size_bytes=30) == PURGING


def test_late_check_is_noted_beside_the_purge():
    """The mark keeps when it was purged, and has no lease afterwards."""
    taken = claimed(PURGED, now_ms=NOW_MS + LATE_CHECK_MS, by=OURS, grace_ms=GRACE_MS)
    assert taken.deletion.lease == Lease(OURS, NOW_MS + LATE_CHECK_MS + LEASE_MS)
    found = finished(taken, now_ms=NOW_MS + LATE_CHECK_MS + 5, by=OURS)
    assert found.deletion == replace(PURGED.deletion, checked_at_ms=NOW_MS + LATE_CHECK_MS + 5)


@pytest.mark.parametrize(
    ("manifest", "is_taken"),
    [
        pytest.param(leased(OTHER, left_ms=0), True, id="another's is over"),
        pytest.param(leased("copy-1", left_ms=1), True, id="of an interrupted command"),
        pytest.param(PURGED, False, id="purged meanwhile"),
    ],
)
def test_interrupted_purge_is_resumed_with_a_lease_of_its_own(manifest, is_taken):
    """The counts from before stay, and a purged topic stays as it is."""
    found = purge_resumed(manifest, now_ms=NOW_MS, by=OURS, also_from="copy-")
    lease = Lease(OURS, NOW_MS + LEASE_MS) if is_taken else manifest.deletion.lease
    assert found == replace(manifest, deletion=replace(manifest.deletion, lease=lease))


def test_purge_of_a_daemon_is_not_resumed():
    """The lease of a daemon holds until it is over."""
    with pytest.raises(ConfigError, match=f"is being purged by {OTHER}"):
        purge_resumed(leased(OTHER, left_ms=1), now_ms=NOW_MS, by=OURS, also_from="copy-")
