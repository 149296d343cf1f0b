"""The local retention hint: PR 30545's table, its cadence, and what is published."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import TIME_MS, local_log, remote, stored
from tieringd.policies.local_hint import (
    EVALUATION_INTERVAL_MS,
    HintMemory,
    HintPlan,
    HintShape,
    HintStep,
    StorageMode,
    hint_due_ms,
    next_hint_step,
    plan_hint,
)
from tieringd.policies.local_retention import LocalRetentionTarget

TIERED, CLOUD = StorageMode.TIERED_CLOUD, StorageMode.CLOUD
TARGET = LocalRetentionTarget(target_ms=None, target_bytes=2048)
SHAPE = HintShape(TIERED, is_compacted=False, target=TARGET)
FRESH = HintMemory(SHAPE, evaluated_at_ms=TIME_MS)
DUE_MS = TIME_MS + EVALUATION_INTERVAL_MS
SEGMENT_BYTES = 1000

BASES = [0, 10, 20, 30, 40]
LOG = local_log(BASES)
MANIFEST = stored(remote(base, end - 1) for base, end in pairwise(BASES))


def step(shape=SHAPE, memory=FRESH, *, stored=30, now_ms=TIME_MS):
    found, because = next_hint_step(shape, memory, stored=stored, segment_bytes=SEGMENT_BYTES, now_ms=now_ms)
    assert because
    return found


def plan(shape=SHAPE, memory=FRESH, *, stored=30, now_ms=TIME_MS, log=LOG, log_start_offset=0):
    return plan_hint(
        log,
        MANIFEST,
        shape,
        memory,
        stored=stored,
        segment_bytes=SEGMENT_BYTES,
        log_start_offset=log_start_offset,
        now_ms=now_ms,
    )


@pytest.mark.parametrize(
    ("mode", "is_compacted", "stored", "at_once", "at_cadence"),
    [
        pytest.param(TIERED, False, None, HintStep.EVALUATE, HintStep.EVALUATE, id="no hint yet"),
        pytest.param(TIERED, False, 30, HintStep.LEAVE, HintStep.EVALUATE, id="a hint"),
        pytest.param(TIERED, False, 0, HintStep.LEAVE, HintStep.EVALUATE, id="offset 0 is a hint"),
        pytest.param(TIERED, True, 30, HintStep.CLEAR, HintStep.CLEAR, id="compacted, with a hint"),
        pytest.param(TIERED, True, 0, HintStep.CLEAR, HintStep.CLEAR, id="compacted, with offset 0"),
        pytest.param(TIERED, True, None, HintStep.LEAVE, HintStep.LEAVE, id="compacted, without"),
        pytest.param(CLOUD, False, 30, HintStep.CLEAR, HintStep.CLEAR, id="cloud, with a hint"),
        pytest.param(CLOUD, False, None, HintStep.LEAVE, HintStep.LEAVE, id="cloud, without"),
        pytest.param(CLOUD, True, 30, HintStep.CLEAR, HintStep.CLEAR, id="cloud, compacted, with a hint"),
        pytest.param(CLOUD, True, None, HintStep.LEAVE, HintStep.LEAVE, id="cloud, compacted, without"),
    ],
)
def test_hint_step_follows_the_rule_table(mode, is_compacted, stored, at_once, at_cadence):
    """Mode, compaction and what is stored decide, both right after an evaluation and when one is due."""
    shape = HintShape(mode, is_compacted, TARGET)
    memory = HintMemory(shape, TIME_MS)
    assert step(shape, memory, stored=stored) is at_once
    assert step(shape, memory, stored=stored, now_ms=DUE_MS) is at_cadence


@pytest.mark.parametrize(
    ("shape", "memory", "now_ms", "expected"),
    [
        pytest.param(SHAPE, FRESH, TIME_MS, HintStep.LEAVE, id="just evaluated"),
        pytest.param(SHAPE, FRESH, DUE_MS - 1, HintStep.LEAVE, id="short of 60 s"),
        pytest.param(SHAPE, FRESH, DUE_MS, HintStep.EVALUATE, id="60 s"),
        pytest.param(SHAPE, FRESH, TIME_MS - 1, HintStep.EVALUATE, id="the clock was set back"),
        pytest.param(SHAPE, FRESH.noted(999), TIME_MS, HintStep.LEAVE, id="less than a segment"),
        pytest.param(SHAPE, FRESH.noted(400).noted(600), TIME_MS, HintStep.EVALUATE, id="a segment in all"),
        pytest.param(SHAPE, FRESH.noted(1001), TIME_MS, HintStep.EVALUATE, id="more than a segment"),
        pytest.param(SHAPE, None, TIME_MS, HintStep.EVALUATE, id="a new leader"),
        pytest.param(
            replace(SHAPE, target=LocalRetentionTarget(None, 2049)),
            FRESH,
            TIME_MS,
            HintStep.EVALUATE,
            id="another limit of bytes",
        ),
        pytest.param(
            replace(SHAPE, target=LocalRetentionTarget(1, 2048)),
            FRESH,
            TIME_MS,
            HintStep.EVALUATE,
            id="another limit of time",
        ),
        pytest.param(
            SHAPE,
            replace(FRESH, shape=replace(SHAPE, storage_mode=CLOUD)),
            TIME_MS,
            HintStep.EVALUATE,
            id="another mode",
        ),
        pytest.param(
            SHAPE,
            replace(FRESH, shape=replace(SHAPE, is_compacted=True)),
            TIME_MS,
            HintStep.EVALUATE,
            id="compacted no longer",
        ),
    ],
)
def test_hint_is_evaluated_at_its_triggers(shape, memory, now_ms, expected):
    """A segment's worth of bytes, 60 s, another configuration or another leader: each is enough."""
    assert step(shape, memory, now_ms=now_ms) is expected


def test_hint_is_due_sixty_seconds_after_its_evaluation():
    """The time that is promised is the time at which the step changes."""
    assert hint_due_ms(FRESH) == TIME_MS + 60_000


def test_hint_that_is_new_is_published():
    """Four closed segments of 1 KiB and an active one, of which 2 KiB stay."""
    assert plan(stored=None, memory=None) == HintPlan(
        HintStep.EVALUATE,
        30,
        is_change=True,
        memory=HintMemory(SHAPE, TIME_MS),
        because="there is no hint yet; segment 30 is within the local retention target",
        trims_to=30,
    )


def test_hint_without_anything_to_trim_records_no_trim():
    """The hint is where the log begins, which a user may have cut."""
    shape = replace(SHAPE, target=LocalRetentionTarget(None, None))
    found = plan(shape, None, stored=30, log_start_offset=7)
    assert (found.offset, found.trims_to) == (7, 0)


def test_first_hint_waits_until_something_may_go():
    """A first hint is not worth a commit before that: an awaited hint lets nothing go either."""
    shape = replace(SHAPE, target=LocalRetentionTarget(None, None))
    found = plan(shape, None, stored=None)
    assert (found.step, found.offset, found.is_change) == (HintStep.EVALUATE, None, False)


def test_stored_hint_moves_down_to_the_log_start_where_nothing_may_go():
    """A hint that is there is never taken away, as no hint at all would let everything go."""
    shape = replace(SHAPE, target=LocalRetentionTarget(None, None))
    assert plan(shape, None, stored=30).offset == 0
    assert plan(shape, None, stored=30, log_start_offset=7).offset == 7


def test_hint_that_is_the_same_is_not_published_again():
    """The evaluation is remembered, so the next one is due a cadence later, and nothing is written."""
    found = plan(now_ms=DUE_MS)
    assert (found.step, found.offset, found.is_change) == (HintStep.EVALUATE, 30, False)
    assert found.memory == HintMemory(SHAPE, DUE_MS)
    again = plan(memory=found.memory, now_ms=DUE_MS)
    assert (again.step, again.offset, again.is_change, again.memory) == (
        HintStep.LEAVE,
        30,
        False,
        found.memory,
    )


@pytest.mark.parametrize(("target_bytes", "offset"), [(4096, 10), (1024, 40), (10**9, 0)])
def test_hint_moves_with_the_target_up_and_down(target_bytes, offset):
    """A larger target brings the hint down, a smaller one up, at once."""
    found = plan(replace(SHAPE, target=LocalRetentionTarget(None, target_bytes)))
    assert (found.step, found.offset, found.is_change) == (HintStep.EVALUATE, offset, True)
    assert found.because.startswith("the configuration has changed; ")


@pytest.mark.parametrize("shape", [replace(SHAPE, storage_mode=CLOUD), replace(SHAPE, is_compacted=True)])
def test_hint_that_has_no_say_any_more_is_cleared_once(shape):
    """A stored hint is cleared once, and then there is nothing left to do."""
    found = plan(shape)
    assert (found.step, found.offset, found.is_change, found.memory) == (HintStep.CLEAR, None, True, None)
    again = plan(shape, found.memory, stored=found.offset)
    assert (again.step, again.offset, again.is_change) == (HintStep.LEAVE, None, False)


@pytest.mark.parametrize(
    ("shape", "stored"),
    [
        pytest.param(SHAPE, None, id="first publish"),
        pytest.param(SHAPE, 10, id="another offset"),
        pytest.param(replace(SHAPE, storage_mode=CLOUD), 30, id="clear"),
    ],
)
def test_hint_whose_publish_failed_is_planned_again(shape, stored):
    """The memory is taken over after a publish only; with the old one the next plan is the same."""
    failed = plan(shape, FRESH, stored=stored, now_ms=DUE_MS)
    retried = plan(shape, FRESH, stored=stored, now_ms=DUE_MS + 1)
    assert failed.is_change
    assert (retried.offset, retried.is_change) == (failed.offset, True)


def test_hint_is_not_evaluated_while_it_is_left():
    """The stored hint holds between two evaluations, however the log changes meanwhile."""
    found = plan(log=local_log([0, 10]), stored=30)
    assert (found.step, found.offset, found.memory) == (HintStep.LEAVE, 30, FRESH)


targets = st.builds(LocalRetentionTarget, st.none() | st.integers(0, 10), st.none() | st.integers(0, 6000))
shapes = st.builds(HintShape, st.sampled_from(StorageMode), st.booleans(), targets)
ticks = st.tuples(
    st.integers(0, 90_000), st.integers(0, 700), st.none() | shapes, st.booleans(), st.booleans()
)


@given(shapes, st.lists(ticks, max_size=12))
def test_hint_follows_any_history_of_configurations_failures_and_leaders(shape, history):
    """The stored hint is what the configuration asks for after each publish, and within 60 s."""
    stored_hint, memory, now_ms, since_ms = None, None, TIME_MS, TIME_MS
    for passed_ms, appended, changed, fails, leader_changes in history:
        now_ms += passed_ms
        shape = changed or shape
        memory = None if leader_changes or memory is None else memory.noted(appended)
        found = plan(shape, memory, stored=stored_hint, now_ms=now_ms)
        assert found.is_change == (found.offset != stored_hint)
        if found.is_change and fails:
            continue
        stored_hint, memory = found.offset, found.memory
        since_ms = now_ms if found.step is HintStep.EVALUATE else since_ms
        if not shape.has_hint:
            assert (stored_hint, memory) == (None, None)
            continue
        assert memory is not None
        assert memory.shape == shape
        assert memory.bytes_since < SEGMENT_BYTES
        assert memory.evaluated_at_ms == since_ms > now_ms - EVALUATION_INTERVAL_MS
        assert stored_hint is None or stored_hint in BASES
        repeated = plan(shape, memory, stored=stored_hint, now_ms=now_ms)
        step = HintStep.EVALUATE if stored_hint is None else HintStep.LEAVE
        assert (repeated.step, repeated.is_change) == (step, False)
