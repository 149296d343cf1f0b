"""
One log's leader-epoch history: which leader wrote which offsets.

A history is pairs of (epoch, first offset written under it) that ascend in both, as in a broker's
`leader-epoch-checkpoint`. An epoch ends where the next begins, and the last one where the log does. Two
pairs may share an offset: the leader of the first wrote nothing.

The functions here answer questions about one history as Kafka does, or return what two have in common.
`lineage` and `pinning` compare histories.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from typing import TypeAlias

from tieringd.model.segment import EpochStart

EpochHistory: TypeAlias = "tuple[EpochStart, ...]"

_epoch_of = itemgetter(0)
_start_of = itemgetter(1)


def with_records(history: Sequence[EpochStart]) -> EpochHistory:
    """
    Return *history* without the epochs under which nothing was written.

    The last epoch stays: this function does not know where it ends.
    """
    return (*(entry for entry, later in pairwise(history) if entry[1] != later[1]), *history[-1:])


def epoch_at(history: Sequence[EpochStart], offset: int) -> int | None:
    """Return the epoch under which *offset* was written; None below the first one known."""
    row = bisect_right(history, offset, key=_start_of) - 1
    return history[row][0] if row >= 0 else None


def end_offset_for(
    history: Sequence[EpochStart], epoch: int, *, log_end_offset: int
) -> tuple[int, int] | None:
    """
    Return the newest known epoch that is not above *epoch*, and where it ends (exclusive).

    This is the answer to an `OffsetForLeaderEpoch` request. Below the first known epoch it is *epoch*
    itself, which ends where the first one begins. None when *epoch* is newer than all: this log does not
    know where it will end.
    """
    row = bisect_right(history, epoch, key=_epoch_of) - 1
    if row == len(history) - 1:
        return (epoch, log_end_offset) if history and history[row][0] == epoch else None
    return (epoch if row < 0 else history[row][0], history[row + 1][1])


def newest_shared_epoch(one: Sequence[EpochStart], other: Sequence[EpochStart]) -> int | None:
    """Return the newest epoch that both histories know; None when there is none."""
    return max({epoch for epoch, _ in one} & {epoch for epoch, _ in other}, default=None)


def without_below(history: Sequence[EpochStart], offset: int) -> EpochHistory:
    """
    Return the history of a log that was cut at its head, so that it begins at *offset*.

    The epoch under which *offset* was written begins there from now on.
    """
    row = bisect_right(history, offset, key=_start_of) - 1
    if row < 0:
        return tuple(history)
    return ((history[row][0], offset), *history[row + 1 :])


def without_from(history: Sequence[EpochStart], offset: int) -> EpochHistory:
    """Return the history of a log that was cut at its tail, so that *offset* is the next to be written."""
    return tuple(entry for entry in history if entry[1] < offset)


def clipped(history: Sequence[EpochStart], *, base_offset: int, next_offset: int) -> EpochHistory:
    """
    Return the epochs of the offsets from *base_offset* up to *next_offset* (exclusive).

    A segment with these bounds carries them. Unlike the epochs of the batches found inside, they include
    epochs whose batches compaction has removed.
    """
    inside = without_from(history, next_offset)
    return with_records(without_below(inside, base_offset))


def completed(history: Sequence[EpochStart], of_batches: Sequence[EpochStart]) -> EpochHistory:
    """
    Return *history*, preceded by those epochs *of_batches* that begin before it.

    A broker forgets the epochs of offsets that it deletes, but a pin may hold those offsets.
    """
    known_from = history[0][1] if history else None
    return (*(one for one in of_batches if known_from is None or one[1] < known_from), *history)
