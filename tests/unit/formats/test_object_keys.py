"""Names of objects in the bucket."""

from __future__ import annotations

from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.make_own_golden import CLUSTER, PARTITION, SEGMENTS, TOPIC, TOPIC_ID
from tests.unit.model.values import remote
from tieringd.formats.object_keys import (
    TOPIC_MANIFESTS_PREFIX,
    DataKey,
    TopicKey,
    brokers_prefix,
    client_quotas_key,
    data_key,
    decision_key,
    decision_prefix,
    disk_state_key,
    erasure_key,
    history_link_key,
    index_key,
    is_decision_key,
    is_partition_object,
    manifest_key,
    owner_of,
    parse_data_key,
    parse_disk_state_key,
    parse_history_link_key,
    parse_joined_part_key,
    parse_quarantined_key,
    parse_rewriting_key,
    parse_topic_manifest_key,
    quarantine_report_key,
    quarantined_key,
    rewriting_key,
    rewriting_prefix,
    spillover_key,
    spillover_prefix,
    topic_key,
    topic_manifest_key,
)
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import JOB_PREFIX, NO_CRC, REWRITER_PREFIX
from tieringd.model.spillover import SpilloverName

DATA_KEY = (
    "42420a25/MkU3OEVBNTcwNTJENDM2Qk/pay.ments_eu-1/12_wJalrXUtnFEMI-K7MDENGg/"
    "1000-1999-1073741824-4-0123456789abcdef0123456789abcdef.log"
)
"""Of a segment that was stored before its index's checksum became a part of the name."""
NEW_DATA_KEY = (
    "6efe9194/MkU3OEVBNTcwNTJENDM2Qk/pay.ments_eu-1/12_wJalrXUtnFEMI-K7MDENGg/"
    "1000-1999-1073741824-4-0123456789abcdef0123456789abcdef-00c0ffee.log"
)
TOPIC_MANIFEST_KEY = (
    "meta/MkU3OEVBNTcwNTJENDM2Qk/topics/pay.ments_eu-1_wJalrXUtnFEMI-K7MDENGg/topic_manifest.json"
)

base64url = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
topic_ids = st.text(base64url, min_size=22, max_size=22)
topics = st.text("ab.-_9", min_size=1, max_size=12) | st.sampled_from(
    ["__consumer_offsets", "_", "-", "a_" + "B" * 22, "meta", "topics", "x.log", "0-1-2-3-ab.log"]
)
partitions = st.builds(
    TopicIdPartition, st.text(base64url, min_size=1), topics, topic_ids, st.integers(0, 10**6)
)
segments = st.builds(
    lambda base, length, size, epoch, writer, index: remote(
        base, base + length, size_bytes=size, leader_epoch=epoch, writer_id=writer, index_crc32c=index
    ),
    st.integers(0, 2**62),
    st.integers(0, 10**6),
    st.integers(0, 2**40),
    st.integers(0, 2**31 - 1),
    st.builds(
        str.__add__,
        st.sampled_from(["", JOB_PREFIX, REWRITER_PREFIX]),
        st.text("0123456789abcdef", min_size=1, max_size=32),
    ),
    st.just(NO_CRC) | st.integers(0, 2**32 - 1),
)


def test_keys_are_laid_out_as_documented():
    """Every part of a key is where the page of the format says, behind a hash of the rest."""
    assert data_key(PARTITION, SEGMENTS[0]) == DATA_KEY
    assert index_key(PARTITION, SEGMENTS[0]) == DATA_KEY + ".index"
    newer = replace(SEGMENTS[0], index_crc32c=0xC0FFEE)
    assert data_key(PARTITION, newer) == NEW_DATA_KEY
    assert index_key(PARTITION, newer) == NEW_DATA_KEY + ".index"
    assert manifest_key(PARTITION) == (
        "10a57fad/MkU3OEVBNTcwNTJENDM2Qk/meta/pay.ments_eu-1/12_wJalrXUtnFEMI-K7MDENGg/manifest"
    )
    assert topic_manifest_key(TopicKey(CLUSTER, TOPIC, TOPIC_ID)) == TOPIC_MANIFEST_KEY
    assert TOPIC_MANIFEST_KEY.startswith(TOPIC_MANIFESTS_PREFIX)


@given(partitions, segments)
def test_data_key_is_parsed(partition, segment):
    """Topics with dots, dashes, underscores, or that look like other keys, come back from the key."""
    assert parse_data_key(data_key(partition, segment)) == DataKey(
        partition,
        base_offset=segment.base_offset,
        last_offset=segment.last_offset,
        size_bytes=segment.size_bytes,
        leader_epoch=segment.leader_epoch,
        writer_id=segment.writer_id,
        index_crc32c=segment.index_crc32c,
    )


@given(st.builds(TopicKey, st.text(base64url, min_size=1), topics, topic_ids))
def test_topic_manifest_key_is_parsed(key):
    """A topic's name may hold underscores and end like an id: the id is the last 22 characters."""
    text = topic_manifest_key(key)
    assert text.startswith(TOPIC_MANIFESTS_PREFIX)
    assert parse_topic_manifest_key(text) == key


@given(partitions, segments)
def test_each_key_is_of_one_kind(partition, segment):
    """No key is taken for one of another kind, whatever the topic is called."""
    key = topic_key(partition)
    others = [index_key(partition, segment), manifest_key(partition), topic_manifest_key(key)]
    assert [parse_data_key(one) for one in others] == [None] * 3
    others = [data_key(partition, segment), index_key(partition, segment), manifest_key(partition)]
    assert [parse_topic_manifest_key(one) for one in others] == [None] * 3


@given(partitions, segments)
def test_keys_begin_with_the_hash_of_the_rest(partition, segment):
    """The prefix is eight hex digits of xxh32; an index lies beside its data object."""
    for key in (data_key(partition, segment), manifest_key(partition)):
        head, rest = key.split("/", 1)
        assert head == xxhash.xxh32(rest.encode(), seed=0).hexdigest()
    assert index_key(partition, segment) == data_key(partition, segment) + ".index"


KEY = data_key(PARTITION, SEGMENTS[0])


def hashed_again(key: str) -> str:
    """Return *key* with the hash that the rest of it has."""
    return f"{xxhash.xxh32(key[9:].encode()).hexdigest()}{key[8:]}"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        KEY + ".index",
        KEY + ".part",
        KEY + "\n",
        hashed_again(KEY + ".part"),
        hashed_again(KEY.replace(".log", "-log")),
        hashed_again(KEY.replace(".log", "-.log")),
        hashed_again(KEY.replace(".log", "-c0ffee.log")),
        hashed_again(KEY.replace(".log", "-00C0FFEE.log")),
        hashed_again(KEY.replace(".log", "-00c0ffee-00c0ffee.log")),
        "x" + KEY,
        KEY[1:],
        KEY.upper(),
        "00000000" + KEY[8:],
        KEY.replace("1000-", "1001-"),
        KEY.replace("12_", "13_"),
        KEY.replace("0123456789abcdef", "0123456789abcdeg"),
        KEY.replace("/pay.ments_eu-1/", "/"),
        KEY.replace("-4-", "--1-"),
        KEY.replace(TOPIC_ID, TOPIC_ID[1:]),
    ],
)
def test_other_keys_are_no_data_keys(key):
    """A key with another shape, or whose hash is not of the rest, names no data object."""
    assert parse_data_key(key) is None


@pytest.mark.parametrize(
    "key",
    [
        "",
        "meta",
        TOPIC_MANIFEST_KEY + "/",
        TOPIC_MANIFEST_KEY + ".bak",
        "x/" + TOPIC_MANIFEST_KEY,
        TOPIC_MANIFEST_KEY.replace("meta/", "mete/"),
        TOPIC_MANIFEST_KEY.replace("/topics/", "/topic/"),
        TOPIC_MANIFEST_KEY.replace("topic_manifest", "manifest"),
        TOPIC_MANIFEST_KEY.replace("-1_wJal", "-1-wJal"),
        TOPIC_MANIFEST_KEY.replace("pay.ments_eu-1_", "_"),
        TOPIC_MANIFEST_KEY.replace("pay.ments_eu-1_", ""),
        TOPIC_MANIFEST_KEY.replace("MkU3OEVBNTcwNTJENDM2Qk/", ""),
        TOPIC_MANIFEST_KEY.replace(TOPIC_ID, "short"),
    ],
)
def test_other_keys_are_no_topic_manifest_keys(key):
    """A key with another shape, without a topic or with a short id, names no topic."""
    assert parse_topic_manifest_key(TOPIC_MANIFEST_KEY) == TopicKey(CLUSTER, TOPIC, TOPIC_ID)
    assert parse_topic_manifest_key(key) is None


@given(partitions, segments)
def test_owner_of_an_object_is_in_its_name(partition, segment):
    """Keys of data, index and manifest objects name their owner, also if spilled, for any name of a topic."""
    name = SpilloverName(1, 2, 3, 4, 5)
    for key in (
        data_key(partition, segment),
        index_key(partition, segment),
        manifest_key(partition),
        spillover_key(partition, name),
        f"{data_key(partition, segment)}.part-0-31",
        rewriting_key(partition, segment.writer_id, crc32c=5),
        decision_key(partition, "0a"),
    ):
        assert owner_of(key) == partition


@pytest.mark.parametrize(
    "key",
    [
        KEY[:-1],
        "0" + KEY[1:],
        KEY + ".copy",
        KEY + ".part-0",
        KEY + ".part-0-0.part-1-0",
        "00000000/" + manifest_key(PARTITION)[9:],
        manifest_key(PARTITION) + "s",
        "00000000/" + rewriting_key(PARTITION, "rewritten-0a", crc32c=5)[9:],
        TOPIC_MANIFEST_KEY,
        history_link_key(TopicKey(CLUSTER, TOPIC, TOPIC_ID)),
        client_quotas_key(CLUSTER),
        "quarantine/" + KEY,
        "",
    ],
)
def test_other_objects_have_no_owner(key):
    """A key with another shape, or a wrong hash, belongs to no topic: it is not deleted with one."""
    assert owner_of(key) is None


def test_what_a_join_has_left_is_no_data_object():
    """The name of such an object gives the data object that it was for, and is no name of a data object."""
    assert parse_joined_part_key(f"{KEY}.part-1-0") == parse_data_key(KEY)
    assert parse_data_key(f"{KEY}.part-1-0") is None
    assert parse_joined_part_key(KEY) is None


def test_history_link_key_leads_to_its_topic():
    """No other key does."""
    key = TopicKey(CLUSTER, TOPIC, TOPIC_ID)
    assert parse_history_link_key(history_link_key(key)) == key
    assert parse_history_link_key(topic_manifest_key(key)) is None
    assert parse_topic_manifest_key(history_link_key(key)) is None


def test_keys_about_brokers_are_laid_out_as_documented():
    """Keys about brokers lie under one prefix of the cluster, and are no topic manifests."""
    keys = [disk_state_key(CLUSTER, 12), client_quotas_key(CLUSTER)]
    assert keys == [
        "meta/MkU3OEVBNTcwNTJENDM2Qk/brokers/12/disk_state.json",
        "meta/MkU3OEVBNTcwNTJENDM2Qk/brokers/client_quotas.json",
    ]
    for key in keys:
        assert key.startswith(brokers_prefix(CLUSTER))
        assert parse_topic_manifest_key(key) is None


@given(st.text(base64url, min_size=1), st.integers(0, 2**31 - 1))
def test_disk_state_key_is_parsed(cluster, node_id):
    """The broker's id comes back from the key."""
    assert parse_disk_state_key(disk_state_key(cluster, node_id)) == node_id


@pytest.mark.parametrize(
    "key",
    [
        client_quotas_key(CLUSTER),
        TOPIC_MANIFEST_KEY,
        f"meta/{CLUSTER}/brokers/one/disk_state.json",
        f"meta/{CLUSTER}/brokers/-1/disk_state.json",
        f"meta/{CLUSTER}/brokers/1/disk_state.json/x",
        f"other/{CLUSTER}/brokers/1/disk_state.json",
    ],
)
def test_other_keys_are_no_disk_states(key):
    """A key that is no broker's state is not parsed as one."""
    assert parse_disk_state_key(key) is None


@given(partitions, segments)
def test_object_in_quarantine_keeps_its_key_after_a_prefix(partition, segment):
    """The original key comes back from the key in quarantine, which names no data object."""
    for key in (data_key(partition, segment), index_key(partition, segment), manifest_key(partition)):
        assert quarantined_key(key) == f"quarantine/objects/{key}"
        assert parse_quarantined_key(quarantined_key(key)) == key
        assert parse_quarantined_key(key) is None
        assert owner_of(quarantined_key(key)) is None


@given(partitions, segments)
def test_object_of_a_partition_is_known_also_in_quarantine(partition, segment):
    """A move into quarantine is an upload of ours; what others keep in a shared bucket is not."""
    for key in (data_key(partition, segment), index_key(partition, segment), manifest_key(partition)):
        assert is_partition_object(key)
        assert is_partition_object(quarantined_key(key))
        assert not is_partition_object(f"their/{key}")
    assert not is_partition_object(quarantined_key("their/key"))


def test_report_of_the_quarantine_has_its_own_place():
    """The key of a report is not the key of an object in quarantine."""
    key = quarantine_report_key(now_ms=12, crc32c=0xAB)
    assert key == "quarantine/reports/12-000000ab.json"
    assert parse_quarantined_key(key) is None


@pytest.mark.parametrize("writer_id", ["other-0a", "spark-", "spark-rewritten-0a", "-0a", "Spark-0a"])
def test_other_writers_have_no_keys(writer_id):
    """Only a daemon's name, or a job's, is in the name of a data object."""
    assert parse_data_key(data_key(PARTITION, replace(SEGMENTS[0], writer_id=writer_id))) is None


@given(partitions)
def test_decision_lies_beside_the_manifest(partition):
    """The key of a decision gives the partition, and is no other object's."""
    key = decision_key(partition, "c0ffee")
    assert key == manifest_key(partition)[:-8] + "decision.c0ffee"
    assert key.startswith(decision_prefix(partition))
    assert is_decision_key(partition, key)
    assert not is_decision_key(replace(partition, partition=partition.partition + 1), key)
    for prefix in (spillover_prefix(partition), rewriting_prefix(partition)):
        assert not key.startswith(prefix)
    for other in (f"{key}x", key.removesuffix("c0ffee"), manifest_key(partition)):
        assert not is_decision_key(partition, other)


@given(partitions, segments)
def test_record_of_a_rewriting_lies_beside_the_manifest(partition, segment):
    """The key of a record gives the writer, and is no other object's."""
    key = rewriting_key(partition, segment.writer_id, crc32c=0xC0FFEE)
    assert key == manifest_key(partition)[:-8] + f"rewriting.{segment.writer_id}.00c0ffee"
    assert key.startswith(rewriting_prefix(partition))
    assert parse_rewriting_key(partition, key) == segment.writer_id
    assert parse_rewriting_key(replace(partition, partition=partition.partition + 1), key) is None
    assert parse_data_key(key) is None
    assert not key.startswith(spillover_prefix(partition))
    for other in (key[:-1], f"{key}0", key.replace(segment.writer_id, "other-0a")):
        assert parse_rewriting_key(partition, other) is None


def test_records_of_erasures_are_listed_in_their_order():
    """The keys of erasures are as documented, and belong to no partition."""
    begun = erasure_key(begun_at_ms=1_700_000_000_000, job_id="0a0b", is_done=False)
    done = erasure_key(begun_at_ms=1_700_000_000_000, job_id="0a0b", is_done=True)
    assert begun == "audit/erasures/1700000000000-0a0b-begun.json"
    assert done == "audit/erasures/1700000000000-0a0b-done.json"
    assert sorted([done, begun, erasure_key(begun_at_ms=5, job_id="0c", is_done=True)])[1:] == [begun, done]
    assert owner_of(begun) is None
