"""
Write the golden files of our own formats: `python -m tests.golden.make_own_golden`.

The values below are what the files in `own/` hold; the tests decode each file and compare. A
file of a released format version is never written again: a new version gets new files beside
the old ones, and this recipe's names say which version they are of. Values named `_V1` to `_V3`
are what the files of these versions hold; no release writes those any more.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tieringd.formats.archive_owners import BROKER, ArchiveOwners, encode_archive_owners
from tieringd.formats.disk_state import (
    PublishedDiskState,
    QuotaPhase,
    QuotaRecord,
    encode_disk_state,
    encode_quota_record,
)
from tieringd.formats.group_documents import EndpointLease, encode_group, encode_lease
from tieringd.formats.history_link import HistoryLink, encode_history_link
from tieringd.formats.job_records import (
    DeletedPartition,
    DeletionOutcome,
    DeletionRequest,
    ErasedPartition,
    ErasureOutcome,
    ErasureRequest,
    PartitionGoneOver,
    encode_deletion_outcome,
    encode_deletion_request,
    encode_erasure_outcome,
    encode_erasure_request,
    encode_rewriting,
)
from tieringd.formats.manifest_codec import encode_manifest, encode_spillover
from tieringd.formats.object_keys import TopicKey
from tieringd.formats.operator_decision import encode_decision, encode_decision_outcome
from tieringd.formats.sidecar import encode_sidecar
from tieringd.formats.topic_manifest import (
    Archiving,
    OriginalRetention,
    TieringDefaults,
    TopicManifest,
    encode_topic_manifest,
)
from tieringd.model.consumer_group import (
    CommittedOffset,
    ConsumerGroup,
    ConsumerMember,
    GroupMember,
    GroupState,
    GroupTopic,
    StoredGroup,
    SubscribedTopic,
)
from tieringd.model.disk_state import EVERY_PRODUCER, DiskState, QuotaChange, quota_entity
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap, RecordDeletion, Replacement, Retired, Unsettled
from tieringd.model.offset_translation import OffsetTranslation
from tieringd.model.operator_decision import (
    DecisionOutcome,
    DecisionState,
    ManifestVersion,
    OperatorDecision,
)
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import (
    AbortedTransaction,
    BrokerIndexes,
    CrossingTransaction,
    IndexEntry,
    RemoteSegment,
    Rewriting,
    RewritingKind,
    SegmentIdentity,
    SegmentIndex,
)
from tieringd.model.segment_table import SegmentTable
from tieringd.model.spillover import ExpiredSpillover, Spillover, SpilloverManifest, SpilloverName
from tieringd.model.topic_lifecycle import Deletion, Lease, Lifecycle

OWN = Path(__file__).parent / "own"

CLUSTER, TOPIC, TOPIC_ID = "MkU3OEVBNTcwNTJENDM2Qk", "pay.ments_eu-1", "wJalrXUtnFEMI-K7MDENGg"
PARTITION = TopicIdPartition(CLUSTER, TOPIC, TOPIC_ID, 12)
FIRST_WRITER, SECOND_WRITER = "0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210"

SEGMENTS = (
    RemoteSegment(
        base_offset=1000,
        last_offset=1999,
        size_bytes=1_073_741_824,
        crc32c=0xDEADBEEF,
        base_timestamp_ms=1_700_000_000_000,
        max_timestamp_ms=1_700_000_600_000,
        leader_epoch=4,
        writer_id=FIRST_WRITER,
        uploaded_at_ms=1_700_000_700_123,
        index_size_bytes=4711,
    ),
    RemoteSegment(
        base_offset=2000,
        last_offset=2000,
        size_bytes=61,
        crc32c=0,
        base_timestamp_ms=-1,
        max_timestamp_ms=-1,
        leader_epoch=7,
        writer_id=SECOND_WRITER,
        uploaded_at_ms=1_700_000_800_000,
        index_size_bytes=1,
    ),
    RemoteSegment(
        base_offset=2500,
        last_offset=2**62,
        size_bytes=2**40,
        crc32c=0xFFFFFFFF,
        base_timestamp_ms=1_699_999_999_999,
        max_timestamp_ms=2**60,
        leader_epoch=2**31 - 1,
        writer_id=FIRST_WRITER,
        uploaded_at_ms=1_700_000_900_000,
        index_size_bytes=0xFFFFFFFF,
    ),
)
"""The second begins where the first ends; before the third there is a gap. Extremes on purpose."""

MANIFEST_V1 = PartitionManifest(
    partition=PARTITION,
    start_offset=1000,
    next_offset=2**62 + 1,
    leader_epoch=2**31 - 1,
    writer_id=FIRST_WRITER,
    commit_number=17,
    committed_at_ms=1_700_000_900_001,
    epochs=((0, 0), (4, 1000), (7, 2000), (2**31 - 1, 2500)),
    segments=PartitionManifest.begin(PARTITION, start_offset=1000).segments.appended(SEGMENTS),
    gaps=(Gap(2001, 2499, "the broker deleted them first, after 7 Tage (é)", 1_700_000_850_000),),
    trimmed_offset=2**62 + 1,
)
NEW_MANIFEST_V1 = PartitionManifest.begin(PARTITION, start_offset=0)
"""Of a partition of which nothing is stored yet."""

MANIFEST_V2 = replace(
    MANIFEST_V1,
    began_at_ms=1_699_999_000_000,
    replacements=(
        Replacement(2001, 3000, leader_epoch=7, replaced_at_ms=1_700_000_840_000),
        Replacement(2500, 2**62, leader_epoch=2**31 - 1, replaced_at_ms=2**60),
    ),
    translation=OffsetTranslation(2**62 + 5, 2**40),
)
"""What version 1 could say, and what version 2 brought."""
NEW_MANIFEST_V2 = replace(NEW_MANIFEST_V1, began_at_ms=1_700_000_000_000)

NEWEST_SEGMENTS = (
    replace(SEGMENTS[0], broker_timestamp_ms=1_700_000_650_000, index_crc32c=0xFFFFFFFF),
    replace(SEGMENTS[1], index_crc32c=0),
    SEGMENTS[2],
)
RETIRED_SEGMENTS = tuple(
    replace(SEGMENTS[0], base_offset=base, last_offset=base + 9, size_bytes=base + 1, writer_id=writer)
    for base, writer in ((0, FIRST_WRITER), (10, "5" * 32), (20, FIRST_WRITER))
)

MANIFEST_V3 = replace(
    MANIFEST_V2,
    allowed_local_start_offset=2**61,
    crossing=(
        CrossingTransaction(9_000_000_000, 1010, 2**62 + 1, 2**31 - 1),
        CrossingTransaction(5, 2600, 2**62 + 9, 2**31 - 1),
    ),
    expired_at_ms=1_700_000_830_000,
    segments=SegmentTable.of(NEWEST_SEGMENTS),
    retired=(
        Retired(SegmentTable.of(RETIRED_SEGMENTS[:2]), 1_700_000_820_000),
        Retired(SegmentTable.of(RETIRED_SEGMENTS[2:]), 1_700_000_830_000),
    ),
)
"""What version 2 could say, and what version 3 brought."""
NEW_MANIFEST_V3 = NEW_MANIFEST_V2

SPILLED_SEGMENTS = tuple(
    replace(SEGMENTS[0], base_offset=base, last_offset=base + 99, writer_id=writer, index_crc32c=base)
    for base, writer in ((700, SECOND_WRITER), (900, FIRST_WRITER))
)
SPILLOVER_PART = SpilloverManifest(
    PARTITION,
    base_offset=700,
    next_offset=1000,
    segments=SegmentTable.of(SPILLED_SEGMENTS),
    gaps=(Gap(800, 899, "the broker deleted them first (é)", 1_699_999_000_500),),
    previous=SpilloverName(500, 699, 0, 2**60, 0xFFFFFFFF),
)
FIRST_SPILLOVER_PART = replace(
    SPILLOVER_PART, segments=SegmentTable.of(SPILLED_SEGMENTS[1:]), base_offset=900, gaps=(), previous=None
)
MANIFEST_V4 = replace(
    MANIFEST_V3,
    start_offset=603,
    trimmed_offset=2500,
    spillover=Spillover(
        begin_offset=550,
        newest=SpilloverName(700, 999, 1_700_000_000_000, 1_700_000_600_000, 0x12345678),
        segments=3,
        size_bytes=2**41,
        gap_offsets=17,
        retired=(
            ExpiredSpillover(570, 1_700_000_820_000),
            ExpiredSpillover(600, 1_700_000_830_000),
        ),
    ),
)
"""What version 3 could say, and what version 4 brought."""
NEW_MANIFEST_V4 = NEW_MANIFEST_V3

MANIFEST_V5 = replace(
    MANIFEST_V4,
    retired=(MANIFEST_V4.retired[0], replace(MANIFEST_V4.retired[1], winners_end=2**62)),
    unsettled=Unsettled(2500, 2**62 + 1),
)
"""What version 4 could say, and what version 5 brought."""
NEW_MANIFEST_V5 = NEW_MANIFEST_V4

MANIFEST = replace(MANIFEST_V5, deletions=(RecordDeletion(2**62, leader_epoch=2**31 - 2),))
"""What version 5 could say, and what version 6 brought."""
NEW_MANIFEST = NEW_MANIFEST_V5

INDEX = SegmentIndex(
    base_offset=1000,
    last_offset=1999,
    size_bytes=1_073_741_824,
    crc32c=0xDEADBEEF,
    record_count=990,
    batch_count=3,
    epochs=((4, 1000), (6, 1500)),
    aborted=(AbortedTransaction(9_000_000_000, 1010, 1100), AbortedTransaction(5, 1050, 2**40)),
    entries=(
        IndexEntry(1000, 0, 1_700_000_000_000),
        IndexEntry(1400, 65_536, -1),
        IndexEntry(1900, 2**33, 1_700_000_600_000),
    ),
    broker=BrokerIndexes(
        offset_index=bytes(range(16)),
        time_index=bytes(range(100, 112)),
        transaction_index=b"txn",
        producer_snapshot=b"snapshot\x00\xff",
    ),
)
EMPTY_INDEX = SegmentIndex(
    base_offset=0,
    last_offset=0,
    size_bytes=0,
    crc32c=0,
    record_count=0,
    batch_count=0,
    epochs=(),
    aborted=(),
    entries=(),
    broker=BrokerIndexes(offset_index=b""),
)

TOPIC_MANIFEST_V1 = TopicManifest(
    TopicKey(CLUSTER, TOPIC, TOPIC_ID), partition_count=13, created_at_ms=1_700_000_000_000
)
TOPIC_MANIFEST_V2 = replace(
    TOPIC_MANIFEST_V1,
    archiving=Archiving.PAUSED,
    original_retention=OriginalRetention(retention_ms="604800000", retention_bytes=None),
    retention_released=True,
)
TOPIC_MANIFEST_V3 = replace(
    TOPIC_MANIFEST_V2,
    defaults=TieringDefaults(remote_write=True, remote_read=False, local_target_ms=86_400_000),
)
TOPIC_MANIFEST_V4 = replace(
    TOPIC_MANIFEST_V3,
    original_retention=OriginalRetention("604800000", None, effective_ms=604_800_000, effective_bytes=-1),
)
TOPIC_MANIFEST = replace(
    TOPIC_MANIFEST_V4,
    remote_delete=True,
    lifecycle=Lifecycle.PURGING,
    deletion=Deletion(
        noted_at_ms=1_700_000_000_000,
        noted_by=FIRST_WRITER,
        reason="the cluster has no topic with this id (é)",
        lease=Lease(SECOND_WRITER, 1_700_000_400_000),
        segments=2**40,
        size_bytes=2**62,
    ),
    moved_to="s3://bücket/prefix",
)
PURGED_TOPIC_MANIFEST = replace(
    TOPIC_MANIFEST_V1,
    remote_delete=False,
    lifecycle=Lifecycle.PURGED,
    deletion=Deletion(
        noted_at_ms=1_700_000_000_000,
        noted_by="operator",
        reason="an operator deleted the archive",
        segments=0,
        size_bytes=0,
        purged_at_ms=1_700_000_500_000,
        checked_at_ms=1_700_004_100_000,
    ),
)

DISK_STATE = PublishedDiskState(CLUSTER, 2**31 - 1, DiskState.DEGRADED, published_at_ms=1_700_000_000_000)
QUOTA_RECORD = QuotaRecord(
    QuotaPhase.LOWERED,
    rate=65_536,
    changes=(
        QuotaChange(quota_entity(user="alice", client_id=None), 1_048_576.0),
        QuotaChange(quota_entity(user="é"), 2e9),
        QuotaChange(EVERY_PRODUCER, None),
    ),
    node_id=3,
    changed_at_ms=1_700_000_000_000,
)

CLASSIC_GROUP = StoredGroup(
    ConsumerGroup(
        "billing/é",
        GroupState.COMPLETING,
        generation=2**31 - 1,
        protocol_type="consumer",
        protocol="range",
        leader="app-1-00ff",
        members={
            "app-1-00ff": GroupMember(
                "app-1-00ff", None, "app-1", "10.0.0.1", "0123456789abcdef", 45_000, 300_000,
                (("range", b"\x00\x01orders"), ("sticky", b"")), b"\xff\x00", has_joined=False,
            ),
            "static-aa00": GroupMember(
                "static-aa00", "static", "é", "fe80::1", "fedcba9876543210", 6000, 6000,
                (("range", b""),), b"", has_joined=True,
            ),
        },
        offsets={
            GroupTopic(TOPIC, TOPIC_ID): {
                0: CommittedOffset(0, -1, "", 1_700_000_000_000),
                2**31 - 1: CommittedOffset(2**63 - 1, 2**31 - 1, "é", 1_700_000_000_001),
            },
            GroupTopic("orders", "AAAAAAAAAAAAAAAAAAAAAQ"): {
                7: CommittedOffset(12, 3, "note", 1_700_000_000_002)
            },
        },
    ),
    "0123456789abcdef",
    2**40,
)  # fmt: skip
NEWER_GROUP = StoredGroup(
    ConsumerGroup(
        "newer",
        GroupState.STABLE,
        generation=7,
        protocol_type="consumer",
        protocol="uniform",
        members={
            "m": GroupMember(
                "m", None, "app", "10.0.0.1", "0123456789abcdef", 45_000, 300_000,
                consumer=ConsumerMember(
                    6, 5, ("orders", "returns"), "uniform", target=frozenset({("0a" * 16, 0)}),
                    assigned=frozenset({("0a" * 16, 0), ("0a" * 16, 1)}),
                    revoking=frozenset({("0b" * 16, 2)}),
                ),
            )
        },
        topics={"orders": SubscribedTopic("0a" * 16, 2), "returns": SubscribedTopic("0b" * 16, 3)},
    ),
    "fedcba9876543210",
    1,
)  # fmt: skip
DELETED_GROUP = StoredGroup(ConsumerGroup("gone", generation=12), "0123456789abcdef", 3)
ENDPOINT_LEASE = EndpointLease("0123456789abcdef", 2**30 - 1, "archive.example.com", 9092, renewals=2**40)

HISTORY_LINK = HistoryLink(
    TopicKey("new-cluster", TOPIC, "AAAAAAAAAAAAAAAAAAAAAQ"),
    TopicKey(CLUSTER, TOPIC, TOPIC_ID),
    starts=((0, 0), (3, 2**63 - 1), (2**31 - 1, 7)),
)

ERASURE_REQUEST = ErasureRequest(
    "0123456789abcdef",
    begun_at_ms=1_700_000_000_000,
    requested_by="dpo@example.org",
    reason="request 4711 (é)",
    topics=("pay.*", "orders"),
    key_sha256=("00" * 32, "ff" * 32),
)
ERASURE_OUTCOME = ErasureOutcome(
    finished_at_ms=1_700_000_060_000,
    partitions=(
        ErasedPartition(
            PARTITION,
            records=2**40,
            replaced=("00000000/c/t/0_x/0-9-100-4-0a-0000000b.log",),
            stored=("11111111/c/t/0_x/0-9-61-4-rewritten-0123456789abcdef-0000000c.log",),
            retired_at_ms=1_700_000_050_000,
            deletion_due_at_ms=1_700_003_650_000,
        ),
    ),
    deleted_at_ms=None,
    faults=("pay.ments_eu-1-3: a segment may still have one of the keys",),
    gone_over=(PartitionGoneOver(PARTITION, start_offset=7, next_offset=2**63 - 1, has_expired=True),),
    objects_left=("22222222/c/t/0_x/0-9-100-4-0a-0000000b.log",),
    kept_by_store=("soft delete keeps deleted objects for 604800 seconds",),
)
DELETION_REQUEST = DeletionRequest(
    "0123456789abcdef",
    begun_at_ms=1_700_000_000_000,
    requested_by="ops@host-1 (é)",
    cluster=CLUSTER,
    topic=TOPIC,
    topic_id=TOPIC_ID,
    partitions=(0, 12),
    before_offset=2**62,
)
DELETION_OUTCOME = DeletionOutcome(
    finished_at_ms=1_700_000_060_000,
    results=(
        DeletedPartition(0, log_start_offset=2**62, archive_start_offset=2**61, fault=""),
        DeletedPartition(
            12, log_start_offset=None, archive_start_offset=None, fault="broker 1 does not answer"
        ),
    ),
)
DECISION = OperatorDecision(
    PARTITION,
    decision_id="0123456789abcdef",
    decided_at_ms=1_700_000_000_000,
    decided_by="ann@broker-1",
    made_for=ManifestVersion(7, SECOND_WRITER, 2**53 - 1),
    is_aborted={5: True, 2**62: False},
    give_up=(1000, 2**62),
    keep=True,
)
DECISION_OUTCOME = DecisionOutcome(
    DecisionState.COMMITTING,
    at_ms=1_700_000_060_000,
    leader_epoch=7,
    writer_id=FIRST_WRITER,
    voided=(CrossingTransaction(5, 1000, 2**62, 4),),
)
REWRITING = Rewriting(
    RewritingKind.COMPACTED,
    replaced=(SegmentIdentity(1000, 1999, 61, 4, "rewritten-0123456789abcdef"),),
    stored=(
        SegmentIdentity(1000, 2999, 0, 4, "rewritten-fedcba9876543210"),
        SegmentIdentity(3000, 2**63 - 2, 2**40, 7, "rewritten-fedcba9876543210"),
    ),
)
ARCHIVE_OWNERS = ArchiveOwners({"wZ3qkPqzR2mH1v0uYx9A_g": BROKER, "local": "00ff" * 8, "earlier": None})


def files() -> dict[str, bytes]:
    """Return what this release writes for each file."""
    return {
        "partition-manifest.v6": encode_manifest(MANIFEST),
        "partition-manifest-new.v6": encode_manifest(NEW_MANIFEST),
        "spillover-manifest.v1": encode_spillover(SPILLOVER_PART)[0],
        "spillover-manifest-first.v1": encode_spillover(FIRST_SPILLOVER_PART)[0],
        "segment-index.v1": encode_sidecar(INDEX),
        "segment-index-empty.v1": encode_sidecar(EMPTY_INDEX),
        "topic-manifest.v5.json": encode_topic_manifest(TOPIC_MANIFEST),
        "topic-manifest-purged.v5.json": encode_topic_manifest(PURGED_TOPIC_MANIFEST),
        "disk-state.v1.json": encode_disk_state(DISK_STATE),
        "erasure-begun.v3.json": encode_erasure_request(ERASURE_REQUEST),
        "erasure-done.v3.json": encode_erasure_outcome(ERASURE_REQUEST, ERASURE_OUTCOME),
        "deletion-begun.v1.json": encode_deletion_request(DELETION_REQUEST),
        "deletion-done.v1.json": encode_deletion_outcome(DELETION_REQUEST, DELETION_OUTCOME),
        "decision.v1.json": encode_decision(DECISION),
        "decision-done.v1.json": encode_decision_outcome(DECISION, DECISION_OUTCOME),
        "rewriting.v1.json": encode_rewriting(PARTITION, REWRITING),
        "history-link.v1": encode_history_link(HISTORY_LINK),
        "quota-record.v1.json": encode_quota_record(QUOTA_RECORD),
        "archive-owners.v1.json": encode_archive_owners(ARCHIVE_OWNERS),
        "consumer-group.v1.json": encode_group(CLASSIC_GROUP),
        "consumer-group-newer.v1.json": encode_group(NEWER_GROUP),
        "consumer-group-deleted.v1.json": encode_group(DELETED_GROUP),
        "endpoint-lease.v1.json": encode_lease(ENDPOINT_LEASE),
    }


def main() -> None:
    """Write every file that is not there yet."""
    OWN.mkdir(exist_ok=True)
    for name, data in files().items():
        path = OWN / name
        if not path.exists():
            path.write_bytes(data)


if __name__ == "__main__":
    main()
