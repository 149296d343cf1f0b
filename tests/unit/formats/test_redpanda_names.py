"""Names in a Redpanda data directory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.formats.object_keys import data_key
from tieringd.formats.redpanda_names import (
    RawFileKind,
    RawFileName,
    is_set_aside,
    parse_partition_directory,
    parse_raw_file_name,
    topic_id_of,
)
from tieringd.model.partition import NO_TOPIC_ID, TopicIdPartition
from tieringd.model.segment import RemoteSegment

offsets = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("0-1-v1.log", RawFileName(0, 1, RawFileKind.LOG)),
        ("3676-12-v1.base_index", RawFileName(3676, 12, RawFileKind.INDEX)),
        ("3676-12-v1.compaction_index", RawFileName(3676, 12, RawFileKind.COMPACTION_INDEX)),
        ("9-1-v2.log", RawFileName(9, 1, RawFileKind.LOG, "v2")),
        ("9223372036854775807-1-v1.log", RawFileName(2**63 - 1, 1, RawFileKind.LOG)),
    ],
)
def test_segment_file_names_are_taken_apart(name, parsed):
    """Base, term and version are all in the name."""
    assert parse_raw_file_name(name) == parsed


@pytest.mark.parametrize(
    "name",
    [
        "0-1-v1.log.staging",
        "0-1-v1.log.compaction.staging",
        "0-1-v1.log.compaction.base_index",
        "0-1-v1.log.compaction.compaction_index",
        "0-1-v1.log.cannotrecover",
        "archival_metadata.snapshot",
        "snapshot",
        "00000000000000000000.log",
        "00-1-v1.log",
        "0-01-v1.log",
        "-1-1-v1.log",
        "9223372036854775808-1-v1.log",
        "0-9223372036854775808-v1.log",
        "\u0660-1-v1.log",
        "0-1.log",
    ],
)
def test_other_files_are_no_segments(name):
    """Work in progress, state machines' snapshots and Kafka's own names are left alone."""
    assert parse_raw_file_name(name) is None


@given(offsets, offsets, st.sampled_from(RawFileKind))
def test_names_of_all_numbers_are_taken_apart(base, term, kind):
    """Each base, term and kind that fits is read from the name."""
    assert parse_raw_file_name(f"{base}-{term}-v1.{kind.value}") == RawFileName(base, term, kind)


@pytest.mark.parametrize(("term", "epoch"), [(0, 0), (2**31 - 1, 2**31 - 1), (2**31, -1)])
def test_term_is_the_leader_epoch_where_kafka_has_room_for_it(term, epoch):
    """A term beyond Kafka's range is no epoch at all, as on the wire."""
    assert RawFileName(0, term, RawFileKind.LOG).leader_epoch == epoch


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("0_16", (0, 16)),
        ("12_9223372036854775807", (12, 2**63 - 1)),
        ("2147483648_1", None),
        ("0_9223372036854775808", None),
        ("0-16", None),
        ("00_16", None),
        ("0_16.part", None),
        ("_16", None),
    ],
)
def test_partition_directories_have_a_number_and_a_revision(name, parsed):
    """Both numbers are plain, and within what Redpanda can count."""
    assert parse_partition_directory(name) == parsed


def test_segments_that_were_set_aside_are_told_by_their_suffix():
    """Redpanda renames what it cannot recover."""
    assert is_set_aside("0-1-v1.log.cannotrecover")
    assert not is_set_aside("0-1-v1.log")


def test_revisions_make_topic_ids_that_keys_can_hold():
    """A revision's id has the form of Kafka's, differs from any other's, and from none at all."""
    ids = [topic_id_of(revision) for revision in (1, 16, 2**63 - 1)]
    assert len({*ids, NO_TOPIC_ID}) == 4
    assert {len(each) for each in ids} == {len(NO_TOPIC_ID)}
    segment = RemoteSegment(0, 1, 1, 0, 0, 0, 0, "w", 0, 1)
    assert f"/0_{ids[1]}/" in data_key(TopicIdPartition("c", "t", ids[1], 0), segment)
