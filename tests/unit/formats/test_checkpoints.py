"""The broker's small text files."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import GOLDEN
from tieringd.errors import CorruptDataError
from tieringd.formats.checkpoints import (
    MetaProperties,
    encode_epoch_checkpoint,
    encode_offset_checkpoint,
    encode_partition_metadata,
    parse_epoch_checkpoint,
    parse_meta_properties,
    parse_offset_checkpoint,
    parse_partition_metadata,
)
from tieringd.model.partition import TopicPartition

PARSERS = (parse_epoch_checkpoint, parse_offset_checkpoint, parse_partition_metadata, parse_meta_properties)


def test_epochs_of_a_broker_are_read():
    """A log that saw three restarts has four leader epochs."""
    data = (GOLDEN / "rolled" / "leader-epoch-checkpoint").read_bytes()
    assert parse_epoch_checkpoint(data) == ((0, 0), (2, 5), (4, 10), (6, 15))
    assert encode_epoch_checkpoint(parse_epoch_checkpoint(data)) == data


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**62)), unique_by=lambda one: one[0]))
def test_epochs_survive_encoding(entries):
    """Ascending epochs are read as they were written."""
    epochs = tuple(
        zip(sorted(epoch for epoch, _ in entries), sorted(start for _, start in entries), strict=True)
    )
    assert parse_epoch_checkpoint(encode_epoch_checkpoint(epochs)) == epochs


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "line 1: version is missing"),
        (b"1\n0\n", "line 1: version is 1"),
        (b"0", "line 2: the number of entries is missing"),
        (b"0\nx\n", "line 2: 'x' is not a number"),
        (b"0\n2\n0 0\n", "line 2: 2 entries are announced and 1 follow"),
        (b"0\n1\n0 0\n1 5\n", "line 2: 1 entries are announced and 2 follow"),
        (b"0\n1\n0\n", "line 3: 2 fields are expected and 1 found"),
        (b"0\n2\n0 0\n1 x\n", "line 4: 'x' is not a number"),
        (b"0\n2\n1 0\n1 5\n", "line 4: leader epoch 1 at offset 5 is out of order"),
        (b"0\n2\n1 6\n2 5\n", "line 4: leader epoch 2 at offset 5 is out of order"),
        (b"0\n1\n-1 0\n", "line 3: leader epoch -1"),
        (b"0\n1\n0 -1\n", "line 3: leader epoch 0 at offset -1"),
        (b"0\n1\n0 \xff\n", "line 3: byte 6 is not text"),
    ],
)
def test_damaged_epoch_checkpoint_names_the_line(data, words):
    """Each fault says in which line to look."""
    with pytest.raises(CorruptDataError, match=words):
        parse_epoch_checkpoint(data)


@pytest.mark.parametrize("name", ["recovery-point-offset-checkpoint", "replication-offset-checkpoint"])
def test_offsets_of_a_broker_are_read(name):
    """Checkpoints of a real log directory list every partition."""
    offsets = parse_offset_checkpoint((GOLDEN / name).read_bytes())
    assert offsets[TopicPartition("codec-gzip", 0)] == 24
    assert offsets[TopicPartition("transactions", 0)] == 10
    assert encode_offset_checkpoint(offsets) == (GOLDEN / name).read_bytes()


def test_offset_checkpoint_takes_topics_with_dots_dashes_and_underscores():
    """A topic is everything up to the first space."""
    data = b"0\n2\na.b-c_d-9 12 345\n__consumer_offsets 0 0\n"
    assert parse_offset_checkpoint(data) == {
        TopicPartition("a.b-c_d-9", 12): 345,
        TopicPartition("__consumer_offsets", 0): 0,
    }


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("a 0", "line 3: 3 fields"),
        ("a b 0 1", "line 3: 3 fields"),
        ("a 0 x", "line 3: 'x' is not a number"),
        ("a 0 -1", "line 3: a-0 has offset -1"),
        ("a -1 0", "line 3: 'a' -1 is not a partition"),
        ("a/b 0 0", "line 3: 'a/b' 0 is not a partition"),
        ("a 0 1\na 0 2", "line 4: a-0 appears twice"),
    ],
)
def test_damaged_offset_checkpoint_names_the_line(row, words):
    """Each fault says in which line to look."""
    data = f"0\n{row.count(chr(10)) + 1}\n{row}\n".encode()
    with pytest.raises(CorruptDataError, match=words):
        parse_offset_checkpoint(data)


def test_topic_id_of_a_broker_is_read():
    """The golden topic's id is read, and encodes to the same bytes."""
    data = (GOLDEN / "rolled" / "partition.metadata").read_bytes()
    topic_id = parse_partition_metadata(data)
    assert len(topic_id) == 22
    assert encode_partition_metadata(topic_id) == data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "line 1: version is missing"),
        (b"version: 1\ntopic_id: AAAAAAAAAAAAAAAAAAAAAA", "line 1: version is 1"),
        (b"version: 0\n", "line 1: topic id is 'missing'"),
        (b"version: 0\ntopic_id: short\n", "line 2: topic id is 'short'"),
        (b"version: 0\nnonsense\n", "line 2: 'nonsense' is not"),
    ],
)
def test_damaged_partition_metadata_names_the_line(data, words):
    """Each fault says in which line to look."""
    with pytest.raises(CorruptDataError, match=words):
        parse_partition_metadata(data)


def test_meta_properties_of_a_broker_are_read():
    """A KRaft broker's log directory knows cluster, node and directory."""
    found = parse_meta_properties((GOLDEN / "meta.properties").read_bytes())
    assert (found.version, found.node_id) == (1, 1)
    assert len(found.cluster_id) == len(found.directory_id) == 22


def test_meta_properties_of_version_0_name_the_broker():
    """A ZooKeeper broker wrote `broker.id`, no directory id, and before 2.0 no cluster id."""
    data = b"#\n! note\n\nversion=0\nbroker.id=3\ncluster.id=a\\=b\n"
    assert parse_meta_properties(data) == MetaProperties(0, "a=b", 3, None)
    assert parse_meta_properties(b"version=0\nbroker.id=3").cluster_id is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "line 1: version is missing"),
        (b"version=2\n", "line 1: version is 2"),
        (b"version=1\ncluster.id=x\n", "line 2: 'missing' is not a number"),
        (b"version=1\nnode.id=1\n", "line 2: cluster.id is missing"),
        (b"version=1\ncluster.id=\nnode.id=1\n", "line 2: cluster.id is missing"),
        (b"version=1\ncluster.id=x\nnode.id=one\n", "line 3: 'one' is not a number"),
        (b"version=0\nnode.id=1\n", "line 2: 'missing' is not a number"),
        (b"version=1\nnonsense\n", "line 2: 'nonsense' is not"),
    ],
)
def test_damaged_meta_properties_name_the_line(data, words):
    """Each fault says in which line to look."""
    with pytest.raises(CorruptDataError, match=words):
        parse_meta_properties(data)


@given(st.one_of(st.binary(max_size=80), st.text("019 -\n:=#aversionidtopc_.", max_size=80).map(str.encode)))
def test_arbitrary_bytes_are_read_or_corrupt(data):
    """No file content raises anything but CorruptDataError."""
    for parse in PARSERS:
        with contextlib.suppress(CorruptDataError):
            parse(data)
