"""Spilling on a small scale: parts of one segment each, a store that crashes, and observations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.fakes.archive import observed, values_in
from tests.fakes.memory_store import MemoryStore
from tieringd.formats.object_keys import parse_spillover_key
from tieringd.policies import spillover as policy
from tieringd.policies.total_retention import RetentionPace, TotalRetention

if TYPE_CHECKING:
    import pytest

    from tests.fakes.log_writer import LogWriter
    from tieringd.archiving.archiver import Archiver
    from tieringd.archiving.observer import Observation

MINUTE_MS = 60_000
PACE = RetentionPace(interval_ms=MINUTE_MS, delete_delay_ms=10 * MINUTE_MS)
FOREVER = TotalRetention(limit_ms=None, limit_bytes=None)


class Crash(Exception):
    """Simulates the end of the process."""


class CrashingStore(MemoryStore):
    """
    Raises `Crash` at the change number *crash_at*, before or after its effect (*takes_effect*).

    With *crash_again* the next process crashes that many changes later, and so on.
    """

    crash_at: int | None = None
    crash_again: int | None = None
    takes_effect = False
    changes = 0

    def _is_last(self) -> bool:
        self.changes += 1
        is_last = self.changes == self.crash_at
        if is_last and self.crash_again is not None:
            self.crash_at = self.changes + self.crash_again
        return is_last

    async def put(self, key, body, *, crc32c, condition=None):
        """Store an object, unless the process crashes before."""
        is_last = self._is_last()
        if is_last and not self.takes_effect:
            raise Crash
        info = await super().put(key, body, crc32c=crc32c, condition=condition)
        if is_last:
            raise Crash
        return info

    async def delete_many(self, keys):
        """Delete objects, unless the process crashes before."""
        is_last = self._is_last()
        if is_last and not self.takes_effect:
            raise Crash
        await super().delete_many(keys)
        if is_last:
            raise Crash


class CrashingJoins(CrashingStore):
    """Also counts joins as changes, and crashes at them."""

    async def join(self, key, sources, *, crc32c, condition=None):
        """Join objects, unless the process crashes before."""
        is_last = self._is_last()
        if is_last and not self.takes_effect:
            raise Crash
        joined = await super().join(key, sources, crc32c=crc32c, condition=condition)
        if is_last:
            raise Crash
        return joined


def make_parts_small(monkeypatch: pytest.MonkeyPatch, *, rows: int = 1, remembered: int = 1) -> None:
    """
    Make spilled parts of *rows* segments or more, and let the live manifest keep *remembered* of them.

    By default each segment that may spill becomes a part of its own. The plan is made deep inside archivers
    and jobs, and its limits are part of no setting, so this is the one place that patches them.
    """
    # See above.
    monkeypatch.setattr(policy, "ROWS_MIN", rows)
    monkeypatch.setattr(policy, "SEGMENTS_REMEMBERED", remembered)


def observe(writer: LogWriter, *, total: TotalRetention = FOREVER, **changes: Any) -> Observation:
    """Return an observation of a topic whose manifest always exceeds its target size."""
    return observed(writer, total=total, target_manifest_bytes=1, **{"retention_pace": PACE, **changes})


def spilled_names(store, writer):
    """Return the names of all spillover manifests in the bucket, ascending."""
    found = (parse_spillover_key(writer.identified, key) for key in store.objects)
    return sorted(name for name in found if name is not None)


def data_keys(store) -> list[str]:
    """Return the keys of all data objects in the bucket."""
    return sorted(key for key in store.objects if key.endswith(".log"))


async def filled(writer: LogWriter, archiver: Archiver, *, segments: int = 6, local: int = 2) -> None:
    """Archive *segments* segments, keep the newest *local* in the local log, and let the others spill."""
    for number in range(segments):
        writer.closed_segment(b"a%d" % number, b"b%d" % number)
    while (await archiver.step(observe(writer))).uploaded:
        pass
    for _ in range(segments - local):
        writer.drop_head()
    await archiver.step(observe(writer))


async def expect_all(archive, manifest, expected) -> None:
    """Check that readers of an archive find *expected*, and that the verifier finds no fault."""
    assert await values_in(archive, manifest, from_offset=manifest.start_offset) == expected
    report = await archive.verifier.verify(manifest, deep=True)
    assert report.faults == ()
    assert report.segments == manifest.segment_count
    # The first segment may have records that a user has deleted.
    assert report.records >= len(expected)
