"""The rules between the properties of disk space: what contradicts, and what is hardly meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.config.finding import Finding
from tieringd.config.space import Space

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tieringd.config.model import Config
    from tieringd.config.yaml_source import Place

_WHOLE_PERCENT = 100


def find_space_contradictions(config: Config) -> Iterator[Finding]:
    """Yield what keeps the areas of a disk from being divided."""
    reserved, log = config.disk_reservation_percent, config.retention_local_target_capacity_percent or 0
    if reserved + log > _WHOLE_PERCENT:
        yield Finding(
            (("retention_local_target_capacity_percent",), ("disk_reservation_percent",)),
            f"is {log:g}, and with disk_reservation_percent {reserved:g} that is more than the disk",
        )


def find_space_doubts(config: Config) -> Iterator[Finding]:
    """Yield what has no effect as things are."""
    if not config.tune_ballast_file:
        switch: Place = ("tune_ballast_file",)
        for name in ("ballast_file_path", "ballast_file_size", "ballast_release_when_degraded"):
            if _is_space_changed(config, name):
                yield Finding(((name,), switch), "has no effect while tune_ballast_file is false")
    kind: Place = ("broker", "kind")
    rate, action = "storage_degraded_producer_byte_rate", "storage_degraded_action"
    for name in (action, rate):
        if config.broker.kind != "kafka" and _is_space_changed(config, name):
            reason = "there are no producers" if config.broker.kind == "none" else "it refuses writes itself"
            yield Finding(((name,), kind), f"has no effect with broker.kind {config.broker.kind}: {reason}")
    if (
        config.broker.kind == "kafka"
        and config.storage_degraded_action == "alert"
        and _is_space_changed(config, rate)
    ):
        yield Finding(((rate,), (action,)), "has no effect while storage_degraded_action is alert")


def _is_space_changed(config: Config, name: str) -> bool:
    """Say whether the file sets something else than the default."""
    return bool(getattr(config, name) != Space.model_fields[name].default)
