"""
The figures of several processes on one page.

`figures_of` takes from a worker's metrics what can be added: counters, histograms, and the gauges of
connections, of consumer groups and of work under way. `MergedPage` adds them to the families of the daemon's
own page, sample by sample. What only the daemon knows comes from the daemon alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

ADDED_GAUGES: Final = frozenset(
    {
        "tieringd_gateway_connections",
        "tieringd_gateway_buffered_bytes",
        "tieringd_cache_open_chunks",
        "tieringd_cache_hydrations_in_progress",
        "tieringd_store_requests_in_flight",
        "tieringd_store_connections_limit",
        "redpanda_cloud_storage_cache_op_in_progress_files",
        "redpanda_cloud_storage_active_segments",
        "tieringd_endpoint_groups",
        "tieringd_endpoint_group_members",
    }
)
"""Gauges whose sum over processes has a meaning."""
LARGEST_GAUGES: Final = frozenset({"tieringd_endpoint_live_endpoints"})
"""Gauges of what all processes see: the most that one of them sees counts."""
_RENAMED: Final = {
    "process_resident_memory_bytes": "tieringd_gateway_workers_resident_bytes",
    "process_cpu_seconds": "tieringd_gateway_workers_cpu_seconds",
}
"""The daemon has these of its own process, so those of the workers get another name."""

_COUNTED: Final = frozenset({"counter", "histogram", "unknown"})
"""Redpanda's counters have no type: the library would add a suffix to their names."""

_Place: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and its labels."""


class Figures(NamedTuple):
    """The values of one process, by family; gauges end with their process."""

    counts: dict[str, dict[_Place, float]]
    gauges: dict[str, dict[_Place, float]]


def figures_of(registries: Iterable[CollectorRegistry]) -> Figures:
    """Return what can be added of the metrics in *registries*, without samples of 0 that no sum needs."""
    found = Figures({}, {})
    for registry in registries:
        for family in registry.collect():
            name = _RENAMED.get(family.name, family.name)
            if (
                family.name in ADDED_GAUGES | LARGEST_GAUGES
                or name == "tieringd_gateway_workers_resident_bytes"
            ):
                into = found.gauges
            elif family.type in _COUNTED and not (family.name.startswith("process_") and name == family.name):
                into = found.counts
            else:
                continue
            values = into.setdefault(name, {})
            for one in family.samples:
                if one.value or family.type == "histogram":
                    sample = one.name.replace(family.name, name, 1)
                    values[sample, tuple(sorted(one.labels.items()))] = one.value
    return found


def added(one: Figures, other: Figures) -> Figures:
    """Return the sums of both, and the larger ones of `LARGEST_GAUGES`."""
    gauges = _sum(one.gauges, other.gauges)
    for name in LARGEST_GAUGES & gauges.keys():
        for place in gauges[name]:
            gauges[name][place] = max(
                figures.gauges.get(name, {}).get(place, 0.0) for figures in (one, other)
            )
    return Figures(_sum(one.counts, other.counts), gauges)


def _sum(
    one: dict[str, dict[_Place, float]], other: dict[str, dict[_Place, float]]
) -> dict[str, dict[_Place, float]]:
    found = {name: dict(values) for name, values in one.items()}
    for name, values in other.items():
        into = found.setdefault(name, {})
        for place, value in values.items():
            into[place] = into.get(place, 0.0) + value
    return found


NOTHING: Final = Figures({}, {})


class MergedPage:
    """A page of this process, with what other processes have counted. Rendered like a registry."""

    def __init__(self, registry: CollectorRegistry, figures: Callable[[], Figures]) -> None:
        """Keep the arguments. *figures* returns the sums of the other processes."""
        self._registry = registry
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yield the families of the registry with the sums."""
        counts, gauges = self._figures()
        for family in self._registry.collect():
            more = counts.get(family.name) or gauges.get(family.name)
            yield _with(family, dict(more)) if more else family


def _with(family: Metric, more: dict[_Place, float]) -> Metric:
    found = Metric(family.name, family.documentation, family.type, family.unit)
    samples: list[Sample] = []
    for one in family.samples:
        value = more.pop((one.name, tuple(sorted(one.labels.items()))), 0.0)
        samples.append(Sample(one.name, one.labels, one.value + value))
    samples += _new(more.items())
    found.samples = samples
    return found


def _new(values: Iterable[tuple[_Place, float]]) -> Sequence[Sample]:
    """Return the samples that this process has no series for, in the order in which they were collected."""
    return [Sample(name, dict(labels), value) for (name, labels), value in values]
