"""Limits in words: spans that people read, and the time at which a limit lets go."""

from __future__ import annotations

import pytest

from tieringd.model.human_units import span
from tieringd.policies.limit_wording import KeptReason, kept_in_total, kept_locally
from tieringd.policies.local_retention import LocalLimit, LocalTarget
from tieringd.policies.total_retention import TotalRetention

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


def target(ms=None, size=None) -> LocalTarget:
    """Return an enforced target, with places that tell where its limits come from."""
    return LocalTarget(
        LocalLimit(ms, ms, "ms of the file", is_explicit=True),
        LocalLimit(size, size, "bytes of the broker", is_explicit=False),
    )


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [
        (-5, "0 s"),
        (0, "0 s"),
        (7, "7 ms"),
        (1_000, "1 s"),
        (1_500, "1 s 500 ms"),
        (59_999, "59 s 999 ms"),
        (60_000, "1 min"),
        (3_600_000 + 59_000, "1 h"),
        (3_600_000 + 60_000, "1 h 1 min"),
        (26 * 3_600_000, "1 d 2 h"),
        (400 * 86_400_000, "400 d"),
    ],
)
def test_span_names_two_neighbouring_units(milliseconds, words):
    """A length of time is written in its largest unit and the next one, if that adds anything."""
    assert span(milliseconds) == words


@pytest.mark.parametrize(
    ("limits", "following_bytes", "expected"),
    [
        pytest.param(
            target(ms=2 * HOUR_MS),
            0,
            KeptReason(
                "its newest record is 1 h of 2 h old (ms of the file)",
                "local retention releases the segment in 1 h",
                NOW_MS + HOUR_MS,
            ),
            id="time",
        ),
        pytest.param(target(ms=HOUR_MS), 0, None, id="time that is up"),
        pytest.param(
            target(size=500),
            300,
            KeptReason(
                "300 of 500 bytes follow it (bytes of the broker)",
                "local retention releases the segment after 200 more bytes",
            ),
            id="size",
        ),
        pytest.param(target(size=500), 500, None, id="as many bytes as are to stay"),
        pytest.param(
            target(ms=2 * HOUR_MS, size=500),
            499,
            KeptReason(
                "its newest record is 1 h of 2 h old (ms of the file), "
                "and 499 of 500 bytes follow it (bytes of the broker)",
                "local retention releases the segment in 1 h or after 1 more bytes",
                NOW_MS + HOUR_MS,
            ),
            id="both",
        ),
        pytest.param(target(ms=2 * HOUR_MS, size=500), 500, None, id="both, and the size is enough"),
        pytest.param(target(ms=HOUR_MS, size=500), 0, None, id="both, and the time is up"),
        pytest.param(
            target(),
            9,
            KeptReason(
                "no local limit is in force (ms of the file; bytes of the broker)",
                "the segment stays as long as there is no limit",
            ),
            id="no limit",
        ),
    ],
)
def test_local_limits_say_what_they_keep(limits, following_bytes, expected):
    """Either limit lets go; the words name each limit in force, its place, and what it still takes."""
    newest_ms = NOW_MS - HOUR_MS
    assert (
        kept_locally(limits, following_bytes=following_bytes, newest_ms=newest_ms, now_ms=NOW_MS) == expected
    )


def test_advice_is_told_from_a_rule():
    """A limit that is not enforced says so, and that total retention holds in its place."""
    limit = LocalLimit(None, HOUR_MS, "a default", is_explicit=False)
    unset = LocalLimit(None, None, "unset", is_explicit=False)
    kept = kept_locally(LocalTarget(limit, unset), following_bytes=0, newest_ms=0, now_ms=NOW_MS)
    assert kept.reason == (
        "no local limit is in force (a default, which is not enforced: total retention applies; unset)"
    )


@pytest.mark.parametrize(
    ("limits", "left_bytes", "next_step", "due_ms"),
    [
        (TotalRetention(2 * HOUR_MS, None), 0, "in 1 h", NOW_MS + HOUR_MS),
        (TotalRetention(None, 100), 60, "after 41 more bytes", None),
        (TotalRetention(None, 100), 100, "after 1 more bytes", None),
        (TotalRetention(None, 100), 150, "after 1 more bytes", None),
        (TotalRetention(2 * HOUR_MS, 100), 99, "in 1 h or after 2 more bytes", NOW_MS + HOUR_MS),
    ],
)
def test_total_limits_say_when_they_let_go(limits, left_bytes, next_step, due_ms):
    """A segment goes when its newest record is old enough, or when the partition is over its size."""
    kept = kept_in_total(limits, left_bytes=left_bytes, time_ms=NOW_MS - HOUR_MS, now_ms=NOW_MS)
    assert (kept.next_step, kept.due_ms) == (f"total retention removes the segment {next_step}", due_ms)
