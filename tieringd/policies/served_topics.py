"""
Which of a bucket's topics are served under their names, when there is no broker to say so.

A name can stand for several topics: incarnations of one that was deleted and created again, and
topics of other clusters. Of incarnations the newest is meant that is not purged. Between clusters
nobody can know, so an operator chooses; a cluster that shows up later takes no name away from one that
has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieringd.policies.topic_lifecycle import BEYOND_RETURN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tieringd.formats.topic_manifest import TopicManifest


@dataclass(frozen=True, slots=True)
class NamedTopics:
    """What is served, and what cannot be decided."""

    topics: Mapping[str, TopicManifest]
    """By name."""
    contested: Mapping[str, tuple[str, ...]]
    """By name, the clusters that have a topic of it; not among *topics*, unless one had the name before."""


def choose_topics(
    found: Iterable[TopicManifest], *, cluster: str | None = None, before: Mapping[str, str] | None = None
) -> NamedTopics:
    """
    Return which topic each name stands for: of *cluster* alone, or of all where it is None.

    *before* says, by name, of which cluster it was until now.
    """
    newest: dict[str, dict[str, TopicManifest]] = {}
    for manifest in found:
        key = manifest.key
        is_there = manifest.partition_count and manifest.lifecycle not in BEYOND_RETURN
        if is_there and cluster in {None, key.cluster}:
            of_name = newest.setdefault(key.topic, {})
            known = of_name.get(key.cluster)
            if known is None or _age(known) < _age(manifest):
                of_name[key.cluster] = manifest
    topics: dict[str, TopicManifest] = {}
    contested: dict[str, tuple[str, ...]] = {}
    for name, of_name in sorted(newest.items()):
        if len(of_name) > 1:
            contested[name] = tuple(sorted(of_name))
        owner = (before or {}).get(name)
        if len(of_name) == 1:
            topics[name] = next(iter(of_name.values()))
        elif owner in of_name:
            topics[name] = of_name[owner]
    return NamedTopics(topics, contested)


def _age(manifest: TopicManifest) -> tuple[int, str]:
    return manifest.created_at_ms, manifest.key.topic_id
