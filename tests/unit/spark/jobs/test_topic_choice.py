"""Topics by name and by pattern."""

from __future__ import annotations

import pytest

from tieringd.spark.jobs.topic_choice import is_chosen_by, unmatched


@pytest.mark.parametrize(
    ("topics", "chosen"),
    [
        ([], ["orders", "orders-eu", "Orders", "pay"]),
        (["orders"], ["orders"]),
        (["orders*"], ["orders", "orders-eu"]),
        (["*eu", "pa?"], ["orders-eu", "pay"]),
        (["nothing"], []),
    ],
)
def test_topics_are_chosen(topics, chosen):
    """All without a choice; otherwise those that a name or pattern is for."""
    is_chosen = is_chosen_by(topics)
    assert [one for one in ("orders", "orders-eu", "Orders", "pay") if is_chosen(one)] == chosen


def test_what_no_topic_has_is_told():
    """Each name and pattern for itself."""
    assert unmatched(["orders", "pay*", "orders-?", "clicks"], {"orders", "payments"}) == [
        "orders-?",
        "clicks",
    ]
    assert unmatched([], ()) == []
