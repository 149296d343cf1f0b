"""How many processors the process may use: affinity, and quotas of control groups of both versions."""

from __future__ import annotations

import os

import pytest

from tieringd.processors import usable_processors


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Give a host of 64 processors, whose control groups are files that a test writes."""
    # A process cannot be given more processors than its host has.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))

    def found(own: str, **files: str) -> int:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "groups" / name.replace("__", "/").replace("cpu_max", "cpu.max")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return usable_processors(root=tmp_path / "groups", own=tmp_path / "own")

    return found


def test_affinity_counts_where_there_is_no_quota(host):
    """No control group, or one without a limit, leaves the mask."""
    assert host("") == 64
    assert host("0::/pod\n", pod__cpu_max="max 100000\n") == 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("9900000 100000\n", 64),
        ("max\n", 64),
        ("what 100000\n", 64),
        ("", 64),
        ("0 0\n", 64),
    ],
)
def test_quota_is_rounded_up_to_whole_processors(host, text, expected):
    """A part of a processor is one; a quota above the mask has no effect; what is no quota sets no limit."""
    assert host("0::/\n", cpu_max=text) == expected


def test_smallest_quota_above_the_process_counts(host):
    """The limit of a pod holds for the containers in it."""
    assert host("0::/pod/box\n", pod__box__cpu_max="800000 100000", pod__cpu_max="300000 100000") == 3


def test_quota_of_version_1(host):
    """There the controllers have hierarchies of their own."""
    own = "4:memory:/x\n3:cpu,cpuacct:/box\n"
    limits = {"cpu__box__cpu.cfs_quota_us": "400000", "cpu__box__cpu.cfs_period_us": "100000"}
    assert host(own, **limits) == 4
    assert host(own, **{"cpu__box__cpu.cfs_quota_us": "-1"}) == 64


def test_this_process_has_a_processor():
    """The number of processors is sensible on the machine of this test."""
    assert 1 <= usable_processors() <= (os.cpu_count() or 1)
