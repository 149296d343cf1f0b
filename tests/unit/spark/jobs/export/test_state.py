"""The state of an export: as text and back, and whether a run may go on from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.errors import ConfigError, CorruptDataError
from tieringd.formats.object_keys import TopicKey
from tieringd.model.partition import TopicIdPartition
from tieringd.spark.jobs.export.plan import Portion
from tieringd.spark.jobs.export.state import ExportState, continued, parse_state

TOPIC = TopicKey("cluster", "orders", "W1xNUlUlTfigw_K-dvdxsA")
OFFSETS = st.dictionaries(st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1), max_size=5)


@given(OFFSETS, st.sampled_from(["read_committed", "read_uncommitted"]), st.integers(0, 2**62))
def test_state_is_read_as_it_was_written(offsets, isolation, now_ms):
    """A state that is written and read is the same, with any offsets."""
    state = ExportState(TOPIC, isolation, offsets, "run", now_ms)
    assert parse_state(state.as_json(), source="test") == state


@given(st.text() | st.sampled_from(['{"offsets": 1}', "[]", "1", '{"isolation": []}', "[" * 100_000]))
def test_any_other_text_is_corrupt(text):
    """The error names the text's origin, and nothing else is raised."""
    with pytest.raises(CorruptDataError, match="found here"):
        parse_state(text, source="found here")


def test_unknown_isolation_is_corrupt():
    """A later release may have written it."""
    text = ExportState(TOPIC, "read_committed").as_json().replace("read_committed", "linearizable")
    with pytest.raises(CorruptDataError, match="linearizable"):
        parse_state(text, source="test")


def test_state_moves_on_to_the_end_of_each_partition_s_last_portion():
    """Partitions without a portion stay where they are."""
    partitions = [TopicIdPartition(*vars_of(TOPIC), number) for number in range(2)]
    portions = [Portion(partitions[1], 5, 9, 1), Portion(partitions[1], 9, 12, 1)]
    state = ExportState(TOPIC, "read_committed", {0: 7, 1: 5})

    advanced = state.advanced(portions, run_id="run", now_ms=3)

    assert advanced == ExportState(TOPIC, "read_committed", {0: 7, 1: 12}, "run", 3)


def vars_of(key: TopicKey) -> tuple[str, str, str]:
    """Return the parts of a key."""
    return key.cluster, key.topic, key.topic_id


def test_place_of_another_topic_is_refused():
    """
    A place is refused if its state is another topic's.

    Two names can be one after their dots are replaced.
    """
    state = ExportState(TopicKey("cluster", "or.ders", TOPIC.topic_id), "read_committed")
    with pytest.raises(ConfigError, match=r"holds an export of topic or\.ders, not of orders"):
        continued(state, TOPIC, isolation="read_committed", recreated="append", place="table t")


def test_topic_of_another_cluster_is_another_topic():
    """Even with the same id: a copied cluster goes its own way."""
    state = ExportState(TopicKey("other", "orders", TOPIC.topic_id), "read_committed", {0: 5})
    with pytest.raises(ConfigError, match="of cluster other"):
        continued(state, TOPIC, isolation="read_committed", recreated="error", place="table t")
    again = continued(state, TOPIC, isolation="read_committed", recreated="append", place="table t")
    assert again == ExportState(TOPIC, "read_committed", earlier=(state.topic,))


def test_appended_topics_are_read_as_they_were_written():
    """A state keeps the earlier topics of its target, and a state of an earlier release names none."""
    other = replace(TOPIC, cluster="other")
    state = ExportState(TOPIC, "read_committed", earlier=(other, replace(TOPIC, topic_id="older")))
    text = state.as_json()
    assert parse_state(text, source="test") == state
    before, _, _ = text.partition(',"earlier"')
    assert parse_state(before + "}", source="test") == ExportState(TOPIC, "read_committed")
