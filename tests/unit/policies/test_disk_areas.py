"""Disk areas: whose bytes are whose on one filesystem, and which directories share one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.policies.disk_areas import (
    AreaSettings,
    DirectoryUse,
    DiskAreas,
    DiskSpace,
    divide_disk,
    plan_spaces,
)

DEFAULTS = AreaSettings(reservation_percent=20, cache_percent=20, cache_bytes=0)
"""With the defaults of the documents: the log gets what the reserve and the cache leave."""


def areas(total_bytes=1000, *, has_logs=True, has_cache=True, **settings) -> tuple[int, int, int]:
    found = divide_disk(total_bytes, replace(DEFAULTS, **settings), has_logs=has_logs, has_cache=has_cache)
    return found.reserved_bytes, found.cache_bytes, found.log_bytes


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({}, (200, 200, 600), id="the documents' defaults"),
        pytest.param({"reservation_percent": 0}, (0, 200, 800), id="no reserve"),
        pytest.param({"reservation_percent": 100}, (1000, 0, 0), id="all in reserve"),
        pytest.param({"cache_bytes": 150}, (200, 150, 650), id="cache: bytes are smaller"),
        pytest.param({"cache_bytes": 250}, (200, 200, 600), id="cache: percent is smaller"),
        pytest.param({"cache_bytes": None}, (200, 200, 600), id="cache: bytes null"),
        pytest.param({"cache_percent": None, "cache_bytes": 150}, (200, 150, 650), id="cache: percent null"),
        pytest.param({"cache_percent": 0, "cache_bytes": 150}, (200, 150, 650), id="cache: percent 0"),
        pytest.param({"cache_percent": None}, (200, 0, 800), id="cache: null and 0"),
        pytest.param({"cache_percent": 0, "cache_bytes": None}, (200, 0, 800), id="cache: 0 and null"),
        pytest.param({"log_percent": 50}, (200, 200, 500), id="log: percent only"),
        pytest.param({"log_bytes": 450}, (200, 200, 450), id="log: bytes only"),
        pytest.param({"log_percent": 50, "log_bytes": 450}, (200, 200, 450), id="log: bytes are smaller"),
        pytest.param({"log_percent": 50, "log_bytes": 550}, (200, 200, 500), id="log: percent is smaller"),
        pytest.param({"log_percent": 50, "log_bytes": 0}, (200, 200, 500), id="log: bytes 0"),
        pytest.param({"log_percent": 0, "log_bytes": 450}, (200, 200, 450), id="log: percent 0"),
        pytest.param({"log_percent": 0, "log_bytes": 0}, (200, 200, 600), id="log: both 0"),
        pytest.param({"log_percent": 12.5}, (200, 200, 125), id="a fraction of a percent"),
    ],
)
def test_areas_are_the_smaller_of_percent_and_bytes(settings, expected):
    """Percentages are of the whole disk, the smaller limit counts, and null or 0 sets nothing."""
    assert areas(**settings) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({"log_percent": 70}, (200, 100, 700), id="some of the cache is left"),
        pytest.param({"log_percent": 80}, (200, 0, 800), id="none of the cache is left"),
        pytest.param({"log_percent": 95}, (200, 0, 800), id="never into the reserve"),
        pytest.param({"log_bytes": 5000}, (200, 0, 800), id="log sized for a larger disk"),
        pytest.param({"log_bytes": 5000, "cache_bytes": 5000}, (200, 0, 800), id="both sized so"),
    ],
)
def test_cache_gives_way_where_both_do_not_fit(settings, expected):
    """The log's area is filled first if log and cache together are larger than the disk."""
    assert areas(**settings) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({"cache_percent": 50}, (200, 500, 300), id="what the log is left with is enough"),
        pytest.param({"cache_percent": 60}, (200, 600, 200), id="just enough"),
        pytest.param({"cache_percent": 70}, (200, 600, 200), id="too little"),
        pytest.param({"cache_percent": None, "cache_bytes": 20_000}, (200, 600, 200), id="sized in bytes"),
    ],
)
def test_cache_leaves_a_quarter_to_a_log_without_a_target(settings, expected):
    """A log without a target of its own keeps a quarter of what the reserve leaves, whatever the cache."""
    assert areas(**settings) == expected


@pytest.mark.parametrize(
    ("has_logs", "has_cache", "expected"),
    [
        pytest.param(True, False, (200, 0, 800), id="logs only"),
        pytest.param(False, True, (200, 200, 0), id="cache only"),
    ],
)
def test_areas_of_absent_parts_are_empty(has_logs, has_cache, expected):
    """A cache elsewhere is deducted from nothing, and a disk without logs has no log area."""
    assert areas(has_logs=has_logs, has_cache=has_cache) == expected


def test_cache_on_its_own_disk_may_fill_all_but_the_reserve():
    """Nothing is kept for logs where there are none."""
    found = areas(has_logs=False, cache_percent=None, cache_bytes=5000, log_percent=50)
    assert found == (200, 800, 0)


percents = st.none() | st.floats(0, 100, allow_subnormal=False)
sizes = st.none() | st.integers(0, 2**50)


@given(
    total_bytes=st.integers(0, 2**50),
    settings=st.builds(
        AreaSettings,
        st.floats(0, 100, allow_subnormal=False),
        log_percent=percents,
        log_bytes=sizes,
        cache_percent=percents,
        cache_bytes=sizes,
    ),
    has_logs=st.booleans(),
    has_cache=st.booleans(),
)
def test_areas_never_exceed_the_disk(total_bytes, settings, has_logs, has_cache):
    """No area is negative, and the areas together fit the disk, for any disk and settings."""
    found = divide_disk(total_bytes, settings, has_logs=has_logs, has_cache=has_cache)
    parts = (found.reserved_bytes, found.cache_bytes, found.log_bytes)
    assert min(parts) >= 0
    assert sum(parts) <= total_bytes
    if has_logs and has_cache:
        alone = divide_disk(total_bytes, settings, has_logs=True, has_cache=False).log_bytes
        has_target = bool(settings.log_percent or settings.log_bytes)
        assert found.log_bytes == alone if has_target else found.log_bytes >= alone // 4


def use(path, *, filesystem=1, used=0, total=1000) -> DirectoryUse:
    return DirectoryUse(path, filesystem, total, used)


def test_log_directories_on_one_filesystem_are_one_space():
    """The directories share one log area, and their use is added up."""
    found = plan_spaces([use("/a", used=300), use("/b", used=250)], use("/c", used=40), DEFAULTS)
    expected = DiskSpace(
        filesystem=1,
        total_bytes=1000,
        areas=DiskAreas(200, 200, 600),
        log_dirs=("/a", "/b"),
        log_used_bytes=550,
        cache_dir="/c",
        cache_used_bytes=40,
    )
    assert found == (expected,)


def test_log_directories_on_several_filesystems_are_several_spaces():
    """Each is divided by itself; the cache counts on its own filesystem only."""
    logs = [
        use("/a", filesystem=7, used=10),
        use("/b", filesystem=3, used=20, total=500),
        use("/c", filesystem=7, used=30),
    ]
    first, second, third = plan_spaces(logs, use("/cache", filesystem=9, used=5, total=100), DEFAULTS)
    assert (first.filesystem, first.log_dirs, first.log_used_bytes) == (7, ("/a", "/c"), 40)
    assert (first.areas, first.cache_dir, first.cache_used_bytes) == (DiskAreas(200, 0, 800), None, 0)
    assert (second.filesystem, second.log_dirs, second.log_used_bytes) == (3, ("/b",), 20)
    assert (second.areas, second.total_bytes) == (DiskAreas(100, 0, 400), 500)
    assert (third.filesystem, third.log_dirs, third.cache_dir) == (9, (), "/cache")
    assert (third.areas, third.cache_used_bytes) == (DiskAreas(20, 20, 0), 5)


def test_limit_in_bytes_holds_for_each_filesystem():
    """`retention_local_target_capacity_bytes` is not divided between disks."""
    logs = [use("/a", filesystem=1), use("/b", filesystem=2)]
    found = plan_spaces(logs, None, replace(DEFAULTS, log_bytes=450))
    assert [one.areas.log_bytes for one in found] == [450, 450]


def test_disk_that_is_resized_between_two_measurements_counts_with_the_smaller_size():
    """Two sizes of one filesystem make one space of the smaller."""
    (found,) = plan_spaces([use("/a", total=2000), use("/b", total=1000)], None, DEFAULTS)
    assert (found.total_bytes, found.areas.log_bytes) == (1000, 800)


def space(total, *, log_used, cache_used) -> DiskSpace:
    """Return the one space of a disk that holds a log directory and the cache."""
    (found,) = plan_spaces(
        [use("/log", used=log_used, total=total)], use("/cache", used=cache_used, total=total), DEFAULTS
    )
    return found


@pytest.mark.parametrize(
    ("log_used", "cache_used", "limit", "cache_excess", "log_excess"),
    [
        pytest.param(0, 0, 200, 0, 0, id="empty disk"),
        pytest.param(600, 200, 200, 0, 0, id="both full"),
        pytest.param(600, 201, 200, 1, 0, id="the cache is over its area"),
        pytest.param(601, 200, 199, 1, 1, id="the log is over its area"),
        pytest.param(700, 50, 100, 0, 100, id="the log is over, the cache is small"),
        pytest.param(800, 50, 0, 50, 200, id="the log has all of it"),
        pytest.param(900, 50, 0, 50, 300, id="the log is in the reserve"),
    ],
)
def test_cache_never_takes_what_the_log_uses(log_used, cache_used, limit, cache_excess, log_excess):
    """The cache gets less while the log is over its area, and evicts what it has above that."""
    found = space(1000, log_used=log_used, cache_used=cache_used)
    assert (found.cache_limit_bytes, found.cache_excess_bytes) == (limit, cache_excess)
    assert found.log_excess_bytes == log_excess


@pytest.mark.parametrize(
    ("total", "cache_limit", "log_excess"),
    [
        pytest.param(1000, 200, 0, id="as it was"),
        pytest.param(900, 180, 0, id="log still in its area"),
        pytest.param(800, 140, 20, id="the cache goes far below its area"),
        pytest.param(650, 20, 110, id="nearly all of the cache"),
        pytest.param(625, 0, 125, id="all of the cache"),
        pytest.param(500, 0, 200, id="and then only the log is left to go"),
    ],
)
def test_cache_goes_first_on_a_disk_that_shrinks(total, cache_limit, log_excess):
    """A disk that shrinks takes the missing bytes from a full cache first, and then from the log."""
    found = space(total, log_used=500, cache_used=200)
    assert found.cache_limit_bytes == cache_limit
    assert found.cache_excess_bytes == 200 - cache_limit
    assert found.log_excess_bytes == log_excess
