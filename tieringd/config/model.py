"""
The configuration: one frozen tree, under the property names of Redpanda and Kafka.

Every default is here and nowhere else; the reference page and the check of `full.yaml` read it from these
classes. Each property takes effect in this release. Rules between properties are in `config.checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PrivateAttr, SecretStr

from tieringd.config.access import StoreAccess
from tieringd.config.fields import (
    LIVE,
    MAX_INT64,
    UNLIMITED,
    AbsolutePath,
    Choice,
    Flag,
    Number,
    SecretText,
    Text,
    duration,
    size,
)
from tieringd.config.properties import (
    STRICT,
    Cache,
    CompactedReuploads,
    GatewayConfig,
    HousekeepingTimes,
    Merging,
    Retention,
    Scrubbing,
    Space,
    TopicProperties,
    Transfers,
)
from tieringd.config.topic import ClusterDefaults, TopicConfig, is_pattern, keeps_deleted, resolve_topic
from tieringd.formats.topic_manifest import TieringDefaults, TopicManifest
from tieringd.policies.housekeeping_turns import HousekeepingLimits
from tieringd.policies.local_retention import ClusterLocalTarget
from tieringd.policies.total_retention import RetentionPace

_SECOND_MS, _HOUR_MS, _DAY_MS = 1_000, 3_600_000, 86_400_000
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9])"
_PORT = r"(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_LONGEST_TOPIC_NAME = 249
"""Kafka's own limit."""


def _empty_section(value: Any) -> Any:
    """Let a section whose lines are all commented out have its defaults."""
    return {} if value is None else value


def _limit(value: int | None) -> int | None:
    """Hold -1 as None, so that readers have to check only one value for "no limit"."""
    return None if value == UNLIMITED else value


def _at_least_one(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    if not paths:
        raise ValueError("must list at least one")
    return paths


def _topic_name(name: str) -> str:
    if not name or name in (".", "..") or set(name) - _TOPIC_CHARACTERS:
        raise ValueError("a topic's name or pattern holds only letters, digits and . _ - * ? [ ] !")
    if len(name) > _LONGEST_TOPIC_NAME and not is_pattern(name):
        raise ValueError(f"a topic's name has at most {_LONGEST_TOPIC_NAME} characters")
    return name


_TOPIC_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-*?[]!")


class Security(BaseModel):
    """How to reach the broker's listener, and the user to log in as."""

    model_config = STRICT

    protocol: Annotated[Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"], Choice()] = "PLAINTEXT"
    """The security protocol of the listener."""
    sasl_mechanism: Annotated[Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"], Choice()] = "PLAIN"
    """How to log in; used with a SASL protocol only."""
    sasl_username: Annotated[str, Text()] | None = None
    """Required with a SASL protocol."""
    sasl_password: Annotated[SecretStr, SecretText()] | None = None
    """Required with a SASL protocol. Take it from the environment: `${NAME}`."""
    ssl_ca_file: Annotated[Path, AbsolutePath()] | None = None
    """PEM file with the authorities to trust; null: the system's authorities."""
    ssl_cert_file: Annotated[Path, AbsolutePath()] | None = None
    """PEM file with the client certificate, if the broker requires one."""
    ssl_key_file: Annotated[Path, AbsolutePath()] | None = None
    """PEM file with the certificate's private key."""


class BrokerConfig(BaseModel):
    """The broker beside this daemon."""

    model_config = STRICT

    kind: Annotated[Literal["none", "kafka", "redpanda"], Choice()]
    """The kind of broker. `none`: only a log directory, whose segments are trimmed by unlinking them."""
    log_dirs: Annotated[tuple[Annotated[Path, AbsolutePath()], ...], AfterValidator(_at_least_one)]
    """All log directories of the broker (Kafka's `log.dirs`)."""
    bootstrap: tuple[
        Annotated[
            str, Text("host:port", f"{_HOST}:{_PORT}", "must be host:port with a port from 1 to 65535")
        ],
        ...,
    ] = ()
    """Addresses of the broker; required for kafka, refused for none."""
    node_id: Annotated[int, Number(0, 2**31 - 1)] | None = None
    """The broker's `node.id`; null finds the broker by its advertised address among `bootstrap`."""
    pin_directory: Annotated[Path, AbsolutePath()] | None = None
    """Directory for pins of segments, on the log directories' filesystem; null tries `state_directory`."""
    security: Annotated[Security, BeforeValidator(_empty_section)] = Security()
    """The security settings and credentials for the broker's listener."""


WITHOUT_BROKER = BrokerConfig.model_construct(kind="none", log_dirs=())
"""Stands in for a missing broker section, in files that are used without a broker."""


class AdminConfig(BaseModel):
    """The admin page: health, metrics and status over HTTP."""

    model_config = STRICT

    enabled: Annotated[bool, Flag()] = True
    """Serve the admin page."""
    # To read the page takes no login, so it stays on this host until an operator decides otherwise.
    host: Annotated[str, Text("host", r"[A-Za-z0-9:._-]{1,253}", "must be a host name or an address")] = (
        "127.0.0.1"
    )
    """Address to listen on."""
    port: Annotated[int, Number(0, 65535)] = 9640
    """Port to listen on; 0 lets the system choose one."""
    metrics_topics: Annotated[int, Number(0, 10_000), LIVE] = 50
    """
    How many topics, the largest first, have series of their own on `/metrics`: five for each. Every topic and
    every partition is on `/metrics/partitions`.
    """
    token: Annotated[SecretStr, SecretText()] | None = None
    """
    Requests that change something must carry it, as `Authorization: Bearer TOKEN`. null: the page is
    read-only. Take it from the environment: `${NAME}`.
    """


class LogConfig(BaseModel):
    """The daemon's own log, on standard error."""

    model_config = STRICT

    format: Annotated[Literal["json", "console"], Choice()] = "json"
    """`console` is for a person at a terminal."""
    level: Annotated[Literal["debug", "info", "warning", "error"], Choice(), LIVE] = "info"
    """The lowest level of the events that are written."""


class Daemon(BaseModel):
    """The daemon, the broker beside it, and whether anything is to be archived."""

    model_config = STRICT

    broker: BrokerConfig
    """The broker beside this daemon."""
    cluster_id: Annotated[
        str,
        Text("text", r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", "must be 1 to 100 letters, digits, . _ or -"),
    ] = "local"
    """The cluster's name in the archive; only with kind none, where no broker can tell it."""
    state_directory: Annotated[Path, AbsolutePath()]
    """The daemon's own directory. Must not be inside a log directory: Kafka would not start."""
    shutdown_timeout_ms: Annotated[int, duration(1, _HOUR_MS), LIVE] = 30 * _SECOND_MS
    """How long a stopping daemon may take to finish the uploads in progress."""

    cloud_storage_enabled: Annotated[bool, Flag()] = False
    """Turns tiering on."""
    cloud_storage_enable_remote_write: Annotated[bool, Flag(), LIVE] = False
    """Upload topics that have no setting of their own."""
    cloud_storage_enable_remote_read: Annotated[bool, Flag(), LIVE] = False
    """Serve reads from the archive for topics that have no setting of their own."""


# The properties of the last base class come first, and those of this class last.
class Config(
    Scrubbing,
    CompactedReuploads,
    Merging,
    HousekeepingTimes,
    Retention,
    Space,
    Cache,
    Transfers,
    StoreAccess,
    Daemon,
):
    """
    The whole configuration, valid in every part and as a whole.

    Built by `config.load` and never changed. A reload builds another one.
    """

    model_config = STRICT

    retention_local_target_ms_default: Annotated[
        Annotated[int, duration(1, MAX_INT64, UNLIMITED)] | None, AfterValidator(_limit), LIVE
    ] = _DAY_MS
    """How long to keep data on the broker if a topic does not set it; null or -1: no limit."""
    retention_local_target_bytes_default: Annotated[
        Annotated[int, size(1, MAX_INT64, UNLIMITED)] | None, AfterValidator(_limit), LIVE
    ] = None
    """
    How many bytes of each partition to keep on the broker if a topic does not set it; null or -1: no
    limit.
    """

    admin: Annotated[AdminConfig, BeforeValidator(_empty_section)] = AdminConfig()
    """The admin page: health, metrics and status over HTTP."""
    gateway: Annotated[GatewayConfig, BeforeValidator(_empty_section)] = GatewayConfig()
    """The read gateway: Kafka's protocol for clients, with the archive behind the broker."""
    log: Annotated[LogConfig, BeforeValidator(_empty_section)] = LogConfig()
    """The daemon's own log."""
    topics: Annotated[
        dict[
            Annotated[str, AfterValidator(_topic_name)],
            Annotated[TopicProperties, BeforeValidator(_empty_section)],
        ],
        BeforeValidator(_empty_section),
        LIVE,
    ] = Field(default_factory=dict)
    """Topic properties by topic name or pattern."""

    _warnings: tuple[str, ...] = PrivateAttr(default=())
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return settings that are allowed but probably a mistake, one line each, for the log at start."""
        return self._warnings

    @property
    def notes(self) -> tuple[str, ...]:
        """Return properties of the file that do not apply here, one line each with the reason."""
        return self._notes

    def with_remarks(self, *, warnings: tuple[str, ...], notes: tuple[str, ...]) -> Config:
        """Return this configuration with *warnings* and *notes*."""
        copy = self.model_copy()
        copy._warnings, copy._notes = warnings, notes  # noqa: SLF001 its own class
        return copy

    @property
    def has_broker_section(self) -> bool:
        """Return whether the file has a broker section. Without one only the bucket can be used."""
        return bool(self.broker.log_dirs)

    @property
    def cache_directory(self) -> Path:
        """Return the directory that caches archived chunks; never a log directory."""
        return self.cloud_storage_cache_directory or self.state_directory / "cloud_storage_cache"

    @property
    def housekeeping_limits(self) -> HousekeepingLimits:
        """Return when housekeeping may run."""
        return HousekeepingLimits(
            window_seconds=self.cloud_storage_idle_timeout_ms / _SECOND_MS,
            threshold_rps=self.cloud_storage_idle_threshold_rps,
            interval_seconds=self.cloud_storage_housekeeping_interval_ms / _SECOND_MS,
        )

    @property
    def retention_without_broker_ms(self) -> int | None:
        """
        Return the limit by time of topics that set none themselves; None or -1 without a limit.

        It applies only to log directories without a broker. A broker has a value for every topic. If a
        broker leaves a topic out of an answer, nothing of the topic may be deleted for it.
        """
        has_none = self.broker.kind == "none" and self.has_broker_section
        return self.total_ms if has_none else None

    @property
    def tiering_defaults(self) -> TieringDefaults:
        """Return the settings of a topic that sets nothing itself."""
        return TieringDefaults(self.cloud_storage_enable_remote_write, self.cloud_storage_enable_remote_read)

    def topic(
        self, name: str, broker_properties: Mapping[str, str], recorded: TopicManifest | None = None
    ) -> TopicConfig:
        """
        Return the settings of a topic, given the broker's own configuration of it.

        *recorded* has the cluster's defaults from when the topic was first seen: a later change of the
        cluster's values for write and read applies only to new topics. It also has the topic's original
        retention, which the broker no longer has if tieringd manages it.
        """
        defaults = (recorded.defaults if recorded else None) or self.tiering_defaults
        return resolve_topic(
            name,
            overrides=self.topics,
            broker_properties=broker_properties,
            defaults=ClusterDefaults(
                enabled=self.cloud_storage_enabled,
                remote_write=defaults.remote_write,
                remote_read=defaults.remote_read,
                local_target=ClusterLocalTarget(
                    target_ms=_recorded(defaults.local_target_ms, self.retention_local_target_ms_default),
                    target_bytes=_recorded(
                        defaults.local_target_bytes, self.retention_local_target_bytes_default
                    ),
                    is_strict=self.retention_local_strict,
                ),
                is_kafka=self.broker.kind == "kafka",
                total_ms=self.retention_without_broker_ms,
                total_bytes=self.total_bytes,
                merging=self.merge_settings,
                reuploads_compacted=self.cloud_storage_enable_compacted_topic_reupload,
                pace=RetentionPace(self.cloud_storage_housekeeping_interval_ms, self.archive_delete_delay_ms),
                target_manifest_bytes=self.cloud_storage_target_manifest_size_bytes,
            ),
            original=recorded.original_retention if recorded else None,
        )

    def keeps_deleted(self, name: str) -> bool:
        """Say whether this file keeps the archives of deleted topics of this name."""
        return keeps_deleted(name, self.topics)


def _recorded(value: int | None, default: int | None) -> int | None:
    """Return a recorded limit, with None for -1. Without a record, return the cluster's."""
    return default if value is None else _limit(value)
