"""Which topics a job is for: names, or patterns as in the configuration."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


def is_chosen_by(topics: Sequence[str]) -> Callable[[str], bool]:
    """Return what says whether a topic is one of *topics*: names or patterns; all are where none is given."""
    patterns = tuple(topics)
    return lambda name: not patterns or any(fnmatchcase(name, one) for one in patterns)


def unmatched(topics: Sequence[str], names: Collection[str]) -> list[str]:
    """Return those of *topics*, names or patterns, that none of *names* matches: mistakes, most likely."""
    return [one for one in topics if not any(fnmatchcase(name, one) for name in names)]
