"""
Alert rules on a real Prometheus that scrapes a test's daemons: which of them hold while a fault is there.

An alert "holds" here when its expression is true; the time for which it has to be true is promtool's matter
(`tests/integration/test_alerts.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.support.prometheus import running_prometheus

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tests.support.daemon import Daemon
    from tests.support.prometheus import Prometheus

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"

SHORTER = {
    "TieringdStalled": (" > 300", " > 1"),
    "TieringdLoopStalled": (" > 900", " > 3"),
    "TieringdUploadHangs": (" > 600", " > 1"),
    "TieringdHeldByTransaction": (" > 3600", " > 1"),
    "TieringdHousekeepingStalled": (" > 6 * 3600", " > 3"),
}
"""Limits that no test can wait for, and those that are asked for in their place."""


def watching(directory: Path, *daemons: Daemon) -> AbstractContextManager[Prometheus]:
    """Run a Prometheus with the rules beside *daemons*; its files are below *directory*."""
    targets = [f"127.0.0.1:{daemon.admin_port}" for daemon in daemons]
    return running_prometheus(directory / "prometheus", targets, rules=[RULES])


def rules() -> dict[str, str]:
    """Return the expression of each alert."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def holding(prometheus: Prometheus) -> set[str]:
    """Return the alerts whose expression held at the last evaluation, without the time it has to hold for."""
    found: list[dict[str, Any]] = []

    def are_evaluated() -> bool:
        # One request for all rules: a query for each of them took a core while a test waited.
        (group,) = prometheus.get("rules")["groups"]
        found[:] = group["rules"]
        return all(one["health"] != "unknown" for one in found)

    prometheus.until(are_evaluated, "each rule is evaluated")
    faults = {one["name"]: one["lastError"] for one in found if one["health"] != "ok"}
    assert not faults, faults
    return {one["name"] for one in found if one["state"] != "inactive"}


def until_holding(prometheus: Prometheus, *names: str) -> None:
    """Wait until exactly these alerts' expressions hold, but for the machine's disk: other tests fill it."""
    prometheus.until(
        lambda: holding(prometheus) - {"TieringdDiskFillsSoon"} == set(names),
        lambda: f"exactly {sorted(names)} hold; these hold: {sorted(holding(prometheus))}",
    )


def until_soon_holding(prometheus: Prometheus, name: str, **labels: str) -> None:
    """Wait until an alert's expression holds for these labels, by its limit in `SHORTER`."""
    prometheus.until(
        lambda: shortly_holding(prometheus, name, **labels), f"{name} holds for {labels} by seconds"
    )


def until_soon_ended(prometheus: Prometheus, name: str, **labels: str) -> None:
    """Wait until it no longer holds for them."""
    prometheus.until(
        lambda: not shortly_holding(prometheus, name, **labels), f"{name} ends for {labels} by seconds"
    )


def shortly_holding(prometheus: Prometheus, name: str, **labels: str) -> list[dict[str, Any]]:
    """Return the rows for which an alert holds by its limit in `SHORTER`."""
    limit, shorter = SHORTER[name]
    expression = rules()[name]
    assert expression.count(limit) == 1
    found = prometheus.query(expression.replace(limit, shorter))
    return [one for one in found if labels.items() <= one["metric"].items()]


def until_also_holding(prometheus: Prometheus, *names: str) -> None:
    """Wait until these alerts' expressions hold, whatever else does."""
    prometheus.until(
        lambda: holding(prometheus) >= set(names),
        lambda: f"{sorted(names)} hold; these hold: {sorted(holding(prometheus))}",
    )


def until_ended(prometheus: Prometheus, *names: str) -> None:
    """Wait until none of these alerts' expressions holds."""
    prometheus.until(
        lambda: not holding(prometheus) & set(names),
        lambda: f"none of {sorted(names)} holds; these hold: {sorted(holding(prometheus))}",
    )


def until_shown(directory: Path, daemon: Daemon, *names: str) -> None:
    """Run a Prometheus beside *daemon* until these alerts' expressions hold, whatever else does."""
    with watching(directory, daemon) as prometheus:
        until_also_holding(prometheus, *names)
