"""Ordinary segments, logs and manifests, and hypothesis strategies for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap, Replacement
from tieringd.model.offset_translation import OffsetTranslation
from tieringd.model.partition import TopicIdPartition, TopicPartition
from tieringd.model.segment import CrossingTransaction, LocalSegment, RemoteSegment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

TOPIC_ID = "wJalrXUtnFEMI-K7MDENGg"
PARTITION = TopicIdPartition("cluster-1", "orders", TOPIC_ID, 3)
TIME_MS = 1_700_000_000_000
WRITERS = ("0a" * 16, "0b" * 16, "0c" * 16)


def local(base_offset: int, next_offset: int | None, *, size_bytes: int = 1024) -> LocalSegment:
    """Return a local segment; None as *next_offset* makes it the active one."""
    path = f"/logs/orders-3/{base_offset:020d}.log"
    return LocalSegment(base_offset, next_offset, size_bytes, path, inode=base_offset + 1, modified_ns=1)


def local_log(bases: Sequence[int], *, sizes: Mapping[int, int] | None = None) -> LocalLog:
    """Return a log whose segments begin at *bases*; the last one is active. *sizes* go by base."""
    sizes = sizes or {}
    ends = [*bases[1:], None] if bases else []
    segments = tuple(
        local(base, end, size_bytes=sizes.get(base, 1024)) for base, end in zip(bases, ends, strict=True)
    )
    directory = LocalPartition(TopicPartition("orders", 3), TOPIC_ID, "/logs/orders-3", "/logs")
    return LocalLog(directory, segments, ((0, 0),))


def remote(base_offset: int, last_offset: int, **changes: object) -> RemoteSegment:
    """Return a stored segment; *changes* go to its fields."""
    fields = {
        "size_bytes": 1024,
        "crc32c": 0x12345678,
        "base_timestamp_ms": TIME_MS,
        "max_timestamp_ms": TIME_MS + 999,
        "leader_epoch": 5,
        "writer_id": WRITERS[0],
        "uploaded_at_ms": TIME_MS + 2000,
        "index_size_bytes": 300,
    }
    return RemoteSegment(base_offset, last_offset, **(fields | changes))


def stored(segments: Iterable[RemoteSegment], *, start_offset: int | None = None) -> PartitionManifest:
    """Return a manifest of contiguous *segments*, which begins where the first one does."""
    rows = tuple(segments)
    first = rows[0].base_offset if rows else 0
    begun = PartitionManifest.begin(PARTITION, start_offset=first if start_offset is None else start_offset)
    return begun.appended(rows)


timestamps = st.one_of(st.just(-1), st.integers(0, 2**62))


@st.composite
def remote_segments(draw: st.DrawFn, base_offset: int, *, max_length: int = 1000) -> RemoteSegment:
    """Draw a segment that begins at *base_offset*; every other field is anything that fits its column."""
    return RemoteSegment(
        base_offset,
        base_offset + draw(st.integers(0, max_length - 1)),
        size_bytes=draw(st.integers(0, 2**62)),
        crc32c=draw(st.integers(0, 2**32 - 1)),
        base_timestamp_ms=draw(timestamps),
        max_timestamp_ms=draw(timestamps),
        leader_epoch=draw(st.integers(-1, 2**31 - 1)),
        writer_id=draw(st.sampled_from(WRITERS)),
        uploaded_at_ms=draw(st.integers(0, 2**62)),
        broker_timestamp_ms=draw(timestamps),
        index_size_bytes=draw(st.integers(0, 2**32 - 1)),
        index_crc32c=draw(st.just(-1) | st.integers(0, 2**32 - 1)),
    )


_offsets = st.integers(0, 2**62)
_replacements = st.builds(Replacement, _offsets, _offsets, st.integers(-1, 2**31 - 1), _offsets)
_translations = _offsets.flatmap(
    lambda raw: st.integers(0, raw).map(lambda delta: OffsetTranslation(raw, delta))
)


def _crossing_at(manifest: PartitionManifest) -> st.SearchStrategy[CrossingTransaction]:
    return st.integers(manifest.start_offset, manifest.next_offset - 1).flatmap(
        lambda first_offset: st.builds(
            CrossingTransaction,
            producer_id=_offsets,
            first_offset=st.just(first_offset),
            marker_offset=st.integers(first_offset + 1, 2**62),
            leader_epoch=st.integers(0, 2**31 - 1),
        )
    )


@st.composite
def manifests(draw: st.DrawFn) -> PartitionManifest:
    """Draw a sound manifest: segments and gaps in any order, a history of epochs, and its writer."""
    start_offset = draw(st.integers(0, 2**40))
    partition = TopicIdPartition("cluster-1", draw(st.text(max_size=20)), TOPIC_ID, draw(st.integers(0, 99)))
    manifest = PartitionManifest.begin(partition, start_offset=start_offset)
    for is_gap in draw(st.lists(st.booleans(), max_size=8)):
        base_offset = manifest.next_offset
        if is_gap:
            last_offset = base_offset + draw(st.integers(0, 100))
            recorded_at_ms = draw(st.integers(0, 2**62))
            manifest = manifest.with_gap(
                Gap(base_offset, last_offset, draw(st.text(max_size=20)), recorded_at_ms)
            )
        else:
            manifest = manifest.appended([draw(remote_segments(base_offset))])
            if draw(st.booleans()) and draw(st.booleans()):
                manifest = manifest.expired(
                    draw(st.integers(1, len(manifest.segments))), now_ms=draw(st.integers(0, 2**62))
                )
    if manifest.next_offset > manifest.start_offset:
        manifest = manifest.appended((), crossing=draw(st.lists(_crossing_at(manifest), max_size=3)))
    manifest = replace(
        manifest,
        began_at_ms=draw(st.integers(0, 2**62)),
        replacements=tuple(draw(st.lists(_replacements, max_size=2))),
        translation=draw(st.none() | _translations),
        allowed_local_start_offset=draw(st.none() | _offsets),
    )
    epochs = draw(st.lists(st.integers(0, 2**31 - 1), unique=True, max_size=4).map(sorted))
    starts = sorted(draw(st.lists(st.integers(0, 2**40), min_size=len(epochs), max_size=len(epochs))))
    return manifest.appended((), zip(epochs, starts, strict=True)).committed(
        writer_id=draw(st.sampled_from(WRITERS)),
        leader_epoch=draw(st.integers(-1, 2**31 - 1)),
        commit_number=draw(st.integers(0, 2**40)),
        now_ms=draw(st.integers(0, 2**62)),
    )
