"""
The configuration: one frozen tree, under the names of the systems we implement.

Every default stands here and nowhere else; the reference page and the check of `full.yaml`
read it from these classes. Each property takes effect in this release. Rules between
properties are in `config.checks`.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 pydantic reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PrivateAttr, SecretStr

from tieringd.config.fields import (
    MAX_INT64,
    NEVER_CLEARED,
    UNLIMITED,
    AbsolutePath,
    Choice,
    Decimal,
    Flag,
    Number,
    SecretText,
    Text,
    duration,
    seconds,
    size,
)
from tieringd.config.topic import (
    STRICT,
    ClusterDefaults,
    TopicConfig,
    TopicProperties,
    is_pattern,
    resolve_topic,
)
from tieringd.policies.local_retention import LocalRetentionTarget

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECOND_MS, _HOUR_MS, _DAY_MS = 1_000, 3_600_000, 86_400_000
_DAY_SEC = 86_400
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9])"
_PORT = r"(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_PREFIX_PART = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9!_.*'()=-]+"
_PREFIX = rf"(?:{_PREFIX_PART}(?:/{_PREFIX_PART})*)?"
_LONGEST_TOPIC_NAME = 249
"""Kafka's own limit."""


def _empty_section(value: Any) -> Any:
    """Let a section whose lines are all commented out hold its defaults."""
    return {} if value is None else value


def _limit(value: int | None) -> int | None:
    """Hold -1 as None: one value for "no limit" is enough for whoever reads it."""
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
    """How to reach the broker's listener, and as whom."""

    model_config = STRICT

    protocol: Annotated[Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"], Choice()] = "PLAINTEXT"
    """The listener's security protocol."""
    sasl_mechanism: Annotated[Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"], Choice()] = "PLAIN"
    """How to log in; read with a SASL protocol only."""
    sasl_username: Annotated[str, Text()] | None = None
    """Required with a SASL protocol."""
    sasl_password: Annotated[SecretStr, SecretText()] | None = None
    """Required with a SASL protocol. Take it from the environment: `${NAME}`."""
    ssl_ca_file: Annotated[Path, AbsolutePath()] | None = None
    """PEM file with the authorities to trust; null trusts the system's."""
    ssl_cert_file: Annotated[Path, AbsolutePath()] | None = None
    """PEM file with our certificate, where the broker asks for one."""
    ssl_key_file: Annotated[Path, AbsolutePath()] | None = None
    """PEM file with the certificate's private key."""


class BrokerConfig(BaseModel):
    """The broker beside this daemon."""

    model_config = STRICT

    kind: Annotated[Literal["none", "kafka", "redpanda"], Choice()]
    """`none` when the log directory is all there is: segments are trimmed by unlinking them."""
    log_dirs: Annotated[tuple[Annotated[Path, AbsolutePath()], ...], AfterValidator(_at_least_one)]
    """The broker's log directories (Kafka's `log.dirs`), all of them."""
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
    """Where segments are pinned: on the log directories' filesystem; null tries `state_directory`."""
    security: Annotated[Security, BeforeValidator(_empty_section)] = Security()
    """How to reach the broker's listener, and as whom."""


class AdminConfig(BaseModel):
    """The admin page: health, metrics and status over HTTP."""

    model_config = STRICT

    enabled: Annotated[bool, Flag()] = True
    """Serve the admin page."""
    # It has no login of its own, so it stays on this host until an operator decides otherwise.
    host: Annotated[str, Text("host", r"[A-Za-z0-9:._-]{1,253}", "must be a host name or an address")] = (
        "127.0.0.1"
    )
    """Address to listen on."""
    port: Annotated[int, Number(0, 65535)] = 9640
    """Port to listen on; 0 lets the system pick one."""


class LogConfig(BaseModel):
    """The daemon's own log, on standard error."""

    model_config = STRICT

    format: Annotated[Literal["json", "console"], Choice()] = "json"
    """`console` is for a person at a terminal."""
    level: Annotated[Literal["debug", "info", "warning", "error"], Choice()] = "info"
    """The least important events that are written."""


class Config(BaseModel):
    """
    The whole configuration, valid in every part and as a whole.

    Built by `config.load`, never changed; a reload builds another one.
    """

    model_config = STRICT

    broker: BrokerConfig
    """The broker beside this daemon."""
    cluster_id: Annotated[
        str,
        Text("text", r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", "must be 1 to 100 letters, digits, . _ or -"),
    ] = "local"
    """Names the cluster in the archive where there is no broker to ask; only with kind none."""
    state_directory: Annotated[Path, AbsolutePath()]
    """The daemon's own directory. Never inside a log directory: Kafka does not start then."""
    shutdown_timeout_ms: Annotated[int, duration(1, _HOUR_MS)] = 30 * _SECOND_MS
    """How long a stopping daemon may take to finish the uploads it is in."""

    cloud_storage_enabled: Annotated[bool, Flag()] = False
    """Turns tiering on."""
    cloud_storage_enable_remote_write: Annotated[bool, Flag()] = False
    """Upload the topics that do not say otherwise."""
    cloud_storage_enable_remote_read: Annotated[bool, Flag()] = False
    """Serve reads from the archive for the topics that do not say otherwise."""

    cloud_storage_backend: Annotated[
        Annotated[Literal["file", "aws"], Choice(later=("gcs", "azure"))] | None, NEVER_CLEARED
    ] = None
    """The object store. Not set, it is aws when a bucket and region, or an endpoint, are given."""
    cloud_storage_file_root: Annotated[Annotated[Path, AbsolutePath()] | None, NEVER_CLEARED] = None
    """Directory that stands in for a bucket; required for the file backend."""
    cloud_storage_bucket: Annotated[
        Annotated[
            str,
            Text("text", r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]", "must be a bucket's bare name"),
        ]
        | None,
        NEVER_CLEARED,
    ] = None
    """The bucket; required for the aws backend."""
    cloud_storage_region: Annotated[
        Annotated[str, Text("text", r"[A-Za-z0-9_-]+", "must be a region's name, such as eu-central-1")]
        | None,
        NEVER_CLEARED,
    ] = None
    """The bucket's region; required for AWS itself, optional with an endpoint."""
    cloud_storage_credentials_source: Annotated[
        Annotated[
            Literal["config_file"],
            Choice(
                later=(
                    "aws_instance_metadata",
                    "sts",
                    "gcp_instance_metadata",
                    "azure_vm_instance_metadata",
                    "azure_aks_oidc_federation",
                )
            ),
        ],
        NEVER_CLEARED,
    ] = "config_file"
    """Where the credentials come from: the two properties below."""
    cloud_storage_access_key: Annotated[Annotated[str, Text()] | None, NEVER_CLEARED] = None
    """The access key's id; required for the aws backend."""
    cloud_storage_secret_key: Annotated[Annotated[SecretStr, SecretText()] | None, NEVER_CLEARED] = None
    """The access key's secret; required for the aws backend. Take it from the environment: `${NAME}`."""
    cloud_storage_api_endpoint: Annotated[
        Annotated[
            str,
            Text("host", _HOST, "must be a bare host name; the port and TLS have properties of their own"),
        ]
        | None,
        NEVER_CLEARED,
    ] = None
    """Host of an S3-compatible store; not set, AWS's own endpoint of the region."""
    cloud_storage_api_endpoint_port: Annotated[Annotated[int, Number(1, 65535)], NEVER_CLEARED] = 443
    """Port of `cloud_storage_api_endpoint`."""
    cloud_storage_disable_tls: Annotated[Annotated[bool, Flag()], NEVER_CLEARED] = False
    """Speak plain HTTP to the endpoint, as when a proxy terminates TLS."""
    cloud_storage_trust_file: Annotated[Annotated[Path, AbsolutePath()] | None, NEVER_CLEARED] = None
    """PEM file with the authorities to trust; not set, the system's."""
    cloud_storage_url_style: Annotated[Literal["virtual_host", "path"], Choice()] | None = None
    """Where a request names the bucket; null is virtual_host on AWS itself and path on an endpoint."""
    cloud_storage_prefix: Annotated[
        str,
        Text(
            "text",
            _PREFIX,
            "must be letters, digits and !_.*'()=- in parts with one slash between them",
        ),
    ] = ""
    """Put before every object's key, with a slash after it."""

    cloud_storage_max_connections: Annotated[int, Number(1, 1024)] = 20
    """Connections to the object store, for reads and writes together."""
    cloud_storage_initial_backoff_ms: Annotated[int, duration(1, 60 * _SECOND_MS)] = 100
    """The first pause before a request is tried again; it doubles from there."""
    cloud_storage_segment_upload_timeout_ms: Annotated[int, duration(1, _DAY_MS)] = 30 * _SECOND_MS
    """The longest that uploading one segment may take, retries included."""
    cloud_storage_manifest_upload_timeout_ms: Annotated[int, duration(1, _DAY_MS)] = 10 * _SECOND_MS
    """The longest that storing one manifest may take, retries included."""
    cloud_storage_max_connection_idle_time_ms: Annotated[int, duration(1, _DAY_MS)] = 5 * _SECOND_MS
    """An unused connection is closed after this long."""
    cloud_storage_reconciliation_interval_ms: Annotated[int, duration(1, _DAY_MS)] = 10 * _SECOND_MS
    """How often the log directories and the cluster are looked at without being asked to."""
    cloud_storage_segment_max_upload_interval_sec: Annotated[int, seconds(1, _DAY_SEC * 365)] | None = None
    """No record waits longer than this for its segment to close: its stable part is uploaded. 10m or more."""

    cloud_storage_upload_ctrl_update_interval_ms: Annotated[int, duration(1, _DAY_MS)] = 60 * _SECOND_MS
    """How often the pace of uploads is set by the backlog."""
    cloud_storage_upload_ctrl_p_coeff: Annotated[float, Decimal(-1_000_000, 0)] = -2.0
    """Shares for each thousandth of the disk that waits to be uploaded; negative, as the error is."""
    cloud_storage_upload_ctrl_d_coeff: Annotated[float, Decimal(0, 1_000_000)] = 0.0
    """How much a growing backlog counts on top of its size."""
    cloud_storage_upload_ctrl_min_shares: Annotated[int, Number(1, 1000)] = 100
    """The pace when next to nothing waits: this many thousandths of what the store takes."""
    cloud_storage_upload_ctrl_max_shares: Annotated[int, Number(1, 1000)] = 1000
    """The pace when half of the free disk waits: 1000 is without limit."""

    pin_segments: Annotated[bool, Flag()] = True
    """Hold closed segments by hard links until they are durable, against the broker's own retention."""
    pin_max_bytes: Annotated[int, size(0, MAX_INT64)] = 10 * 2**30
    """How many bytes pins may hold that the broker has deleted, for each log directory."""

    retention_local_target_ms_default: Annotated[
        Annotated[int, duration(1, MAX_INT64, UNLIMITED)] | None, AfterValidator(_limit)
    ] = _DAY_MS
    """Keep this much time on the broker, where a topic does not say; null or -1 is without limit."""
    retention_local_target_bytes_default: Annotated[
        Annotated[int, size(1, MAX_INT64, UNLIMITED)] | None, AfterValidator(_limit)
    ] = None
    """Keep this many bytes of each partition on the broker, where a topic does not say."""

    admin: Annotated[AdminConfig, BeforeValidator(_empty_section)] = AdminConfig()
    """The admin page: health, metrics and status over HTTP."""
    log: Annotated[LogConfig, BeforeValidator(_empty_section)] = LogConfig()
    """The daemon's own log."""
    topics: Annotated[
        dict[
            Annotated[str, AfterValidator(_topic_name)],
            Annotated[TopicProperties, BeforeValidator(_empty_section)],
        ],
        BeforeValidator(_empty_section),
    ] = Field(default_factory=dict)
    """Topic properties by topic name or pattern."""

    _warnings: tuple[str, ...] = PrivateAttr(default=())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what is allowed but hardly meant, one line each, for the log at start."""
        return self._warnings

    def with_warnings(self, warnings: tuple[str, ...]) -> Config:
        """Return this configuration with *warnings*."""
        copy = self.model_copy()
        copy._warnings = warnings  # noqa: SLF001 its own class
        return copy

    @property
    def backend(self) -> Literal["file", "aws"] | None:
        """Return the object store to use, inferred when it is not named; None when nothing says."""
        if self.cloud_storage_backend is not None:
            return self.cloud_storage_backend
        on_aws = self.cloud_storage_bucket is not None and self.cloud_storage_region is not None
        return "aws" if on_aws or self.cloud_storage_api_endpoint is not None else None

    @property
    def url_style(self) -> Literal["virtual_host", "path"]:
        """Return where requests name the bucket."""
        if self.cloud_storage_url_style is not None:
            return self.cloud_storage_url_style
        return "virtual_host" if self.cloud_storage_api_endpoint is None else "path"

    @property
    def endpoint_url(self) -> str | None:
        """Return the URL of the S3-compatible store; None for AWS's own endpoint."""
        if self.cloud_storage_api_endpoint is None:
            return None
        scheme = "http" if self.cloud_storage_disable_tls else "https"
        return f"{scheme}://{self.cloud_storage_api_endpoint}:{self.cloud_storage_api_endpoint_port}"

    def topic(self, name: str, broker_properties: Mapping[str, str]) -> TopicConfig:
        """Return what holds for a topic, given what the broker itself has set on it."""
        return resolve_topic(
            name,
            overrides=self.topics,
            broker_properties=broker_properties,
            defaults=ClusterDefaults(
                enabled=self.cloud_storage_enabled,
                remote_write=self.cloud_storage_enable_remote_write,
                remote_read=self.cloud_storage_enable_remote_read,
                local_retention_target=LocalRetentionTarget(
                    target_ms=self.retention_local_target_ms_default,
                    target_bytes=self.retention_local_target_bytes_default,
                ),
            ),
        )
