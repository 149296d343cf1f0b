"""
The rules between properties: what is missing, what contradicts, and what is hardly meant.

Each rule sees a configuration whose single values are all valid and names the places it looked
at. `config.load` drops a finding that rests on a place with a fault of its own.
"""

from __future__ import annotations

from os.path import realpath
from typing import TYPE_CHECKING

from tieringd.config.cache_checks import find_cache_contradictions, find_cache_doubts
from tieringd.config.finding import Finding
from tieringd.config.gateway_checks import find_gateway_contradictions, find_gateway_doubts
from tieringd.config.retention_checks import find_retention_doubts
from tieringd.config.space_checks import find_space_contradictions, find_space_doubts
from tieringd.config.store_checks import find_store_contradictions, find_store_doubts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tieringd.config.model import Config
    from tieringd.config.topic_properties import TopicProperties
    from tieringd.config.yaml_source import Place


def find_contradictions(config: Config) -> Iterator[Finding]:
    """Yield what keeps *config* from being usable."""
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


def find_doubts(config: Config) -> Iterator[Finding]:
    """Yield what is allowed and most likely not meant."""
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
        yield Finding(
            (("cloud_storage_enabled",), ("cloud_storage_enable_remote_write",), ("topics",)),
            "nothing will be archived: set cloud_storage_enable_remote_write, "
            "or redpanda.remote.write for a topic",
        )


def _disabled(config: Config) -> Iterator[Finding]:
    message = "has no effect while cloud_storage_enabled is false"
    for name in ("cloud_storage_enable_remote_write", "cloud_storage_enable_remote_read"):
        if getattr(config, name):
            yield Finding(((name,), ("cloud_storage_enabled",)), message)
    for topic, properties in config.topics.items():
        if properties.remote_storage_enable:
            yield Finding((("topics", topic, "remote.storage.enable"), ("cloud_storage_enabled",)), message)
        if properties.remote_write:
            yield Finding((("topics", topic, "redpanda.remote.write"), ("cloud_storage_enabled",)), message)


def _broker(config: Config) -> Iterator[Finding]:
    kind: Place = ("broker", "kind")
    if config.broker.kind != "none":
        if not config.broker.bootstrap:
            yield Finding(
                (("broker", "bootstrap"), kind),
                f"is required with broker.kind {config.broker.kind}: a list of host:port",
            )
        if "cluster_id" in config.model_fields_set:
            yield Finding(
                (("cluster_id",), kind), "remove the line: the broker knows its cluster's id itself"
            )
        if (
            config.broker.kind == "redpanda"
            and config.cloud_storage_segment_max_upload_interval_sec is not None
        ):
            yield Finding(
                (("cloud_storage_segment_max_upload_interval_sec",), kind),
                "remove it: a Redpanda log is uploaded in whole segments; to bound how long a record waits, "
                "set segment.ms on the topic, or log_segment_ms in the cluster",
            )
        return
    for name in ("bootstrap", "node_id", "security"):
        if getattr(config.broker, name) != type(config.broker).model_fields[name].default:
            yield Finding(
                (("broker", name), kind), "remove it: with broker.kind none there is no broker to reach"
            )


def _security(config: Config) -> Iterator[Finding]:
    security = config.broker.security
    protocol: Place = ("broker", "security", "protocol")
    for name in ("sasl_username", "sasl_password"):
        place: Place = ("broker", "security", name)
        is_set = getattr(security, name) is not None
        if security.protocol.startswith("SASL_") and not is_set:
            yield Finding((place, protocol), f"is required with protocol {security.protocol}")
        if not security.protocol.startswith("SASL_") and is_set:
            yield Finding((place, protocol), f"contradicts protocol {security.protocol}, which has no login")
    if not security.protocol.endswith("SSL"):
        for name in ("ssl_ca_file", "ssl_cert_file", "ssl_key_file"):
            if getattr(security, name) is not None:
                yield Finding(
                    (("broker", "security", name), protocol),
                    f"contradicts protocol {security.protocol}, which has no TLS",
                )
    certificate: Place = ("broker", "security", "ssl_cert_file")
    key: Place = ("broker", "security", "ssl_key_file")
    if security.ssl_key_file is not None and security.ssl_cert_file is None:
        yield Finding((key, certificate), "needs ssl_cert_file beside it")


def _directories(config: Config) -> Iterator[Finding]:
    log_dirs: list[tuple[Place, Path]] = [
        (("broker", "log_dirs", index), path) for index, path in enumerate(config.broker.log_dirs)
    ]
    for index, (place, path) in enumerate(log_dirs):
        for _, earlier in log_dirs[:index]:
            if realpath(path) == realpath(earlier):
                yield Finding((place,), f"{path} is the same directory as {earlier}, which is listed already")
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
                yield Finding(
                    (own_place, place),
                    f"{own} is inside the log directory {path}: Kafka does not start when it finds "
                    "anything there that it does not know",
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
            yield Finding((root, place), f"{file_root} holds {held}; it must hold nothing but the archive")


def _holds(outer: Path, inner: Path) -> bool:
    """Say whether *inner* is *outer* or below it, symbolic links followed."""
    outer_path, inner_path = realpath(outer), realpath(inner)
    return inner_path == outer_path or inner_path.startswith(outer_path.rstrip("/") + "/")


def _topics(config: Config) -> Iterator[Finding]:
    for topic, properties in config.topics.items():
        kafka = properties.remote_storage_enable
        for name, value in (
            ("redpanda.remote.write", properties.remote_write),
            ("redpanda.remote.read", properties.remote_read),
        ):
            if kafka is not None and value is not None and kafka != value:
                yield Finding(
                    (("topics", topic, name), ("topics", topic, "remote.storage.enable")),
                    "contradicts remote.storage.enable, which stands for write and read; remove one of them",
                )
        yield from _read_replica(topic, properties)


def _read_replica(topic: str, properties: TopicProperties) -> Iterator[Finding]:
    if properties.read_replica is None:
        return
    for name, value in (
        ("remote.storage.enable", properties.remote_storage_enable),
        ("redpanda.remote.write", properties.remote_write),
    ):
        if value:
            yield Finding(
                (("topics", topic, name), ("topics", topic, "redpanda.remote.readreplica")),
                "contradicts redpanda.remote.readreplica, as a read replica is never uploaded; remove one",
            )


def _deletes(config: Config) -> Iterator[Finding]:
    """Yield where a topic's objects are to be deleted with it, which takes more than is set."""
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
            yield Finding(
                (place, ("topics", topic)),
                f"has no effect with {reason}: it takes write, read and no read replica",
            )


def _controller(config: Config) -> Iterator[Finding]:
    low: Place = ("cloud_storage_upload_ctrl_min_shares",)
    high: Place = ("cloud_storage_upload_ctrl_max_shares",)
    lowest, highest = config.cloud_storage_upload_ctrl_min_shares, config.cloud_storage_upload_ctrl_max_shares
    if lowest > highest:
        yield Finding(
            (low, high), f"{lowest} is more than cloud_storage_upload_ctrl_max_shares, which is {highest}"
        )


def _pins(config: Config) -> Iterator[Finding]:
    kind: Place = ("broker", "kind")
    switch: Place = ("pin_segments",)
    names = ("pin_segments", "pin_max_bytes")
    places: list[Place] = [(name,) for name in names if name in config.model_fields_set]
    if config.broker.pin_directory is not None:
        places.append(("broker", "pin_directory"))
    for place in places:
        if config.broker.kind == "none":
            yield Finding(
                (place, kind), "has no effect with broker.kind none: only this daemon deletes segments"
            )
        elif not config.pin_segments and place != switch:
            yield Finding((place, switch), "has no effect while pin_segments is false")
