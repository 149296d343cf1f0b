"""The trim target: how far a log may be trimmed, and what holds it there."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import local_log, remote, stored
from tieringd.policies.trim_target import (
    ShareGroupHold,
    TrimTarget,
    TrimWishes,
    choose_trim_target,
    plan_trim_to_target,
    why_never_trimmed,
)

BASES = [0, 10, 20, 30, 40]
LOG = local_log(BASES)


def archived(until=40):
    return stored(remote(base, end - 1) for base, end in pairwise(BASES) if base < until)


def choose(durable_offset, *, log_start_offset=0, **wishes):
    return choose_trim_target(
        TrimWishes(**wishes), durable_offset=durable_offset, log_start_offset=log_start_offset
    )


KEEPS_20 = "local retention keeps offset 20 and later"
KEEPS_30 = "local retention keeps offset 30 and later"
NO_HINT = "there is no local retention hint"
ASKED = "the space manager requested a trim to offset"
TO_20 = ", but only offsets below 20 are durable"
TO_30 = ", but only offsets below 30 are durable"


@pytest.mark.parametrize(
    ("durable", "hint", "cloud_gc", "offset", "because"),
    [
        pytest.param(30, 20, None, 20, KEEPS_20, id="the hint"),
        pytest.param(20, 30, None, 20, KEEPS_30 + TO_20, id="durable"),
        pytest.param(30, 30, None, 30, KEEPS_30, id="equal"),
        pytest.param(30, None, None, 30, NO_HINT + TO_30, id="no hint"),
        pytest.param(30, 0, None, 0, "local retention keeps offset 0 and later", id="hint is 0"),
        pytest.param(30, 10, 20, 20, f"{ASKED} 20", id="raised"),
        pytest.param(30, 10, 30, 30, f"{ASKED} 30", id="raised to all that is durable"),
        pytest.param(30, 10, 99, 30, f"{ASKED} 99{TO_30}", id="raised and clamped"),
        pytest.param(30, 20, 20, 20, KEEPS_20, id="asked for as much"),
        pytest.param(30, 20, 10, 20, KEEPS_20, id="asked for less"),
        pytest.param(30, 20, 0, 20, KEEPS_20, id="asked for nothing"),
        pytest.param(20, 30, 25, 20, KEEPS_30 + TO_20, id="all past what is durable"),
        pytest.param(20, 30, 15, 20, KEEPS_30 + TO_20, id="asked for what is durable"),
        pytest.param(30, None, 20, 30, NO_HINT + TO_30, id="asked without a hint"),
        pytest.param(30, None, 99, 30, NO_HINT + TO_30, id="asked without a hint, and too much"),
    ],
)
def test_trim_target_is_the_smaller_of_durable_and_hint(*, durable, hint, cloud_gc, offset, because):
    """The space manager raises it, durability bounds it, and a request is spent by being read."""
    found = choose(durable, hint=hint, cloud_gc_offset=cloud_gc)
    assert found == TrimTarget(offset, cloud_gc is not None, because)


@pytest.mark.parametrize(
    ("durable", "hint", "cloud_gc"),
    [
        pytest.param(30, 20, None, id="trimmed further than the hint"),
        pytest.param(30, 20, 24, id="trimmed further than was asked"),
        pytest.param(5, 20, 30, id="trimmed further than is durable"),
        pytest.param(5, None, None, id="trimmed further than is durable, and no hint"),
    ],
)
def test_trim_target_is_never_below_the_log_start(durable, hint, cloud_gc):
    """The target stands at the log's start if that is higher."""
    assert choose(durable, hint=hint, cloud_gc_offset=cloud_gc, log_start_offset=25).offset == 25


@pytest.mark.parametrize(
    ("hint", "cloud_gc", "offset", "because"),
    [
        pytest.param(None, None, 5, "the local retention hint is not published yet", id="nothing goes"),
        pytest.param(None, 20, 20, "the space manager requested a trim to offset 20", id="but for space"),
        pytest.param(None, 99, 30, "the space manager requested", id="as far as it is durable"),
        pytest.param(20, None, 20, "local retention keeps offset 20", id="there is one"),
    ],
)
def test_trim_target_awaits_the_first_hint(hint, cloud_gc, offset, because):
    """A hint that is still to come is not taken for none if local retention applies."""
    found = choose(30, hint=hint, cloud_gc_offset=cloud_gc, awaits_hint=True, log_start_offset=5)
    assert found.offset == offset
    assert found.because.startswith(because)


@pytest.mark.parametrize(("hint", "cloud_gc"), [(None, None), (20, None), (None, 30), (20, 30)])
def test_trim_target_of_a_log_that_is_never_trimmed_is_its_start(hint, cloud_gc):
    """A missing hint and the space manager do not move it. A request for space is spent all the same."""
    found = choose(30, hint=hint, cloud_gc_offset=cloud_gc, log_start_offset=5, never_because="it is so")
    assert found == TrimTarget(5, cloud_gc is not None, "it is so")


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        pytest.param({}, "", id="ordinary"),
        pytest.param(
            {"is_compact_only": True}, "Kafka refuses to delete records of a topic", id="compact only"
        ),
        pytest.param(
            {"is_policy_empty": True}, "Kafka may refuse to delete records of a topic", id="empty policy"
        ),
        pytest.param({"is_internal": True}, "Kafka refuses to delete records of an int", id="internal"),
        pytest.param(
            {"is_kafka": False, "is_compact_only": True, "is_internal": True},
            "",
            id="neither matters to another broker",
        ),
        pytest.param({"is_kafka": False, "is_policy_empty": True}, "", id="empty policy, another broker"),
        pytest.param({"is_read_remotely": False}, "remote read is off", id="write only"),
        pytest.param(
            {"is_kafka": False, "is_read_remotely": False},
            "remote read is off",
            id="write only, another broker",
        ),
    ],
)
def test_some_logs_are_never_trimmed(fields, begins):
    """DeleteRecords refuses some trims, and some would leave records unreadable."""
    ordinary = {
        "is_kafka": True,
        "is_compact_only": False,
        "is_policy_empty": False,
        "is_internal": False,
        "is_read_remotely": True,
    }
    found = why_never_trimmed(**ordinary | fields)
    assert found.startswith(begins)
    assert bool(found) == bool(begins)


def plan(*, until=40, log_start_offset=0, **wishes):
    target, found = plan_trim_to_target(
        LOG, archived(until), TrimWishes(**wishes), log_start_offset=log_start_offset
    )
    return target.offset, [one.local.base_offset for one in found.candidates], found


@pytest.mark.parametrize(
    ("hint", "cloud_gc", "until", "log_start", "offset", "trimmed", "because"),
    [
        pytest.param(
            20, None, 40, 0, 20, [0, 10], "segment 20 reaches past offset 20: local retention", id="hint"
        ),
        pytest.param(
            19, None, 40, 0, 19, [0], "segment 10 reaches past offset 19: local ret", id="inside a segment"
        ),
        pytest.param(
            30, None, 20, 0, 20, [0, 10], "offset 20 of segment 20 is not in the archive", id="durable"
        ),
        pytest.param(None, None, 40, 0, 40, [0, 10, 20, 30], "the active segment always stays", id="no hint"),
        pytest.param(
            None, None, 10, 0, 10, [0], "offset 10 of segment 10 is not in the archive", id="no hint, in part"
        ),
        pytest.param(
            10,
            30,
            40,
            0,
            30,
            [0, 10, 20],
            "segment 30 reaches past offset 30: the space manager",
            id="raised",
        ),
        pytest.param(10, 99, 40, 0, 40, [0, 10, 20, 30], "the active segment always stays", id="all of it"),
        pytest.param(10, 99, 20, 0, 20, [0, 10], "offset 20 of segment 20 is not in the", id="clamped"),
        pytest.param(30, None, 40, 15, 30, [10, 20], "segment 30 reaches", id="log start inside a segment"),
        pytest.param(10, None, 40, 15, 15, [], "segment 10 reaches past offset 15", id="nothing below"),
        pytest.param(20, None, 40, 20, 20, [], "segment 20 reaches past offset 20", id="gone already"),
    ],
)
def test_trim_to_a_target_takes_the_whole_segments_below_it(
    *, hint, cloud_gc, until, log_start, offset, trimmed, because
):
    """Closed, durable, and wholly below the target; and the next one's reason is an operator's."""
    found_offset, found_trimmed, found = plan(
        hint=hint, cloud_gc_offset=cloud_gc, until=until, log_start_offset=log_start
    )
    assert (found_offset, found_trimmed) == (offset, trimmed)
    assert found.kept_because.startswith(because)
    assert found.start_offset == max(log_start, trimmed[-1] + 10 if trimmed else 0)


def test_trim_of_a_log_that_is_never_trimmed_takes_nothing():
    """The one reason for the whole log is why it is never trimmed."""
    offset, trimmed, found = plan(cloud_gc_offset=99, log_start_offset=15, never_because="it is so")
    assert (offset, trimmed, found.start_offset, found.kept_because) == (15, [], 15, "it is so")


def test_trim_of_a_log_without_an_active_segment_takes_every_durable_one():
    """
    A trim takes every durable closed segment if a directory has no active segment yet.

    The log's end stays.
    """
    log = replace(LOG, segments=LOG.closed_segments)
    _, found = plan_trim_to_target(log, archived(), TrimWishes(), log_start_offset=0)
    assert (len(found.candidates), found.start_offset, found.kept_because) == (
        4,
        40,
        "there is no active segment yet",
    )


def test_trim_names_the_stored_pieces_of_each_segment():
    """The trimmer compares bytes with these before it asks the broker."""
    _, _, found = plan(hint=20)
    assert [one.pieces for one in found.candidates] == [(row,) for row in archived(20).segments]


offsets = st.integers(0, 60)


@given(offsets, st.none() | offsets, st.none() | offsets, offsets, st.sampled_from(["", "awaits", "never"]))
def test_trim_target_lets_go_of_what_is_durable_and_not_wanted(durable, hint, cloud_gc, log_start, state):
    """Each trimmed offset was gone before, or is durable and released by a hint or a request."""
    found = choose(
        durable,
        hint=hint,
        cloud_gc_offset=cloud_gc,
        log_start_offset=log_start,
        awaits_hint=state == "awaits",
        never_because="never" if state == "never" else "",
    )
    no_hint = 0 if state == "awaits" else 99
    kept_from = no_hint if hint is None else hint
    may_go = [
        at < log_start
        or (
            state != "never" and at < durable and (at < kept_from or (cloud_gc is not None and at < cloud_gc))
        )
        for at in range(100)
    ]
    assert found.offset == may_go.index(False)
    assert found.because
    assert found.spends_cloud_gc == (cloud_gc is not None)


@given(st.none() | offsets, st.none() | offsets, st.sampled_from(BASES), st.integers(0, 45), st.booleans())
def test_trim_takes_all_durable_closed_segments_below_the_target(hint, cloud_gc, until, log_start, is_short):
    """A prefix, never the active segment; and where the walk stops, the next segment must stay."""
    rows = [*archived(until).segments]
    if rows and is_short:
        rows = [*rows[:-1], remote(rows[-1].base_offset, rows[-1].last_offset - 4)]
    target, found = plan_trim_to_target(
        LOG, stored(rows), TrimWishes(hint, cloud_gc_offset=cloud_gc), log_start_offset=log_start
    )
    durable_to = rows[-1].next_offset if rows else 0
    limit = 99 if hint is None else max(hint, cloud_gc or 0)
    alive = [base for base in BASES[:-1] if base + 10 > log_start]
    expected = [base for base in alive if base + 10 <= min(durable_to, limit)]
    assert [one.local.base_offset for one in found.candidates] == expected
    assert target.offset <= max(log_start, durable_to)
    assert found.kept_because


@given(
    offset=st.integers(0, 50),
    hint=st.sampled_from([None, 0, 20, 40]),
    cloud_gc=st.sampled_from([None, 10, 30, 99]),
    kept_from_ms=st.sampled_from([0, 10**15]),
)
def test_share_group_keeps_its_records_unless_they_are_old_or_space_is_needed(
    offset, hint, cloud_gc, kept_from_ms
):
    """A share group takes nothing else out of the plan, and adds nothing to it."""
    hold = ShareGroupHold(offset, "it is so", kept_from_ms)
    _, free, _ = plan(hint=hint, cloud_gc_offset=cloud_gc)
    _, left, found = plan(hint=hint, cloud_gc_offset=cloud_gc, share_group_hold=hold)
    let_go = max(offset, cloud_gc or 0) if not kept_from_ms else 50
    assert left == [base for base in free if base + 10 <= let_go]
    if left != free:
        assert found.kept_because.endswith("is kept on disk: it is so")
