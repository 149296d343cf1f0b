"""
The reference of all metrics: the one definition of `docs/metrics_reference.md` is the code.

`python -m deploy.metrics_reference` writes the page.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client import Counter, Gauge, Histogram

from tieringd.metrics import Metrics
from tieringd.metrics.gateway import GatewayCollector
from tieringd.metrics.partition_figures import PartitionFigures
from tieringd.metrics.readers import Reader, Source
from tieringd.model.partition import TopicPartition
from tieringd.policies.prices import LIST_PRICES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client import CollectorRegistry

PAGE: Final = Path(__file__).parents[1] / "docs" / "metrics_reference.md"
_HEAD: Final = """\
# Reference of all metrics

Generated from the code by `make metrics-reference`. [Metrics](metrics.md) says what to look at and when to
act.

* `/metrics` has the metrics of the daemon. Their number does not grow with partitions, and of topics only the
  largest have series (`admin.metrics_topics`).
* `/metrics/partitions` has the metrics of every topic and every partition. A job that scrapes it is printed
  by `tieringd generate scrape-config --partitions`.
* Names that begin with `redpanda_` or `vectorized_` are those that Redpanda's dashboards read.
"""


class _Everything:
    """Stands for each part whose figures are read at a scrape."""

    open_connections = 0
    buffered_bytes = 0
    counts: Mapping[str, int] = dict.fromkeys(GatewayCollector.COUNTS, 0)

    def readiness(self) -> dict[str, str]:
        """Return one reason, for its label."""
        return {"round": ""}

    def faults(self) -> dict[str, int]:
        """Return one kind of fault, for its label."""
        return {"store": 0}


def complete_metrics() -> Metrics:
    """Return metrics with every part that a daemon can have, and a series of each."""
    metrics, parts = Metrics(), _Everything()
    metrics.watch_readiness(parts)
    metrics.watch_faults(parts)
    metrics.watch_gateway(parts)
    metrics.watch_certificates(lambda: [Path("certificate.pem")])
    metrics.watch_credentials(lambda: 0.0)
    metrics.watch_cost(LIST_PRICES["aws"])
    metrics.readers.count_fetch(Reader(), Source.STORE, 1, 1.0)
    metrics.partitions.show(TopicPartition("topic", 0), PartitionFigures())
    for registry in (metrics.default_page, metrics.by_topic):
        for one in tuple(registry._collector_to_names):  # noqa: SLF001
            if isinstance(one, Counter | Gauge | Histogram) and one._labelnames:  # noqa: SLF001
                one.labels(*("x" for _ in one._labelnames))  # noqa: SLF001
    return metrics


def families(registry: CollectorRegistry) -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Return the type, the labels and the meaning of each metric, by the name that a query uses."""
    found = {}
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        kind = "counter or gauge" if family.type == "unknown" else family.type
        found[name] = kind, tuple(sorted(labels)), family.documentation
    return found


def labels_by_name() -> dict[str, set[str]]:
    """Return the labels of every metric, by the name that a query uses."""
    return {name: set(labels) for name, (_, labels, _) in families(complete_metrics().registry).items()}


def rendered() -> str:
    """Return the page."""
    metrics = complete_metrics()
    default = families(metrics.default_page)
    detail = {name: one for name, one in families(metrics.registry).items() if name not in default}
    parts = [_HEAD]
    for path, found in (("/metrics", default), ("/metrics/partitions", detail)):
        parts.append(f"\n## On {path}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n")
        for name, (kind, labels, meaning) in sorted(found.items()):
            shown = ", ".join(f"`{one}`" for one in labels)
            parts.append(f"| `{name}` | {kind} | {shown} | {meaning} |\n")
    return "".join(parts)


def main() -> None:
    """Write the page."""
    PAGE.write_text(rendered(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
