"""The choice of a job's topics, by names or by patterns as in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase

from tieringd.errors import ObjectNotFound


def matches(name: str, topics: Collection[str]) -> bool:
    """Return whether the topic *name* matches one of *topics*, which are names or patterns."""
    return any(fnmatchcase(name, one) for one in topics)


def is_chosen_by(topics: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate on topic names: matches one of *topics*, names or patterns, or *topics* is empty."""
    patterns = tuple(topics)
    return lambda name: not patterns or matches(name, patterns)


def unmatched(topics: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the *topics*, names or patterns, that match none of *names*. They are most likely mistakes."""
    return [one for one in topics if not any(matches(name, [one]) for name in names)]


def require_matched(topics: Sequence[str], names: Collection[str]) -> None:
    """
    Check that each of *topics*, names or patterns, matches one of *names*.

    Raises:
        ObjectNotFound: One of *topics* matches none.
    """
    missing = unmatched(topics, names)
    if missing:
        raise ObjectNotFound(
            f"the bucket holds no topic that matches {', '.join(missing)}",
            hint="`tieringd archive topics` lists what it holds",
        )
