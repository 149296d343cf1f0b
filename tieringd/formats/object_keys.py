"""
Names of objects in the bucket: built here, parsed here, and nowhere else.

    {h}/{cluster}/{topic}/{partition}_{topic_id}/{base}-{last}-{size}-{epoch}-{writer}-{index}.log
    ... .log.index
    {h}/{cluster}/meta/{topic}/{partition}_{topic_id}/manifest
    ... manifest.{base}.{last}.{base_ts}.{max_ts}.{crc}
    ... rewriting.{writer}.{crc}
    ... decision.{id}
    meta/{cluster}/topics/{topic}_{topic_id}/topic_manifest.json
    meta/{cluster}/topics/{topic}_{topic_id}/history_link
    meta/{cluster}/brokers/{node_id}/disk_state.json
    meta/{cluster}/brokers/client_quotas.json
    {key of a data object}.part-{level}-{number}
    quarantine/objects/{key of an orphan}
    quarantine/reports/{milliseconds}-{crc}.json
    quarantine/damaged/{key of a manifest}-{crc}
    audit/erasures/{milliseconds}-{job}-{begun or done}.json
    audit/deletions/{milliseconds}-{job}-{begun or done}.json
    audit/decisions/{milliseconds}-{id}-{begun or done}.json

A `writer` is a process: sixteen hex digits or more for a daemon, the same after `spark-` for a job. A job
that removes records has them after `rewritten-`, and so has a writer that merges what such a job has stored.

`index` is the CRC32C of the index sidecar, in eight hex digits. The sidecar depends on the data object
as well, so a process stores the same bytes under a name each time, and a late request changes nothing.
Objects from before partition manifests of version 3 have no such part in their keys.

A `part` is an intermediate object from which a data object is joined, where joining takes more than one
step (`storage.gcs.store`). It belongs to the same partition, and no manifest ever references it.

A spillover manifest has the live manifest's key, followed by its bounds in decimal (offsets and
times) and the CRC32C of the document, so that other bytes have another name. The record of a
rewriting has a key beside them, under the writer of the segments that it names, and so has the decision of
an operator, under its id.

`h` is the xxh32 (seed 0) of all that follows it, in eight hex digits: it spreads load over a
store's key ranges. A data object and its index share the data object's hash, so they lie side
by side; the manifests of a partition share the live one's, so that they can be listed. Topic
manifests and the brokers' reports have no hash and one common prefix, so that a bucket can be
listed with nothing but its name.

Keys are relative to `cloud_storage_prefix`, which the store adds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import xxhash

from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import JOB_PREFIX, NO_CRC, REWRITER_PREFIX, RemoteSegment, SegmentIdentity
from tieringd.model.spillover import SpilloverName

TOPIC_MANIFESTS_PREFIX = "meta/"
"""The prefix of the keys of all topic manifests."""

QUARANTINED_PREFIX = "quarantine/objects/"
"""A quarantined object has this prefix before its former key."""
QUARANTINE_REPORTS_PREFIX = "quarantine/reports/"
ERASURES_PREFIX = "audit/erasures/"
"""The prefix of the records of erasures, in the order in which the erasures began."""
DELETIONS_PREFIX = "audit/deletions/"
"""The prefix of the records of deletions by offset, in the order in which they began."""
DECISIONS_PREFIX = "audit/decisions/"
"""The prefix of the records of operators' decisions, in the order in which they were made."""

WRITER_PATTERN = rf"(?:{JOB_PREFIX}|{REWRITER_PREFIX})?[0-9a-f]+"
"""The pattern of writers in the keys of data objects."""
DAMAGED_PREFIX = "quarantine/damaged/"
"""The prefix of copies of damaged manifests that were rebuilt. tieringd never deletes them."""

_TOPIC_ID_LENGTH = 22
_DATA_KEY = re.compile(
    r"[0-9a-f]{8}/(?P<cluster>[^/]+)/(?P<topic>[^/]+)/(?P<partition>\d+)_(?P<topic_id>[^/]{22})/"
    r"(?P<base>\d+)-(?P<last>\d+)-(?P<size>\d+)-(?P<epoch>\d+)-"
    rf"(?P<writer>{WRITER_PATTERN})(?:-(?P<index>[0-9a-f]{{8}}))?\.log"
)
_MANIFEST_KEY = re.compile(
    r"[0-9a-f]{8}/(?P<cluster>[^/]+)/meta/(?P<topic>[^/]+)/(?P<partition>\d+)_(?P<topic_id>[^/]{22})/"
    r"(?:manifest(?:\..+)?|rewriting\..+|decision\..+)"
)
_REWRITING_SUFFIX = re.compile(rf"(?P<writer>{WRITER_PATTERN})\.[0-9a-f]{{8}}", re.ASCII)
_DECISION_ID = re.compile(r"[0-9a-f]+", re.ASCII)
_PART_SUFFIX = re.compile(r"\.part-\d+-\d+$", re.ASCII)
_NUMBER = r"(0|[1-9]\d*)"
_SPILLOVER_SUFFIX = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}\.{_NUMBER}\.{_NUMBER}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TopicKey:
    """A topic of a cluster, as a topic manifest's key names it."""

    cluster: str
    topic: str
    topic_id: str


def topic_key(partition: TopicIdPartition) -> TopicKey:
    """Return the topic of *partition*."""
    return TopicKey(partition.cluster, partition.topic, partition.topic_id)


@dataclass(frozen=True, slots=True)
class DataKey:
    """The parts of a data object's key."""

    partition: TopicIdPartition
    base_offset: int
    last_offset: int
    size_bytes: int
    leader_epoch: int
    writer_id: str
    index_crc32c: int
    """NO_CRC where the key has none."""

    @property
    def identity(self) -> SegmentIdentity:
        """Return what the key says of its segment, without its index."""
        return SegmentIdentity(
            self.base_offset, self.last_offset, self.size_bytes, self.leader_epoch, self.writer_id
        )


def data_key(partition: TopicIdPartition, segment: RemoteSegment) -> str:
    """Return the key of a segment's data object."""
    index = "" if segment.index_crc32c == NO_CRC else f"-{segment.index_crc32c:08x}"
    return _hashed(
        f"{partition.cluster}/{partition.topic}/{partition.partition}_{partition.topic_id}/"
        f"{segment.base_offset}-{segment.last_offset}-{segment.size_bytes}-"
        f"{segment.leader_epoch}-{segment.writer_id}{index}.log"
    )


def index_key(partition: TopicIdPartition, segment: RemoteSegment) -> str:
    """Return the key of a segment's index sidecar."""
    return data_key(partition, segment) + ".index"


def manifest_key(partition: TopicIdPartition) -> str:
    """Return the key of a partition's live manifest."""
    return _hashed(
        f"{partition.cluster}/meta/{partition.topic}/{partition.partition}_{partition.topic_id}/manifest"
    )


def spillover_prefix(partition: TopicIdPartition) -> str:
    """Return the common prefix of the keys of a partition's spillover manifests, and of no others."""
    return f"{manifest_key(partition)}."


def spillover_key(partition: TopicIdPartition, name: SpilloverName) -> str:
    """Return the key of one of a partition's spillover manifests."""
    return (
        f"{spillover_prefix(partition)}{name.base_offset}.{name.last_offset}."
        f"{name.base_timestamp_ms}.{name.max_timestamp_ms}.{name.crc32c}"
    )


def parse_spillover_key(partition: TopicIdPartition, key: str) -> SpilloverName | None:
    """Return the name of the partition's spillover manifest with this key; None for any other key."""
    prefix = spillover_prefix(partition)
    found = _SPILLOVER_SUFFIX.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
    return None if found is None else SpilloverName(*(int(number) for number in found.groups()))


def rewriting_prefix(partition: TopicIdPartition) -> str:
    """Return the common prefix of the keys of a partition's rewriting records, and of no others."""
    return f"{manifest_key(partition).removesuffix('manifest')}rewriting."


def rewriting_key(partition: TopicIdPartition, writer_id: str, *, crc32c: int) -> str:
    """Return the key of *writer_id*'s rewriting record; *crc32c* is the checksum of its bytes."""
    return f"{rewriting_prefix(partition)}{writer_id}.{crc32c:08x}"


def parse_rewriting_key(partition: TopicIdPartition, key: str) -> str | None:
    """Return the writer whose rewriting record has this key; None for any other key."""
    prefix = rewriting_prefix(partition)
    found = _REWRITING_SUFFIX.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
    return None if found is None else found["writer"]


def decision_prefix(partition: TopicIdPartition) -> str:
    """Return the common prefix of the keys of an operator's decisions for a partition, and of no others."""
    return f"{manifest_key(partition).removesuffix('manifest')}decision."


def decision_key(partition: TopicIdPartition, decision_id: str) -> str:
    """Return the key of one of an operator's decisions for a partition."""
    return f"{decision_prefix(partition)}{decision_id}"


def is_decision_key(partition: TopicIdPartition, key: str) -> bool:
    """Say whether *key* is the key of a decision for the partition."""
    prefix = decision_prefix(partition)
    return key.startswith(prefix) and _DECISION_ID.fullmatch(key.removeprefix(prefix)) is not None


def topic_manifest_key(key: TopicKey) -> str:
    """Return the key of a topic's manifest."""
    return f"{TOPIC_MANIFESTS_PREFIX}{key.cluster}/topics/{key.topic}_{key.topic_id}/topic_manifest.json"


def history_link_key(key: TopicKey) -> str:
    """Return the key of the history link that joins a restored topic to its archive."""
    return f"{TOPIC_MANIFESTS_PREFIX}{key.cluster}/topics/{key.topic}_{key.topic_id}/history_link"


def parse_topic_manifest_key(key: str) -> TopicKey | None:
    """Return the topic whose manifest has this key; None for any other key."""
    return _parse_topic_key(key, "topic_manifest.json")


def parse_history_link_key(key: str) -> TopicKey | None:
    """Return the topic whose history link has this key; None for any other key."""
    return _parse_topic_key(key, "history_link")


def _parse_topic_key(key: str, object_name: str) -> TopicKey | None:
    match key.split("/"):
        case ["meta", cluster, "topics", name, last] if last == object_name:
            topic, separator, topic_id = (
                name[: -_TOPIC_ID_LENGTH - 1],
                name[-_TOPIC_ID_LENGTH - 1 : -_TOPIC_ID_LENGTH],
                name[-_TOPIC_ID_LENGTH:],
            )
            if topic and separator == "_":
                return TopicKey(cluster, topic, topic_id)
    return None


def brokers_prefix(cluster: str) -> str:
    """Return the common prefix of all keys about a cluster's brokers."""
    return f"meta/{cluster}/brokers/"


def disk_state_key(cluster: str, node_id: int) -> str:
    """Return the key under which a broker's daemon publishes its disk state."""
    return f"{brokers_prefix(cluster)}{node_id}/disk_state.json"


def parse_disk_state_key(key: str) -> int | None:
    """Return the id of the broker whose disk state has this key; None for any other key."""
    match key.split("/"):
        case ["meta", _, "brokers", node_id, "disk_state.json"] if re.fullmatch(r"[0-9]{1,10}", node_id):
            return int(node_id)
    return None


def client_quotas_key(cluster: str) -> str:
    """Return the key of the record of lowered client quotas."""
    return f"{brokers_prefix(cluster)}client_quotas.json"


def parse_data_key(key: str) -> DataKey | None:
    """Return the parts of a data object's key; None for any other key, or one with a wrong hash."""
    found = _DATA_KEY.fullmatch(key)
    if found is None or key != _hashed(key[9:]):
        return None
    return DataKey(
        TopicIdPartition(found["cluster"], found["topic"], found["topic_id"], int(found["partition"])),
        base_offset=int(found["base"]),
        last_offset=int(found["last"]),
        size_bytes=int(found["size"]),
        leader_epoch=int(found["epoch"]),
        writer_id=found["writer"],
        index_crc32c=NO_CRC if found["index"] is None else int(found["index"], 16),
    )


def parse_joined_part_key(key: str) -> DataKey | None:
    """Return the data object for which an intermediate object was joined; None for any other key."""
    whole = _PART_SUFFIX.sub("", key)
    return parse_data_key(whole) if whole != key else None


def owner_of(key: str) -> TopicIdPartition | None:
    """
    Return the partition whose data, index or manifest object has this key; None for any other key.

    Intermediate objects of a join belong to the data object's partition; rewriting records and decisions
    belong to theirs.

    The key alone decides: the object may be damaged or unreferenced.
    """
    data = parse_data_key(key.removesuffix(".index")) or parse_joined_part_key(key)
    if data is not None:
        return data.partition
    found = _MANIFEST_KEY.fullmatch(key)
    if found is None:
        return None
    partition = TopicIdPartition(found["cluster"], found["topic"], found["topic_id"], int(found["partition"]))
    is_its_own = key == manifest_key(partition) or key.startswith(
        (spillover_prefix(partition), rewriting_prefix(partition), decision_prefix(partition))
    )
    return partition if is_its_own else None


def quarantined_key(key: str) -> str:
    """Return the key of an object in quarantine; *key* is its former key."""
    return f"{QUARANTINED_PREFIX}{key}"


def parse_quarantined_key(key: str) -> str | None:
    """Return the former key of an object in quarantine; None for any other key."""
    return key.removeprefix(QUARANTINED_PREFIX) if key.startswith(QUARANTINED_PREFIX) else None


def is_partition_object(key: str) -> bool:
    """Say whether a partition's object has this key, in its place or in quarantine."""
    return owner_of(parse_quarantined_key(key) or key) is not None


def quarantine_report_key(*, now_ms: int, crc32c: int) -> str:
    """Return the key of a report about quarantined objects."""
    return f"{QUARANTINE_REPORTS_PREFIX}{now_ms}-{crc32c:08x}.json"


def erasure_key(*, begun_at_ms: int, job_id: str, is_done: bool) -> str:
    """Return the key of a record of an erasure: the outcome with *is_done*, else the request."""
    # The milliseconds have the same length until the year 2286, so a listing is in their order.
    return f"{ERASURES_PREFIX}{begun_at_ms:013d}-{job_id}-{'done' if is_done else 'begun'}.json"


def deletion_key(*, begun_at_ms: int, job_id: str, is_done: bool) -> str:
    """Return the key of a record of a deletion by offset: the outcome with *is_done*, else the request."""
    return f"{DELETIONS_PREFIX}{begun_at_ms:013d}-{job_id}-{'done' if is_done else 'begun'}.json"


def decision_record_key(*, decided_at_ms: int, decision_id: str, is_done: bool) -> str:
    """Return the key of a record of a decision: what became of it with *is_done*, else the decision."""
    return f"{DECISIONS_PREFIX}{decided_at_ms:013d}-{decision_id}-{'done' if is_done else 'begun'}.json"


def damaged_copy_key(key: str, *, crc32c: int) -> str:
    """Return the key of a copy of the damaged manifest *key*, with the CRC32C of its bytes."""
    return f"{DAMAGED_PREFIX}{key}-{crc32c:08x}"


def _hashed(path: str) -> str:
    return f"{xxhash.xxh32_intdigest(path.encode()):08x}/{path}"
