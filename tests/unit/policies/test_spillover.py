"""What of a manifest spills, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import remote, stored
from tieringd.model.spillover import ExpiredSpillover, Spillover, SpilloverName
from tieringd.policies.spillover import PARTS_AT_ONCE_MAX, ROWS_MIN, plan_spillover

TARGET = 10_000


def manifest_of(rows: int):
    return stored(remote(10 * row, 10 * row + 9) for row in range(rows))


def plan(rows: int, size_bytes: int, *, local_offset: int | None = None) -> tuple[int, ...]:
    return plan_spillover(
        manifest_of(rows), size_bytes=size_bytes, target_bytes=TARGET, local_offset=local_offset
    )


def test_manifest_within_its_target_keeps_all():
    """Nothing spills at the target size. One byte more spills segments."""
    assert plan(500, TARGET) == ()
    assert plan(500, TARGET + 1) == (249,)


@pytest.mark.parametrize(
    ("rows", "size_bytes", "parts"),
    [
        pytest.param(500, 10_100, (247,), id="a little over: one part"),
        pytest.param(1000, 20_000, (250, 250, 250), id="twice: down to half"),
        pytest.param(1000, 19_900, (251, 251), id="less than twice: no more than is needed"),
        pytest.param(100, 1_000_000, (ROWS_MIN, ROWS_MIN), id="large rows: parts of a least size"),
        pytest.param(40, 1_000_000, (), id="few rows, whatever their size"),
    ],
)
def test_parts_are_half_a_target_each(rows, size_bytes, parts):
    """The remaining size is between half of the target and all of it."""
    assert plan(rows, size_bytes) == parts


def test_first_spill_of_a_long_history_goes_on_with_the_next_commit():
    """The number of parts at once is limited, so that uploads do not wait for long."""
    assert plan(100 * 100, 50 * TARGET) == (100,) * PARTS_AT_ONCE_MAX


@pytest.mark.parametrize(
    ("local_offset", "parts"),
    [
        pytest.param(0, 0, id="all is local"),
        pytest.param(2499, 0, id="one segment too few"),
        pytest.param(2500, 1, id="one part is not local"),
        pytest.param(7499, 2, id="the last segment of the third part is"),
        pytest.param(None, 3, id="there is no local log"),
        pytest.param(10_000, 3, id="it begins behind the archive"),
    ],
)
def test_what_the_local_log_holds_stays(local_offset, parts):
    """Whole parts only, of segments that end before the local log begins."""
    assert plan(1000, 20_000, local_offset=local_offset) == (250,) * parts


def test_nothing_spills_behind_an_expired_part():
    """Parts follow each other without a hole, so one that is to be deleted goes first."""
    spillover = Spillover(0, SpilloverName(0, 99, 0, 0, 0), 0, 0, (ExpiredSpillover(100, 5),))
    manifest = replace(manifest_of(1000), spillover=spillover)
    assert plan_spillover(manifest, size_bytes=20_000, target_bytes=TARGET, local_offset=None) == ()
    held = replace(manifest, spillover=replace(spillover, segments=1, retired=()))
    assert plan_spillover(held, size_bytes=20_000, target_bytes=TARGET, local_offset=None)


@given(st.integers(0, 3000), st.integers(0, 200_000), st.none() | st.integers(0, 30_000))
def test_plan_can_always_be_carried_out(rows, size_bytes, local_offset):
    """There are as many segments before the local log, and some stay behind."""
    parts = plan(rows, size_bytes, local_offset=local_offset)
    assert all(part >= ROWS_MIN for part in parts)
    assert len(parts) <= PARTS_AT_ONCE_MAX
    if parts:
        assert sum(parts) < rows
        assert local_offset is None or 10 * sum(parts) <= local_offset
