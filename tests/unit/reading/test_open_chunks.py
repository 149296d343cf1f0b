"""Open chunks: one descriptor for all readers of a chunk, closed when no reader has it."""

from __future__ import annotations

import os

import pytest

from tests.fakes.hydration import open_files
from tests.unit.cache.cached import a_chunk, data_in, put, started
from tieringd.metrics import Metrics
from tieringd.policies.cache_trim import (
    ChunkEvictionLimits,
    EvictionStrategy,
    TrimLimits,
    plan_cache_trim,
    trim_demand,
)
from tieringd.reading.cache_keeper import OpenChunks

CAPPED = ChunkEvictionLimits(EvictionStrategy.CAPPED, hydrated_ratio=0.5, min_chunks_threshold=0)


@pytest.fixture
def directory(tmp_path):
    directory = started(tmp_path / "cache")
    for number in range(4):
        put(directory, a_chunk(0, number), b"abc")
    return directory


@pytest.fixture
def time():
    """Give a clock that a test moves on."""
    return [0.0]


@pytest.fixture
def opened(time, tmp_path):
    """Give open chunks; in the end none of their files is open."""
    before = open_files(tmp_path)
    opened = OpenChunks(ChunkEvictionLimits(), now=lambda: time[0], metrics=Metrics().cache)
    yield opened
    opened.close()
    assert open_files(tmp_path) == before


def add(opened, directory, number):
    opened.add(directory.open(a_chunk(0, number), 3), segment="s", number=number, chunk_count=4)
    return a_chunk(0, number)


def test_readers_share_a_descriptor(opened, directory):
    """The chunk is in use until the last reader has given it back."""
    name = add(opened, directory, 0)
    first, second = opened.take(name, 3), opened.take(name, 3)
    assert first is second
    assert opened.in_use() == {name}
    opened.give_back(first)
    assert opened.in_use() == {name}
    opened.give_back(second)
    assert (opened.in_use(), opened.holds(name)) == (frozenset(), True)


def test_reader_keeps_a_forgotten_chunk_to_the_end(opened, directory, tmp_path):
    """No other reader gets it; it is closed when it is given back."""
    name = add(opened, directory, 0)
    entry = opened.take(name, 3)
    before = open_files(tmp_path)
    opened.forget([name, "unknown"])
    assert opened.take(name, 3) is None
    assert os.pread(entry.file.fd, 9, 0) == b"abc"
    opened.give_back(entry)
    assert open_files(tmp_path) == before - 1


def test_chunk_of_another_size_or_changed_on_the_disk_is_not_given(opened, directory):
    """Such a chunk has to be checked again."""
    name = add(opened, directory, 0)
    assert opened.take(name, 4) is None
    assert opened.take(name, 3) is None
    name = add(opened, directory, 1)
    (directory.path / name).write_bytes(b"abd")
    assert opened.take(name, 3) is None
    assert not opened.holds(name)


def test_chunk_that_is_added_again_takes_the_place_of_the_old_one(opened, directory):
    """Readers of the old one keep that."""
    name = add(opened, directory, 0)
    old = opened.take(name, 3)
    add(opened, directory, 0)
    new = opened.take(name, 3)
    assert new is not old
    opened.give_back(old)
    assert os.pread(new.file.fd, 9, 0) == b"abc"
    opened.give_back(new)


def test_sweep_closes_what_the_strategy_does_not_keep(opened, directory, time):
    """Eager closes all chunks without readers, capped the least recently used over the segment's share."""
    names = [add(opened, directory, number) for number in range(4)]
    entry = opened.take(names[1], 3)
    opened.limits = CAPPED
    for number in (3, 0, 2):
        time[0] += 1
        opened.give_back(opened.take(names[number], 3))
    opened.sweep()
    assert [opened.holds(name) for name in names] == [False, True, True, False]
    opened.limits = ChunkEvictionLimits()
    opened.sweep()
    assert [opened.holds(name) for name in names] == [False, True, False, False]
    opened.give_back(entry)
    opened.sweep()
    assert not opened.holds(names[1])


@pytest.mark.parametrize("strategy", EvictionStrategy)
def test_strategies_bound_open_files_and_trims_bound_files_on_the_disk(opened, directory, strategy, tmp_path):
    """A chunk that is closed is read again without a download, until the cache is over its limit."""
    names = [add(opened, directory, number) for number in range(4)]
    opened.limits = ChunkEvictionLimits(strategy, hydrated_ratio=0.5, min_chunks_threshold=0)
    before = open_files(tmp_path)
    opened.sweep()
    still_open = 0 if strategy is EvictionStrategy.EAGER else 2
    assert open_files(tmp_path) == before - 4 + still_open
    assert directory.accounts.use().objects == 4
    assert [data_in(directory, name, 3) for name in names] == [b"abc"] * 4
    demand = trim_demand(directory.accounts.use(), TrimLimits(size_bytes=100, objects=2, low_watermark=1.0))
    plan = plan_cache_trim(directory.accounts.files(), demand, in_use=opened.in_use())
    gone = [one.file.name for one in plan.evictions]
    assert gone == names[:2]
    opened.forget(gone)
    directory.evict(gone)
    assert [data_in(directory, name, 3) for name in names] == [None, None, b"abc", b"abc"]
    assert directory.accounts.use().objects == 2


def test_predictive_keeps_open_what_most_readers_come_to(opened, directory):
    """The fourth chunk stays open with one reader at the segment's first chunk and two at its third."""
    names = [add(opened, directory, number) for number in range(4)]
    entries = [opened.take(names[number], 3) for number in (0, 2, 2)]
    opened.limits = ChunkEvictionLimits(
        EvictionStrategy.PREDICTIVE, hydrated_ratio=0.75, min_chunks_threshold=0
    )
    opened.sweep()
    assert [opened.holds(name) for name in names] == [True, False, True, True]
    for entry in entries:
        opened.give_back(entry)


def test_close_leaves_readers_their_files(opened, directory):
    """Readers close their files as they leave."""
    name = add(opened, directory, 0)
    entry = opened.take(name, 3)
    opened.close()
    assert os.pread(entry.file.fd, 9, 0) == b"abc"
    opened.give_back(entry)
