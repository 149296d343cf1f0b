"""The record of an erasure: it is stored, and says what became of objects that were replaced."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.fakes.local_spark import LocalSpark
from tieringd.errors import StorageUnavailable, TieringError
from tieringd.formats.erasure_record import ErasureRequest
from tieringd.formats.object_keys import manifest_key
from tieringd.spark.bucket import Bucket
from tieringd.spark.jobs.erase import _deleted_at_ms, _store_record, erase
from tieringd.spark.jobs.swapping import Outcome
from tieringd.storage.memory import MemoryStore
from tieringd.storage.resilient import ResilientStore, StoreLimits


@pytest.fixture
def bucket(shelf):
    bucket = Bucket(shelf.config)
    yield bucket
    bucket.close()


class LostAnswer(MemoryStore):
    """Stores the first object, and does not say so."""

    async def put(self, key, body, *, crc32c, condition=None):
        is_first = not self._objects
        info = await super().put(key, body, crc32c=crc32c, condition=condition)
        if is_first:
            raise StorageUnavailable("no answer", outcome_unknown=True)
        return info


def test_record_whose_answer_was_lost_is_stored():
    """All that it tells of is done by then: a job that failed over it would leave no trace of that."""
    backend = LostAnswer()
    limits = StoreLimits(initial_backoff_seconds=0.001, max_backoff_seconds=0.001)
    bucket = SimpleNamespace(store=ResilientStore(backend, limits), run=asyncio.run)
    request = ErasureRequest("0a", 7, "dpo", "", ("orders",), ())

    _store_record(bucket, request, b"told", is_done=True)

    assert [data for data, *_ in backend._objects.values()] == [b"told"]


@pytest.mark.parametrize("after_ms", [None, 0, 1])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_record_says_deleted_only_where_nothing_is_left(shelf, bucket, after_ms, is_damaged):
    """Not where a partition's manifest could not be read: what was replaced there may be in the bucket."""
    partitions = [shelf.fill(partition=number).identified for number in range(2)]
    if is_damaged:
        shelf.write(manifest_key(partitions[0]), b"damaged")
    outcome = Outcome()

    deleted_at_ms = bucket.run(_deleted_at_ms(bucket, partitions, outcome, after_ms=after_ms))

    assert (deleted_at_ms is not None) == (after_ms == 0 and not is_damaged)
    assert bool(outcome.faults) == (after_ms is not None and is_damaged)


@pytest.fixture
def failing_spark(shelf):
    """Give a Spark at the end of whose tasks no record of an erasure can be stored any more."""
    shelf.fill()
    records = shelf.root / "audit" / "erasures"

    def take_away() -> None:
        records.rename(shelf.root / "audit" / "elsewhere")
        records.write_bytes(b"no directory")

    return LocalSpark(take_away)


def test_erasure_whose_record_cannot_be_stored_at_its_end_reports(shelf, failing_spark):
    """The records are gone: a job that failed over it would not tell which, and who had asked for it."""
    report = erase(failing_spark, shelf.config, topics=["orders"], keys=[b"k0"], requested_by="me")

    assert report.figures["records_removed"] > 0
    assert report.figures["record"] is None
    (fault,) = report.faults
    assert fault.startswith("the record of what was erased is not stored; run the job again: ")


def test_erasure_that_has_replaced_nothing_fails_with_its_store(shelf, failing_spark):
    """There is nothing to report."""
    with pytest.raises(TieringError):
        erase(failing_spark, shelf.config, topics=["orders"], keys=[b"none"], requested_by="me")
