"""Plan the next round of a topic's export, from the archive's current manifests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from tieringd.errors import ObjectNotFound, TieringError
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment
from tieringd.spark.jobs.export.plan import (
    ALLOW_GAPS,
    LostOffsets,
    Portion,
    losses,
    portions_of,
    require_reached,
)
from tieringd.storage.at_once import at_once

if TYPE_CHECKING:
    # An ordinary import would load prometheus_client and xxhash into processes that do not need them.
    from tieringd.spark.bucket import Bucket
    from tieringd.spark.jobs.export.state import ExportRules, ExportState

T = TypeVar("T")

LOADS_AT_ONCE: Final = 32
"""Manifests that are loaded at once."""
READ_ATTEMPTS_MAX: Final = 5
"""Attempts with a newly loaded manifest, if the spillover manifests that it names are missing."""


CUT_BACK: Final = (
    "an earlier run has begun to write them, and the archive was cut back since to the log of another "
    "leader. They are exported once the archive reaches past them; with gaps allowed, they never are"
)


@dataclass(frozen=True, slots=True)
class Round:
    """The portions that are written and committed together, and the offsets that the archive lacks."""

    portions: tuple[Portion, ...]
    lost: tuple[LostOffsets, ...] = ()
    passed: Mapping[int, int] = field(default_factory=dict)
    """The offset at which the export of each partition goes on that lost everything there was to export."""


def next_round(
    bucket: Bucket, state: ExportState, ends: Mapping[TopicIdPartition, int], rules: ExportRules
) -> Round:
    """
    Return a round of up to `rules.round_bytes` from the rest of all partitions, up to their *ends*.

    Each partition gets its share of the round, or one portion. If not all have room in it, those with the
    most offsets left come first. Only a single portion may be larger than the round.

    Raises:
        TieringError: The archive ends before the exported offsets, or it lacks offsets and the rules do not
            allow that.
    """
    for partition, end in ends.items():
        if end < state.offsets[partition.partition]:
            _require_exported(bucket, partition, state.offsets[partition.partition])
    left = {one: end for one, end in ends.items() if state.offsets[one.partition] < end}
    # A partition that was just given a portion has fewer offsets left, so the others have their turn next.
    in_order = sorted(left, key=lambda one: state.offsets[one.partition] - left[one])
    room = _Room(rules.round_bytes, share_bytes=rules.round_bytes // max(1, len(left)))
    rounds: list[Round] = []
    for partition, loaded in _loaded(bucket, in_order):
        found = _round_of(
            bucket,
            partition,
            loaded,
            exported_to=state.offsets[partition.partition],
            end=left[partition],
            portion_bytes=rules.portion_bytes,
            room=room,
        )
        rounds.append(found)
        if room.is_full:
            break
    lost = tuple(one for found in rounds for one in found.lost)
    _require_none(lost, rules)
    portions = [portion for found in rounds for portion in found.portions]
    return Round(
        tuple(sorted(portions, key=lambda one: (one.partition, one.from_offset))),
        lost,
        {number: offset for found in rounds for number, offset in found.passed.items()},
    )


def _require_exported(bucket: Bucket, partition: TopicIdPartition, next_offset: int) -> None:
    """
    Check that the archive still has the offsets up to *next_offset*, exclusive, which were exported.

    The manifest is loaded again. Another run may have begun later than this one, and exported more.

    Raises:
        TieringError: The archive ends earlier, or has no manifest of *partition* any more.
    """
    manifest = require_reached(bucket.run(bucket.manifests.load(partition)).manifest, partition, 0)
    if manifest.next_offset < next_offset:
        raise TieringError(
            f"{partition} was exported up to offset {next_offset - 1}, but the archive ends at "
            f"{manifest.next_offset - 1}: it was cut back to the log of another leader",
            hint="The target has records that are no longer in the log; export to another target",
        )


@dataclass(slots=True)
class _Room:
    """The bytes that a round still has room for."""

    left_bytes: int
    share_bytes: int
    """About what each partition may take of it; at least one portion, however large."""
    is_empty: bool = True
    is_full: bool = False

    def takes(self, size_bytes: int) -> bool:
        """Take a portion and return True, or return False if it does not fit. The first one always fits."""
        if size_bytes > self.left_bytes and not self.is_empty:
            self.is_full = True
            return False
        self.left_bytes -= size_bytes
        self.is_empty = False
        self.is_full = self.left_bytes <= 0
        return True


def _loaded(
    bucket: Bucket, partitions: Iterable[TopicIdPartition]
) -> Iterator[tuple[TopicIdPartition, PartitionManifest | None]]:
    """Yield partitions with their current manifests, of which some are loaded at once."""
    waiting = iter(partitions)
    while some := list(islice(waiting, LOADS_AT_ONCE)):
        stored = bucket.run(at_once(some, bucket.manifests.load, count=LOADS_AT_ONCE))
        yield from ((partition, one.manifest) for partition, one in zip(some, stored, strict=True))


def _require_none(lost: Sequence[LostOffsets], rules: ExportRules) -> None:
    if lost and rules.fails_on_gap:
        raise TieringError(
            f"the archive lacks records that were to be exported: {'; '.join(map(str, lost))}",
            hint=ALLOW_GAPS,
        )


def begun_round(bucket: Bucket, state: ExportState, portions: Sequence[Portion], rules: ExportRules) -> Round:
    """
    Return the round of *portions* that an earlier run began but did not commit; they continue *state*.

    That run did not report the offsets that the archive lacks, so they are determined here.

    Raises:
        TieringError: The archive lacks offsets, and the rules do not allow that.
    """
    by_partition: dict[TopicIdPartition, list[Portion]] = defaultdict(list)
    for one in portions:
        by_partition[one.partition].append(one)
    lost: list[LostOffsets] = []
    for partition, loaded in _loaded(bucket, by_partition):
        some = by_partition[partition]
        begin, end = some[0].from_offset, some[-1].next_offset
        if loaded is not None and loaded.next_offset < end:
            lost.append(LostOffsets(partition, max(begin, loaded.next_offset), end, CUT_BACK))
        lost += losses(
            partition,
            _with_manifest(bucket, partition, loaded, partial(_gaps, bucket, begin, end)),
            exported_to=state.offsets.get(partition.partition, begin),
            from_offset=begin,
            next_offset=end,
        )
    _require_none(lost, rules)
    return Round(tuple(portions), tuple(lost))


def _round_of(
    bucket: Bucket,
    partition: TopicIdPartition,
    loaded: PartitionManifest | None,
    *,
    exported_to: int,
    end: int,
    portion_bytes: int,
    room: _Room,
) -> Round:
    """Return a round with the next portions of one partition, as far as *room* takes them."""

    def cut(manifest: PartitionManifest | None) -> Round:
        tried = replace(room)
        found = _cut(
            bucket,
            require_reached(manifest, partition, end),
            exported_to=exported_to,
            end=end,
            portion_bytes=portion_bytes,
            room=tried,
        )
        room.left_bytes, room.is_empty, room.is_full = tried.left_bytes, tried.is_empty, tried.is_full
        return found

    return _with_manifest(bucket, partition, loaded, cut)


def _with_manifest(
    bucket: Bucket,
    partition: TopicIdPartition,
    loaded: PartitionManifest | None,
    see: Callable[[PartitionManifest | None], T],
) -> T:
    """Return *see* of *loaded*, a partition's manifest. Load it again if a spillover manifest is missing."""
    manifest = loaded
    for attempt in range(1, READ_ATTEMPTS_MAX + 1):
        try:
            return see(manifest)
        except ObjectNotFound:
            if attempt == READ_ATTEMPTS_MAX:
                raise
        manifest = bucket.run(bucket.manifests.load(partition)).manifest
    raise AssertionError("the last attempt returns or raises")


def _gaps(
    bucket: Bucket, from_offset: int, next_offset: int, manifest: PartitionManifest | None
) -> list[Gap]:
    """Return the gaps in the manifest and spillover manifests that cover the given offsets."""
    if manifest is None:
        # Reading the portions will report the missing manifest.
        return []
    found: list[Gap] = []
    with closing(bucket.iterate(bucket.spillovers.pieces(manifest, from_offset=from_offset))) as pieces:
        for piece in pieces:
            if piece.start_offset >= next_offset:
                break
            found += piece.gaps
    return found


def _cut(
    bucket: Bucket,
    manifest: PartitionManifest,
    *,
    exported_to: int,
    end: int,
    portion_bytes: int,
    room: _Room,
) -> Round:
    from_offset = min(max(exported_to, manifest.start_offset), end)
    pieces: list[PartitionManifest] = []

    def segments() -> Generator[RemoteSegment]:
        with closing(bucket.iterate(bucket.spillovers.pieces(manifest, from_offset=from_offset))) as found:
            for piece in found:
                pieces.append(piece)
                for row in range(piece.segments.row_at_or_after(from_offset), len(piece.segments)):
                    yield piece.segments[row]

    portions: list[Portion] = []
    share_bytes = room.share_bytes
    with closing(segments()) as ascending:
        for portion in portions_of(
            manifest.partition,
            ascending,
            from_offset=from_offset,
            next_offset=end,
            portion_bytes=portion_bytes,
        ):
            if not room.takes(portion.size_bytes):
                break
            portions.append(portion)
            share_bytes -= portion.size_bytes
            if share_bytes <= 0 or room.is_full:
                break
    if room.is_full and not portions and from_offset < end:
        # Nothing of this partition fits, and it has its turn in the next round.
        return Round(())
    next_offset = portions[-1].next_offset if portions else from_offset
    lost = losses(
        manifest.partition,
        [gap for piece in pieces for gap in piece.gaps],
        exported_to=exported_to,
        from_offset=from_offset,
        next_offset=next_offset,
    )
    passed = {} if portions else {manifest.partition.partition: from_offset}
    return Round(tuple(portions), tuple(lost), passed)
