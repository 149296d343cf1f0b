"""A user's DeleteRecords, told from our own trims and from the broker's retention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.model.values import local_log, remote, stored
from tieringd.model.manifest_parts import Gap, Replacement
from tieringd.policies.total_retention import TotalRetention, plan_total_retention, users_start

LOG = local_log([0, 100, 250, 300])
ARCHIVE = stored([remote(0, 99), remote(100, 199), remote(200, 299)])
NO_LIMIT = TotalRetention(limit_ms=None, limit_bytes=None)


@pytest.mark.parametrize(
    ("log_start_offset", "expected"),
    [
        pytest.param(0, None, id="at the archive's start"),
        pytest.param(1, 1, id="in the first segment"),
        pytest.param(99, 99, id="at its last record"),
        pytest.param(100, None, id="at a local segment"),
        pytest.param(199, 199, id="further"),
        pytest.param(200, None, id="at a segment of another leader"),
        pytest.param(250, None, id="at a local segment that was archived otherwise"),
        pytest.param(251, 251, id="inside that"),
        pytest.param(300, None, id="at the active segment"),
        pytest.param(340, 340, id="past what is archived"),
    ],
)
def test_log_that_begins_inside_a_segment_was_cut_by_a_user(log_start_offset, expected):
    """Retention and trims end where a segment does, here or on the leader that archived it."""
    assert users_start(LOG, ARCHIVE, log_start_offset=log_start_offset) == expected


@pytest.mark.parametrize(("trimmed_offset", "expected"), [(149, 150), (150, None), (151, None)])
def test_what_was_trimmed_by_us_is_no_users(trimmed_offset, expected):
    """The record in the manifest tells, wherever another leader's segments end."""
    manifest = replace(ARCHIVE, trimmed_offset=trimmed_offset)
    assert users_start(LOG, manifest, log_start_offset=150) == expected


@pytest.mark.parametrize(
    ("trimmed_offset", "base_offset", "last_offset", "expected"),
    [
        pytest.param(150, 100, 199, None, id="at our trim, and the records there are others now"),
        pytest.param(180, 149, 149, None, id="below our last trim: an earlier one may be late as well"),
        pytest.param(149, 100, 199, 150, id="past every trim of ours"),
        pytest.param(150, 0, 148, 150, id="other records end before it"),
        pytest.param(150, 150, 199, 150, id="other records begin at it"),
    ],
)
def test_late_trim_of_ours_inside_a_batch_is_no_users(trimmed_offset, base_offset, last_offset, expected):
    """The trim ended at a segment's end in the log that another leader's has replaced since."""
    cut = replace(
        ARCHIVE,
        trimmed_offset=trimmed_offset,
        replacements=(Replacement(base_offset, last_offset, leader_epoch=2, replaced_at_ms=0),),
    )
    assert users_start(LOG, cut, log_start_offset=150, is_inside_batch=True) == expected


def test_log_with_other_offsets_of_its_own_tells_nothing():
    """Redpanda's own retention may cut a segment."""
    reframed = replace(LOG, is_reframed=True)
    assert users_start(LOG, ARCHIVE, log_start_offset=150) == 150
    assert users_start(reframed, ARCHIVE, log_start_offset=150) is None


def test_log_that_begins_outside_its_files_tells_nothing():
    """Facts that do not fit each other are no reason to delete."""
    assert users_start(local_log([200, 300]), ARCHIVE, log_start_offset=150) is None
    assert users_start(local_log([]), ARCHIVE, log_start_offset=150) is None


def plan(deleted_before, *, manifest=ARCHIVE, limits=NO_LIMIT, log_start_offset=150, **changes):
    return plan_total_retention(
        manifest,
        LOG,
        limits,
        log_start_offset=log_start_offset,
        now_ms=0,
        deleted_before=deleted_before,
        **changes,
    )


@pytest.mark.parametrize(
    ("deleted_before", "segments", "start_offset", "inside"),
    [
        (1, 0, 0, 1),
        (99, 0, 0, 99),
        (100, 1, 100, None),
        (101, 1, 100, 101),
        (299, 2, 200, 299),
        (300, 3, 300, None),
    ],
)
def test_deleted_records_go_whatever_the_limits_say(deleted_before, segments, start_offset, inside):
    """Whole segments go, and the first that stays is read from where the user said."""
    found = plan(deleted_before)
    assert (found.segments, found.start_offset, found.inside_offset) == (segments, start_offset, inside)
    assert found.first_offset == deleted_before


def test_compact_only_topic_keeps_what_a_user_deleted():
    """Nothing is ever deleted from its archive."""
    found = plan(150, limits=TotalRetention(limit_ms=0, limit_bytes=0, deletes=False))
    assert (found.segments, found.first_offset) == (0, 0)


def test_limits_hold_for_what_a_user_left():
    """Both together: the larger removal wins."""
    assert plan(150, limits=TotalRetention(None, 3072)).first_offset == 150
    assert plan(150, limits=TotalRetention(None, 2048)).first_offset == 200
    assert plan(150, limits=TotalRetention(None, 2048)).inside_offset is None


def test_archive_that_begins_inside_a_segment_stays_as_it_is():
    """Another observation of the same log finds nothing more to do."""
    cut = ARCHIVE.starting_inside(ARCHIVE.segments[0], 50, now_ms=7)
    assert users_start(LOG, cut, log_start_offset=50) is None
    found = plan(50, manifest=cut)
    assert (found.segments, found.inside_offset) == (0, None)
    assert plan(51, manifest=cut).inside_offset == 51


def test_nothing_goes_past_what_both_observations_found():
    """A segment goes only if both observations found it."""
    found = plan(300, up_to=100)
    assert (found.segments, found.start_offset) == (1, 100)


def test_offsets_of_a_gap_that_a_user_deleted_are_no_part_of_a_segment():
    """The archive then begins with the rest of that gap, which holds nothing."""
    manifest = stored([remote(0, 99)]).with_gap(Gap(100, 199, "lost", 5)).appended([remote(200, 299)])
    found = plan(150, manifest=manifest)
    assert (found.segments, found.start_offset, found.inside_offset) == (1, 100, None)
