"""The time at which a partition is scrubbed next."""

from __future__ import annotations

import pytest

from tieringd.policies.scrub import ScrubPace, first_due_ms, next_due_ms

PACE = ScrubPace(
    is_enabled=True,
    partial_interval_ms=100,
    full_interval_ms=1000,
    jitter_ms=10,
    orphan_grace_ms=1,
    quarantine_ms=1,
)


@pytest.mark.parametrize(("jitter", "added"), [(0.0, 0), (0.55, 5), (1.0, 10)])
def test_next_scrub_is_an_interval_away_and_a_part_of_the_jitter(jitter, added):
    """A whole scrub waits for the full interval, a cut one for the partial one, the first for none."""
    assert first_due_ms(PACE, now_ms=7, jitter=jitter) == 7 + added
    assert next_due_ms(PACE, now_ms=7, is_complete=False, jitter=jitter) == 107 + added
    assert next_due_ms(PACE, now_ms=7, is_complete=True, jitter=jitter) == 1007 + added
