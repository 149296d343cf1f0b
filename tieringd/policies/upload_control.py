"""
Upload control: how hard to upload, and which partition is next.

Three decisions, each a pure function. `update` is the PD controller: the backlog, as a share of the disk
that was free, becomes shares. `pace_for` turns shares into a pace. `is_near_loss`, `is_fair_turn` and the
keys of `WaitingPartition` order the waiting partitions.

Partitions near to loss come first, the nearest before all. The others follow, least recently served first,
so a large backlog buys no second turn while another partition has had none. Every few turns the least
recently served partition comes first all the same, so that none waits for ever.

Shares conserve work. While nothing else wants the machine, uploads run at full speed at any shares. While
something does (`judge`), shares limit how fast a backlog is caught up with: how many uploads at once, and
how many bytes per second. They never limit keeping up: a segment that was closed a moment ago is not
braked, because holding it back saves nothing and grows the backlog. The one limit that holds at all times
is `cloud_storage_upload_bytes_per_second`.

This module knows no uploads. `archiving.upload_gate` enforces the pace and the order that are decided
here, and compares waiting partitions by this module's own keys, so there is one order.

`judge` decides the contention: whether something else on this machine wants what uploads take. Uploads by
themselves keep a small machine busy, so a busy machine alone proves nothing. The measure is how busy the
machine is while no upload runs. When little is uploaded, such moments occur by themselves. When they do
not occur and the machine is busy, the policy asks for one: it *listens*, which means that no upload
begins until the machine's load without uploads was measured for a moment. The facts are loads
(`HostLoad`), measured over all time and over the moments without uploads. The plan is a
`ContentionState`. Times are seconds of one clock that never goes back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tieringd.model.partition import TopicIdPartition

CPU, IO, MEMORY = "cpu", "io", "memory"
"""The resources that others may wait for, with the names of `/proc/pressure`."""

SLOTS = "slots"
"""Holds uploads back: as many are under way as connections and threads allow. Nothing is braked."""
LIMIT = "limit"
"""Holds uploads back: `cloud_storage_upload_bytes_per_second`."""
LISTENING = "listening"
"""Holds uploads back: the machine's load is measured without uploads for a moment."""

_HELD_BECAUSE = {
    SLOTS: "the connections and threads for uploads are all in use",
    LIMIT: "the limit cloud_storage_upload_bytes_per_second is reached",
    LISTENING: "the machine is busy, and uploads pause for a moment to measure the load of other programs",
    CPU: "other programs need the processors, and uploads get only their shares",
    IO: "other programs wait for the disks, and uploads get only their shares",
    MEMORY: "other programs wait for memory, and uploads get only their shares",
}
_PER_MILLE = 1000
_MAX_COEFFICIENT = 1e6
"""Keeps every product finite, whatever the disk and the backlog."""


@dataclass(frozen=True, slots=True)
class HostLoad:
    """A machine's load in an interval. Parts are from 0 to 1; None is not known."""

    seconds: float
    cpu_busy: float | None = None
    """The part of all processors' time that was not idle."""
    cpu_waiting: float | None = None
    """The part of the time in which a task waited for a processor: "some" in pressure stall information."""
    io_waiting: float | None = None
    """The same for reads and writes."""
    memory_waiting: float | None = None
    """The same for memory: mostly for pages that were dropped and are needed again."""
    cpu_of_others: float | None = None
    """The part of all processors' time that other processes took."""


@dataclass(frozen=True, slots=True)
class ContentionLimits:
    """The loads from which a machine counts as wanted by others, and what listening may cost."""

    cpu_busy: float = 0.9
    cpu_waiting: float = 0.25
    io_waiting: float = 0.2
    memory_waiting: float = 0.1
    heard_seconds: float = 0.2
    """The time without uploads that a judgement needs. The kernel counts processors' time in 10 ms."""
    listening_seconds_max: float = 10.0
    """Uploads under way may take this long to end; after that the last judgement stays."""
    listening_pause_seconds: float = 5.0
    """Minimum time between two phases of listening."""
    growth: float = 0.15
    """Other load that has grown by this since the last judgement is listened to without a pause."""
    rise_pause_seconds: float = 0.5
    """
    The pause after a phase of listening that heard other load grow by `growth`, but not to a bound.

    A program that begins in the middle of the phase is heard in half of it. After a longer phase the pause is
    as long as the phase. The phase after a short pause is followed by a long one.
    """
    listening_cost: float = 0.05
    """The part of the time that listening may take: after a long phase the pause is longer."""

    def __post_init__(self) -> None:
        assert self.heard_seconds > 0, "a judgement needs some time"
        assert self.rise_pause_seconds > 0, "a pause takes some time"
        assert 0 < self.listening_cost <= 1, "listening takes a part of the time"


@dataclass(frozen=True, slots=True)
class ContentionState:
    """What is known after a probe, and what the next probe continues from."""

    contended_by: str = ""
    """The resource that others want: `CPU`, `IO` or `MEMORY`; empty when they want none."""
    listening_since: float | None = None
    """
    Since when uploads are kept from beginning, to measure the load without them; None when not listening.
    """
    listen_at: float = 0.0
    """No listening before this, unless other load has grown."""
    load: HostLoad | None = None
    """The first load measured after the last judgement; None while that is not known."""
    heard: HostLoad | None = field(default=None, compare=False)
    """The load that the last judgement rests on; None before the first one. No pace depends on it."""
    rise_at: float = field(default=0.0, compare=False)
    """No short pause for other load that has grown before this. No pace depends on it."""
    explained_cpu: float = 0.0
    """
    Others that take this part of the processors are known to leave room for uploads. More than this is news.
    A store on the same host takes a part only while uploads run, so listening does not hear it.
    """

    @property
    def is_listening(self) -> bool:
        """Say whether no upload may begin now."""
        return self.listening_since is not None


def wanted_by(load: HostLoad, limits: ContentionLimits) -> str:
    """Return the resource that *load* presses on: `CPU`, `IO` or `MEMORY`; empty for an unloaded machine."""
    if _is_from(load.cpu_busy, limits.cpu_busy) or _is_from(load.cpu_waiting, limits.cpu_waiting):
        return CPU
    if _is_from(load.io_waiting, limits.io_waiting):
        return IO
    if _is_from(load.memory_waiting, limits.memory_waiting):
        return MEMORY
    return ""


def judge(
    state: ContentionState,
    limits: ContentionLimits,
    *,
    total: HostLoad,
    others: HostLoad,
    is_catching_up: bool,
    is_moving: bool = True,
    now: float,
) -> ContentionState:
    """
    Return what is known at *now*.

    *total* is the load since the last probe. *others* is the load of the moments without uploads since
    the last judgement that used them; it is used as soon as it has `heard_seconds`. *is_catching_up* says
    whether any waiting upload would be braked: otherwise there is no reason to listen. *is_moving* says
    whether any upload has succeeded since listening began.
    """
    if others.seconds >= limits.heard_seconds:
        found = wanted_by(others, limits)
        explained = 0.0 if found else max(state.explained_cpu, others.cpu_of_others or 0.0)
        is_short = not found and now >= state.rise_at and _is_rising(state.heard, others, limits)
        ended = _ended(state, limits, now=now, pause_seconds=limits.rise_pause_seconds if is_short else None)
        return replace(ended, contended_by=found, load=None, heard=others, explained_cpu=explained)
    if total.seconds >= limits.heard_seconds and not wanted_by(total, limits):
        # Uploads ran besides all other work, and the machine still has room.
        ended = _ended(state, limits, now=now)
        return replace(ended, contended_by="", heard=total, explained_cpu=total.cpu_of_others or 0.0)
    if state.listening_since is not None:
        is_over = now >= state.listening_since + limits.listening_seconds_max or not is_catching_up
        return _given_up(state, limits, is_moving=is_moving, now=now) if is_over else state
    explained_cpu = _asked_about(state, limits, total=total, now=now) if is_catching_up else None
    if explained_cpu is not None:
        return replace(state, listening_since=now, explained_cpu=explained_cpu)
    if state.load is None:
        explained = max(state.explained_cpu, total.cpu_of_others or 0.0)
        return replace(state, load=total, explained_cpu=explained)
    return state


def _given_up(
    state: ContentionState, limits: ContentionLimits, *, is_moving: bool, now: float
) -> ContentionState:
    """Return *state* without listening, where nothing was heard."""
    if is_moving:
        return _ended(state, limits, now=now)
    # The store is away, so listening cost nothing; listen again soon after the store is back.
    return replace(state, listening_since=None, listen_at=now + limits.listening_pause_seconds)


def _asked_about(
    state: ContentionState, limits: ContentionLimits, *, total: HostLoad, now: float
) -> float | None:
    """
    Return the part of the processors that listening explains if it hears nothing; None where none begins now.

    It is what others take now, or what others took beside uploads after the last judgement.
    """
    if _have_come(state, total, limits):
        return total.cpu_of_others or 0.0
    if now < state.listen_at:
        return None
    return 0.0 if state.load is None or state.contended_by else state.load.cpu_of_others or 0.0


def _have_come(state: ContentionState, load: HostLoad, limits: ContentionLimits) -> bool:
    """Say whether others take more of the machine than the last judgement explains."""
    before = state.load
    if before is None:
        # The first load after a judgement has the others that came since the quiet moment that was judged.
        known_cpu = None if state.contended_by else state.explained_cpu
        return _has_grown(known_cpu, load.cpu_of_others, limits)
    known_cpu = max(state.explained_cpu, before.cpu_of_others or 0.0)
    return _is_rising(replace(before, cpu_of_others=known_cpu), load, limits)


def _is_rising(before: HostLoad | None, heard: HostLoad, limits: ContentionLimits) -> bool:
    """Say whether others take more of any resource than *before*; None is an unloaded machine."""
    if before is None:
        before = HostLoad(0.0, io_waiting=0.0, memory_waiting=0.0, cpu_of_others=0.0)
    return (
        _has_grown(before.cpu_of_others, heard.cpu_of_others, limits)
        or _has_grown(before.io_waiting, heard.io_waiting, limits)
        or _has_grown(before.memory_waiting, heard.memory_waiting, limits)
    )


def _has_grown(was: float | None, now: float | None, limits: ContentionLimits) -> bool:
    return was is not None and now is not None and now >= was + limits.growth


def _ended(
    state: ContentionState, limits: ContentionLimits, *, now: float, pause_seconds: float | None = None
) -> ContentionState:
    """
    Return *state* without listening, with a pause in proportion to the last phase of listening.

    *pause_seconds* makes it a short one, which is no shorter than that phase. The next short one comes only
    after the time of the long one: load that goes up and down would let uploads stand still again and again.
    """
    if state.listening_since is None:
        return state
    spent = now - state.listening_since
    pause = max(limits.listening_pause_seconds, spent * (1 / limits.listening_cost - 1))
    if pause_seconds is not None:
        listen_at = now + max(pause_seconds, spent)
        return replace(state, listening_since=None, listen_at=listen_at, rise_at=listen_at + pause)
    return replace(state, listening_since=None, listen_at=now + pause)


def _is_from(value: float | None, bound: float) -> bool:
    return value is not None and value >= bound


@dataclass(frozen=True, slots=True)
class ControllerLimits:
    """The `cloud_storage_upload_ctrl_*` properties. The setpoint is always a backlog of nothing."""

    p_coeff: float = -2.0
    """Negative: a backlog is a negative error, and must raise the shares."""
    d_coeff: float = 0.0
    """Relative: *p_coeff* multiplies it too."""
    min_shares: int = 100
    max_shares: int = 1000

    def __post_init__(self) -> None:
        assert abs(self.p_coeff) <= _MAX_COEFFICIENT, "p_coeff is a number of ordinary size"
        assert abs(self.d_coeff) <= _MAX_COEFFICIENT, "d_coeff is a number of ordinary size"
        assert 1 <= self.min_shares <= self.max_shares, "shares are positive, and min_shares is the lower"


@dataclass(frozen=True, slots=True)
class ControllerState:
    """The state that one update leaves for the next."""

    error: float = 0.0
    """Setpoint minus backlog, per mille: 0 without a backlog, -1000 with one as large as the free disk."""


def backlog_per_mille(*, backlog_bytes: int, free_bytes_at_start: int) -> float:
    """
    Return the backlog as a share of the space that was free when the daemon started.

    It exceeds 1000 when the backlog is larger than that space was. A disk that had nothing free counts as
    one byte: then any backlog is as urgent as possible, and none is still none.
    """
    return _PER_MILLE * backlog_bytes / max(1, free_bytes_at_start)


def update(
    limits: ControllerLimits, state: ControllerState, *, backlog_bytes: int, free_bytes_at_start: int
) -> tuple[ControllerState, int]:
    """
    Return the next state, and the shares that uploads have until the next update.

    Call it every `cloud_storage_upload_ctrl_update_interval_ms`. With the default properties shares are
    twice the backlog per mille: the maximum from half the free space on, and the minimum up to a twentieth.
    """
    backlog = backlog_per_mille(backlog_bytes=backlog_bytes, free_bytes_at_start=free_bytes_at_start)
    error = 0.0 - backlog
    wanted = limits.p_coeff * (error + limits.d_coeff * (error - state.error))
    # Clamped first, so that the integer is made of a number that is known to be small.
    shares = int(min(max(wanted, limits.min_shares), limits.max_shares))
    return ControllerState(error), shares


@dataclass(frozen=True, slots=True)
class UploadPace:
    """
    What uploads may take together, until the next pace.

    *concurrent_uploads* and *bytes_per_second* are the brake: they limit segments that have waited for
    long. New segments (`is_new`), and those about to be lost, are limited by *most_uploads* and by
    *limit_bytes_per_second* only.
    """

    concurrent_uploads: int
    bytes_per_second: int | None
    """None is without limit."""
    held_by: str = ""
    """The resource that others want, where there is a brake; see `judge`."""
    new_uploads: int | None = None
    """How many uploads may run at once where some are new; None is as many as *concurrent_uploads*."""
    limit_bytes_per_second: int | None = None
    """`cloud_storage_upload_bytes_per_second`: binds every upload."""
    is_listening: bool = False
    """No upload begins, so that the load can be measured; uploads of data about to be lost still begin."""

    def __post_init__(self) -> None:
        assert self.concurrent_uploads >= 1, "a pace lets at least one upload run"
        assert self.bytes_per_second is None or self.bytes_per_second >= 1, "a pace lets bytes through"
        assert self.limit_bytes_per_second is None or self.limit_bytes_per_second >= 1
        assert self.new_uploads is None or self.new_uploads >= self.concurrent_uploads

    @property
    def most_uploads(self) -> int:
        """Return how many uploads may run at once, of whatever kind."""
        return self.concurrent_uploads if self.new_uploads is None else self.new_uploads


@dataclass(frozen=True, slots=True)
class PaceLimits:
    """The bounds between which shares move the pace."""

    max_uploads: int
    """Concurrent uploads at maximum shares: what connections and threads allow."""
    polite_uploads: int = 2
    """
    Concurrent uploads at minimum shares. Two, so that one upload that hangs does not hold up all the others.
    """
    polite_bytes_per_second: int = 16 * 1024 * 1024
    """
    The rate never falls below this, whatever is measured: a 64 MiB segment then takes four seconds. It is an
    eighth of a gigabit link, and less of a disk.
    """
    upload_interval_seconds: float | None = None
    """`cloud_storage_segment_max_upload_interval_sec`: the maximum wait of a stable record."""
    bytes_per_second: int | None = None
    """`cloud_storage_upload_bytes_per_second`: the limit that holds at all times; None is without one."""

    def __post_init__(self) -> None:
        assert self.max_uploads >= 1, "at least one upload runs at once"
        assert self.polite_uploads >= 1, "at least one upload runs at once"
        assert self.polite_bytes_per_second >= 1, "politeness lets bytes through"
        assert self.upload_interval_seconds is None or self.upload_interval_seconds > 0


def pace_for(
    shares: int,
    control: ControllerLimits,
    limits: PaceLimits,
    *,
    contention: ContentionState,
    measured_bytes_per_second: float | None = None,
    backlog_bytes: int = 0,
) -> UploadPace:
    """
    Return the pace that *shares* stand for.

    Without contention it is the full pace, whatever the shares. With contention, maximum shares are the
    full pace too: the kernel's priorities decide. Below them a backlog is braked: its uploads take the
    same part of the ceiling as *shares* are of the maximum. By default that is a tenth at minimum shares,
    which leaves a producer nine. The ceiling is *measured_bytes_per_second*: what this machine and store
    carried recently while an upload was running (`UploadGate.measured_bytes_per_second`). It shrinks when
    a producer needs the machine, and so does the rate. Without a measurement, or with a low one, the
    ceiling is the one that makes minimum shares the polite rate. Concurrency rises linearly.

    With an upload interval, the rate is at least what carries *backlog_bytes* within it.
    """
    max_shares, min_shares = control.max_shares, control.min_shares
    shares = max(shares, min_shares)
    if shares >= max_shares or not contention.contended_by:
        return UploadPace(
            limits.max_uploads,
            None,
            limit_bytes_per_second=limits.bytes_per_second,
            # At maximum shares listening could not change the pace.
            is_listening=contention.is_listening and shares < max_shares,
        )
    polite_uploads = min(limits.polite_uploads, limits.max_uploads)
    span = limits.max_uploads - polite_uploads
    uploads = polite_uploads + span * (shares - min_shares) // (max_shares - min_shares)
    lowest_ceiling = limits.polite_bytes_per_second * max_shares / min_shares
    rate = max(measured_bytes_per_second or 0.0, lowest_ceiling) * shares / max_shares
    if limits.upload_interval_seconds is not None:
        rate = max(rate, backlog_bytes / limits.upload_interval_seconds)
    return UploadPace(
        uploads,
        math.ceil(rate),
        held_by=contention.contended_by,
        new_uploads=limits.max_uploads,
        limit_bytes_per_second=limits.bytes_per_second,
        is_listening=contention.is_listening,
    )


def held_because(by: str, waited_seconds: float) -> str:
    """Say in a sentence what holds an upload back: *by* is one of the constants above."""
    return f"{_HELD_BECAUSE[by]}; the upload has waited for {waited_seconds:.1f} s"


_NEW_SECONDS = 10.0
"""Longer than a closed segment takes to be noticed and to get its partition's turn, on a busy host."""


def is_new(*, closed_seconds_ago: float) -> bool:
    """
    Say whether a segment has just been closed, so that uploading it is keeping up.

    A file time in the future gives no evidence: its segment counts as old.
    """
    return 0 <= closed_seconds_ago <= _NEW_SECONDS


@dataclass(frozen=True, slots=True)
class OrderLimits:
    """Limits of the order: from when on danger precedes fairness, and how far."""

    near_loss_seconds: float = 3600.0
    """Data that the broker deletes within this time precedes the rest."""
    last_moment_seconds: float = 60.0
    """Data this close to deletion is exempt from the brake: losing it is worse than being impolite."""
    fair_turn_every: int = 8
    """Every n-th turn goes to the partition that waits longest, however much danger others are in."""

    def __post_init__(self) -> None:
        assert self.fair_turn_every >= 1, "fair turns come round"


@dataclass(frozen=True, slots=True)
class WaitingPartition:
    """A partition with something to upload, and what decides its place in the order."""

    partition: TopicIdPartition
    loss_at: float
    """Time at which the broker would delete bytes that are not durable; infinity when it would not."""
    backlog_bytes: int
    last_served_turn: int
    """0 when it has not been served yet."""
    is_new: bool = False
    """Whether its oldest waiting segment was closed a moment ago: no brake holds it."""

    @property
    def turn_key(self) -> tuple[int, int, TopicIdPartition]:
        """Return the place by fairness: least recently served first, then the larger backlog."""
        return (self.last_served_turn, -self.backlog_bytes, self.partition)

    @property
    def loss_key(self) -> tuple[float, int, int, TopicIdPartition]:
        """Return the place by danger: nearest to loss first, then by fairness."""
        return (self.loss_at, *self.turn_key)


def is_near_loss(waiting: WaitingPartition, limits: OrderLimits, *, now: float) -> bool:
    """Say whether *waiting* precedes partitions that are in no danger."""
    return waiting.loss_at - now <= limits.near_loss_seconds


def last_moment_of(waiting: WaitingPartition, limits: OrderLimits) -> float:
    """Return the time from which *waiting* is served without a brake."""
    return waiting.loss_at - limits.last_moment_seconds


def is_fair_turn(turn: int, limits: OrderLimits) -> bool:
    """Say whether *turn* (the first is 1) goes to the partition that waits longest."""
    return turn % limits.fair_turn_every == 0
