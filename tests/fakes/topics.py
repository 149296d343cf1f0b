"""The configuration of a topic, from a few arguments of a test."""

from __future__ import annotations

from typing import Any

from tieringd.config import TopicConfig
from tieringd.policies.local_retention import ClusterLocalTarget, LocalSettings, resolve_local_target

_UNLIMITED = -1


def topic_config(
    *,
    remote_write: bool = True,
    remote_read: bool = True,
    target_ms: int | None = None,
    target_bytes: int | None = None,
    **changes: Any,
) -> TopicConfig:
    """Return the configuration of a topic with an enforced local target; None is no limit."""
    target = resolve_local_target(
        [
            LocalSettings(
                "the test",
                kafka_ms=_UNLIMITED if target_ms is None else target_ms,
                kafka_bytes=_UNLIMITED if target_bytes is None else target_bytes,
            )
        ],
        cluster=ClusterLocalTarget(None, None, is_strict=False),
        total_ms=None,
        total_bytes=None,
    )
    return TopicConfig(remote_write=remote_write, remote_read=remote_read, local_target=target, **changes)
