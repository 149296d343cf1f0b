"""Durability: up to where a local log is in the archive without a hole."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import local_log, remote, stored
from tieringd.model.manifest_parts import Gap
from tieringd.policies.durability import durable_end

LOG = local_log([10, 20, 30])


def end(manifest, *, log=LOG, log_start_offset=0, up_to=None):
    return durable_end(log, manifest, log_start_offset=log_start_offset, up_to=up_to)


@pytest.mark.parametrize(
    ("rows", "offset", "because"),
    [
        pytest.param([], 10, "offset 10 of segment 10 is not in the archive", id="nothing stored"),
        pytest.param([remote(10, 19)], 20, "offset 20 of segment 20 is not in the archive", id="one"),
        pytest.param(
            [remote(10, 19), remote(20, 24)], 25, "offset 25 of segment 20 is not in the archive", id="a part"
        ),
        pytest.param(
            [remote(10, 19), remote(20, 29)], 30, "offset 30 is in the active segment", id="all closed"
        ),
        pytest.param(
            [remote(10, 19), remote(20, 29), remote(30, 33)],
            34,
            "offset 34 is in the active segment",
            id="a part of the active one",
        ),
        pytest.param([remote(0, 99)], 100, "offset 100 is in the active segment", id="inside one larger"),
        pytest.param(
            [remote(10, 19, size_bytes=1), remote(20, 29)],
            10,
            "segment 10 has 1024 bytes on disk and 1 in the archive",
            id="another size",
        ),
        pytest.param(
            [remote(10, 19, size_bytes=1, writer_id="rewritten-0a"), remote(20, 29)],
            30,
            "offset 30 is in the active segment",
            id="another size, as a job took records out",
        ),
        pytest.param(
            [remote(10, 14, size_bytes=1, writer_id="rewritten-0a"), remote(15, 19), remote(20, 29)],
            30,
            "offset 30 is in the active segment",
            id="a job took records out of a part",
        ),
        pytest.param(
            [remote(10, 18, writer_id="rewritten-0a")],
            19,
            "offset 19 of segment 10 is not in the archive",
            id="a job rewrote less than all",
        ),
        pytest.param(
            [remote(10, 19, size_bytes=1, writer_id="spark-0a"), remote(20, 29)],
            10,
            "segment 10 has 1024 bytes on disk and 1 in the archive",
            id="another size by another job",
        ),
        pytest.param(
            [remote(11, 29)], 10, "offset 10 of segment 10 is not in the archive", id="head missing"
        ),
    ],
)
def test_durable_end_is_the_first_offset_that_is_not_stored(rows, offset, because):
    """The durable end is where the archive stops covering what is on disk, however the archive is cut."""
    found = end(replace(stored(rows), epochs=((0, 0),)))
    assert (found.offset, found.because) == (offset, because)


@pytest.mark.parametrize("is_log_known", [True, False])
@pytest.mark.parametrize("is_archive_known", [True, False])
def test_rewritten_segment_covers_only_a_log_of_known_leader_epochs(is_log_known, is_archive_known):
    """No byte of it is compared: that it is of this log is for the lineage to say."""
    manifest = stored([remote(10, 19), remote(20, 29, writer_id="rewritten-0a")])
    manifest = replace(manifest, epochs=((0, 0),) if is_archive_known else ())
    log = LOG if is_log_known else replace(LOG, epochs=())
    found = end(manifest, log=log)
    assert found.offset == (30 if is_log_known and is_archive_known else 20)
    assert ("no leader-epoch history" in found.because) == (found.offset == 20)


def test_durable_end_is_before_a_gap():
    """A recorded gap holds no bytes, and what is stored behind it does not count."""
    manifest = stored([remote(10, 14)]).with_gap(Gap(15, 16, "", 0)).appended([remote(17, 29)])
    assert end(manifest).offset == 15


def test_durable_end_passes_over_what_is_on_its_way_out():
    """Segments below the log's start need no copy; behind them the same rule holds."""
    manifest = stored([remote(20, 29)])
    assert end(manifest).offset == 10
    assert end(manifest, log_start_offset=20).offset == 30
    assert end(manifest, log_start_offset=30).offset == 30


def test_durable_end_of_a_reframed_log_does_not_compare_sizes():
    """The bounds alone count for a reframed log: its files are not the bytes that are stored."""
    manifest = stored([remote(10, 19, size_bytes=1), remote(20, 29)])
    assert end(manifest, log=replace(LOG, is_reframed=True)).offset == 30


def test_durable_end_is_not_searched_past_what_was_asked():
    """The walk ends with the segment that reaches the offset asked for."""
    manifest = stored([remote(10, 19), remote(20, 29)])
    assert [end(manifest, up_to=up_to).offset for up_to in (11, 20, 21, 99)] == [20, 20, 30, 30]


def test_durable_end_of_no_segment_is_the_log_start():
    """The durable end of a log without segments is the log's start: nothing on disk waits for an upload."""
    assert end(stored([remote(0, 9)]), log=local_log([]), log_start_offset=7).offset == 7


@given(
    st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=6).map(sorted),
    st.lists(st.integers(0, 45), unique=True, min_size=2, max_size=6).map(sorted),
    st.sets(st.integers(0, 5)),
    st.integers(0, 45),
)
def test_durable_end_covers_every_offset_below_it(bases, cuts, gaps, log_start_offset):
    """Each offset on disk below the end is stored, and the next one is not."""
    manifest = stored([], start_offset=cuts[0])
    for number, (base, until) in enumerate(pairwise(cuts)):
        if number in gaps:
            manifest = manifest.with_gap(Gap(base, until - 1, "", 0))
        else:
            manifest = manifest.appended([remote(base, until - 1)])
    log = replace(local_log(bases), is_reframed=True)
    found = end(manifest, log=log, log_start_offset=log_start_offset)
    alive = [one for one in log.segments if one.next_offset is None or one.next_offset > log_start_offset]
    held = {offset for row in manifest.segments for offset in range(row.base_offset, row.next_offset)}
    # Offsets between two segments' files do not exist here: each segment ends where the next begins.
    expected = alive[0].base_offset
    while expected in held:
        expected += 1
    assert found.offset == (max(expected, log_start_offset) if alive[0].is_active else expected)
