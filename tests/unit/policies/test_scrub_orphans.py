"""Which objects are orphans: a table of reasons, and objects that no sequence of changes makes orphans."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.builders import DEFAULT_TIME_MS
from tests.support.examples import examples
from tests.unit.model.values import PARTITION, WRITERS, remote, stored
from tieringd.formats.manifest_codec import encode_spillover
from tieringd.formats.object_keys import (
    data_key,
    decision_key,
    index_key,
    manifest_key,
    rewriting_key,
    spillover_key,
)
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Replacement
from tieringd.model.spilling import part_to_spill, spilled, spillover_expired, with_parts
from tieringd.model.tail_cut import cut_back
from tieringd.policies.scrub import Keep, Orphan, Owner, StoredObject, TopicState, plan_orphans

if TYPE_CHECKING:
    from tieringd.model.segment import RemoteSegment

HOUR_MS = 3_600_000
NOW_MS = DEFAULT_TIME_MS + 1_000 * HOUR_MS
GRACE_MS = 24 * HOUR_MS

HELD = [remote(0, 9, leader_epoch=5), remote(10, 19, leader_epoch=5)]
MANIFEST = replace(stored(HELD), leader_epoch=5)
LEFT = remote(0, 9, leader_epoch=4, writer_id=WRITERS[1])
"""What a deposed leader has left behind."""
AT_THE_END = remote(20, 29, leader_epoch=5)
BEGUN_ANEW = replace(MANIFEST, began_at_ms=NOW_MS - 50 * HOUR_MS)


def owner(**changes) -> Owner:
    return replace(Owner(PARTITION, TopicState.LIVE, MANIFEST), **changes)


def judged(segment: RemoteSegment, of: Owner, *, age_ms: int = 25 * HOUR_MS, name=data_key) -> Orphan | Keep:
    """Return what becomes of one object."""
    key = name(of.partition, segment)
    plan = plan_orphans(
        of, [StoredObject(key, segment.size_bytes, NOW_MS - age_ms)], grace_ms=GRACE_MS, now_ms=NOW_MS
    )
    assert len(plan.orphans) + len(plan.kept) == 1
    return plan.orphans[0] if plan.orphans else plan.kept[0][1]


@pytest.mark.parametrize("name", [data_key, index_key])
@pytest.mark.parametrize(
    ("segment", "changes", "age_ms", "expected"),
    [
        pytest.param(HELD[0], {}, 99 * HOUR_MS, Keep.NAMED, id="named"),
        pytest.param(HELD[0], {"uncertain": "damaged"}, 99 * HOUR_MS, Keep.NAMED, id="named and uncertain"),
        pytest.param(LEFT, {}, 24 * HOUR_MS - 1, Keep.YOUNG, id="young"),
        pytest.param(LEFT, {"uncertain": "damaged"}, 99 * HOUR_MS, Keep.UNCERTAIN, id="uncertain"),
        pytest.param(LEFT, {"manifest": None}, 99 * HOUR_MS, Keep.NO_MANIFEST, id="manifest is gone"),
        pytest.param(
            LEFT,
            {"manifest": None, "topic": TopicState.RESTORABLE},
            99 * HOUR_MS,
            Keep.NO_MANIFEST,
            id="manifest of a restorable topic is gone",
        ),
        pytest.param(AT_THE_END, {}, 99 * HOUR_MS, Keep.AT_THE_END, id="may yet be named"),
        pytest.param(LEFT, {"manifest": BEGUN_ANEW}, 51 * HOUR_MS, Keep.BEFORE_MANIFEST, id="of before"),
        pytest.param(
            LEFT,
            {"manifest": BEGUN_ANEW, "topic": TopicState.UNKNOWN},
            51 * HOUR_MS,
            Keep.BEFORE_MANIFEST,
            id="of before, of an unknown topic",
        ),
    ],
)
def test_object_is_kept_for_a_reason(segment, changes, age_ms, expected, name):
    """Each reason to leave an object where it is, for data and index alike."""
    assert judged(segment, owner(**changes), age_ms=age_ms, name=name) is expected


@pytest.mark.parametrize("name", [data_key, index_key])
@pytest.mark.parametrize(
    "segment",
    [
        pytest.param(LEFT, id="of a deposed leader"),
        pytest.param(remote(0, 9, writer_id=WRITERS[1]), id="of an earlier process"),
        pytest.param(remote(5, 25), id="that began before the end"),
        pytest.param(replace(AT_THE_END, leader_epoch=4), id="past the end, of a deposed leader"),
        pytest.param(replace(HELD[0], index_crc32c=7), id="with another index"),
    ],
)
def test_unnamed_object_is_an_orphan_after_its_grace(segment, name):
    """An object that no manifest can name any more is an orphan once it is as old as the grace."""
    found = judged(segment, owner(), age_ms=GRACE_MS, name=name)
    assert isinstance(found, Orphan)
    assert not found.needs_operator


@pytest.mark.parametrize(
    ("began_at_ms", "topic"),
    [
        pytest.param(NOW_MS - 51 * HOUR_MS + 60_000, TopicState.LIVE, id="as old, as clocks may differ"),
        pytest.param(NOW_MS + HOUR_MS, TopicState.LIVE, id="began in the future"),
        pytest.param(0, TopicState.LIVE, id="not noted"),
        pytest.param(NOW_MS - 50 * HOUR_MS, TopicState.LEAVING, id="the topic is purged"),
    ],
)
def test_object_that_may_be_of_this_manifest_s_time_is_an_orphan(began_at_ms, topic):
    """Only what was certainly there before the manifest shows that another one is lost."""
    manifest = replace(MANIFEST, began_at_ms=began_at_ms)
    assert isinstance(judged(LEFT, owner(manifest=manifest, topic=topic), age_ms=51 * HOUR_MS), Orphan)


@pytest.mark.parametrize(
    ("topic", "manifest"),
    [
        (TopicState.RESTORABLE, MANIFEST),
        (TopicState.LEAVING, MANIFEST),
        (TopicState.LEAVING, None),
        (TopicState.UNKNOWN, MANIFEST),
        (TopicState.UNKNOWN, None),
    ],
)
def test_orphans_of_a_topic_that_is_not_live_need_an_operator(topic, manifest):
    """The orphans are found, and nothing is done to them without being asked."""
    found = judged(LEFT, owner(topic=topic, manifest=manifest))
    assert isinstance(found, Orphan)
    assert found.needs_operator
    assert topic.value in found.detail


def test_what_was_replaced_lately_is_kept():
    """An old object that left the manifest a moment ago is still for readers of the manifest before."""
    for at_ms, offsets, is_kept in (
        (NOW_MS - GRACE_MS + 1, (5, 12), True),
        (NOW_MS - GRACE_MS, (5, 12), False),
        (NOW_MS, (10, 19), False),
    ):
        replaced = replace(MANIFEST, replacements=(Replacement(*offsets, 5, at_ms),))
        found = judged(LEFT, owner(manifest=replaced))
        assert (found is Keep.LATELY_REPLACED) == is_kept


@pytest.mark.parametrize(
    ("age_ms", "is_kept"),
    [pytest.param(GRACE_MS - 1, True, id="young"), pytest.param(GRACE_MS, False, id="old")],
)
@pytest.mark.parametrize("segment", [HELD[0], LEFT, AT_THE_END])
def test_what_a_join_has_left_is_an_orphan_after_its_grace(segment, age_ms, is_kept):
    """A part that a join has left is an orphan after its grace, even if the joined object is named."""
    found = judged(
        segment, owner(), age_ms=age_ms, name=lambda *object_of: f"{data_key(*object_of)}.part-0-31"
    )
    assert found is Keep.YOUNG if is_kept else isinstance(found, Orphan)


@pytest.mark.parametrize("place", ["held", "retired", "spilled", None])
def test_record_of_a_rewriting_stays_while_anything_rewritten_does(place):
    """The record is not needed when all rewritten segments have left the archive."""
    rewritten = [replace(one, writer_id="rewritten-0b") for one in HELD]
    manifest, parts = MANIFEST, ()
    match place:
        case "held":
            manifest = replace(stored(rewritten), leader_epoch=5)
        case "retired":
            merged = remote(0, 19, size_bytes=2048, leader_epoch=5)
            manifest = replace(stored(rewritten), leader_epoch=5).merged(merged, now_ms=1)
        case "spilled":
            parts = (part_to_spill(stored(rewritten), 1),)
    of = owner(manifest=manifest, parts=parts)
    key = rewriting_key(PARTITION, "rewritten-0a", crc32c=7)
    for age_ms, otherwise in ((GRACE_MS, None), (GRACE_MS - 1, Keep.YOUNG)):
        plan = plan_orphans(of, [StoredObject(key, 1, NOW_MS - age_ms)], grace_ms=GRACE_MS, now_ms=NOW_MS)
        if place or otherwise:
            assert plan.kept == ((key, Keep.NAMED if place else otherwise),)
        else:
            assert [one.stored.key for one in plan.orphans] == [key]


def test_decision_that_nothing_has_ended_is_an_orphan_after_its_grace():
    """The archiver that waits for a decision looks for it all the time, so an old one decides nothing."""
    key = decision_key(PARTITION, "0a")
    for age_ms, is_kept in ((GRACE_MS - 1, True), (GRACE_MS, False)):
        stored_object = StoredObject(key, 1, NOW_MS - age_ms)
        plan = plan_orphans(owner(), [stored_object], grace_ms=GRACE_MS, now_ms=NOW_MS)
        assert plan.kept == (((key, Keep.YOUNG),) if is_kept else ())
        assert [one.stored.key for one in plan.orphans] == ([] if is_kept else [key])


def test_object_of_another_partition_is_not_judged():
    """A name that is not of this partition is left alone."""
    other = replace(PARTITION, partition=4)
    key = data_key(other, LEFT)
    plan = plan_orphans(owner(), [StoredObject(key, 1, 0)], grace_ms=0, now_ms=NOW_MS)
    assert plan.kept == ((key, Keep.FOREIGN),)


def test_live_manifest_is_never_an_orphan():
    """A live manifest is kept even if nothing else is known of its partition."""
    for of in (owner(), owner(manifest=None, topic=TopicState.UNKNOWN)):
        plan = plan_orphans(of, [StoredObject(manifest_key(PARTITION), 1, 0)], grace_ms=0, now_ms=NOW_MS)
        assert plan.orphans == ()


class OrphanMachine(RuleBasedStateMachine):
    """
    Upload, lose, merge, replace, expire, spill and take back, in any order.

    The model is the set of keys that a manifest names, kept by hand, and all that was ever stored. It
    knows nothing of tables and searches.
    """

    @initialize()
    def begin(self) -> None:
        self.manifest = replace(PartitionManifest.begin(PARTITION, start_offset=0), leader_epoch=5)
        self.ever: set[str] = set()
        self.named: set[str] = set()
        self.parts: list = []
        self.uploads = 0

    def _new(self, base_offset: int, length: int, size_bytes: int = 100) -> RemoteSegment:
        self.uploads += 1
        segment = remote(
            base_offset,
            base_offset + length - 1,
            size_bytes=size_bytes,
            index_crc32c=self.uploads,
            leader_epoch=5,
            writer_id=WRITERS[self.uploads % 3],
        )
        self.ever |= self._keys(segment)
        return segment

    def _keys(self, segment: RemoteSegment) -> set[str]:
        return {data_key(PARTITION, segment), index_key(PARTITION, segment)}

    @property
    def part_names(self) -> frozenset:
        return frozenset(encode_spillover(part)[1] for part in self.parts)

    @rule(length=st.integers(1, 5))
    def upload(self, length: int) -> None:
        segment = self._new(self.manifest.next_offset, length)
        self.named |= self._keys(segment)
        self.manifest = self.manifest.appended([segment])

    @precondition(lambda self: self.manifest.next_offset > 0)
    @rule(data=st.data())
    def lose_an_upload(self, data: st.DataObject) -> None:
        self._new(data.draw(st.integers(0, self.manifest.next_offset - 1)), data.draw(st.integers(1, 5)))

    @precondition(lambda self: len(self.manifest.segments) > 2)
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.manifest.segments) - 2))
        first, second = self.manifest.segments[row], self.manifest.segments[row + 1]
        length = second.next_offset - first.base_offset
        merged = self._new(first.base_offset, length, first.size_bytes + second.size_bytes)
        self.named |= self._keys(merged)
        self.manifest = self.manifest.merged(merged, now_ms=0)

    @precondition(lambda self: len(self.manifest.segments) > 1 and not self.parts)
    @rule()
    def expire(self) -> None:
        self.manifest = self.manifest.expired(1, now_ms=0)

    @precondition(lambda self: self.manifest.retired)
    @rule()
    def delete_retired(self) -> None:
        gone = self._keys(self.manifest.retired[0].segments[0])
        self.manifest = self.manifest.forgotten(1)
        self.named -= gone
        self.ever -= gone

    @precondition(lambda self: len(self.manifest.segments) > 1)
    @rule()
    def replace_the_tail(self) -> None:
        last = self.manifest.segments[-1]
        self.named -= self._keys(last)
        self.manifest = cut_back(self.manifest, last.base_offset, leader_epoch=5, now_ms=-GRACE_MS)

    @precondition(lambda self: len(self.manifest.segments) > 1)
    @rule()
    def spill(self) -> None:
        part = part_to_spill(self.manifest, 1)
        _, name = encode_spillover(part)
        self.parts.append(part)
        self.named.add(spillover_key(PARTITION, name))
        self.ever.add(spillover_key(PARTITION, name))
        self.manifest = spilled(self.manifest, part, name)

    @precondition(lambda self: len(self.manifest.segments) > 1)
    @rule()
    def lose_a_part(self) -> None:
        part = part_to_spill(self.manifest, 1)
        self.ever.add(spillover_key(PARTITION, encode_spillover(part)[1]))

    @precondition(lambda self: len(self.parts) > 1 and self.manifest.start_offset < self.parts[0].next_offset)
    @rule()
    def expire_spilled(self) -> None:
        first = self.parts[0].segments
        held = first.without_head(first.row_at_or_after(self.manifest.start_offset))
        self.manifest = spillover_expired(self.manifest, held, now_ms=0)

    @precondition(lambda self: self.parts)
    @rule()
    def take_back(self) -> None:
        self.named -= {spillover_key(PARTITION, name) for name in self.part_names}
        self.manifest = with_parts(self.manifest, self.parts)
        self.parts = []

    @invariant()
    def nothing_that_is_named_is_an_orphan(self) -> None:
        of = Owner(PARTITION, TopicState.LIVE, self.manifest, tuple(self.parts), self.part_names)
        objects = [StoredObject(key, 1, 0) for key in sorted(self.ever)]
        plan = plan_orphans(of, objects, grace_ms=GRACE_MS, now_ms=NOW_MS)
        orphans = {one.stored.key for one in plan.orphans}
        assert not orphans & self.named
        reasons = dict(plan.kept)
        assert {key for key, reason in reasons.items() if reason is Keep.NAMED} == self.named
        for key in self.ever - self.named - orphans:
            # What is unnamed and stays lies at the archive's end.
            assert reasons[key] is Keep.AT_THE_END, (key, reasons[key])


TestOrphans = OrphanMachine.TestCase
TestOrphans.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
