"""
The schedule of a swarm: which fault comes when, on which node, and for how long. It is pure.

The same seed and kinds make the same schedule. Each kind comes once, in an order of the seed, before any
comes again: so a run of a few minutes has as many kinds as it can. After that, the slow kinds come in one
round of six, so that an hour has many faults.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.5, 2.0
_SLOW_EACH = 6
"""Slow kinds come in one round of so many."""


@dataclass(frozen=True)
class Step:
    """One fault of a schedule."""

    number: int
    kind: str
    node_id: int
    """The node that it happens to, where the kind happens to one: 1, 2 or 3."""
    partition: int
    """The partition that it happens to, where the kind happens to one: 0, 1 or 2."""
    seconds: float
    """How long it lasts at least."""


def schedule(seed: int, kinds: Sequence[str], slow: Collection[str] = ()) -> Iterator[Step]:
    """Yield steps without end. *kinds* is not empty; *slow* has those of them that come less often."""
    chance = random.Random(seed)
    number = 0
    for turn in itertools.count():
        coming = [one for one in sorted(kinds) if turn % _SLOW_EACH == 0 or one not in slow]
        for kind in chance.sample(coming, len(coming)):
            yield Step(
                number,
                kind,
                chance.randint(1, 3),
                chance.randrange(3),
                round(chance.uniform(_SHORTEST_SECONDS, _LONGEST_SECONDS), 1),
            )
            number += 1
