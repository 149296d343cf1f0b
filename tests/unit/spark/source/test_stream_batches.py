"""What the next batch of a stream takes, from where it is and what is archived: values in, values out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.errors import CorruptDataError, DataLossError
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Replacement
from tieringd.model.partition import TopicIdPartition, TopicPartition
from tieringd.spark.source.data_loss import LossRule
from tieringd.spark.source.stream import (
    StreamOffsets,
    batch_end,
    ends_of,
    goes_on_from,
    limited,
    starts_ahead,
    waiting_offsets,
)
from tieringd.spark.source.subscribed_topics import SubscribedPartitions

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
STRICT = LossRule()
IDS = {"a": "id-a"}


def archived(*ranges, ids=None, unarchived=()):
    """Return an archive of partitions, each with where it begins and ends."""
    manifests = {
        name: PartitionManifest(
            TopicIdPartition(
                "c", name.topic, (ids or {}).get(name.topic, f"id-{name.topic}"), name.partition
            ),
            start_offset=begin,
            next_offset=end,
        )
        for name, begin, end in ranges
    }
    return SubscribedPartitions(manifests, frozenset(unarchived))


def step(start, found, *, rule=STRICT, until=None):
    begin = goes_on_from(start, found, rule=rule)
    return batch_end(begin, ends_of(begin, found, until=until))


def test_batch_goes_on_to_the_end_of_the_archive():
    """A batch goes from the end of the one before it to the end of the archive."""
    start = StreamOffsets({A0: 10, A1: 20}, IDS)
    assert step(start, archived((A0, 0, 30), (A1, 0, 20))) == StreamOffsets({A0: 30, A1: 20}, IDS)


def test_first_batch_says_where_it_began():
    """The batch may be repeated by a reader that would begin elsewhere by then."""
    start = StreamOffsets({A0: 10}, IDS, is_initial=True)
    assert step(start, archived((A0, 0, 30))) == StreamOffsets({A0: 30}, IDS, begins={A0: 10})


def test_new_partition_begins_at_its_earliest_offset():
    """A new topic does as well. The batch says where that was."""
    start = StreamOffsets({A0: 10}, IDS)
    found = archived((A0, 0, 10), (A1, 0, 5), (B0, 7, 9))
    assert step(start, found) == StreamOffsets(
        {A0: 10, A1: 5, B0: 9}, IDS | {"b": "id-b"}, begins={A1: 0, B0: 7}
    )


def test_new_partition_without_records_waits():
    """A batch of such a partition would be empty."""
    start = StreamOffsets({A0: 10}, IDS)
    assert step(start, archived((A0, 0, 12), (A1, 0, 0), (B0, 3, 3))) == StreamOffsets({A0: 12}, IDS)


def test_partition_that_is_not_archived_yet_is_waited_for():
    """The user may have given such a partition an offset to begin at."""
    start = StreamOffsets({A0: 10, A1: 5}, IDS)
    assert step(start, archived((A0, 0, 12), unarchived=[A1])) == StreamOffsets({A0: 12, A1: 5}, IDS)


def test_nothing_is_read_past_what_was_there_at_the_start():
    """The trigger `availableNow` reads neither records nor partitions that came after the query's start."""
    start = StreamOffsets({A0: 10}, IDS)
    found = archived((A0, 0, 40), (A1, 0, 5))
    assert step(start, found, until={A0: 30}) == StreamOffsets({A0: 30}, IDS)
    assert step(StreamOffsets({A0: 30}, IDS), found, until={A0: 30}) == StreamOffsets({A0: 30}, IDS)


def test_partition_that_the_bucket_does_not_know_is_waited_for():
    """Nothing of it was read, so nothing is lost; once it is known, it may be lost like any other."""
    start = StreamOffsets({A0: 10, A1: 0}, IDS, awaited={A1: 0})
    assert starts_ahead({A0: 10, A1: 0}, archived((A0, 0, 10))) == {A1: 0}
    waiting = step(start, archived((A0, 0, 30)))
    assert waiting == StreamOffsets({A0: 30, A1: 0}, IDS, awaited={A1: 0})
    known = step(waiting, archived((A0, 0, 30), unarchived=[A1]))
    assert known == StreamOffsets({A0: 30, A1: 0}, IDS)
    assert step(waiting, archived((A0, 0, 30), (A1, 0, 7))) == StreamOffsets({A0: 30, A1: 7}, IDS)
    with pytest.raises(DataLossError, match="the bucket no longer has this partition"):
        step(known, archived((A0, 0, 30)))


@pytest.mark.parametrize(
    ("found", "reason", "end"),
    [
        pytest.param(
            archived((A0, 0, 5)),
            "offset 10 of a-0: the archive was cut back, and now ends at offset 5",
            StreamOffsets({A0: 5}, IDS),
            id="cut back",
        ),
        pytest.param(
            archived((B0, 0, 0)),
            "offset 10 of a-0: the bucket no longer has this partition",
            StreamOffsets({A0: 10}, IDS),
            id="gone",
        ),
        pytest.param(
            archived((A0, 3, 9), ids={"a": "new"}),
            "offset 10 of a-0: the topic was deleted and created again",
            StreamOffsets({A0: 9}, {"a": "new"}, begins={A0: 3}),
            id="created again",
        ),
    ],
)
def test_archive_that_is_not_what_it_was(warnings, found, reason, end):
    """A changed archive is an error. The stream goes on with what there is if records may be missing."""
    start = StreamOffsets({A0: 10}, IDS)
    with pytest.raises(DataLossError, match=reason):
        step(start, found)
    assert step(start, found, rule=LossRule(is_fatal=False)) == end
    assert warnings.events() == ["records are not in the archive"]


def after_election(found, *replacements):
    """Return an archive of `a-0` with more *replacements*: base and last offset, and the leader's epoch."""
    manifest = found.manifests[A0]
    added = tuple(Replacement(*one, replaced_at_ms=0) for one in replacements)
    return SubscribedPartitions({A0: replace(manifest, replacements=manifest.replacements + added)})


def test_records_that_another_leader_replaced_are_not_passed_over(warnings):
    """
    The archive may be as long as before when the stream looks again, as after a restart of the query.

    The records were read as the deposed leader had them, and the new ones come at offsets behind the stream.
    """
    found = after_election(archived((A0, 0, 10)), (2, 3, 1))
    start = as_stored(step(StreamOffsets({A0: 8}, IDS), found))
    after = after_election(archived((A0, 0, 40)), (2, 3, 1), (6, 14, 5))
    with pytest.raises(DataLossError, match=r"offsets 6 to 9 of a-0: .* leader epoch 5"):
        step(start, after)
    end = as_stored(step(start, after, rule=LossRule(is_fatal=False)))
    assert end == StreamOffsets({A0: 40}, IDS)
    assert warnings.events() == ["records are not in the archive"]
    assert step(end, after) == end, "they are told of once"


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(StreamOffsets({A0: 10}, IDS, is_initial=True, replacements={}), id="before the first"),
        pytest.param(StreamOffsets({A0: 10}, IDS), id="checkpoint of an earlier release"),
        pytest.param(StreamOffsets({A0: 6}, IDS, replacements={}), id="behind what was read"),
        pytest.param(StreamOffsets({A0: 90}, IDS, awaited={A0: 90}, replacements={}), id="nothing read yet"),
    ],
)
def test_records_that_were_replaced_before_they_were_read_are_no_loss(start):
    """A checkpoint of an earlier release does not say what was known then, and is taken as it is."""
    after = after_election(archived((A0, 0, 40)), (6, 14, 5))
    assert as_stored(step(start, after)).replacements == {A0: {(6, 14, 5)}}


def test_election_after_a_rebuild_is_noticed():
    """A manifest that was rebuilt from objects alone has lost its replacements, and has as many again."""
    start = as_stored(step(StreamOffsets({A0: 10}, IDS), after_election(archived((A0, 0, 10)), (2, 3, 1))))
    rebuilt = archived((A0, 0, 40))
    with pytest.raises(DataLossError, match=r"offsets 6 to 9 of a-0: .* leader epoch 5"):
        step(start, after_election(rebuilt, (6, 14, 5)))
    assert as_stored(step(start, rebuilt)).replacements == {A0: frozenset()}


def test_corrected_time_of_a_replacement_is_no_other_one():
    """A daemon corrects it where a wrong clock has recorded it."""
    found = after_election(archived((A0, 0, 10)), (2, 3, 1))
    start = as_stored(step(StreamOffsets({A0: 10}, IDS), found))
    manifest = found.manifests[A0]
    corrected = tuple(replace(one, replaced_at_ms=7) for one in manifest.replacements)
    found = SubscribedPartitions({A0: replace(manifest, replacements=corrected)})
    assert step(start, found) == StreamOffsets({A0: 10}, IDS)


def test_count_of_replacements_in_a_checkpoint_is_passed_over():
    """A release before this one noted their number, which says nothing after a rebuild."""
    document = {"a": {"0": 10}, "@topicIds": IDS, "@replaced": {"a": {"0": 1}}}
    assert StreamOffsets.from_json(document).replacements is None


def as_stored(offsets):
    """Return what the checkpoint gives back."""
    return StreamOffsets.from_json(json.loads(json.dumps(offsets.to_json())))


def test_limit_is_shared_by_what_waits():
    """
    Partitions share the limit in proportion to what waits, with one offset each at the least.

    The Kafka source does the same.
    """
    ends, waiting = {A0: 100, A1: 1030, B0: 7}, {A0: 90, A1: 30, B0: 1}
    assert limited(ends, waiting, 40) == {A0: 39, A1: 1009, B0: 7}
    assert limited(ends, waiting, 121) == ends


def test_limit_does_not_count_what_has_expired():
    """Only what can be read."""
    start = StreamOffsets({A0: 10}, IDS)
    found = archived((A0, 80, 100))
    begin = goes_on_from(start, found, rule=STRICT)
    ends = ends_of(begin, found, until=None)
    waiting = waiting_offsets(begin, ends, found)
    assert waiting == {A0: 20}
    assert limited(ends, waiting, 5) == {A0: 85}


partitions = st.builds(TopicPartition, st.sampled_from(["a", "b.c", "d_e-f"]), st.integers(0, 20))


@given(
    waiting=st.dictionaries(partitions, st.integers(1, 10**9), min_size=1),
    max_offsets=st.integers(1, 10**9),
)
def test_limited_batches_reach_the_end(waiting, max_offsets):
    """Each partition with records goes on, none past its end, all together by about the limit."""
    ends = dict.fromkeys(waiting, 10**12)
    taken = {
        partition: end - (ends[partition] - waiting[partition])
        for partition, end in limited(ends, waiting, max_offsets).items()
    }
    assert all(1 <= taken[partition] <= waiting[partition] for partition in waiting)
    assert sum(taken.values()) <= max_offsets + len(waiting)


@given(
    offsets=st.dictionaries(partitions, st.integers(0, 2**62)),
    begins=st.dictionaries(partitions, st.integers(0, 2**62)),
    awaited=st.dictionaries(partitions, st.integers(0, 2**62)),
    is_initial=st.booleans(),
)
def test_checkpoint_holds_everything(offsets, begins, awaited, is_initial):
    """A checkpoint is read as it was written, whatever the order of a dictionary."""
    found = StreamOffsets(offsets, {one.topic: "id" for one in offsets}, begins, awaited, is_initial)
    assert StreamOffsets.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_checkpoint_is_read_as_the_kafka_source_writes_it():
    """
    A checkpoint has offsets by topic and partition, as the Kafka source writes them.

    What is more stands under names that no topic can have.
    """
    found = StreamOffsets({A1: 2, A0: 1, B0: 3}, IDS | {"b": "x"})
    assert json.dumps(found.to_json()) == (
        '{"a": {"0": 1, "1": 2}, "b": {"0": 3}, "@topicIds": {"a": "id-a", "b": "x"}}'
    )


@pytest.mark.parametrize(
    "document",
    [
        {"a": {"0": 1}},
        {"a": 1, "@topicIds": {}},
        {"logOffset": 3, "@topicIds": {}},
        {"a": {"x": 1}, "@topicIds": {}},
        {"a": {"0": 1}, "@topicIds": {}, "@replacements": {"a": {"0": [[1, 2]]}}},
    ],
)
def test_checkpoint_of_another_source_is_refused(document):
    """The message says what to do."""
    with pytest.raises(
        CorruptDataError, match=r"is not of the data source tieringd.*new checkpoint location"
    ):
        StreamOffsets.from_json(document)
