"""
Records the values that a topic begins with when it is first seen; they hold from then on.

These are the cluster's defaults for remote write and read and, for a topic that is created with tiering
on, the retention that its creator set as its local target. A creator's own local target is not recorded: the
topic has it. Topics that existed before tieringd keep their local properties, and so do those whose tiering
is switched on later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from tieringd.broker.base import Broker
from tieringd.config import TopicConfig
from tieringd.formats.object_keys import TopicKey
from tieringd.formats.topic_manifest import TieringDefaults
from tieringd.policies.local_retention import UNLIMITED
from tieringd.topics.each_topic import TopicFaults, each_topic
from tieringd.topics.topic_registry import TopicRegistry


class TopicDefaultsRecorder:
    """Record the values that topics begin with. One task at a time calls `step`."""

    def __init__(self, broker: Broker, registry: TopicRegistry) -> None:
        self._broker = broker
        self._registry = registry
        self._are_new: bool | None = None
        """
        Whether a topic without a record is new. False while a cluster's topics are recorded for the first
        time; None before the first step.
        """
        self._existed_before: set[TopicKey] = set()
        """Topics that could not be recorded at that first time. They are not new either."""

    async def step(
        self, unrecorded_topics: Mapping[TopicKey, TopicConfig], defaults: TieringDefaults
    ) -> None:
        """
        Record *unrecorded_topics*, with the cluster's current values as *defaults*.

        Raises:
            BrokerUnavailable: Try again in the next round.
            StorageUnavailable: Try again in the next round.
            TopicFaults: These topics could not be recorded; all others are.
        """
        if self._are_new is None:
            self._are_new = self._registry.has_records
        are_new = self._are_new

        async def record(key: TopicKey) -> None:
            begins_with = defaults
            if are_new and unrecorded_topics[key].remote_write and key not in self._existed_before:
                begins_with = _with_local_target(defaults, await self._broker.topic_overrides(key.topic))
            await self._registry.record_defaults(key, begins_with)

        self._existed_before &= unrecorded_topics.keys()
        try:
            await each_topic(unrecorded_topics, record)
        except TopicFaults as error:
            if not are_new:
                self._existed_before |= error.faults.keys()
            self._are_new = True
            raise
        self._are_new = True


def _with_local_target(defaults: TieringDefaults, overrides: Mapping[str, str]) -> TieringDefaults:
    return replace(
        defaults, local_target_ms=_target(overrides, "ms"), local_target_bytes=_target(overrides, "bytes")
    )


def _target(overrides: Mapping[str, str], kind: str) -> int | None:
    """
    Return the local target of one kind to record, which is the total retention that the creator set.

    None if the creator set no total retention, or set a local target on the topic.
    """
    local = (f"retention.local.target.{kind}", f"local.retention.{kind}")
    if any(_limit(overrides, name) is not None for name in local):
        return None
    total = _limit(overrides, f"retention.{kind}")
    return total if total is None else max(total, UNLIMITED)


def _limit(overrides: Mapping[str, str], name: str) -> int | None:
    """Return one of the limits set on a topic; the broker has validated them."""
    text = overrides.get(name, "").strip()
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None
