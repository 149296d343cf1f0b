"""
How many objects become one, where a request takes 32 at most (compose).

More are joined in levels: first each 32 into an object of their own, then those. The objects in between
have names that follow from the last one's, so that joining again writes over them, and are deleted
in the end. What a killed process left of them is named by nothing, and is found as any such object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCES_MAX = 32
"""What one compose request takes."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request: *keys* become the object *key*."""

    key: str
    keys: tuple[str, ...]


def steps_to(key: str, sources: Sequence[str]) -> list[Step]:
    """Return the requests that make *key* of *sources*, in order; the last one makes it."""
    steps: list[Step] = []
    keys, level = tuple(sources), 0
    while len(keys) > SOURCES_MAX:
        groups = [keys[start : start + SOURCES_MAX] for start in range(0, len(keys), SOURCES_MAX)]
        made = [Step(f"{key}.part-{level}-{number}", group) for number, group in enumerate(groups)]
        steps += made
        keys, level = tuple(step.key for step in made), level + 1
    return [*steps, Step(key, keys)]
