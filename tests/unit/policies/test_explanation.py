"""Explanations: one entry a segment, with its place, its state, the reason and the next step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import TIME_MS, local_log, remote, stored
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import LogBounds
from tieringd.policies.explanation import Place, State, TopicFacts, explain, why_idle
from tieringd.policies.local_hint import HintShape, StorageMode
from tieringd.policies.local_retention import LocalLimit, LocalTarget, plan_trim
from tieringd.policies.total_retention import TotalRetention, plan_total_retention
from tieringd.policies.trim_target import why_never_trimmed

BASES = (0, 10, 20, 30, 40)
"""Four closed segments of 1024 bytes, and the active one."""
NO_TOTAL = TotalRetention(None, None)
NEWEST_MS = TIME_MS + 999
NOW_MS = NEWEST_MS + 60_000
FAR_MS = NOW_MS + 10**12


def facts(
    *,
    target_ms=None,
    target_bytes=None,
    mode=StorageMode.TIERED_CLOUD,
    is_compacted=False,
    is_kafka=True,
    is_internal=False,
    **changes,
) -> TopicFacts:
    """Return a topic with an enforced local target; *changes* go to the facts."""
    target = LocalTarget(
        LocalLimit(target_ms, target_ms, "ms", is_explicit=True),
        LocalLimit(target_bytes, target_bytes, "bytes", is_explicit=True),
    )
    fields = {"total": NO_TOTAL, "is_compact_only": False, **changes}
    never = why_never_trimmed(
        is_kafka=is_kafka,
        is_compact_only=fields["is_compact_only"],
        is_policy_empty=not (fields["total"].deletes or fields["is_compact_only"]),
        is_internal=is_internal,
        is_read_remotely=fields["total"].is_read_remotely,
    )
    shape = HintShape(mode, is_compacted, target.enforced, never)
    return TopicFacts(local_target=target, hint_shape=shape, **fields)


def archive(*bases, first=None):
    """Return a manifest of segments that begin and end at *bases*."""
    rows = [remote(base, end - 1) for base, end in pairwise(bases)]
    return stored(rows, start_offset=first)


def explained(
    topic, *, bases=BASES, manifest=None, start=0, stable=None, sizes=None, now_ms=NOW_MS, log=None
):
    """Return each segment's explanation by its base offset."""
    log = local_log(bases, sizes=sizes) if log is None else log
    bounds = LogBounds(start, bases[-1] + 5 if stable is None else stable, bases[-1] + 5)
    found = explain(log, archive() if manifest is None else manifest, bounds, topic, now_ms=now_ms)
    order = [one.base_offset for one in found.segments]
    assert order == sorted(set(order))
    return {one.base_offset: one for one in found.segments}


def seen(found):
    """Return place and state of each segment, by its base offset."""
    return {base: (one.place, one.state) for base, one in found.items()}


def test_log_that_is_not_archived_is_uploaded_in_order():
    """Closed and stable segments are due, one after the other; the active one waits to be closed."""
    found = explained(facts())
    assert seen(found) == {
        0: (Place.LOCAL, State.DUE),
        10: (Place.LOCAL, State.DUE),
        20: (Place.LOCAL, State.DUE),
        30: (Place.LOCAL, State.DUE),
        40: (Place.LOCAL, State.ACTIVE),
    }
    assert found[0].reason == "closed and stable, and not uploaded yet"
    assert found[0].next_step == "the daemon's next rounds upload the segment"
    assert found[30].next_step == "the daemon's next rounds upload the segment, after 3 earlier segments"
    assert (found[0].local_bytes, found[0].archived_bytes, found[0].last_offset) == (1024, None, 9)
    assert (found[40].reason, found[40].last_offset) == ("the broker still appends to the segment", None)
    assert found[40].next_step == "the segment is uploaded once the broker has closed it"


def test_open_transaction_holds_a_segment_and_those_after_it():
    """The segment with the last stable offset says what it waits for, and the later ones follow it."""
    found = explained(facts(), manifest=archive(0, 10), stable=25)
    assert seen(found) == {
        0: (Place.BOTH, State.KEPT),
        10: (Place.LOCAL, State.DUE),
        20: (Place.LOCAL, State.WAITING),
        30: (Place.LOCAL, State.WAITING),
        40: (Place.LOCAL, State.ACTIVE),
    }
    waits = "segment 20 ends past the last stable offset 25: a transaction is open"
    assert found[20].reason == waits
    assert found[30].reason == f"segments are uploaded in order, and {waits}"
    assert found[30].next_step == "the segment is uploaded after segment 20"


def test_active_segment_tells_when_its_stable_part_goes():
    """The stable part of the active segment is due one upload interval after the last upload."""
    topic = facts(upload_interval_ms=60_000)
    manifest = archive(*BASES)
    uploaded_ms = TIME_MS + 2000
    before = explained(topic, manifest=manifest, now_ms=uploaded_ms + 15_000)[40]
    assert (before.state, before.due_ms) == (State.ACTIVE, uploaded_ms + 60_000)
    assert (
        before.next_step == "the segment is uploaded once the broker has closed it; its stable part in 45 s"
    )
    after = explained(topic, manifest=manifest, now_ms=uploaded_ms + 60_000)[40]
    assert (after.state, after.reason) == (
        State.DUE,
        "its stable part has waited long enough, and not uploaded yet",
    )
    idle = explained(topic, manifest=manifest, now_ms=uploaded_ms + 60_000, stable=40)[40]
    assert (
        idle.next_step
        == "the segment is uploaded once the broker has closed it, or with the next stable record"
    )


def test_part_of_a_segment_in_the_archive_is_said():
    """A segment that an upload ended inside is partly there, and the rest of it is uploaded."""
    found = explained(facts(), manifest=archive(0, 10, 15))
    assert (found[10].place, found[10].state, found[10].archived_bytes) == (Place.PARTLY, State.DUE, 1024)
    active = explained(facts(), manifest=archive(*BASES, 43))[40]
    assert (active.place, active.state, active.archived_bytes) == (Place.PARTLY, State.ACTIVE, 1024)


def test_trim_takes_what_is_past_the_local_target():
    """A segment past the limit is trimmable. The others say how many bytes it still takes."""
    found = explained(facts(target_bytes=3 * 1024), manifest=archive(*BASES))
    assert [found[base].state for base in BASES] == [
        State.TRIMMABLE,
        State.TRIMMABLE,
        State.KEPT,
        State.KEPT,
        State.ACTIVE,
    ]
    assert found[0].reason == "the segment is in the archive, and local retention does not keep it"
    assert found[20].reason == "2048 of 3072 bytes follow it (bytes)"
    assert found[20].next_step == "local retention releases the segment after 1024 more bytes"


def test_segment_behind_one_that_stays_waits_for_it():
    """A trim takes from the head: an older segment behind a younger one goes no earlier."""
    rows = [remote(0, 9, max_timestamp_ms=NOW_MS, uploaded_at_ms=NOW_MS), remote(10, 19)]
    found = explained(facts(target_ms=30_000), bases=(0, 10, 20), manifest=stored(rows))
    assert found[0].due_ms == NOW_MS + 30_000
    assert found[10].state is State.KEPT
    assert found[10].reason.startswith("segments are trimmed in order, and segment 0")
    assert found[10].next_step == "the segment is trimmed after the segments before it"


def test_stable_part_of_a_closed_segment_goes_before_its_end():
    """A segment held by a transaction is due in part past the upload interval, and the next follows it."""
    topic = facts(upload_interval_ms=0)
    found = explained(topic, manifest=archive(0, 10, 20), stable=25)
    assert [found[base].state for base in (20, 30)] == [State.DUE, State.WAITING]
    assert found[20].reason == "its stable part has waited long enough, and not uploaded yet"
    assert found[30].next_step == "the segment is uploaded after segment 20"


def test_segment_in_two_pieces_is_as_young_as_the_younger_and_goes_with_the_later():
    """A file that was uploaded in two parts waits for both limits of time to pass."""
    rows = [remote(0, 4, size_bytes=512), remote(5, 9, size_bytes=512, max_timestamp_ms=TIME_MS + 1500)]
    found = explained(facts(target_ms=90_000), bases=(0, 10), manifest=stored(rows))
    assert found[0].due_ms == TIME_MS + 1500 + 90_000
    half_gone = facts(total=TotalRetention(None, 1600))
    assert explained(half_gone, bases=(0, 10), manifest=stored(rows))[0].state is State.KEPT


def test_log_without_an_active_segment_repeats_nothing():
    """A stored segment that is on disk has one entry. Redpanda's logs show only closed segments."""
    log = local_log(BASES)
    closed = replace(log, segments=log.segments[:-1])
    found = explained(facts(), log=closed, manifest=archive(*BASES))
    assert seen(found) == dict.fromkeys(BASES[:-1], (Place.BOTH, State.KEPT))


def test_stored_segment_in_a_hole_of_the_log_is_told():
    """An archived segment between two files says that no file has it."""
    log = local_log(BASES)
    holed = replace(log, segments=(log.segments[0], *log.segments[2:]))
    found = explained(facts(), log=holed, manifest=archive(*BASES))
    assert seen(found)[10] == (Place.ARCHIVE, State.ARCHIVED)
    assert found[10].reason == "the local log has no file with all offsets of the segment"


def test_trimmed_segment_waits_for_the_broker():
    """Files below the log's start are the broker's to delete."""
    found = explained(facts(), manifest=archive(*BASES), start=20)
    assert [found[base].state for base in (0, 10, 20)] == [State.LEAVING, State.LEAVING, State.KEPT]
    assert found[10].reason == "the log begins after the segment, at offset 20"


@pytest.mark.parametrize(
    ("topic", "because"),
    [
        pytest.param(facts(mode=StorageMode.CLOUD), "there is no local retention hint", id="cloud"),
        pytest.param(facts(is_compacted=True), "there is no local retention hint", id="compact, delete"),
    ],
)
def test_topic_without_local_retention_gives_up_all_that_is_durable(topic, because):
    """Everything durable may go if local retention does not apply to the topic, whatever the limits are."""
    found = explained(topic, manifest=archive(*BASES[:4]))
    assert [found[base].state for base in BASES] == [*[State.TRIMMABLE] * 3, State.DUE, State.ACTIVE]
    assert because in found[0].reason


def test_topic_without_local_retention_still_waits_for_what_is_not_durable():
    """Segments behind a file that is not proved stay, and local limits are not named as the reason."""
    found = explained(
        facts(mode=StorageMode.CLOUD, target_bytes=10**9), manifest=archive(*BASES), sizes={0: 1000}
    )
    assert found[10].reason.startswith("segments are trimmed in order, and segment 0 has 1000 bytes on disk")


@pytest.mark.parametrize(
    ("topic", "reason", "next_step"),
    [
        pytest.param(
            facts(target_bytes=0, is_compacted=True, is_compact_only=True),
            "Kafka refuses to delete records of a topic whose cleanup.policy is only compact",
            "it is trimmed only if cleanup.policy includes delete",
            id="compact-only on Kafka",
        ),
        pytest.param(
            facts(target_bytes=0, total=replace(NO_TOTAL, deletes=False)),
            "Kafka may refuse to delete records of a topic whose cleanup.policy is empty",
            "it is trimmed only if cleanup.policy includes delete",
            id="empty policy on Kafka",
        ),
        pytest.param(
            facts(target_bytes=0, is_internal=True),
            "Kafka refuses to delete records of an internal topic",
            "until the broker itself deletes it",
            id="internal on Kafka",
        ),
        pytest.param(
            facts(target_bytes=0, total=replace(NO_TOTAL, is_read_remotely=False)),
            "remote read is off for the topic: only the broker's own retention trims it",
            "with remote read on, local retention would trim it",
            id="not read from the archive",
        ),
    ],
)
def test_topic_that_is_never_trimmed_says_why(topic, reason, next_step):
    """A segment stays, however far past its target, and the reason is the topic's."""
    found = explained(topic, manifest=archive(*BASES))
    assert [found[base].state for base in BASES[:-1]] == [State.KEPT] * 4
    assert found[0].reason == reason
    assert next_step in found[0].next_step


@pytest.mark.parametrize("fields", [{"is_compacted": True, "is_compact_only": True}, {"is_internal": True}])
def test_redpanda_trims_what_kafka_refuses(fields):
    """Only Kafka refuses to delete records of compact-only and internal topics."""
    found = explained(facts(target_bytes=0, is_kafka=False, **fields), manifest=archive(*BASES))
    assert found[0].state is State.TRIMMABLE


def test_archive_only_segment_tells_when_total_retention_takes_it():
    """Time and size both count: each offset once, from the segment on."""
    topic = facts(total=TotalRetention(120_000, 6 * 1024))
    found = explained(topic, bases=(20, 30, 40), manifest=archive(*BASES), start=20)
    assert seen(found)[0] == seen(found)[10] == (Place.ARCHIVE, State.ARCHIVED)
    assert (found[0].local_bytes, found[0].archived_bytes) == (None, 1024)
    assert found[0].reason == "the local log begins at offset 20"
    # Four stored segments and the active one, which is on disk alone.
    assert found[0].next_step == "total retention removes the segment in 1 min or after 1025 more bytes"
    assert found[10].next_step == "total retention removes the segment in 1 min or after 2049 more bytes"
    assert found[0].due_ms == NEWEST_MS + 120_000


def test_archive_only_segment_without_a_time_counts_from_its_upload():
    """Records without timestamps are as old as their upload."""
    rows = [remote(0, 9, max_timestamp_ms=-1, uploaded_at_ms=TIME_MS)]
    found = explained(facts(total=TotalRetention(10**9, None)), bases=(10,), manifest=stored(rows))
    assert found[0].due_ms == TIME_MS + 10**9


@pytest.mark.parametrize(
    ("total", "because"),
    [
        (TotalRetention(0, 0, deletes=False), "cleanup.policy does not delete"),
        (TotalRetention(None, None), "retention.ms and retention.bytes are unlimited"),
    ],
)
def test_archive_without_total_retention_keeps_everything(total, because):
    """The next step says why nothing deletes the segment."""
    found = explained(facts(total=total), bases=(40, 50), manifest=archive(*BASES), start=40)
    assert (found[0].state, found[0].next_step) == (State.ARCHIVED, f"the segment stays: {because}")


def test_segments_past_total_retention_go_for_good():
    """Both tiers give up what total retention does not keep, whatever the local target is."""
    topic = facts(total=TotalRetention(None, 3 * 1024))
    found = explained(topic, bases=(10, 20, 30, 40), manifest=archive(*BASES), start=10)
    assert seen(found) == {
        0: (Place.ARCHIVE, State.EXPIRED),
        10: (Place.BOTH, State.EXPIRED),
        20: (Place.BOTH, State.KEPT),
        30: (Place.BOTH, State.KEPT),
        40: (Place.LOCAL, State.ACTIVE),
    }
    assert found[10].reason == "total retention keeps only offset 20 and later"


def test_stored_segment_that_reaches_into_the_local_log_has_its_own_entry():
    """A segment that another leader cut elsewhere stands beside the file that holds its end."""
    found = explained(facts(), bases=(15, 20, 30), manifest=archive(0, 20), start=15)
    assert seen(found) == {
        0: (Place.ARCHIVE, State.ARCHIVED),
        15: (Place.BOTH, State.KEPT),
        20: (Place.LOCAL, State.DUE),
        30: (Place.LOCAL, State.ACTIVE),
    }


def test_gap_and_missing_offsets_are_nowhere():
    """A recorded gap has its reason, and offsets that have just gone are not a gap yet."""
    manifest = archive(0, 10).with_gap(Gap(10, 19, "deleted too early", TIME_MS))
    found = explained(facts(), bases=(30, 40), manifest=manifest, start=30)
    assert seen(found) == {
        0: (Place.ARCHIVE, State.ARCHIVED),
        10: (Place.NOWHERE, State.GAP),
        20: (Place.NOWHERE, State.MISSING),
        30: (Place.LOCAL, State.DUE),
        40: (Place.LOCAL, State.ACTIVE),
    }
    assert (found[10].reason, found[10].last_offset) == ("deleted too early", 19)
    assert (found[20].last_offset, found[20].local_bytes, found[20].archived_bytes) == (29, None, None)


def test_gap_that_is_on_disk_is_told_with_its_file():
    """A file whose offsets are a recorded gap is never uploaded, and is no second entry."""
    manifest = archive(0, 10).with_gap(Gap(10, 19, "magic 1", TIME_MS)).appended([remote(20, 29)])
    found = explained(facts(target_bytes=0), manifest=manifest)
    assert seen(found)[10] == (Place.LOCAL, State.UNPROVED)
    assert found[10].next_step == "the segment is never uploaded: a gap is recorded for its offsets (magic 1)"
    assert found[0].state is State.TRIMMABLE
    assert found[20].state is State.KEPT
    assert "offset 10 of segment 10 is not in the archive" in found[20].reason


def test_gap_beside_a_segment_is_not_its_own():
    """A file that differs from its copy is not taken for a gap that ends where it begins."""
    manifest = archive(0, 10).with_gap(Gap(10, 19, "magic 1", TIME_MS)).appended([remote(20, 29)])
    found = explained(facts(), manifest=manifest, sizes={20: 1000})
    assert found[20].state is State.UNPROVED
    assert "verify --deep" in found[20].next_step


@pytest.mark.parametrize(
    ("topic", "next_step"),
    [
        (facts(target_bytes=0), "compare it with the archive by `tieringd archive verify --deep`"),
        (
            facts(target_bytes=0, is_compacted=True),
            "but it is not uploaded again: cloud_storage_enable_compacted_topic_reupload is off",
        ),
        (
            facts(target_bytes=0, is_compacted=True, idle_because="the topic is paused"),
            "but it is not uploaded again: the topic is paused",
        ),
        (
            facts(target_bytes=0, is_compacted=True, reuploads_compacted=True),
            "housekeeping replaces the archived one",
        ),
    ],
)
def test_file_with_another_size_than_its_copy_is_unproved(topic, next_step):
    """A file that is not what was stored is named with both sizes, and what an operator may do."""
    found = explained(topic, manifest=archive(*BASES), sizes={10: 1000})
    assert seen(found)[10] == (Place.PARTLY, State.UNPROVED)
    assert found[10].reason == "segment 10 has 1000 bytes on disk and 1024 in the archive"
    assert next_step in found[10].next_step


def test_compacted_file_that_replaces_nothing_says_why():
    """The next step of a compacted segment gives housekeeping's reason for not uploading it again."""
    topic = facts(target_bytes=0, is_compacted=True, is_compact_only=True, reuploads_compacted=True)
    found = explained(topic, manifest=archive(*BASES), sizes={10: 1025})
    assert found[10].state is State.UNPROVED
    assert "another broker had already compacted the segment further" in found[10].next_step


@pytest.mark.parametrize(
    ("flags", "because"),
    [
        ({}, ""),
        ({"is_written": False, "is_paused": True}, "remote write is off"),
        ({"is_paused": True, "is_held": False}, "tieringd topic resume"),
        ({"is_held": False, "is_led": False}, "no replica"),
        ({"is_led": False}, "another broker leads"),
    ],
)
def test_idle_partition_names_the_first_thing_to_change(flags, because):
    """The reasons that stop a partition altogether come with the most general first."""
    found = why_idle(**{"is_written": True, "is_paused": False, "is_held": True, "is_led": True, **flags})
    assert because in found
    assert bool(found) == bool(because)


def test_idle_partition_neither_uploads_nor_trims():
    """Every segment tells the reason that holds for the whole partition."""
    topic = facts(target_bytes=0, idle_because="the topic is paused")
    log, manifest = local_log(BASES), archive(0, 10)
    found = explain(log, manifest, None, topic, now_ms=FAR_MS)
    states = [(one.state, one.reason) for one in found.segments]
    assert states == [
        (State.KEPT, "the topic is paused"),
        *[(State.WAITING, "the topic is paused")] * 3,
        (State.ACTIVE, "the topic is paused"),
    ]
    assert (found.trim_offset, found.trim_because) == (0, "the topic is paused")


def test_partition_without_files_here_is_explained_from_the_archive():
    """A broker without a replica still tells what the archive has."""
    found = explain(
        local_log(()), archive(0, 10), None, facts(idle_because="this broker has no replica"), now_ms=NOW_MS
    )
    (one,) = found.segments
    assert (one.place, one.reason) == (Place.ARCHIVE, "this broker has no file of the partition on disk")


def test_explanation_sums_up_what_holds_for_all():
    """The trim target and total retention come with their own reasons."""
    log, bounds = local_log(BASES), LogBounds(0, 45, 45)
    topic = facts(target_bytes=3 * 1024, total=TotalRetention(None, 4 * 1024))
    found = explain(log, archive(*BASES), bounds, topic, now_ms=NOW_MS)
    assert (found.trim_offset, found.trim_because) == (20, "local retention keeps offset 20 and later")
    assert (found.expired_offset, found.never_trimmed_because) == (10, "")
    assert found.expired_because == "segment 10 stays: the partition has 4096 of at most 4096 bytes"


@given(
    times=st.lists(st.integers(0, 100), min_size=1, max_size=6),
    target_ms=st.none() | st.integers(0, 100),
    target_bytes=st.none() | st.integers(0, 6 * 1024),
    total=st.builds(TotalRetention, st.none() | st.integers(0, 200), st.none() | st.integers(0, 8 * 1024)),
    now=st.integers(0, 250),
)
def test_explanation_agrees_with_the_policies(times, target_ms, target_bytes, total, now):
    """Segments that are called trimmable or expired are those that are planned, and a due time is right."""
    bases = range(0, 10 * (len(times) + 1), 10)
    rows = [
        remote(base, base + 9, max_timestamp_ms=TIME_MS + time, uploaded_at_ms=TIME_MS + 500)
        for base, time in zip(bases, times, strict=False)
    ]
    log, manifest, bounds = local_log(bases), stored(rows), LogBounds(0, bases[-1], bases[-1])
    topic = facts(target_ms=target_ms, target_bytes=target_bytes, total=total)
    found = explain(log, manifest, bounds, topic, now_ms=TIME_MS + now).segments

    expired = plan_total_retention(manifest, log, total, log_start_offset=0, now_ms=TIME_MS + now).segments
    assert [one.state for one in found[:expired]] == [State.EXPIRED] * expired

    def trimmed(now_ms):
        plan = plan_trim(log, manifest, topic.hint_shape.target, log_start_offset=0, now_ms=now_ms)
        return [one.local.base_offset for one in plan.candidates]

    told = [one.base_offset for one in found if one.state in {State.TRIMMABLE, State.EXPIRED}]
    gone = trimmed(TIME_MS + now)
    assert told == [*bases[: max(expired, len(gone))]]
    first_kept = next(one for one in found if one.state in {State.KEPT, State.ACTIVE})
    if first_kept.state is State.KEPT and first_kept.due_ms is not None:
        assert first_kept.base_offset not in trimmed(first_kept.due_ms - 1)
        assert first_kept.base_offset in trimmed(first_kept.due_ms) or expired > len(gone)


def test_segment_that_retention_took_is_told_until_its_objects_are_gone():
    """The segment is out of the archive, and its objects wait for readers that began before."""
    manifest = archive(*BASES).expired(2, now_ms=NOW_MS - 1000)
    found = explained(
        facts(delete_delay_ms=61_000), manifest=manifest, log=local_log(BASES[2:]), start=20, bases=BASES[2:]
    )
    assert seen(found)[0] == seen(found)[10] == (Place.ARCHIVE, State.RETIRED)
    assert (found[0].next_step, found[0].due_ms) == ("its objects are deleted in 1 min", NOW_MS + 60_000)
    due = explained(
        facts(delete_delay_ms=1000), manifest=manifest, log=local_log(BASES[2:]), start=20, bases=BASES[2:]
    )
    assert due[10].next_step == "its objects are deleted in the next rounds"


def test_parts_of_a_merged_segment_are_told_of_once():
    """The merged segment stands for them, though their objects are still there."""
    plain = archive(*BASES)
    size_bytes = sum(one.size_bytes for one in plain.segments.overlapping(0, 20))
    manifest = plain.merged(replace(plain.segments[0], last_offset=19, size_bytes=size_bytes), now_ms=NOW_MS)
    found = explained(facts(), manifest=manifest, log=local_log(BASES[2:]), start=20, bases=BASES[2:])
    assert seen(found)[0] == (Place.ARCHIVE, State.ARCHIVED)
    assert (found[0].last_offset, 10 in found) == (19, False)


@pytest.mark.parametrize(
    ("changes", "next_step"),
    [
        pytest.param({}, "the segment is trimmed next", id="to be trimmed"),
        pytest.param(
            {"is_compact_only": True},
            "the broker deletes the segment by its own retention: Kafka refuses to delete records of a "
            "topic whose cleanup.policy is only compact",
            id="never trimmed",
        ),
    ],
)
def test_local_segment_that_retention_took_from_the_archive_is_expired(changes, next_step):
    """An expired segment is not called unproved, because no tier has to keep it."""
    found = explained(facts(**changes), manifest=archive(*BASES).expired(2, now_ms=NOW_MS))
    assert [found[base].state for base in BASES[:3]] == [State.EXPIRED, State.EXPIRED, State.KEPT]
    assert found[0].reason == "total retention keeps only offset 20 and later"
    assert found[0].next_step == next_step
    assert found[0].archived_bytes is None
