"""The machine's load, read from files as the kernel writes them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from tieringd.broker.host_load import HostCounters, HostLoadReader, load_between, load_of, sum_of
from tieringd.policies.upload_control import HostLoad


def pressure(some_us: int) -> str:
    line = "avg10=0.18 avg60=1.43 avg300=4.05"
    return f"some {line} total={some_us}\nfull {line} total=7\n"


@pytest.fixture
def proc(tmp_path):
    """Give a `/proc` of a machine that has done nothing yet."""
    directory = tmp_path / "proc"
    (directory / "pressure").mkdir(parents=True)
    (directory / "self").mkdir()
    (directory / "self/cgroup").write_text("9:name=systemd:/\n0::/system.slice/tieringd.service\n")
    (directory / "stat").write_text("cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    for name in ("cpu", "io", "memory"):
        (directory / "pressure" / name).write_text(pressure(0))
    return directory


@pytest.fixture
def read(tmp_path, proc):
    """Give a function that reads the counters at a time, from files that stay open."""
    with closing(HostLoadReader(proc, tmp_path / "cgroup")) as reader:
        yield reader.counters


def test_load_is_what_happened_between_two_readings(proc, read):
    """Waiting for disks is idle time of a processor; guests' time is in that of users already."""
    before = read(10.0)
    (proc / "stat").write_text("cpu  300 0 100 400 100 0 50 50 300 0\ncpu0 1 2 3\n")
    for name, waited_us in (("cpu", 1_000_000), ("io", 500_000), ("memory", 250_000)):
        (proc / "pressure" / name).write_text(pressure(waited_us))
    load = load_between(before, read(12.0))
    assert load.cpu_of_others == pytest.approx(0.5, abs=0.05)
    assert replace(load, cpu_of_others=None) == HostLoad(2.0, pytest.approx(0.5), 0.5, 0.25, 0.125)


def test_what_this_process_takes_is_not_of_others():
    """Busy processor time without this process's own is that of others: four of ten seconds here."""
    load = load_between(HostCounters(1.0, 0.0, 0.0), HostCounters(6.0, 10.0, 4.0, own_cpu_seconds=2.0))
    assert (load.cpu_busy, load.cpu_of_others) == (pytest.approx(0.6), pytest.approx(0.4))


def test_the_control_groups_pressure_takes_the_place_of_the_machines(tmp_path, proc):
    """The control group's own pressure counts if the machine's cannot be read."""
    for name in ("cpu", "io", "memory"):
        (proc / "pressure" / name).unlink()
    own = tmp_path / "cgroup/system.slice/tieringd.service"
    own.mkdir(parents=True)
    (own / "io.pressure").write_text(pressure(3_000_000))
    with closing(HostLoadReader(proc, tmp_path / "cgroup")) as reader:
        assert reader.has_pressure
        found = reader.counters(1.0)
    assert (found.cpu_waited, found.io_waited, found.memory_waited) == (None, 3.0, None)


def test_a_machine_that_tells_nothing_has_an_unknown_load(tmp_path):
    """No /proc at all: nothing is known, and nothing fails."""
    with closing(HostLoadReader(tmp_path / "none", tmp_path / "none")) as reader:
        assert not reader.has_pressure
        assert load_between(reader.counters(1.0), reader.counters(2.0)) == HostLoad(1.0)


def test_this_machine_can_be_read():
    """The kernel that runs the tests writes what is read here."""
    with closing(HostLoadReader()) as reader:
        found = reader.counters(1.0)
    assert found.cpu_seconds is not None
    assert found.cpu_seconds > found.cpu_idle_seconds


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        pytest.param(HostCounters(5.0, 10.0, 5.0), HostLoad(0.0), id="no time"),
        pytest.param(HostCounters(6.0, 9.0, 5.0), HostLoad(1.0), id="no processor time counted"),
        pytest.param(
            HostCounters(6.0, 11.0, 4.0), HostLoad(1.0, 1.0, cpu_of_others=1.0), id="idle time that went back"
        ),
    ],
)
def test_counters_that_stand_or_go_back_make_no_nonsense(later, expected):
    """Kernels count coarsely, and idle time may be corrected."""
    assert load_between(HostCounters(5.0, 9.0, 5.0), later) == expected


def test_intervals_add_up():
    """What is unknown in one of them is unknown together."""
    assert load_of(sum_of(())) == HostLoad(0.0)
    one = HostCounters(1.0, 2.0, 1.6, 0.4, 0.1, own_cpu_seconds=0.2)
    other = HostCounters(3.0, 6.0, 2.4, None, 0.3, own_cpu_seconds=0.4)
    assert load_of(sum_of((one, other))) == HostLoad(
        4.0, pytest.approx(0.5), io_waiting=pytest.approx(0.1), cpu_of_others=pytest.approx(0.425)
    )


def test_interval_between_two_ticks_hides_no_load():
    """Uploads end and begin within 10 ms, and the kernel counts no processor's time in between."""
    busy = HostCounters(0.2, 0.4, 0.0, own_cpu_seconds=0.0)
    between_ticks = HostCounters(0.004, 0.0, 0.0)
    assert load_of(between_ticks).cpu_busy is None
    assert load_of(sum_of((busy, between_ticks))).cpu_busy == 1.0
