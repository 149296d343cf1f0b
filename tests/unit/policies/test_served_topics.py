"""Which topic a name stands for, when there is only a bucket to say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tieringd.formats.object_keys import TopicKey
from tieringd.formats.topic_manifest import TopicManifest
from tieringd.model.topic_lifecycle import Lifecycle
from tieringd.policies.topic_lifecycle import choose_topics


def topic(cluster, name, number, *, created_at_ms=0, partitions=1):
    key = TopicKey(cluster, name, f"{number:022d}")
    return TopicManifest(key, partition_count=partitions, created_at_ms=created_at_ms)


OLD, NEW = topic("east", "orders", 1, created_at_ms=5), topic("east", "orders", 2, created_at_ms=9)
AUDIT = topic("east", "audit", 3)
WEST = topic("west", "orders", 4, created_at_ms=99)


def test_newest_incarnation_has_the_name():
    """The order in which the incarnations are found makes no difference."""
    for found in ([OLD, NEW, AUDIT], [NEW, OLD, AUDIT]):
        chosen = choose_topics(found)
        assert chosen.topics == {"audit": AUDIT, "orders": NEW}
        assert not chosen.contested


def test_name_of_two_clusters_is_contested():
    """The topic of that name is ambiguous, and other names are not affected."""
    chosen = choose_topics([WEST, OLD, NEW, AUDIT])
    assert chosen.topics == {"audit": AUDIT}
    assert chosen.contested == {"orders": ("east", "west")}


def test_cluster_that_is_chosen_has_all_its_names():
    """No other cluster has any."""
    assert choose_topics([WEST, NEW, AUDIT], cluster="east").topics == {"audit": AUDIT, "orders": NEW}
    chosen = choose_topics([WEST, NEW, AUDIT], cluster="west")
    assert chosen.topics == {"orders": WEST}
    assert not chosen.contested


def test_cluster_that_shows_up_later_takes_no_name_away():
    """The cluster that has the name keeps it, with its newest incarnation. The contest is reported."""
    chosen = choose_topics([WEST, OLD, NEW], before={"orders": "east"})
    assert chosen.topics == {"orders": NEW}
    assert chosen.contested == {"orders": ("east", "west")}
    assert choose_topics([WEST], before={"orders": "east"}).topics == {"orders": WEST}


def test_topic_without_partitions_is_not_served():
    """The manifest of such a topic only says what an operator wants of it."""
    assert choose_topics([topic("east", "empty", 1, partitions=0)]).topics == {}


@pytest.mark.parametrize(
    ("lifecycle", "is_served"),
    [
        (Lifecycle.DELETED, True),
        (Lifecycle.KEPT, True),
        (Lifecycle.PURGING, False),
        (Lifecycle.PURGED, False),
    ],
)
def test_incarnation_that_is_purged_has_no_name(lifecycle, is_served):
    """An older one that was kept has it then."""
    newest = replace(NEW, lifecycle=lifecycle)
    assert choose_topics([OLD, newest]).topics == {"orders": newest if is_served else OLD}
