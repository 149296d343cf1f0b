"""Names of directories and files under a log directory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import GOLDEN
from tieringd.formats.log_names import (
    DirectoryKind,
    DirectoryName,
    FileName,
    LogFileKind,
    encode_file_name,
    is_topic_name,
    parse_directory_name,
    parse_file_name,
)
from tieringd.model.partition import TopicPartition

UUID = "0123456789abcdef0123456789abcdef"
TOPICS = st.from_regex(r"[A-Za-z0-9._-]{1,249}", fullmatch=True).filter(lambda name: name not in {".", ".."})


@pytest.mark.parametrize(
    ("name", "kind", "topic", "partition"),
    [
        ("orders-0", DirectoryKind.PARTITION, "orders", 0),
        ("a.b_c-d-12-3", DirectoryKind.PARTITION, "a.b_c-d-12", 3),
        ("t.x-delete-0", DirectoryKind.PARTITION, "t.x-delete", 0),
        ("__consumer_offsets-49", DirectoryKind.PARTITION, "__consumer_offsets", 49),
        ("a" * 249 + "-2147483647", DirectoryKind.PARTITION, "a" * 249, 2147483647),
        ("__cluster_metadata-0", DirectoryKind.METADATA, "__cluster_metadata", 0),
        (f"orders-7.{UUID}-delete", DirectoryKind.DELETED, "orders", 7),
        (f"a.b-c-7.{UUID}-stray", DirectoryKind.STRAY, "a.b-c", 7),
        (f"orders-7.{UUID}-future", DirectoryKind.FUTURE, "orders", 7),
    ],
)
def test_directory_name_is_taken_apart(name, kind, topic, partition):
    """Partition directories are known by their last dash, and passing ones by their suffix."""
    assert parse_directory_name(name) == DirectoryName(kind, TopicPartition(topic, partition))


def test_index_cache_of_kafka_s_own_tiering_is_recognised():
    """The directory of cached remote indexes belongs to no partition."""
    assert parse_directory_name("remote-log-index-cache") == DirectoryName(DirectoryKind.REMOTE_INDEX_CACHE)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "orders",
        "-0",
        "orders-",
        "orders-x",
        "orders-00",
        "orders-٣",
        "orders--1x",
        "orders-2147483648",
        "or ders-0",
        "or/ders-0",
        "örders-0",
        ".-0",
        "..-0",
        "a" * 250 + "-0",
        "orders-0\n",
        "orders-0.x-moved",
        f"or ders-7.{UUID}-delete",
        "lost+found",
    ],
)
def test_other_directory_names_are_none(name):
    """A name that no broker gives is not a partition."""
    assert parse_directory_name(name) is None


@given(TOPICS, st.integers(0, 2**31 - 1))
def test_every_legal_partition_has_a_directory_name(topic, partition):
    """Any legal topic and partition number is found again in its directory's name."""
    if (topic, partition) != ("__cluster_metadata", 0):
        found = parse_directory_name(f"{topic}-{partition}")
        assert found == DirectoryName(DirectoryKind.PARTITION, TopicPartition(topic, partition))


@given(st.text(max_size=300))
def test_any_text_is_a_name_or_none(text):
    """No name raises, and a partition is never named by an illegal topic."""
    parse_file_name(text)
    found = parse_directory_name(text)
    assert found is None or found.topic_partition is None or is_topic_name(found.topic_partition.topic)


@given(st.integers(0, 2**63 - 1), st.sampled_from(LogFileKind))
def test_file_name_survives_encoding(base_offset, kind):
    """A segment file's name holds its offset and kind."""
    assert parse_file_name(encode_file_name(base_offset, kind)) == FileName(base_offset, kind)


def test_file_name_is_padded_to_twenty_digits():
    """Names are those of the broker, which sort by offset."""
    assert encode_file_name(12, LogFileKind.TIME_INDEX) == "00000000000000000012.timeindex"


@pytest.mark.parametrize(
    "name",
    ["0.log", f"{0:021d}.log", f"{2**63:020d}.log", f"{0:020d}.logs", f"{0:020d}", "leader-epoch-checkpoint"]
    + [f"{0:020d}.log{suffix}" for suffix in (".deleted", ".cleaned", ".swap", ".tmp")],
)
def test_other_file_names_are_none(name):
    """Only finished files of a segment are taken apart."""
    assert parse_file_name(name) is None


def test_files_of_a_broker_are_all_recognised():
    """Every file in a golden partition directory is a segment's, a checkpoint or metadata."""
    names = {path.name for path in (GOLDEN / "transactions").iterdir()}
    segment_files = {name for name in names if parse_file_name(name)}
    assert names - segment_files == {"leader-epoch-checkpoint", "partition.metadata"}
    assert len(segment_files) == 5
