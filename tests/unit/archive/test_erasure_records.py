"""The records of erasures in a bucket, by partition."""

from __future__ import annotations

from dataclasses import replace

from crc32c import crc32c

from tests.fakes.memory_store import MemoryStore
from tests.unit.model.values import PARTITION
from tieringd.archive.rebuild.erasure_records import recorded_erasures
from tieringd.formats.job_records import (
    ErasureOutcome,
    ErasureRequest,
    PartitionGoneOver,
    encode_erasure_outcome,
)
from tieringd.formats.object_keys import erasure_key

REQUEST = ErasureRequest("0123456789abcdef", 1_000, "me", "", (PARTITION.topic,), ("00" * 32,))
PARTITIONS = [replace(PARTITION, partition=number) for number in range(40)]


async def test_evidence_of_a_partition_has_no_rows_of_others():
    """A record has a row for each partition. With all rows for each one, cost and memory would be squares."""
    rows = tuple(PartitionGoneOver(one, one.partition, 100) for one in PARTITIONS[:-1])
    data = encode_erasure_outcome(REQUEST, ErasureOutcome(2_000, (), None, (), rows))
    store = MemoryStore()
    key = erasure_key(begun_at_ms=REQUEST.begun_at_ms, job_id=REQUEST.job_id, is_done=True)
    await store.put(key, data, crc32c=crc32c(data))

    found = await recorded_erasures(store, PARTITIONS, matches=lambda name, topics: name in topics)

    assert found.faults == []
    missed = {one: found.evidence[one].missed_by for one in PARTITIONS}
    assert missed[PARTITIONS[0]] == [], "nothing is older than offset 0"
    assert {
        one: [(erasure.gone_over, before) for erasure, before in some] for one, some in missed.items() if some
    } == {row.partition: [((row,), row.start_offset)] for row in rows[1:]} | {PARTITIONS[-1]: [((), None)]}
