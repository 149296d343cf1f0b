"""The clock of an archive, asked often: an answer is used again only while nothing has changed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tieringd.policies.retention_time import CLOCK_ERROR_MAX_MS
from tieringd.storage.archive_clock import ArchiveClock

BEGAN_MS = 1_750_000_000_000
_JUMPS_MS = st.sampled_from([0, 0, 0, 1, -1, 2 * CLOCK_ERROR_MAX_MS, -2 * CLOCK_ERROR_MAX_MS])


class Host:
    """A host whose clocks are set, and a store that tells its time."""

    has_own_clock = True

    def __init__(self) -> None:
        self.wall_ms = BEGAN_MS
        self.steady_seconds = 100.0
        self._listeners = []

    def tell_time_to(self, listener):
        """Call *listener* with the store's time."""
        self._listeners.append(listener)

    def clock(self):
        """Return a clock that reads this host's, and that the store tells its time."""
        clock = ArchiveClock(wall_ms=lambda: self.wall_ms, steady_seconds=lambda: self.steady_seconds)
        clock.listen_to(self)
        return clock

    def move(self, seconds, jump_ms):
        """Let time pass, and set the wall clock by *jump_ms*."""
        self.steady_seconds += seconds
        self.wall_ms += round(seconds * 1000) + jump_ms

    def answer(self, error_ms):
        """Let the store tell a time that is *error_ms* ahead of the wall clock."""
        for listener in self._listeners:
            listener(self.wall_ms + error_ms)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.0002, 0.0011, 1.0]), _JUMPS_MS, st.none() | _JUMPS_MS), max_size=20
    )
)
@settings(max_examples=examples(300))
def test_clock_that_is_asked_often_says_the_same(moves):
    """Ten questions in one step of an archiver have the answers of a clock that has computed each."""
    host = Host()
    often, once = host.clock(), host.clock()
    for seconds, jump_ms, error_ms in moves:
        host.move(seconds, jump_ms)
        if error_ms is not None:
            host.answer(error_ms)
        for _ in range(3):
            often.status()
        once._found = None  # It computes the answer.
        used, computed = often.status(), once.status()
        # A fraction of a millisecond that has passed is rounded.
        assert abs(used.now_ms - computed.now_ms) <= 1
        assert abs(used.error_ms - computed.error_ms) <= 1
        assert replace(used, now_ms=0, error_ms=0) == replace(computed, now_ms=0, error_ms=0)
