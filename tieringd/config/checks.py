"""
The rules between properties: missing values, contradictions, and settings that are probably a mistake.

Each rule gets a configuration whose single values are all valid, and names the places that it examined.
`config.load` drops a finding that depends on a place with a fault of its own.

The rules are grouped by subject: cache, disk space, retention, gateway. Those of the object store are in
`config.store_checks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os.path import realpath
from pathlib import Path

from tieringd.config.fields import UNLIMITED
from tieringd.config.model import Config
from tieringd.config.properties import Cache, GatewayConfig, Retention, Space, TopicProperties
from tieringd.config.rule_violation import RuleViolation
from tieringd.config.store_checks import find_store_contradictions, find_store_doubts
from tieringd.config.yaml_source import Place

_WHOLE_PERCENT = 100
_SIZE: Place = ("cloud_storage_cache_size",)
_PERCENT: Place = ("cloud_storage_cache_size_percent",)
_CHUNK: Place = ("cloud_storage_cache_chunk_size",)

_LAST_PORT = 65_535
_ENABLED: Place = ("gateway", "enabled")


def find_cache_contradictions(config: Config) -> Iterator[RuleViolation]:
    """Yield the settings that keep the cache from holding anything."""
    directory = config.cloud_storage_cache_directory
    if directory is not None:
        for place, other in (
            (("state_directory",), config.state_directory),
            (("broker", "pin_directory"), config.broker.pin_directory),
            (("ballast_file_path",), config.ballast_file_path),
        ):
            if other is not None and realpath(directory) == realpath(other):
                yield RuleViolation(
                    (("cloud_storage_cache_directory",), place),
                    f"{directory} is {'.'.join(place)} as well; give the cache its own directory",
                )
    limit, chunk = config.cloud_storage_cache_size, config.cloud_storage_cache_chunk_size
    if limit and chunk > limit and not config.cloud_storage_disable_chunk_reads:
        yield RuleViolation(
            (_SIZE, _CHUNK),
            f"is {limit} bytes, which is too small for one chunk of cloud_storage_cache_chunk_size, {chunk} "
            "bytes",
        )


def find_cache_doubts(config: Config) -> Iterator[RuleViolation]:
    """Yield cache settings without effect, and those that get less room than they say."""
    if not config.cloud_storage_enabled:
        for name in Cache.model_fields:
            if _is_cache_changed(config, name):
                yield RuleViolation(
                    ((name,), ("cloud_storage_enabled",)),
                    "has no effect while cloud_storage_enabled is false",
                )
        return
    if not (config.cloud_storage_cache_size or config.cloud_storage_cache_size_percent):
        yield RuleViolation(
            (_PERCENT, _SIZE),
            "is 0, and cloud_storage_cache_size is 0: nothing is cached, every read is a download",
        )
    strategy: Place = ("cloud_storage_chunk_eviction_strategy",)
    if config.cloud_storage_chunk_eviction_strategy == "eager":
        for name in (
            "cloud_storage_hydrated_chunks_per_segment_ratio",
            "cloud_storage_min_chunks_per_segment_threshold",
        ):
            if _is_cache_changed(config, name):
                yield RuleViolation(((name,), strategy), f"has no effect while {strategy[0]} is eager")
    yield from _areas(config)


def _areas(config: Config) -> Iterator[RuleViolation]:
    """Yield a finding if the cache's percentage is not available, because the log's area comes first."""
    log_place: Place = ("retention_local_target_capacity_percent",)
    reserved, log = config.disk_reservation_percent, config.retention_local_target_capacity_percent or 0
    left, wanted = max(0.0, _WHOLE_PERCENT - reserved - log), config.cloud_storage_cache_size_percent
    if log and left < wanted and config.cloud_storage_cache_directory is None:
        yield RuleViolation(
            (_PERCENT, log_place, ("disk_reservation_percent",)),
            f"is {wanted:g}, but on a disk with logs, {log_place[0]} {log:g} and disk_reservation_percent "
            f"{reserved:g} leave only {left:g}",
        )


def _is_cache_changed(config: Config, name: str) -> bool:
    """Say whether the file sets another value than the default."""
    return bool(getattr(config, name) != Cache.model_fields[name].default)


def find_gateway_contradictions(config: Config) -> Iterator[RuleViolation]:
    """Yield the settings that keep the gateway from starting."""
    gateway = config.gateway
    yield from _certificate(gateway)
    yield from _users(gateway)
    if gateway.consumer_groups and config.cloud_storage_single_writer:
        yield RuleViolation(
            (("gateway", "consumer_groups"), ("cloud_storage_single_writer",)),
            "takes a store that honours the conditions of writes, which cloud_storage_single_writer: true "
            "says that this one does not",
        )
    yield from _workers(gateway)
    if gateway.advertised is not None and not 0 < int(gateway.advertised.rpartition(":")[2]) <= _LAST_PORT:
        yield RuleViolation((("gateway", "advertised"),), "must have a port from 1 to 65535")
    # Without a broker section the bucket is served alone, so the gateway's broker settings do not matter.
    if not gateway.enabled or not config.has_broker_section:
        return
    if config.broker.kind == "none":
        yield RuleViolation(
            (_ENABLED, ("broker", "kind")),
            "needs a broker, but broker.kind is none; set it to false, and serve the bucket alone with "
            "`tieringd gateway --archive-only`",
        )
    if not config.cloud_storage_enabled:
        yield RuleViolation(
            (_ENABLED, ("cloud_storage_enabled",)),
            "has no archive to read while cloud_storage_enabled is false; set that to true, or this to false",
        )
    if gateway.broker in config.broker.bootstrap:
        yield RuleViolation(
            (("gateway", "broker"), ("broker", "bootstrap")),
            "is in broker.bootstrap as well: the gateway needs the broker's second listener, which "
            "advertises the gateway; the daemon needs a listener that does not",
        )


def _certificate(gateway: GatewayConfig) -> Iterator[RuleViolation]:
    pairs = (
        (("tls_cert_file", gateway.tls_cert_file), ("tls_key_file", gateway.tls_key_file)),
        (
            ("broker_tls_cert_file", gateway.broker_tls_cert_file),
            ("broker_tls_key_file", gateway.broker_tls_key_file),
        ),
    )
    for (cert_name, cert_file), (key_name, key_file) in pairs:
        if (cert_file is None) != (key_file is None):
            missing, given = (cert_name, key_name) if cert_file is None else (key_name, cert_name)
            yield RuleViolation(
                (("gateway", given), ("gateway", missing)),
                f"needs gateway.{missing} as well: set both or neither",
            )


def _workers(gateway: GatewayConfig) -> Iterator[RuleViolation]:
    """Each worker has an equal part of a limit, so the limit has to be large enough to be divided."""
    count, place = gateway.workers, ("gateway", "workers")
    if isinstance(count, str):
        return
    least = {
        "max_connections": count,
        "max_connections_per_host": count,
        "buffer_bytes": count * gateway.max_inspected_bytes,
    }
    for name, wanted in least.items():
        found = getattr(gateway, name)
        if found is not None and found < wanted:
            yield RuleViolation(
                (place, ("gateway", name)),
                f"is {count}, and gateway.{name} {found} is not enough for so many; set it to {wanted} or "
                "more, or have fewer workers",
            )


def _users(gateway: GatewayConfig) -> Iterator[RuleViolation]:
    if gateway.tls_client_ca_file is not None and gateway.tls_cert_file is None:
        yield RuleViolation(
            (("gateway", "tls_client_ca_file"), ("gateway", "tls_cert_file")),
            "needs gateway.tls_cert_file as well: without TLS no client presents a certificate",
        )
    if not gateway.sasl_plain:
        return
    if gateway.users_file is None:
        yield RuleViolation(
            (("gateway", "sasl_plain"), ("gateway", "users_file")),
            "needs gateway.users_file: without it there are no users",
        )
    if gateway.tls_cert_file is None and not gateway.sasl_plain_without_tls:
        yield RuleViolation(
            (("gateway", "sasl_plain"), ("gateway", "tls_cert_file")),
            "sends passwords in clear text without gateway.tls_cert_file; use SCRAM, or set "
            "gateway.sasl_plain_without_tls: true if that is wanted",
        )


def find_gateway_doubts(config: Config) -> Iterator[RuleViolation]:
    """Yield gateway settings without effect."""
    gateway = config.gateway
    if not config.has_broker_section:
        return
    if not gateway.enabled:
        for name in sorted(gateway.model_fields_set - {"enabled", "advertised"}):
            if getattr(gateway, name) != GatewayConfig.model_fields[name].default:
                yield RuleViolation(
                    (("gateway", name), _ENABLED), "has no effect while gateway.enabled is false"
                )
    elif gateway.broker_tls_ca_file is not None and not gateway.broker_tls:
        yield RuleViolation(
            (("gateway", "broker_tls_ca_file"), ("gateway", "broker_tls")),
            "has no effect while gateway.broker_tls is false",
        )
    if gateway.enabled and gateway.advertised is not None:
        yield RuleViolation(
            (("gateway", "advertised"), _ENABLED),
            "has no effect beside a broker, because the broker's listener advertises the gateway; it is "
            "for `tieringd gateway --archive-only`",
        )


def find_retention_doubts(config: Config) -> Iterator[RuleViolation]:
    """Yield retention settings that are allowed but probably a mistake."""
    yield from _unlimited(config)
    for names in (_cluster_ms(config), _cluster_bytes(config)):
        yield from _shadowed((), names)
        yield from _said_by_the_broker(config, names)
    for topic, properties in config.topics.items():
        for names in _topic_names(properties):
            yield from _shadowed(("topics", topic), names)


def _unlimited(config: Config) -> Iterator[RuleViolation]:
    if config.total_ms == UNLIMITED and not (
        config.cloud_storage_enabled and config.cloud_storage_enable_remote_write
    ):
        name = next(name for name, value in _cluster_ms(config) if value is not None)
        yield RuleViolation(
            ((name,), ("cloud_storage_enabled",), ("cloud_storage_enable_remote_write",)),
            "keeps records without limit, and without remote write this fills the local disks: set "
            "cloud_storage_enable_remote_write, or a limit in the broker",
        )


def _said_by_the_broker(config: Config, names: Sequence[tuple[str, int | None]]) -> Iterator[RuleViolation]:
    """Yield cluster limits that no topic uses, because a Kafka broker has its own for every topic."""
    if config.broker.kind == "none":
        return
    for name, value in names:
        default = Retention.model_fields["log_retention_ms"].default if name == "log_retention_ms" else None
        if value not in {None, UNLIMITED, default}:
            yield RuleViolation(
                ((name,), ("broker", "kind")),
                f"has no effect with broker.kind {config.broker.kind}, because the broker has a value for "
                "every topic; set it there, or under topics",
            )


def _shadowed(section: Place, names: Sequence[tuple[str, int | None]]) -> Iterator[RuleViolation]:
    """Yield settings that another name of the same setting overrides. The first set name in *names* wins."""
    known = [name for name, value in names if value is not None]
    for name in known[1:]:
        yield RuleViolation(
            ((*section, name), (*section, known[0])),
            f"has no effect, because {known[0]} takes precedence; remove one of them",
        )


def _cluster_ms(config: Config) -> list[tuple[str, int | None]]:
    is_set = "log_retention_ms" in config.model_fields_set
    return [
        ("log.retention.ms", config.kafka_log_retention_ms),
        ("delete_retention_ms", config.delete_retention_ms),
        ("log_retention_ms", config.log_retention_ms if is_set else None),
    ]


def _cluster_bytes(config: Config) -> list[tuple[str, int | None]]:
    return [
        ("log.retention.bytes", config.kafka_log_retention_bytes),
        ("retention_bytes", config.retention_bytes),
    ]


def _topic_names(properties: TopicProperties) -> list[list[tuple[str, int | None]]]:
    """Return the groups of names that mean the same for a topic, the name that wins first."""
    return [
        [
            ("local.retention.ms", properties.local_retention_ms),
            ("retention.local.target.ms", properties.local_target_ms),
        ],
        [
            ("local.retention.bytes", properties.local_retention_bytes),
            ("retention.local.target.bytes", properties.local_target_bytes),
        ],
        [
            ("retention.ms", properties.retention_ms),
            ("remote.log.retention.minutes", properties.remote_log_retention_minutes),
        ],
        [
            ("retention.bytes", properties.retention_bytes),
            ("remote.log.retention.bytes", properties.remote_log_retention_bytes),
        ],
    ]


def find_space_contradictions(config: Config) -> Iterator[RuleViolation]:
    """Yield the settings with which the areas do not fit on a disk."""
    reserved, log = config.disk_reservation_percent, config.retention_local_target_capacity_percent or 0
    if reserved + log > _WHOLE_PERCENT:
        yield RuleViolation(
            (("retention_local_target_capacity_percent",), ("disk_reservation_percent",)),
            f"is {log:g}; together with disk_reservation_percent {reserved:g} that is more than the whole "
            "disk",
        )


def find_space_doubts(config: Config) -> Iterator[RuleViolation]:
    """Yield disk space settings without effect."""
    if not config.tune_ballast_file:
        switch: Place = ("tune_ballast_file",)
        for name in ("ballast_file_path", "ballast_file_size", "ballast_release_when_degraded"):
            if _is_space_changed(config, name):
                yield RuleViolation(((name,), switch), "has no effect while tune_ballast_file is false")
    kind: Place = ("broker", "kind")
    rate, action = "storage_degraded_producer_byte_rate", "storage_degraded_action"
    for name in (action, rate):
        if config.broker.kind != "kafka" and _is_space_changed(config, name):
            reason = (
                "there are no producers" if config.broker.kind == "none" else "Redpanda itself refuses writes"
            )
            yield RuleViolation(
                ((name,), kind), f"has no effect with broker.kind {config.broker.kind}: {reason}"
            )
    if (
        config.broker.kind == "kafka"
        and config.storage_degraded_action == "alert"
        and _is_space_changed(config, rate)
    ):
        yield RuleViolation(((rate,), (action,)), "has no effect while storage_degraded_action is alert")


def _is_space_changed(config: Config, name: str) -> bool:
    """Say whether the file sets another value than the default."""
    return bool(getattr(config, name) != Space.model_fields[name].default)


def find_contradictions(config: Config) -> Iterator[RuleViolation]:
    """Yield the faults that make *config* unusable."""
    yield from _broker(config)
    yield from _security(config)
    yield from _directories(config)
    yield from _topics(config)
    yield from _controller(config)
    yield from find_space_contradictions(config)
    yield from find_gateway_contradictions(config)
    yield from find_cache_contradictions(config)
    if config.cloud_storage_enabled:
        yield from find_store_contradictions(config)


def find_doubts(config: Config) -> Iterator[RuleViolation]:
    """Yield settings that are allowed but probably a mistake."""
    yield from _pins(config)
    yield from find_retention_doubts(config)
    yield from find_space_doubts(config)
    yield from find_gateway_doubts(config)
    yield from find_cache_doubts(config)
    if not config.cloud_storage_enabled:
        yield from _disabled(config)
        return
    yield from find_store_doubts(config)
    yield from _deletes(config)
    archives = config.cloud_storage_enable_remote_write or any(
        topic.remote_write or topic.remote_storage_enable for topic in config.topics.values()
    )
    if config.broker.kind == "none" and config.has_broker_section and not archives:
        yield RuleViolation(
            (("cloud_storage_enabled",), ("cloud_storage_enable_remote_write",), ("topics",)),
            "nothing will be archived: set cloud_storage_enable_remote_write, "
            "or redpanda.remote.write for a topic",
        )


def _disabled(config: Config) -> Iterator[RuleViolation]:
    message = "has no effect while cloud_storage_enabled is false"
    for name in ("cloud_storage_enable_remote_write", "cloud_storage_enable_remote_read"):
        if getattr(config, name):
            yield RuleViolation(((name,), ("cloud_storage_enabled",)), message)
    for topic, properties in config.topics.items():
        if properties.remote_storage_enable:
            yield RuleViolation(
                (("topics", topic, "remote.storage.enable"), ("cloud_storage_enabled",)), message
            )
        if properties.remote_write:
            yield RuleViolation(
                (("topics", topic, "redpanda.remote.write"), ("cloud_storage_enabled",)), message
            )


def _broker(config: Config) -> Iterator[RuleViolation]:
    kind: Place = ("broker", "kind")
    if config.broker.kind != "none":
        if not config.broker.bootstrap:
            yield RuleViolation(
                (("broker", "bootstrap"), kind),
                f"is required with broker.kind {config.broker.kind}: a list of host:port",
            )
        if "cluster_id" in config.model_fields_set:
            yield RuleViolation(
                (("cluster_id",), kind), "remove this line: the broker knows its cluster's id"
            )
        if (
            config.broker.kind == "redpanda"
            and config.cloud_storage_segment_max_upload_interval_sec is not None
        ):
            yield RuleViolation(
                (("cloud_storage_segment_max_upload_interval_sec",), kind),
                "remove this line: a Redpanda log is uploaded in whole segments; to limit how long a "
                "record waits, set segment.ms on the topic, or log_segment_ms in the cluster",
            )
        return
    for name in ("bootstrap", "node_id", "security"):
        if getattr(config.broker, name) != type(config.broker).model_fields[name].default:
            yield RuleViolation(
                (("broker", name), kind),
                "remove this line: with broker.kind none there is no broker to connect to",
            )


def _security(config: Config) -> Iterator[RuleViolation]:
    security = config.broker.security
    protocol: Place = ("broker", "security", "protocol")
    for name in ("sasl_username", "sasl_password"):
        place: Place = ("broker", "security", name)
        is_set = getattr(security, name) is not None
        if security.protocol.startswith("SASL_") and not is_set:
            yield RuleViolation((place, protocol), f"is required with protocol {security.protocol}")
        if not security.protocol.startswith("SASL_") and is_set:
            yield RuleViolation(
                (place, protocol), f"contradicts protocol {security.protocol}, which has no login"
            )
    if not security.protocol.endswith("SSL"):
        for name in ("ssl_ca_file", "ssl_cert_file", "ssl_key_file"):
            if getattr(security, name) is not None:
                yield RuleViolation(
                    (("broker", "security", name), protocol),
                    f"contradicts protocol {security.protocol}, which has no TLS",
                )
    certificate: Place = ("broker", "security", "ssl_cert_file")
    key: Place = ("broker", "security", "ssl_key_file")
    if security.ssl_key_file is not None and security.ssl_cert_file is None:
        yield RuleViolation((key, certificate), "needs ssl_cert_file as well")


def _directories(config: Config) -> Iterator[RuleViolation]:
    log_dirs: list[tuple[Place, Path]] = [
        (("broker", "log_dirs", index), path) for index, path in enumerate(config.broker.log_dirs)
    ]
    for index, (place, path) in enumerate(log_dirs):
        for _, earlier in log_dirs[:index]:
            if realpath(path) == realpath(earlier):
                yield RuleViolation(
                    (place,), f"{path} is the same directory as {earlier}, which is listed already"
                )
    state: Place = ("state_directory",)
    root: Place = ("cloud_storage_file_root",)
    pins: Place = ("broker", "pin_directory")
    pin_directory = config.broker.pin_directory
    ballast: Place = ("ballast_file_path",)
    cache: Place = ("cloud_storage_cache_directory",)
    for own_place, own in (
        (state, config.state_directory),
        (pins, pin_directory),
        (ballast, config.ballast_file_path),
        (cache, config.cloud_storage_cache_directory),
        (root, config.cloud_storage_file_root),
    ):
        for place, path in log_dirs:
            if own is not None and _holds(path, own):
                yield RuleViolation(
                    (own_place, place),
                    f"{own} is inside the log directory {path}: Kafka does not start if it finds an unknown "
                    "file there",
                )
    file_root = config.cloud_storage_file_root
    if file_root is None:
        return
    apart = [(place, path) for place, path in log_dirs if not _holds(path, file_root)]
    own_paths = (
        (state, config.state_directory),
        (pins, pin_directory),
        (ballast, config.ballast_file_path),
        (cache, config.cloud_storage_cache_directory),
    )
    for place, held in (*own_paths, *apart):
        if held is not None and _holds(file_root, held):
            yield RuleViolation(
                (root, place), f"{file_root} holds {held}; it must hold nothing but the archive"
            )


def _holds(outer: Path, inner: Path) -> bool:
    """Say whether *inner* is *outer* or below it, following symbolic links."""
    outer_path, inner_path = realpath(outer), realpath(inner)
    return inner_path == outer_path or inner_path.startswith(outer_path.rstrip("/") + "/")


def _topics(config: Config) -> Iterator[RuleViolation]:
    for topic, properties in config.topics.items():
        kafka = properties.remote_storage_enable
        for name, value in (
            ("redpanda.remote.write", properties.remote_write),
            ("redpanda.remote.read", properties.remote_read),
        ):
            if kafka is not None and value is not None and kafka != value:
                yield RuleViolation(
                    (("topics", topic, name), ("topics", topic, "remote.storage.enable")),
                    "contradicts remote.storage.enable, which stands for write and read; remove one of them",
                )
        yield from _read_replica(topic, properties)


def _read_replica(topic: str, properties: TopicProperties) -> Iterator[RuleViolation]:
    if properties.read_replica is None:
        return
    for name, value in (
        ("remote.storage.enable", properties.remote_storage_enable),
        ("redpanda.remote.write", properties.remote_write),
    ):
        if value:
            yield RuleViolation(
                (("topics", topic, name), ("topics", topic, "redpanda.remote.readreplica")),
                "contradicts redpanda.remote.readreplica, as a read replica is never uploaded; remove one",
            )


def _deletes(config: Config) -> Iterator[RuleViolation]:
    """Yield topics whose objects should be deleted with them, without the settings that this requires."""
    for topic, properties in config.topics.items():
        if not properties.remote_delete:
            continue
        place: Place = ("topics", topic, "redpanda.remote.delete")
        kafka = properties.remote_storage_enable
        needs = (
            ("redpanda.remote.write", properties.remote_write if kafka is None else kafka),
            ("redpanda.remote.read", properties.remote_read if kafka is None else kafka),
        )
        off = [name for name, value in needs if value is False]
        if off or properties.read_replica is not None:
            reason = f"{' and '.join(off)} set to false" if off else "a read replica"
            yield RuleViolation(
                (place, ("topics", topic)),
                f"has no effect with {reason}: it needs redpanda.remote.write and redpanda.remote.read, and "
                "no read replica",
            )


def _controller(config: Config) -> Iterator[RuleViolation]:
    low: Place = ("cloud_storage_upload_ctrl_min_shares",)
    high: Place = ("cloud_storage_upload_ctrl_max_shares",)
    lowest, highest = config.cloud_storage_upload_ctrl_min_shares, config.cloud_storage_upload_ctrl_max_shares
    if lowest > highest:
        yield RuleViolation(
            (low, high), f"{lowest} is more than cloud_storage_upload_ctrl_max_shares, which is {highest}"
        )


def _pins(config: Config) -> Iterator[RuleViolation]:
    kind: Place = ("broker", "kind")
    switch: Place = ("pin_segments",)
    names = ("pin_segments", "pin_max_bytes")
    places: list[Place] = [(name,) for name in names if name in config.model_fields_set]
    if config.broker.pin_directory is not None:
        places.append(("broker", "pin_directory"))
    for place in places:
        if config.broker.kind == "none":
            yield RuleViolation(
                (place, kind), "has no effect with broker.kind none: only this daemon deletes segments"
            )
        elif not config.pin_segments and place != switch:
            yield RuleViolation((place, switch), "has no effect while pin_segments is false")
