"""What a worker of Spark's leaves out of its collections."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from tieringd.spark import worker_process
from tieringd.spark.worker_process import spare_collections, without_collections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def _fresh_process() -> Iterator[None]:
    """Begin as a process that spared nothing. What the worker of these tests spares itself stays spared."""
    worker_process._freeze_once.cache_clear()
    yield
    worker_process._freeze_once.cache_clear()


def test_a_worker_that_is_used_again_leaves_out_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the first task are not looked through after each of the next."""
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    left_out = gc.get_freeze_count()
    loaded = [[number] for number in range(10_000)]
    spare_collections()
    assert gc.get_freeze_count() >= left_out + len(loaded)


def test_what_comes_later_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first call counts: garbage of later tasks is never kept for good."""
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    spare_collections()
    left_out = gc.get_freeze_count()
    later = [[number] for number in range(1000)]
    spare_collections()
    assert gc.get_freeze_count() <= left_out
    assert len(later) == 1000


def test_a_program_of_a_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that only plans or reads collects garbage as before."""
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    left_out = gc.get_freeze_count()
    later = [[number] for number in range(1000)]
    spare_collections()
    assert gc.get_freeze_count() <= left_out
    assert len(later) == 1000


def _fail_without_collections() -> None:
    with without_collections():
        assert not gc.isenabled()
        raise LookupError


@pytest.mark.parametrize("before", [gc.enable, gc.disable])
def test_nothing_is_collected_meanwhile_and_everything_as_before_later(before: Callable[[], None]) -> None:
    """Also when the work ends with an error."""
    before()
    try:
        was_enabled = gc.isenabled()
        with pytest.raises(LookupError):
            _fail_without_collections()
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
