"""
The properties of the file, a class for each subject. `config.model` combines them.

The classes hold only the properties, with their defaults and limits. `config.checks` has the rules
between them. `TopicProperties` has the properties of a topic: those below `topics`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from tieringd.config.fields import (
    AS_TOTAL,
    LIVE,
    MAX_INT64,
    UNLIMITED,
    AbsolutePath,
    Choice,
    Decimal,
    Flag,
    Number,
    NumberOrWord,
    Text,
    duration,
    seconds,
    size,
)
from tieringd.formats.cache_names import MAX_BUCKETS
from tieringd.policies.cache_trim import ChunkEvictionLimits, EvictionStrategy
from tieringd.policies.disk_alert import AlertSettings
from tieringd.policies.scrub import ScrubPace
from tieringd.policies.segment_merge import FILE_BYTES_MAX, MergeSettings

_BUCKET = r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]"
_MAX_MINUTES = MAX_INT64 // 60_000

STRICT = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    hide_input_in_errors=True,
    use_attribute_docstrings=True,
)
"""How every section is read. Inputs stay out of errors, because one of them may be a secret."""

DegradedAction: TypeAlias = Literal["refuse_writes", "throttle_producers", "alert"]

_SECOND_MS = 1_000
_DAY_MS = 86_400_000
_KIB = 2**10
_GIB = 2**30

_HOUR_MS = 3_600_000

_DAY_SEC = 86_400
_RATE_MIN = 64 * 1024

_MINUTE_MS = 60_000

_HOST_PORT = r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}"
_MIB = 2**20

PER_CPU: Final = "per-cpu"
WORKERS_MAX: Final = 64

StrategyName: TypeAlias = Literal["eager", "capped", "predictive"]


class TopicProperties(BaseModel):
    """What the file sets for a topic, or for the topics that a pattern matches."""

    model_config = STRICT

    remote_write: Annotated[bool, Flag()] | None = Field(default=None, alias="redpanda.remote.write")
    """Upload this topic."""
    remote_read: Annotated[bool, Flag()] | None = Field(default=None, alias="redpanda.remote.read")
    """Serve reads of this topic from the archive."""
    remote_storage_enable: Annotated[bool, Flag()] | None = Field(default=None, alias="remote.storage.enable")
    """Kafka's name for both redpanda.remote.write and redpanda.remote.read."""
    remote_delete: Annotated[bool, Flag()] | None = Field(default=None, alias="redpanda.remote.delete")
    """Delete the topic's objects when the topic is deleted. Needs write and read; true if both are."""
    read_replica: Annotated[str, Text("text", _BUCKET, "must be a bucket's bare name")] | None = Field(
        default=None, alias="redpanda.remote.readreplica"
    )
    """The bucket that this topic is a read replica of. It is never uploaded, its objects never deleted."""
    local_target_ms: Annotated[int, duration(1, MAX_INT64, UNLIMITED)] | None = Field(
        default=None, alias="retention.local.target.ms"
    )
    """Keep this much time on the broker; -1 is without limit."""
    local_target_bytes: Annotated[int, size(1, MAX_INT64, UNLIMITED)] | None = Field(
        default=None, alias="retention.local.target.bytes"
    )
    """Keep this many bytes of each partition on the broker; -1 is without limit."""
    local_retention_ms: Annotated[int, duration(0, MAX_INT64, UNLIMITED, AS_TOTAL)] | None = Field(
        default=None, alias="local.retention.ms"
    )
    """Kafka's name, which takes precedence. -1: no limit. -2: as long as total retention, no local limit."""
    storage_mode: Annotated[Literal["tiered_cloud", "cloud"], Choice()] | None = Field(
        default=None, alias="storage.mode"
    )
    """`tiered_cloud` keeps on the broker what local retention says; `cloud` only segments not yet durable."""
    managed_retention: Annotated[bool, Flag()] | None = Field(
        default=None, alias="tieringd.managed.retention"
    )
    """Set the broker's retention of the topic to unlimited, so that only tieringd deletes from it."""
    local_retention_bytes: Annotated[int, size(0, MAX_INT64, UNLIMITED, AS_TOTAL)] | None = Field(
        default=None, alias="local.retention.bytes"
    )
    """Kafka's name, which takes precedence. -1: no limit. -2: as much as total retention, no local limit."""
    retention_ms: Annotated[int, duration(1, MAX_INT64, UNLIMITED)] | None = Field(
        default=None, alias="retention.ms"
    )
    """Keep records this long in all, on the broker and in the archive; -1 is without limit."""
    retention_bytes: Annotated[int, size(1, MAX_INT64, UNLIMITED)] | None = Field(
        default=None, alias="retention.bytes"
    )
    """Total bytes to keep of each partition if neither topic nor broker sets it; null or -1: no limit."""
    remote_log_retention_minutes: Annotated[int, Number(1, _MAX_MINUTES)] | None = Field(
        default=None, alias="remote.log.retention.minutes"
    )
    """KIP-405's first name of `retention.ms`, in minutes."""
    remote_log_retention_bytes: Annotated[int, size(1, MAX_INT64, UNLIMITED)] | None = Field(
        default=None, alias="remote.log.retention.bytes"
    )
    """KIP-405's first name of `retention.bytes`."""
    cleanup_policy: (
        Annotated[Literal["delete", "compact", "compact,delete", "delete,compact", ""], Choice()] | None
    ) = Field(default=None, alias="cleanup.policy")
    """Total retention deletes nothing without `delete`; `""` keeps all. The default is the broker's."""


class Space(BaseModel):
    """How the disks are divided and watched."""

    model_config = STRICT

    retention_local_strict: Annotated[bool, Flag(), LIVE] = False
    """Enforce the local targets; false lets local data grow until the space is needed."""
    space_management_enable: Annotated[bool, Flag(), LIVE] = True
    """Trim durable segments when the logs are over their area of the disk."""
    share_group_trim_hold_ms: Annotated[int, duration(0, MAX_INT64), LIVE] = 7 * _DAY_MS
    """
    How long after its upload a segment stays on the broker for a share group (KIP-932) that still needs it;
    0 trims without regard to share groups. Share groups cannot read from the archive.
    """
    retention_local_trim_interval: Annotated[int, duration(1, _DAY_MS), LIVE] = 30 * _SECOND_MS
    """How often the use of the disks' areas is checked; a bare number is in milliseconds."""
    disk_reservation_percent: Annotated[float, Decimal(0, 100), LIVE] = 20.0
    """Part of each disk that neither the log nor the cache may use."""
    retention_local_target_capacity_percent: Annotated[Annotated[float, Decimal(0, 100)] | None, LIVE] = None
    """Part of each disk for the log's area; null or 0: what the reservation and the cache leave."""
    retention_local_target_capacity_bytes: Annotated[Annotated[int, size(0, MAX_INT64)] | None, LIVE] = None
    """The log's area of each disk in bytes; the smaller of this and the percentage applies."""

    storage_space_alert_free_threshold_percent: Annotated[float, Decimal(0, 100), LIVE] = 5.0
    """A disk is low on space when at most this much of it is free; 0: only the bytes apply."""
    storage_space_alert_free_threshold_bytes: Annotated[int, size(0, MAX_INT64), LIVE] = 0
    """The same in bytes; the larger of this and the percentage applies."""
    storage_min_free_bytes: Annotated[int, size(0, MAX_INT64), LIVE] = 5 * _GIB
    """A disk with at most this much free is degraded; see `storage_degraded_action`."""
    storage_degraded_action: Annotated[DegradedAction, Choice(), LIVE] = "refuse_writes"
    """What all brokers do when a disk of any broker is degraded; `alert` changes nothing."""
    storage_degraded_producer_byte_rate: Annotated[int, size(1, MAX_INT64), LIVE] = 64 * _KIB
    """Bytes per second of each producer on each broker, with `throttle_producers`."""

    tune_ballast_file: Annotated[bool, Flag()] = False
    """Keep a file that can be deleted when the disk is full."""
    ballast_file_path: Annotated[Path, AbsolutePath()] | None = None
    """
    Path of the ballast file, on a log directory's filesystem but not inside a log directory; null looks
    for a place beside the first log directory.
    """
    ballast_file_size: Annotated[int, size(1, MAX_INT64)] = _GIB
    """Size of the ballast file."""
    ballast_release_when_degraded: Annotated[bool, Flag(), LIVE] = False
    """
    Delete the ballast file when its disk is degraded; false: only `tieringd space ballast release` does.
    """

    @property
    def disk_alerts(self) -> AlertSettings:
        """Return when a disk is low, and when it is degraded."""
        return AlertSettings(
            alert_free_bytes=self.storage_space_alert_free_threshold_bytes,
            alert_free_percent=self.storage_space_alert_free_threshold_percent,
            min_free_bytes=self.storage_min_free_bytes,
        )


class Retention(BaseModel):
    """Total retention: of both tiers together."""

    model_config = STRICT

    log_retention_ms: Annotated[Annotated[int, duration(1, MAX_INT64, UNLIMITED)] | None, LIVE] = 7 * _DAY_MS
    """
    With `broker.kind: none`, total time to keep records of topics without `retention.ms`; -1: no limit.
    """
    delete_retention_ms: Annotated[Annotated[int, duration(1, MAX_INT64, UNLIMITED)] | None, LIVE] = None
    """Another name for `log_retention_ms`, which takes precedence."""
    kafka_log_retention_ms: Annotated[Annotated[int, duration(1, MAX_INT64, UNLIMITED)] | None, LIVE] = Field(
        default=None, alias="log.retention.ms"
    )
    """Kafka's name for `log_retention_ms`, which takes precedence over both others."""
    retention_bytes: Annotated[Annotated[int, size(1, MAX_INT64, UNLIMITED)] | None, LIVE] = None
    """Keep this many bytes of each partition in all, where neither a topic nor its broker says."""
    kafka_log_retention_bytes: Annotated[Annotated[int, size(1, MAX_INT64, UNLIMITED)] | None, LIVE] = Field(
        default=None, alias="log.retention.bytes"
    )
    """Kafka's name for `retention_bytes`."""
    cloud_storage_housekeeping_interval_ms: Annotated[int, duration(1, _DAY_MS), LIVE] = 300 * _SECOND_MS
    """
    How often total retention is evaluated; two evaluations in a row must agree before anything is
    deleted. Also the longest that other housekeeping waits for an idle object store.
    """
    archive_delete_delay_ms: Annotated[int, duration(0, 365 * _DAY_MS), LIVE] = _HOUR_MS
    """
    How long objects are kept after their segment left the manifest; set it longer than any reader takes.
    """
    cloud_storage_topic_purge_grace_period_ms: Annotated[int, duration(0, 365 * _DAY_MS), LIVE] = (
        30 * _SECOND_MS
    )
    """
    How long the archive of a deleted topic is kept after the deletion was noted, if it is to be deleted.
    """
    cloud_storage_target_manifest_size_bytes: Annotated[int, size(4 * _KIB, 64 * _KIB * _KIB), LIVE] = (
        64 * _KIB
    )
    """A partition manifest larger than this moves its oldest segments to spillover manifests."""

    @property
    def total_ms(self) -> int | None:
        """Return the cluster's limit by time under whichever name it has; None or -1 without a limit."""
        # Only `log_retention_ms` has a default, so it comes last: the others are set where they are not None.
        names = (self.kafka_log_retention_ms, self.delete_retention_ms, self.log_retention_ms)
        return next((limit for limit in names if limit is not None), None)

    @property
    def total_bytes(self) -> int | None:
        """Return the cluster's limit by size, likewise."""
        names = (self.kafka_log_retention_bytes, self.retention_bytes)
        return next((limit for limit in names if limit is not None), None)


class Transfers(BaseModel):
    """How segments and manifests are sent."""

    model_config = STRICT

    cloud_storage_max_connections: Annotated[int, Number(1, 1024)] = 20
    """Connections to the object store for each processor that tieringd may use, by affinity and quota."""
    cloud_storage_initial_backoff_ms: Annotated[int, duration(1, 60 * _SECOND_MS), LIVE] = 100
    """The pause before the first retry of a request; it doubles with each retry."""
    cloud_storage_segment_upload_timeout_ms: Annotated[int, duration(1, _DAY_MS), LIVE] = 30 * _SECOND_MS
    """Time limit for uploading one segment, retries included."""
    cloud_storage_manifest_upload_timeout_ms: Annotated[int, duration(1, _DAY_MS), LIVE] = 10 * _SECOND_MS
    """Time limit for storing one manifest, retries included."""
    cloud_storage_max_connection_idle_time_ms: Annotated[int, duration(1, _DAY_MS)] = 5 * _SECOND_MS
    """An unused connection is closed after this long."""
    cloud_storage_reconciliation_interval_ms: Annotated[int, duration(1, _DAY_MS), LIVE] = 10 * _SECOND_MS
    """How often the log directories and the cluster are scanned if no change was noticed earlier."""
    cloud_storage_segment_max_upload_interval_sec: Annotated[
        Annotated[int, seconds(1, _DAY_SEC * 365)] | None, LIVE
    ] = None
    """The stable part of an open segment is uploaded when a record has waited this long; at least 10m."""

    cloud_storage_upload_ctrl_update_interval_ms: Annotated[int, duration(1, _DAY_MS)] = 60 * _SECOND_MS
    """How often the shares of uploads are computed from the backlog."""
    cloud_storage_upload_ctrl_p_coeff: Annotated[float, Decimal(-1_000_000, 0)] = -2.0
    """Shares for each thousandth of the disk that waits to be uploaded; negative, because the error is."""
    cloud_storage_upload_ctrl_d_coeff: Annotated[float, Decimal(0, 1_000_000)] = 0.0
    """Weight of the backlog's growth, in addition to its size."""
    cloud_storage_upload_ctrl_min_shares: Annotated[int, Number(1, 1000)] = 100
    """Part of a busy machine, in thousandths, that uploads may use while the backlog is small."""
    cloud_storage_upload_ctrl_max_shares: Annotated[int, Number(1, 1000)] = 1000
    """The same for a backlog of half of the free disk or more; with 1000, uploads are not slowed then."""
    cloud_storage_upload_bytes_per_second: Annotated[
        Annotated[int, size(_RATE_MIN, MAX_INT64)] | None, LIVE
    ] = None
    """Limit of all uploads together, for example for a metered link; null: no limit."""

    pin_segments: Annotated[bool, Flag()] = True
    """Keep closed segments by hard links until they are durable, even if the broker deletes them."""
    pin_max_bytes: Annotated[int, size(0, MAX_INT64)] = 10 * 2**30
    """How many bytes that the broker has deleted the pins of each log directory may keep."""


class HousekeepingTimes(BaseModel):
    """Housekeeping waits for an object store that is idle, and no longer than its interval."""

    model_config = STRICT

    cloud_storage_idle_timeout_ms: Annotated[int, duration(100, _HOUR_MS), LIVE] = 10 * _SECOND_MS
    """The period over which requests are counted to find out whether the object store is idle."""
    cloud_storage_idle_threshold_rps: Annotated[int, Number(0, 1_000_000), LIVE] = 1
    """The object store is idle with at most this many requests per second, without those of housekeeping."""


class Merging(BaseModel):
    """Merging of adjacent small segments; compacted topics are left alone."""

    model_config = STRICT

    cloud_storage_enable_segment_merging: Annotated[bool, Flag(), LIVE] = True
    """Merge small neighbouring segments of the archive into one object, where the topic is not compacted."""
    cloud_storage_segment_size_target: Annotated[Annotated[int, size(1, FILE_BYTES_MAX)] | None, LIVE] = None
    """Merge up to this size; null is the size at which the broker closes the topic's segments."""
    cloud_storage_segment_size_min: Annotated[Annotated[int, size(0, FILE_BYTES_MAX)] | None, LIVE] = None
    """
    The last segments of the archive wait until they are larger than this; null: half of a segment, and
    below the target.
    """

    @property
    def merge_settings(self) -> MergeSettings:
        """Return the same, for the policy."""
        return MergeSettings(
            is_enabled=self.cloud_storage_enable_segment_merging,
            target_bytes=self.cloud_storage_segment_size_target,
            min_bytes=self.cloud_storage_segment_size_min,
        )


class CompactedReuploads(BaseModel):
    """Compacted topics: what the broker's compaction leaves takes the place of what was archived before."""

    model_config = STRICT

    cloud_storage_enable_compacted_topic_reupload: Annotated[bool, Flag(), LIVE] = True
    """Upload segments of compacted topics once more when compaction has made them smaller."""


class Scrubbing(BaseModel):
    """Scrubbing: faults are found, and mended where the bytes are still somewhere."""

    model_config = STRICT

    cloud_storage_enable_scrubbing: Annotated[bool, Flag(), LIVE] = False
    """Regularly compare the manifests of the partitions that this broker leads with the bucket."""
    cloud_storage_partial_scrub_interval_ms: Annotated[int, duration(1, 365 * _DAY_MS), LIVE] = _HOUR_MS
    """Time after an unfinished scrub of a partition until the scrub continues."""
    cloud_storage_full_scrub_interval_ms: Annotated[int, duration(1, 365 * _DAY_MS), LIVE] = 12 * _HOUR_MS
    """Time after a complete scrub of a partition, or of the whole bucket, until the next one begins."""
    cloud_storage_scrubbing_interval_jitter_ms: Annotated[int, duration(0, 365 * _DAY_MS), LIVE] = (
        10 * _MINUTE_MS
    )
    """Largest random delay that is added to each of these intervals, and before the first scrub."""
    archive_orphan_grace_ms: Annotated[int, duration(_SECOND_MS, 365 * _DAY_MS), LIVE] = _DAY_MS
    """An object that no manifest names is left alone for this long; set it longer than any upload takes."""
    archive_quarantine_ms: Annotated[int, duration(_SECOND_MS, 3650 * _DAY_MS), LIVE] = 7 * _DAY_MS
    """How long such an object then stays in quarantine before it is deleted."""

    @property
    def scrub_pace(self) -> ScrubPace:
        """Return the intervals, for the policy."""
        return ScrubPace(
            is_enabled=self.cloud_storage_enable_scrubbing,
            partial_interval_ms=self.cloud_storage_partial_scrub_interval_ms,
            full_interval_ms=self.cloud_storage_full_scrub_interval_ms,
            jitter_ms=self.cloud_storage_scrubbing_interval_jitter_ms,
            orphan_grace_ms=self.archive_orphan_grace_ms,
            quarantine_ms=self.archive_quarantine_ms,
        )


class GatewayConfig(BaseModel):
    """The read gateway: Kafka's protocol for clients, with the archive behind the broker."""

    model_config = STRICT

    enabled: Annotated[bool, Flag()] = False
    """Serve clients the archived offsets of topics with remote read, together with the broker's offsets."""
    host: Annotated[str, Text("host", r"[A-Za-z0-9:._-]{1,253}", "must be a host name or an address")] = (
        "0.0.0.0"  # noqa: S104 clients are on other hosts
    )
    """Address to listen on. `tieringd gateway --archive-only` listens on 127.0.0.1 unless this is set."""
    port: Annotated[int, Number(0, 65535)] = 9095
    """Port to listen on; the broker's second listener advertises it. 0 lets the system choose one."""
    broker: Annotated[
        str, Text("host:port", _HOST_PORT, "must be host:port of the broker's second listener")
    ] = "localhost:9094"
    """Address of the broker's second listener, which advertises this gateway's address."""
    advertised: (
        Annotated[str, Text("host:port", _HOST_PORT, "must be host:port, as clients reach it")] | None
    ) = None
    """Address that `tieringd gateway --archive-only` advertises to clients; null: its listening address."""
    archive_only_for_everyone: Annotated[bool, Flag()] = False
    """
    Whether `tieringd gateway --archive-only` may listen on other addresses than those of this host without a
    `users_file`: every client that reaches its port can read every topic.
    """
    users_file: Annotated[Path, AbsolutePath()] | None = None
    """
    File with the users of `tieringd gateway --archive-only` and what each may read, made by
    `tieringd endpoint user add`; null: it knows no users. Changes apply without a restart.
    """
    sasl_plain: Annotated[bool, Flag()] = False
    """Whether these users may log in by SASL/PLAIN as well. SCRAM is always offered to them."""
    sasl_plain_without_tls: Annotated[bool, Flag()] = False
    """Whether SASL/PLAIN is allowed without `tls_cert_file`: passwords then cross the network in clear."""
    tls_client_ca_file: Annotated[Path, AbsolutePath()] | None = None
    """
    PEM file with the authorities of clients' certificates; null asks for none. With it, every client has to
    present a certificate, whose subject is its principal.
    """
    tls_cert_file: Annotated[Path, AbsolutePath()] | None = None
    """PEM file with the certificate for clients; null serves clients in plain text."""
    tls_key_file: Annotated[Path, AbsolutePath()] | None = None
    """PEM file with the private key of this certificate."""
    broker_tls: Annotated[bool, Flag()] = False
    """Whether the broker's second listener is encrypted."""
    broker_tls_ca_file: Annotated[Path, AbsolutePath()] | None = None
    """PEM file with the authorities to trust for the broker's listener; null: the system's authorities."""
    broker_tls_cert_file: Annotated[Path, AbsolutePath()] | None = None
    """PEM file with the certificate that the gateway presents to the broker; null: none."""
    broker_tls_key_file: Annotated[Path, AbsolutePath()] | None = None
    """PEM file with the private key of this certificate."""
    workers: Annotated[int | Literal["per-cpu"], NumberOrWord(0, WORKERS_MAX, PER_CPU)] = 0
    """
    How many processes of their own serve the clients; 0: the daemon itself does; `per-cpu`: one for each
    processor that the daemon may use. A worker takes about 100 MiB, and has connections of its own to the
    store. The limits hold for all workers together: each has an equal part of `buffer_bytes`, of
    `max_connections_per_host`, and of each limit per second or day.
    """
    max_connections: Annotated[int, Number(1, 1_000_000)] = 10_000
    """How many clients may be connected at once."""
    max_connections_per_host: Annotated[int, Number(1, 1_000_000)] | None = None
    """How many of these may come from one address; null: half of them."""
    host_connections_per_second: Annotated[Annotated[int, Number(1, 1_000_000)] | None, LIVE] = 20
    """
    How many connections one address may open in a second, like a broker's `max.connection.creation.rate`;
    null: no limit. Ten seconds' worth may be opened at once. Further ones are refused. Raise it where many
    clients share an address, by NAT or on this machine.
    """
    proxy_protocol: Annotated[bool, Flag()] = False
    """
    Whether a load balancer tells the address of each client by the PROXY protocol, version 2. Every
    connection then begins with its header; one without it is closed. Let only the balancer reach the port:
    any other client could claim any address.
    """
    connections_max_idle_ms: Annotated[int, duration(_SECOND_MS, _DAY_MS)] = 660 * _SECOND_MS
    """Connections on which nothing moves are closed after this time; brokers close theirs after 600 s."""
    slow_client_timeout_ms: Annotated[int, duration(_SECOND_MS, _DAY_MS)] = 60 * _SECOND_MS
    """
    How long a client may take to send its first request and to authenticate, and how long it may send a
    request at less than 1 KiB/s. It may take a response as slowly for ten times as long, because a consumer
    reads nothing while it works on what it has polled.
    """
    max_request_bytes: Annotated[int, size(1024, MAX_INT64)] = 100 * _MIB
    """The largest request that is passed on, like the broker's socket.request.max.bytes."""
    buffer_bytes: Annotated[int, size(_MIB, MAX_INT64)] = 256 * _MIB
    """
    How much memory all connections together may use for messages. When it is spent, connections wait for each
    other. One that holds nothing may read 4 KiB more.
    """
    max_inspected_bytes: Annotated[int, size(64 * _KIB, _GIB)] = 4 * _MIB
    """
    The largest message that the gateway holds whole to change it. Archived partitions in a larger response to
    a Fetch wait for the client's next Fetch, which is then for them alone.
    """
    archive_bytes_per_second: Annotated[Annotated[int, size(_RATE_MIN, MAX_INT64)] | None, LIVE] = None
    """Limit of archived records sent to all clients together; null: no limit."""
    client_archive_bytes_per_second: Annotated[Annotated[int, size(_RATE_MIN, MAX_INT64)] | None, LIVE] = None
    """
    Limit of archived records sent to each client host, so that one reader leaves room for others; null:
    no limit.
    """
    principal_archive_bytes_per_second: Annotated[Annotated[int, size(_RATE_MIN, MAX_INT64)] | None, LIVE] = (
        None
    )
    """
    Limit of archived records sent to each principal, on all its connections together; null: no limit. Past it
    answers carry Kafka's throttle time. Clients whose principal is unknown share one limit. The principal is
    the user of SASL/PLAIN or SCRAM, the claim `sub` of a token of OAUTHBEARER, or a certificate's subject.
    """
    principal_store_dollars_per_day: Annotated[Annotated[float, Decimal(0.001, 1_000_000)] | None, LIVE] = (
        None
    )
    """
    The most that reads of each principal from the store may cost in a day, by the list prices of requests;
    null: no limit. Past it answers are small and carry Kafka's throttle time, and none is refused.
    """
    slow_fetch_ms: Annotated[int, duration(1, _DAY_MS), LIVE] = 5 * _SECOND_MS
    """Fetches of archived records that take longer are logged, with what they waited for."""
    consumer_groups: Annotated[bool, Flag()] = False
    """
    Whether `tieringd gateway --archive-only` keeps consumer groups and their offsets in the bucket, below
    `groups/`. Its credentials need to write and delete there. Several endpoints serve the same groups.
    """
    group_members_max: Annotated[int, Number(1, 10_000)] = 250
    """How many members a consumer group may have."""
    groups_max: Annotated[int, Number(1, 1_000_000)] = 1000
    """How many consumer groups an archive may have, without deleted ones."""
    group_offset_metadata_bytes: Annotated[int, size(0, _MIB)] = 4 * _KIB
    """The longest text that a client may store with an offset, like a broker's offset.metadata.max.bytes."""
    group_offsets_retention_ms: Annotated[int, duration(60 * _SECOND_MS, MAX_INT64)] = 7 * _DAY_MS
    """
    How long offsets are kept after the last commit, and after a group's last member has left. They do not
    expire while it has members.
    """
    group_initial_rebalance_delay_ms: Annotated[int, duration(0, 60 * _SECOND_MS)] = 3 * _SECOND_MS
    """How long a consumer group that had no members waits for more of them before it assigns partitions."""
    consumer_group_session_timeout_ms: Annotated[int, duration(6 * _SECOND_MS, 1800 * _SECOND_MS)] = (
        45 * _SECOND_MS
    )
    """
    How long a member of a group of the newer protocol (KIP-848) may be silent until it is removed, as Kafka's
    `group.consumer.session.timeout.ms`. It is told to speak three times as often, and every 5 s at least. In
    the classic protocol each client says this itself.
    """

    def worker_count(self, processors: int) -> int:
        """
        Return how many workers serve the clients on a machine with this many usable *processors*.

        `per-cpu` gives no more of them than have an equal part of each limit.
        """
        if self.workers != PER_CPU:
            return int(self.workers)
        return max(1, min(processors, self.workers_max))

    @property
    def workers_max(self) -> int:
        """Return how many workers the limits of connections and of memory are enough for."""
        per_host = (
            self.max_connections if self.max_connections_per_host is None else self.max_connections_per_host
        )
        return min(WORKERS_MAX, self.max_connections, per_host, self.buffer_bytes // self.max_inspected_bytes)


class Cache(BaseModel):
    """What is kept of the archive on this host, for readers."""

    model_config = STRICT

    cloud_storage_cache_directory: Annotated[Path, AbsolutePath()] | None = None
    """Directory of cached archive chunks; null: `cloud_storage_cache` in `state_directory`."""
    cloud_storage_cache_size: Annotated[int, size(0, MAX_INT64), LIVE] = 0
    """Size limit of the cache; 0: only the percentage applies, otherwise the smaller of the two."""
    cloud_storage_cache_size_percent: Annotated[float, Decimal(0, 100), LIVE] = 20.0
    """Part of its disk that the cache may use; 0: only the size applies. Both 0: nothing is cached."""
    cloud_storage_cache_max_objects: Annotated[int, Number(1, 100_000_000), LIVE] = 100_000
    """How many files the cache may hold."""
    cloud_storage_cache_num_buckets: Annotated[int, Number(0, MAX_BUCKETS)] = 0
    """Number of directories to spread the cache's files over; 0: directories by object names."""
    cloud_storage_cache_check_interval_ms: Annotated[int, duration(1, _DAY_MS), LIVE] = 30 * _SECOND_MS
    """How often the cache is checked against its limits."""
    cloud_storage_cache_trim_carryover_bytes: Annotated[int, size(0, MAX_INT64), LIVE] = 0
    """How many bytes of eviction candidates a trim keeps for the next urgent trim."""
    cloud_storage_cache_trim_threshold_percent_size: Annotated[
        Annotated[float, Decimal(1, 100)] | None, LIVE
    ] = None
    """Trim when the cache is fuller than this part of its size limit; null: when it is full."""
    cloud_storage_cache_trim_threshold_percent_objects: Annotated[
        Annotated[float, Decimal(1, 100)] | None, LIVE
    ] = None
    """The same for its limit of files; 70 for both leaves room for files that arrive during the trim."""
    cloud_storage_cache_trim_walk_concurrency: Annotated[int, Number(1, 1000), LIVE] = 1
    """How many directories of the cache are read at once, at the start and every hour."""
    cloud_storage_cache_chunk_size: Annotated[int, size(4 * _KIB, _GIB), LIVE] = 16 * _MIB
    """
    Approximate size of a chunk, the part of a segment that is fetched at once; chunks end at batch ends.
    """
    cloud_storage_disable_chunk_reads: Annotated[bool, Flag(), LIVE] = False
    """Fetch whole segments, for readers that read everything."""
    cloud_storage_chunk_eviction_strategy: Annotated[StrategyName, Choice(), LIVE] = "eager"
    """
    Which chunks without readers stay open: none, some of each segment, or those that most readers come to.
    """
    cloud_storage_hydrated_chunks_per_segment_ratio: Annotated[float, Decimal(0, 1), LIVE] = 0.7
    """Part of a segment's chunks that may stay open, with `capped` and `predictive`."""
    cloud_storage_min_chunks_per_segment_threshold: Annotated[int, Number(0, 2**31 - 1), LIVE] = 5
    """All chunks of a segment with at most this many chunks may stay open."""

    cloud_storage_readreplica_manifest_sync_timeout_ms: Annotated[int, duration(1, _DAY_MS)] = 30 * _SECOND_MS
    """
    With `gateway --archive-only`: how old the known state of an archive that another cluster writes may
    be.
    """

    kafka_enable_describe_log_dirs_remote_storage: Annotated[bool, Flag()] = True
    """Whether the gateway and `logdirs describe` show the bucket as a log directory, `remote://...`."""

    @property
    def chunk_eviction(self) -> ChunkEvictionLimits:
        """Return which chunks stay open."""
        return ChunkEvictionLimits(
            strategy=EvictionStrategy(self.cloud_storage_chunk_eviction_strategy),
            hydrated_ratio=self.cloud_storage_hydrated_chunks_per_segment_ratio,
            min_chunks_threshold=self.cloud_storage_min_chunks_per_segment_threshold,
        )
