"""The rules between the properties of retention, local and total: what has no effect, or a dangerous one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.config.fields import UNLIMITED
from tieringd.config.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tieringd.config.model import Config
    from tieringd.config.topic_properties import TopicProperties
    from tieringd.config.yaml_source import Place


def find_retention_doubts(config: Config) -> Iterator[Finding]:
    """Yield what is allowed and most likely not meant."""
    yield from _unlimited(config)
    for names in (_cluster_ms(config), _cluster_bytes(config)):
        yield from _shadowed((), names)
        yield from _said_by_the_broker(config, names)
    for topic, properties in config.topics.items():
        for names in _topic_names(properties):
            yield from _shadowed(("topics", topic), names)


def _unlimited(config: Config) -> Iterator[Finding]:
    if config.total_ms == UNLIMITED and not (
        config.cloud_storage_enabled and config.cloud_storage_enable_remote_write
    ):
        name = next(name for name, value in _cluster_ms(config) if value is not None)
        yield Finding(
            ((name,), ("cloud_storage_enabled",), ("cloud_storage_enable_remote_write",)),
            "keeps records without limit, and without remote write that fills the local disks: "
            "set cloud_storage_enable_remote_write, or a limit in the broker",
        )


def _said_by_the_broker(config: Config, names: Sequence[tuple[str, int | None]]) -> Iterator[Finding]:
    """Yield limits of the cluster that no topic comes to, as a Kafka broker has its own for every topic."""
    if config.broker.kind == "none":
        return
    for name, value in names:
        if value not in {None, UNLIMITED}:
            yield Finding(
                ((name,), ("broker", "kind")),
                f"has no effect with broker.kind {config.broker.kind}: the broker has a value for every "
                "topic; set it there, or under topics",
            )


def _shadowed(section: Place, names: Sequence[tuple[str, int | None]]) -> Iterator[Finding]:
    """Yield what stands beside another name of the same thing; the first name in *names* holds."""
    known = [name for name, value in names if value is not None]
    for name in known[1:]:
        yield Finding(
            ((*section, name), (*section, known[0])),
            f"has no effect beside {known[0]}, which holds; remove one",
        )


def _cluster_ms(config: Config) -> list[tuple[str, int | None]]:
    return [
        ("log.retention.ms", config.kafka_log_retention_ms),
        ("log_retention_ms", config.log_retention_ms),
        ("delete_retention_ms", config.delete_retention_ms),
    ]


def _cluster_bytes(config: Config) -> list[tuple[str, int | None]]:
    return [
        ("log.retention.bytes", config.kafka_log_retention_bytes),
        ("retention_bytes", config.retention_bytes),
    ]


def _topic_names(properties: TopicProperties) -> list[list[tuple[str, int | None]]]:
    """Return the families of names that say the same of a topic."""
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
