"""Which topics a job is for: names, or patterns as in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase

from tieringd.errors import ObjectNotFound


def matches(name: str, topics: Collection[str]) -> bool:
    """Say whether a topic is one of *topics*, which are names or patterns."""
    return any(fnmatchcase(name, one) for one in topics)


def is_chosen_by(topics: Sequence[str]) -> Callable[[str], bool]:
    """Return what says whether a topic is one of *topics*: names or patterns; all are where none is given."""
    patterns = tuple(topics)
    return lambda name: not patterns or matches(name, patterns)


def unmatched(topics: Sequence[str], names: Collection[str]) -> list[str]:
    """Return those of *topics*, names or patterns, that none of *names* matches: mistakes, most likely."""
    return [one for one in topics if not any(matches(name, [one]) for name in names)]


def require_matched(topics: Sequence[str], names: Collection[str]) -> None:
    """
    See that each of *topics*, names or patterns, matches one of *names*.

    Raises:
        ObjectNotFound: One does not.
    """
    missing = unmatched(topics, names)
    if missing:
        raise ObjectNotFound(
            f"the bucket holds no topic that matches {', '.join(missing)}",
            hint="`tieringd archive topics` lists what it holds",
        )
