"""Several jobs on one log: a part of it is compacted, keys are erased, and the archive's start moves."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archive_in, archived
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.support.examples import examples
from tests.unit.model.values import remote, stored
from tests.unit.spark.rewriting import Job, assert_sound, latest_of, open_in, records_of, write
from tieringd.formats.manifest_codec import decode_manifest, encode_manifest


@given(random=st.randoms(use_true_random=False), segments=st.integers(2, 8), jobs=st.integers(1, 3))
@settings(max_examples=examples(40), deadline=None)
def test_each_job_takes_what_it_may_and_no_more(random, segments, jobs):
    """Compaction of the first segments leaves the rest as it was, also where a record there is newer."""
    directory = Path(tempfile.mkdtemp())
    try:
        asyncio.run(_each_takes_what_it_may(directory, random, segments, jobs))
    finally:
        shutil.rmtree(directory)


async def _each_takes_what_it_may(directory, random, segments, jobs) -> None:
    store, writer = MemoryStore(), LogWriter(directory)
    write(writer, random, segments=segments)
    await archived(writer, archive_in(store))
    for number in range(jobs):
        job = Job(store, writer.identified, job_id=f"e{number}")
        if random.random() < 0.3:
            await _begin_inside(job, random)
        manifest = await job.manifest()
        opened = await open_in(store, manifest)
        before = await _readings(store, manifest)
        if random.random() < 0.25:
            keys = random.sample([b"", b"a", b"b", b"c"], 2)
            await job.erase(keys)
            expected = [[one for one in records if one.key not in keys] for records in before]
        else:
            expected = await _compacted_in_part(job, manifest, random, before)
        after = await job.manifest()
        assert await _readings(store, after) == expected
        assert await open_in(store, after) <= opened
        await assert_sound(store, after)


async def _compacted_in_part(job, manifest, random, before):
    """Compact some of the first segments; return what both kinds of readers should see of all."""
    head = random.randrange(1, len(manifest.segments) + 1)
    end = manifest.segments[head - 1].next_offset
    rules = {
        "due_before_ms": random.choice([None, DEFAULT_TIME_MS + random.randrange(-1, 1001)]),
        "drops_keyless": random.random() < 0.3,
    }
    target_bytes = random.choice([1, 300, 1 << 30])
    prepared = await job.compacted(manifest, head=head, target_bytes=target_bytes, **rules)
    if prepared:
        assert not (await job.swap_in(manifest, prepared, has_log=random.random() < 0.5)).left
    left = latest_of([one for one in before[1] if one.offset < end], **rules)
    return [left + [one for one in records if one.offset >= end] for records in before]


async def _readings(store, manifest):
    """Return what a reader sees, and then what one of committed records sees."""
    archive = archive_in(store)
    return [await records_of(archive, manifest, read_committed=one) for one in (False, True)]


async def _begin_inside(job, random) -> None:
    """Have the archive begin inside of its first segment, as after a user's DeleteRecords."""
    manifest = await job.manifest()
    first = manifest.segments[0]
    begin = max(manifest.start_offset, first.base_offset) + 1
    if begin > first.last_offset:
        return
    offset = random.randrange(begin, first.last_offset + 1)

    async def change(found):
        return found.starting_inside(first, offset, now_ms=7)

    await job.archive.manifests.edit(job.partition, change)


def test_writers_of_many_jobs_are_not_kept():
    """A stored manifest names the writers of its segments, and none of all the jobs before them."""
    segments = [remote(100 * number, 100 * number + 99) for number in range(3)]
    manifest = stored(segments)
    for number in range(300):
        job = remote(100, 199, writer_id=f"rewritten-{number:016x}")
        manifest = manifest.compacted([job], now_ms=number).forgotten(1)
    assert set(decode_manifest(encode_manifest(manifest)).segments.writers) == {
        segments[0].writer_id,
        f"rewritten-{299:016x}",
    }
