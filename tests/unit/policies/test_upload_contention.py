"""Contention: the load that shows that others want the machine, and the times at which the policy listens."""

from __future__ import annotations

import pytest

from tieringd.policies.upload_control import (
    CPU,
    IO,
    MEMORY,
    ContentionLimits,
    ContentionState,
    HostLoad,
    judge,
    wanted_by,
)

LIMITS = ContentionLimits(listening_pause_seconds=5, listening_cost=0.05)
BUSY, ROOM, UNHEARD = HostLoad(1, cpu_busy=1.0), HostLoad(1, cpu_busy=0.5), HostLoad(0)


def after(
    state: ContentionState,
    total: HostLoad,
    others: HostLoad,
    now: float = 100.0,
    *,
    is_catching_up: bool = True,
) -> ContentionState:
    return judge(state, LIMITS, total=total, others=others, is_catching_up=is_catching_up, now=now)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        pytest.param(HostLoad(1), "", id="nothing known"),
        pytest.param(HostLoad(1, 0.5, 0.1, 0.1, 0.05), "", id="room everywhere"),
        pytest.param(HostLoad(1, cpu_busy=0.95), CPU, id="no idle processor"),
        pytest.param(HostLoad(1, 0.5, cpu_waiting=0.5), CPU, id="tasks wait for processors"),
        pytest.param(HostLoad(1, 0.1, 0.0, io_waiting=0.5), IO, id="tasks wait for disks"),
        pytest.param(HostLoad(1, 0.1, 0.0, 0.0, memory_waiting=0.5), MEMORY, id="tasks wait for memory"),
    ],
)
def test_a_machine_is_wanted_where_it_has_no_room(load, expected):
    """Each part has a bound of its own; what is not known presses on nothing."""
    assert wanted_by(load, LIMITS) == expected


def test_a_machine_with_room_is_not_contended():
    """Uploads run and processors are idle, so nothing has to be measured without uploads."""
    assert after(ContentionState(CPU), ROOM, UNHEARD) == ContentionState()


def test_a_busy_machine_is_listened_to():
    """A measurement without uploads is needed to tell what makes the machine busy."""
    assert after(ContentionState(), BUSY, UNHEARD) == ContentionState(listening_since=100.0)


def test_what_is_heard_without_uploads_decides():
    """Other load that leaves room for uploads is no contention, however busy uploads themselves are."""
    listening = ContentionState(listening_since=99.5)
    assert after(listening, BUSY, ROOM).contended_by == ""
    assert after(listening, BUSY, BUSY).contended_by == CPU
    assert not after(listening, BUSY, ROOM).is_listening


def test_too_short_a_moment_decides_nothing():
    """Listening goes on until enough was heard."""
    listening = ContentionState(listening_since=99.9)
    assert after(listening, HostLoad(0.05, cpu_busy=0.2), HostLoad(0.1, cpu_busy=1.0)) == listening


def test_moments_between_uploads_need_no_listening():
    """The machine is judged between uploads if little is uploaded, and the judgement follows its load."""
    contended = after(ContentionState(), BUSY, BUSY)
    assert (contended.contended_by, contended.is_listening) == (CPU, False)
    assert after(contended, BUSY, ROOM, 101.0) == ContentionState()


def test_others_that_come_are_listened_to_at_once():
    """A producer that starts does not wait for the end of a pause; one that was there already is known."""
    free = ContentionState(listen_at=200, explained_cpu=0.2)
    alone, beside = HostLoad(1, 1.0, cpu_of_others=0.2), HostLoad(1, 1.0, cpu_of_others=0.6)
    known = after(free, alone, UNHEARD)
    assert known == ContentionState(listen_at=200, load=alone, explained_cpu=0.2)
    assert after(known, alone, UNHEARD) == known
    assert after(known, beside, UNHEARD).is_listening
    assert after(after(known, beside, BUSY), beside, UNHEARD).load == beside


def test_others_that_come_right_after_listening_are_met():
    """The first load after a judgement has such others in it, so it is compared with what was heard."""
    quiet = HostLoad(1, 0.5, cpu_of_others=0.1)
    heard = after(ContentionState(listening_since=99.5), BUSY, quiet)
    came = after(heard, HostLoad(1, 1.0, cpu_of_others=0.5), UNHEARD, 100.1)
    assert came.is_listening
    assert after(came, BUSY, BUSY, 100.4).contended_by == CPU


def test_store_on_this_host_is_listened_to_once():
    """Such a store takes processors only while uploads run. Listening explains that, and a pause follows."""
    quiet, beside = HostLoad(1, 0.5, cpu_of_others=0.1), HostLoad(1, 1.0, cpu_of_others=0.5)
    less = HostLoad(1, 1.0, cpu_of_others=0.3)
    state = after(ContentionState(listening_since=99.5), BUSY, quiet)
    state = after(state, beside, UNHEARD, 100.1)
    assert state.is_listening
    state = after(state, beside, quiet, 100.4)
    for now, load in enumerate((less, beside, less, beside), 101):
        state = after(state, load, UNHEARD, now)
        assert not state.is_listening
    # The next time after the pause, and not twice.
    state = after(state, beside, UNHEARD, state.listen_at)
    assert state.is_listening
    state = after(state, beside, quiet, state.listening_since + 0.3)
    assert not after(state, less, UNHEARD, state.listen_at - 1).is_listening


def test_others_that_come_to_a_machine_with_room_are_listened_to():
    """Other load that left room for uploads is explained. Other load that is larger by the limit is not."""
    roomy = after(ContentionState(listen_at=200), HostLoad(1, 0.6, cpu_of_others=0.3), UNHEARD)
    assert not after(roomy, HostLoad(1, 1.0, cpu_of_others=0.4), UNHEARD).is_listening
    assert after(roomy, HostLoad(1, 1.0, cpu_of_others=0.5), UNHEARD).is_listening


def test_listening_to_a_machine_while_the_store_is_away_costs_nothing():
    """No upload ends then, so nothing is heard; the next listening comes soon, and not after a long pause."""
    listening = ContentionState(listening_since=90.0)
    given_up = judge(
        listening, LIMITS, total=BUSY, others=UNHEARD, is_catching_up=True, is_moving=False, now=100.0
    )
    assert given_up == ContentionState(listen_at=105.0)


def test_nothing_is_listened_to_where_a_brake_would_hold_nothing():
    """New segments are not braked, so other load does not matter while only those wait."""
    assert not after(ContentionState(), BUSY, UNHEARD, is_catching_up=False).is_listening
    listening = ContentionState(listening_since=99.9)
    assert not after(listening, BUSY, UNHEARD, is_catching_up=False).is_listening


def test_listening_gives_up_where_uploads_do_not_end():
    """An upload that hangs must not hold up the others for long; what was known stays."""
    listening = ContentionState(IO, listening_since=90.5)
    assert after(listening, BUSY, UNHEARD).is_listening
    given_up = after(listening, BUSY, UNHEARD, 100.5)
    assert (given_up.contended_by, given_up.is_listening) == (IO, False)


@pytest.mark.parametrize(
    ("took", "pause"),
    [pytest.param(0.2, 5, id="short: the shortest pause"), pytest.param(2.0, 38, id="long: a twentieth")],
)
def test_listening_costs_a_twentieth_of_the_time(took, pause):
    """A longer time of listening, as slow uploads cause it, is followed by a longer pause."""
    heard = after(ContentionState(listening_since=100 - took), BUSY, ROOM)
    assert heard.listen_at == pytest.approx(100 + pause)
    assert not after(heard, BUSY, UNHEARD, heard.listen_at - 0.1).is_listening
    assert after(heard, BUSY, UNHEARD, heard.listen_at).is_listening


def test_limits_that_cannot_be_kept_are_refused():
    """A judgement from no time, and listening that costs nothing, are mistakes."""
    for arguments in ({"heard_seconds": 0}, {"listening_cost": 0}):
        with pytest.raises(AssertionError):
            ContentionLimits(**arguments)


@pytest.mark.parametrize(
    ("before", "heard", "pause_seconds"),
    [
        pytest.param(None, 0.5, 0.5, id="others that are heard for the first time"),
        pytest.param(0.1, 0.5, 0.5, id="others that have grown"),
        pytest.param(0.5, 0.5, 5.0, id="others as before"),
        pytest.param(0.9, 0.5, 5.0, id="fewer others"),
        pytest.param(None, 0.1, 5.0, id="next to nothing"),
    ],
)
def test_others_that_have_grown_are_listened_to_again_soon(before, heard, pause_seconds):
    """They may have begun in the middle of what was heard, and leave no room by now."""
    listening = ContentionState(
        listening_since=99.9, heard=None if before is None else HostLoad(0.2, cpu_of_others=before)
    )
    found = after(listening, UNHEARD, HostLoad(0.2, cpu_busy=heard, cpu_of_others=heard))
    assert (found.contended_by, found.listen_at) == ("", 100.0 + pause_seconds)


def test_others_that_have_grown_in_a_long_phase_are_listened_to_after_as_long():
    """Uploads that take long to end would otherwise stand still for most of the time."""
    found = after(ContentionState(listening_since=96.0), UNHEARD, HostLoad(0.2, 0.5, cpu_of_others=0.5))
    assert found.listen_at == 104.0


def test_others_that_go_up_and_down_get_one_short_pause_in_the_time_of_a_long_one():
    """Each quiet moment may hear more than the last one; uploads would stand still for half of the time."""
    low, high = (HostLoad(0.2, cpu_busy=part, cpu_of_others=part) for part in (0.1, 0.5))
    state, now, listened, busy = ContentionState(), 100.0, 0.0, HostLoad(0.5, cpu_busy=1.0)
    while now < 1100:
        state = after(state, busy, UNHEARD, now)
        if state.is_listening:
            state, now, listened = after(state, busy, high, now + 4), now + 4, listened + 4
            assert not state.is_listening
        state = after(state, low, UNHEARD, now + 0.5)
        now = max(now + 0.5, state.listen_at)
    assert listened <= 2 * LIMITS.listening_cost * 1000 * 1.2
