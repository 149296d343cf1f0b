"""Which transactions are open at an offset of a log, and where each began: what a replay there would undo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.broker.segment_file import position_of
from tieringd.formats.segment_scan import HeaderWalk
from tieringd.formats.transactions import TransactionTracker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieringd.broker.layout import Layout
    from tieringd.model.local_log import LocalLog


def open_transactions_at(layout: Layout, log: LocalLog, offset: int) -> Mapping[int, int]:
    """
    Return the first local offset of each producer's transaction that has no marker before *offset*.

    One without any record in what is left of the log is not known. Reads every header below
    *offset*. Blocks.

    Raises:
        LocalFileError: A file cannot be read, or is gone.
        CorruptDataError: A header is impossible, or *offset* is inside a batch.
    """
    tracker = TransactionTracker(log.first_offset or 0)
    for segment in log.segments:
        if segment.base_offset >= offset:
            break
        file = layout.open(segment)
        try:
            size_bytes = file.segment.size_bytes
            if segment.next_offset is None or segment.next_offset > offset:
                size_bytes = position_of(file.fd, file.segment, offset)
            walk = HeaderWalk(
                file.read_at, size_bytes=size_bytes, base_offset=segment.base_offset, source=segment.path
            )
            walk.follow_transactions(tracker)
        finally:
            file.close()
    return dict(tracker.open_transactions)
