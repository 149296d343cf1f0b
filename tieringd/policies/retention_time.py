"""
What time means for retention: which clock counts, and from which moment a stored segment's age counts.

All deletion by age follows these rules: total and local retention, objects whose delay has passed,
orphans, quarantine, and the archives of deleted topics.

**Now.** The object store's own clock is compared with the host's, where the store's responses show it.
Between two responses the host's steady clock, which cannot be set, carries the store's time on. While the
two differ by more than `CLOCK_ERROR_MAX_MS` no age is certain: either of them may be wrong. The same
holds until the store's first response, and where both were set at once: a store on this host has this
host's clock. For a store without a clock of its own the host's clock counts. It is doubted in two cases:
it was set while the process ran, or the last commit to a manifest is dated later than now. The second
doubt ends after `COMMIT_DOUBT_MAX_MS`: the commit's time may have been the wrong one. While no age is
certain, ages count to `NOTHING_IS_OLD_MS`, so that nothing is past any limit; limits by size still apply.

**New objects and commits are dated by the latest of the clocks in doubt.** A date that is too late delays
a deletion, and is corrected when it turns out to be in the future. A date that is too early deletes fresh
data, and nothing shows later that it was wrong.

**A segment's moment.** It is when the broker took its newest record, or that record's own timestamp, and
never later than the upload: a record that is dated in the future delays deletion no longer than the
upload time plus retention. Only a store can tell whether an upload time was noted under a wrong clock, so
a segment that would be deleted because of its upload time alone is looked up first (`needs_proof`,
`proven_upload_ms`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tieringd.model.segment import NO_TIMESTAMP, RemoteSegment

CLOCK_ERROR_MAX_MS = 60_000
"""
Clocks that differ by at most this agree: a response may take half a minute, and its date has whole seconds.
"""

NOTHING_IS_OLD_MS = -(2**62)
"""The time that ages count to while no clock is certain: as of it nothing is old."""

COMMIT_DOUBT_MAX_MS = 3_600_000
"""A clock that ran this long without being set is trusted more than the time of a commit."""

EARLIEST_MS = 1_577_836_800_000
"""The beginning of 2020. An earlier time comes from a host that started without a clock."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Both clocks of this host, read together."""

    wall_ms: int
    """Milliseconds since the epoch."""
    steady_seconds: float
    """Seconds since an arbitrary moment, by a clock that cannot be set."""

    def milliseconds_since(self, earlier: HostTime) -> int:
        """Return the milliseconds since *earlier*, by the steady clock."""
        return round((self.steady_seconds - earlier.steady_seconds) * 1000)


@dataclass(frozen=True, slots=True)
class StoreTime:
    """A reading of the object store's clock."""

    store_ms: int
    read_at: HostTime
    """The host's clocks when the reading arrived."""
    is_own: bool
    """Whether the clock is another machine's."""

    def now_ms(self, host: HostTime) -> int:
        """Return the store's time at *host*, carried on by the steady clock."""
        return self.store_ms + host.milliseconds_since(self.read_at)


@dataclass(frozen=True, slots=True)
class ClockStatus:
    """The current time, and whether ages are certain."""

    now_ms: int
    """The latest of the clocks in doubt; new objects and commits are dated by it."""
    error_ms: int
    """How far the host's clock is ahead of the other time; negative when it is behind."""
    doubt: str = ""
    """Why no age is certain; empty when ages are."""
    is_confirmed: bool = False
    """Whether another machine's clock agrees."""
    is_settled: bool = False
    """Whether the process has run for `COMMIT_DOUBT_MAX_MS`."""

    def doubt_after(self, committed_at_ms: int) -> str:
        """Return why no age is certain in a partition that was last committed at *committed_at_ms*."""
        ahead_ms = committed_at_ms - self.now_ms
        if self.doubt or self.is_confirmed or self.is_settled or ahead_ms <= CLOCK_ERROR_MAX_MS:
            return self.doubt
        return f"the manifest was committed {ahead_ms / 1000:.0f} s in the future by this host's clock"

    def ages_ms(self, committed_at_ms: int = 0) -> int:
        """Return the time that ages count to in a partition that was last committed at *committed_at_ms*."""
        return NOTHING_IS_OLD_MS if self.doubt_after(committed_at_ms) else self.now_ms


@dataclass(frozen=True, slots=True)
class ClockHistory:
    """What a process knows of the clocks."""

    started: HostTime
    """The host's clocks at the start of the process."""
    agreed: HostTime
    """The last reading at which ages were certain; until there is one, the process's start."""
    store_time: StoreTime | None = None
    """The store's last reading."""
    store_time_before: StoreTime | None = None
    """The store's last reading at the time of `agreed`."""
    awaits_store: bool = False
    """Whether the store has a clock of its own, and has not responded yet."""


def clock_status(host: HostTime, history: ClockHistory) -> ClockStatus:
    """Return the current time on *host*, and whether ages are certain."""
    carried_ms = history.agreed.wall_ms + host.milliseconds_since(history.agreed)
    step_ms = host.wall_ms - carried_ms
    is_own = history.store_time is not None and history.store_time.is_own
    error_ms = host.wall_ms - history.store_time.now_ms(host) if history.store_time else 0
    doubt, latest_ms = "", max(host.wall_ms, carried_ms)
    if history.store_time is not None and abs(error_ms) > CLOCK_ERROR_MAX_MS:
        doubt = f"this host's clock is {_off(error_ms)} the object store's clock"
        latest_ms = max(host.wall_ms, host.wall_ms - error_ms)
    elif history.awaits_store and history.store_time is None:
        doubt = "the object store has not reported its time yet"
    elif host.wall_ms < EARLIEST_MS and not is_own:
        doubt = "this host's clock shows a year before 2020"
    elif abs(step_ms) > CLOCK_ERROR_MAX_MS and (not is_own or _was_store_set(host, history)):
        was_set = (
            f"set {'forward' if step_ms > 0 else 'back'} by {abs(step_ms) / 1000:.0f} s while tieringd ran"
        )
        doubt = f"this host's clock was {was_set}, and the object store has no clock to compare with"
        if is_own:
            doubt = f"the clocks of this host and of the object store were both {was_set}"
        error_ms = step_ms
    if doubt:
        return ClockStatus(latest_ms, error_ms, doubt)
    is_settled = host.milliseconds_since(history.started) >= COMMIT_DOUBT_MAX_MS
    return ClockStatus(host.wall_ms, error_ms, is_confirmed=is_own, is_settled=is_settled)


def _was_store_set(host: HostTime, history: ClockHistory) -> bool:
    """Say whether the store's clock was set since its last certain reading."""
    store_time, before = history.store_time, history.store_time_before
    if store_time is None or before is None:
        return False
    return abs(store_time.now_ms(host) - before.now_ms(host)) > CLOCK_ERROR_MAX_MS


def retention_time_ms(segment: RemoteSegment) -> int:
    """
    Return the time from which a segment's age counts.

    It is when the broker took the newest record, where the broker notes that, and otherwise the newest
    record's own timestamp. It is never later than the upload: one record dated in the future must not
    keep its segment, and all that follow, for ever. Records without a timestamp count from the upload.
    """
    newest_ms = _newest_record_ms(segment)
    return segment.uploaded_at_ms if newest_ms is None else min(newest_ms, segment.uploaded_at_ms)


def is_impossible(noted_ms: int, *, now_ms: int) -> bool:
    """Say whether *noted_ms*, the noted time of a past event, can only come from a wrong clock."""
    return not EARLIEST_MS <= noted_ms <= now_ms + CLOCK_ERROR_MAX_MS


def needs_proof(segment: RemoteSegment, *, now_ms: int) -> bool:
    """
    Say whether a segment's age depends on its upload time alone, or that time is impossible.

    Then its records are newer than the upload or have no timestamps: they may be dated in the future, or
    the clock was wrong at the upload.
    """
    newest_ms = _newest_record_ms(segment)
    if is_impossible(segment.uploaded_at_ms, now_ms=now_ms):
        return True
    return newest_ms is None or newest_ms > segment.uploaded_at_ms + CLOCK_ERROR_MAX_MS


def proven_upload_ms(segment: RemoteSegment, *, stored_at_ms: int, now_ms: int) -> int:
    """
    Return the upload time of a segment whose object the store dates at *stored_at_ms*.

    It is the later of the two: one of the clocks was wrong, and it is not known which. An impossible
    noted time is ignored. An object that was copied to another place, or rewritten by a job, is younger,
    and counts from then. Where both are impossible the segment counts from now: it is kept for one more
    retention period.
    """
    found_ms = now_ms if is_impossible(stored_at_ms, now_ms=now_ms) else stored_at_ms
    noted_ms = segment.uploaded_at_ms
    if is_impossible(noted_ms, now_ms=now_ms):
        return found_ms
    return noted_ms if found_ms <= noted_ms + CLOCK_ERROR_MAX_MS else found_ms


def _newest_record_ms(segment: RemoteSegment) -> int | None:
    noted = (segment.broker_timestamp_ms, segment.max_timestamp_ms)
    return next((time_ms for time_ms in noted if time_ms != NO_TIMESTAMP), None)


def _off(error_ms: int) -> str:
    return f"{abs(error_ms) / 1000:.0f} s {'ahead of' if error_ms > 0 else 'behind'}"
