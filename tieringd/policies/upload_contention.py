"""
Contention: whether something else on this machine wants what uploads take.

Uploads by themselves keep a small machine busy, so a busy machine alone proves nothing. What counts is
how busy the machine is while no upload runs. Such moments come by themselves when little is uploaded. When
they do not come and the machine is busy, the policy asks for one: it *listens*, which means that no
upload begins until the machine was heard without them for a moment.

The facts are loads (`HostLoad`), measured over all time and over the moments without uploads. The plan
is a `ContentionState`. Times are seconds of one clock that never goes back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CPU, IO, MEMORY = "cpu", "io", "memory"
"""What others may wait for; the names are those of `/proc/pressure`."""


@dataclass(frozen=True, slots=True)
class HostLoad:
    """What a machine did in some seconds. Parts are from 0 to 1; None is not known."""

    seconds: float
    cpu_busy: float | None = None
    """The part of all processors' time that was not idle."""
    cpu_waiting: float | None = None
    """The part of the time in which a task waited for a processor: "some" in pressure stall information."""
    io_waiting: float | None = None
    """The same for reads and writes."""
    memory_waiting: float | None = None
    """The same for memory: pages that were dropped and are needed again, mostly."""
    cpu_of_others: float | None = None
    """The part of all processors' time that other processes took."""


@dataclass(frozen=True, slots=True)
class ContentionLimits:
    """From which load on a machine is wanted by others, and what listening may cost."""

    cpu_busy: float = 0.9
    cpu_waiting: float = 0.25
    io_waiting: float = 0.2
    memory_waiting: float = 0.1
    heard_seconds: float = 0.2
    """The time without uploads that a judgement needs. The kernel counts processors' time in 10 ms."""
    listening_seconds_max: float = 10.0
    """Uploads under way may take this long to end; after that the last judgement stays."""
    listening_pause_seconds: float = 5.0
    """Between two times of listening, at least."""
    growth: float = 0.15
    """Others that take so much more than after the last judgement are listened to without a pause."""
    listening_cost: float = 0.05
    """The part of the time that listening may take: after a long one the pause is longer."""

    def __post_init__(self) -> None:
        assert self.heard_seconds > 0, "a judgement needs some time"
        assert 0 < self.listening_cost <= 1, "listening takes a part of the time"


@dataclass(frozen=True, slots=True)
class ContentionState:
    """What is known after a look, and what the next look goes on from."""

    contended_by: str = ""
    """What others want: `CPU`, `IO` or `MEMORY`; empty when nothing is wanted."""
    listening_since: float | None = None
    """When no upload was let begin any more, so that the machine can be heard; None at other times."""
    listen_at: float = 0.0
    """Not before this, unless others have come to take more."""
    load: HostLoad | None = None
    """What the machine did first after the last judgement; None while that is not known."""

    @property
    def is_listening(self) -> bool:
        """Say whether no upload may begin now."""
        return self.listening_since is not None


def wanted_by(load: HostLoad, limits: ContentionLimits) -> str:
    """Return what *load* presses on: `CPU`, `IO` or `MEMORY`; empty when the machine has room."""
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

    *total* is the load since the last look. *others* is the load of the moments without uploads since the
    last judgement that used them; it is used as soon as it has `heard_seconds`. *is_catching_up* says
    whether anything waits that a brake would hold: else there is no reason to listen. *is_moving* says
    whether any upload has succeeded since listening began.
    """
    if others.seconds >= limits.heard_seconds:
        return replace(_ended(state, limits, now=now), contended_by=wanted_by(others, limits), load=None)
    if total.seconds >= limits.heard_seconds and not wanted_by(total, limits):
        # Uploads run beside whatever else there is, and the machine still has room.
        return replace(_ended(state, limits, now=now), contended_by="")
    if state.listening_since is not None:
        is_over = now >= state.listening_since + limits.listening_seconds_max or not is_catching_up
        if is_over and not is_moving:
            # The store is away, and listening cost nothing: the machine is to be heard soon after it is back.
            return replace(state, listening_since=None, listen_at=now + limits.listening_pause_seconds)
        return _ended(state, limits, now=now) if is_over else state
    if is_catching_up and (now >= state.listen_at or _have_come(state.load, total, limits)):
        return replace(state, listening_since=now)
    return state if state.load is not None else replace(state, load=total)


def _have_come(before: HostLoad | None, load: HostLoad, limits: ContentionLimits) -> bool:
    """Say whether others take more of the machine than they did after the last judgement."""
    if before is None:
        return False
    return any(
        was is not None and now is not None and now >= was + limits.growth
        for was, now in (
            (before.cpu_of_others, load.cpu_of_others),
            (before.io_waiting, load.io_waiting),
            (before.memory_waiting, load.memory_waiting),
        )
    )


def _ended(state: ContentionState, limits: ContentionLimits, *, now: float) -> ContentionState:
    """Return *state* without listening, and with the pause that the last listening asks for."""
    if state.listening_since is None:
        return state
    spent = now - state.listening_since
    pause = max(limits.listening_pause_seconds, spent * (1 / limits.listening_cost - 1))
    return replace(state, listening_since=None, listen_at=now + pause)


def _is_from(value: float | None, bound: float) -> bool:
    return value is not None and value >= bound
