"""The explanation of merging, segment by segment."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.unit.model.values import local_log, remote, stored
from tieringd.policies.segment_merge import (
    ALONE,
    LARGE,
    STILL_LOCAL,
    WAITS,
    MergeLimits,
    MergingTerms,
    explain_merging,
    why_never_merged,
)

LIMITS = MergeLimits(target_bytes=2048, min_bytes=1500)
TERMS = MergingTerms(is_enabled=True, is_compacted=False, limits=LIMITS)


def archive(*bases, sizes=None):
    rows = [
        remote(base, end - 1, **({"size_bytes": sizes[base]} if sizes and base in sizes else {}))
        for base, end in pairwise(bases)
    ]
    return stored(rows)


def explained(manifest, local=(100,), *, terms=TERMS, log_start=100):
    return explain_merging(manifest, local_log(local), terms, log_start_offset=log_start)


def test_each_segment_has_its_reason():
    """A segment of a run names the run, and one beside runs has the reason why it is in none."""
    manifest = archive(0, 10, 20, 30, 40, 50, 100, sizes={20: 5000, 30: 2000, 40: 3000})
    found = explained(manifest)
    run = (
        "the segment becomes part of offsets 0 to 19, merged from 2 segments of 2048 bytes, once the "
        "object store is idle"
    )
    assert found == {0: run, 10: run, 20: LARGE, 30: ALONE, 40: LARGE, 50: WAITS}


def test_segment_that_is_on_disk_waits_for_its_trim():
    """A segment counts as local from the first file on, whether the log begins there or later."""
    manifest = archive(0, 10, 20, 30)
    assert explained(manifest, (20, 30), log_start=30)[20] == STILL_LOCAL
    assert explained(manifest, (20, 30), log_start=20)[20] == STILL_LOCAL
    assert explained(manifest, (0, 10, 20, 30), log_start=0) == dict.fromkeys((0, 10, 20), STILL_LOCAL)


def test_long_history_is_explained_as_a_whole():
    """More than one plan of the daemon would look at, and more runs."""
    found = explained(archive(*range(0, 1_100, 10)), local=(2_000,), log_start=2_000)
    assert len(found) == 109
    assert sum("becomes part of" in text for text in found.values()) == 108


@pytest.mark.parametrize(
    ("terms", "because"),
    [
        (MergingTerms(is_enabled=False, is_compacted=False, limits=None), "enable_segment_merging is off"),
        (MergingTerms(is_enabled=True, is_compacted=True, limits=None), "compacted"),
        (MergingTerms(is_enabled=True, is_compacted=False, limits=None), "not archived"),
        (MergingTerms(is_enabled=True, is_compacted=False, limits=LIMITS, idle_because="paused"), "paused"),
    ],
)
def test_topic_that_is_never_merged_says_why(terms, because):
    """Each segment of such a topic has the same reason."""
    assert because in why_never_merged(terms)
    assert set(explained(archive(0, 10, 20), terms=terms).values()) == {why_never_merged(terms)}
    assert not why_never_merged(TERMS)
