"""Portions of random logs together are what a reader of the archive sees, also while a job rewrites it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.archive import archive_in
from tests.support.examples import examples
from tests.support.exports import ArchivedLogs
from tests.unit.spark.rewriting import Job, records_of, write
from tieringd.archive.retired_objects import delete_retired
from tieringd.spark.jobs.export.plan import portions_of
from tieringd.spark.jobs.export.work import Losses, Work


@given(
    random=st.randoms(use_true_random=False),
    segments=st.integers(2, 6),
    portion_bytes=st.sampled_from([50, 200, 1000, 10**6]),
    isolation=st.sampled_from(["read_committed", "read_uncommitted"]),
    is_compacted=st.booleans(),
)
@settings(max_examples=examples(40), deadline=None)
def test_portions_are_what_a_reader_sees(random, segments, portion_bytes, isolation, is_compacted):
    """No record twice. A compaction in the middle takes what it takes, and nothing else is missing."""
    directory = Path(tempfile.mkdtemp())
    logs = ArchivedLogs.made(directory)
    try:
        write(logs.writers[0], random, segments=segments)
        asyncio.run(logs.archive())
        compacted_in = random.randrange(8) if is_compacted else None
        _portions_are_what_is_seen(logs, portion_bytes, isolation, compacted_in)
    finally:
        logs.bucket.close()
        shutil.rmtree(directory)


def _portions_are_what_is_seen(logs, portion_bytes, isolation, compacted_in) -> None:
    (writer,) = logs.writers
    manifest = asyncio.run(logs.services.manifests.load(writer.identified)).existing
    before = _seen(logs, isolation)
    portions = list(
        portions_of(
            writer.identified,
            manifest.segments,
            from_offset=0,
            next_offset=manifest.next_offset,
            portion_bytes=portion_bytes,
        )
    )
    assert (portions[0].from_offset, portions[-1].next_offset) == (0, manifest.next_offset)
    assert all(one.next_offset == following.from_offset for one, following in pairwise(portions))

    found = {}
    for number, portion in enumerate(portions):
        work = Work(lambda: logs.bucket, None, isolation, fails_on_gap=True)
        losses = Losses(portion, fails_on_gap=True)
        for place, batch in enumerate(work.batches(portion, losses)):
            for row in batch.to_pylist():
                assert row["offset"] not in found
                found[row["offset"]] = (row["key"], row["value"])
            if number == compacted_in and place == 0:
                asyncio.run(_compact(logs))
    after = _seen(logs, isolation)
    if compacted_in is None:
        assert found == before
    assert found.items() <= before.items()
    assert after.items() <= found.items()


def _seen(logs, isolation):
    """Return the key and value of each record in the archive, by its offset."""
    services = archive_in(logs.services.store)

    async def read():
        stored = await services.manifests.load(logs.writers[0].identified)
        return await records_of(services, stored.existing, read_committed=isolation == "read_committed")

    return {record.offset: (record.key, record.value) for record in asyncio.run(read())}


async def _compact(logs) -> None:
    """Compact the archive, and delete what was replaced under the reader."""
    services, partition = logs.services, logs.writers[0].identified
    await Job(services.store, partition).compact()
    await delete_retired(services.store, services.manifests, partition, retired_until_ms=2**60)
