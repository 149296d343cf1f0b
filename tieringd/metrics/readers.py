"""
What readers fetch through the gateway: by source, by reader, and by topic.

A reader is a principal with a client id. Clients choose client ids, so the number of readers has no bound.
Only the heaviest readers have series of their own. A reader without a series counts under `OTHER`. When it
becomes heavier than a reader with a series, it takes that place: the counts of the other one move to `OTHER`,
and its own begin at 0. So no counter ever falls, and the sum over readers is the total.

`READER` names the reader whose Fetch is being answered. Tasks inherit it, so each request to the object store
counts for the reader that caused it, prefetches included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from tieringd.policies.prices import Prices

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

READERS_MAX: Final = 20
"""How many readers have series of their own."""
OTHER: Final = "(other)"
ANONYMOUS: Final = "User:ANONYMOUS"
"""The principal of a connection without a login, as Kafka names it."""
_SECONDS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_CANDIDATES: Final = 8 * READERS_MAX
_HALVED_AFTER: Final = 10_000
"""After this many fetches, earlier ones weigh half: a place is for readers that read now."""
_NAME_MAX: Final = 128
_STORE_READS: Final = frozenset({"get", "get_range", "head"})


class Source(StrEnum):
    """The place from which a Fetch response has its records."""

    BROKER = "broker"
    CACHE = "cache"
    """The archive; every chunk was in the cache."""
    STORE = "store"
    """The archive; at least one chunk was awaited from the object store."""


class Reader(NamedTuple):
    """A principal, as Kafka writes it, with one of its client ids."""

    principal: str = ANONYMOUS
    client_id: str = ""

    @classmethod
    def of(cls, principal: str, client_id: bytes | None) -> Reader:
        """Return a reader. Long names are cut off, and control characters replaced: a client may send any."""
        name = (client_id or b"")[:_NAME_MAX].decode(errors="replace")
        return cls(_printable(principal[:_NAME_MAX]), _printable(name))


def _printable(name: str) -> str:
    """Return a name that is one line of a log or a metrics page."""
    if name.isprintable():
        return name
    return "".join(one if one.isprintable() else "\ufffd" for one in name)


READER: Final[ContextVar[Reader | None]] = ContextVar("READER", default=None)
_OTHERS: Final = Reader(OTHER, OTHER)


@dataclass(slots=True)
class ReaderTally:
    """The counts of one reader. The lists are by source, in the order of `Source`."""

    fetches: list[int] = field(default_factory=lambda: [0] * len(Source))
    bytes: list[int] = field(default_factory=lambda: [0] * len(Source))
    store_requests: int = 0
    throttled_seconds: float = 0.0
    weight: float = 0.0
    """Recent bytes and fetches, which decide about places."""

    def add(self, other: ReaderTally) -> None:
        """Add all counts of *other*."""
        self.fetches = [one + more for one, more in zip(self.fetches, other.fetches, strict=True)]
        self.bytes = [one + more for one, more in zip(self.bytes, other.bytes, strict=True)]
        self.store_requests += other.store_requests
        self.throttled_seconds += other.throttled_seconds


_AT: Final = {source: number for number, source in enumerate(Source)}


def _ignore_cost(principal: str, dollars: float) -> None:
    """Take what a request cost, and do nothing with it."""


class ReaderCounts(Collector):
    """The counts of fetches. The event loop changes them; any thread may collect them."""

    def __init__(self, registry: CollectorRegistry, by_topic: CollectorRegistry) -> None:
        """Register with *registry*, and what carries a topic with *by_topic*."""
        self.prices: Prices | None = None
        """Prices of the object store, if they are known."""
        self.on_cost: Callable[[str, float], None] = _ignore_cost
        """Gets the principal and the cost of each request that a reader has caused, if there are prices."""
        self._places: dict[Reader, ReaderTally] = {}
        self._others = ReaderTally()
        self._candidates: dict[Reader, float] = {}
        self._counted = 0
        seconds = Histogram(
            "tieringd_gateway_fetch_seconds",
            "Time from a Fetch request to its response, by source; with the wait for new records",
            ("source",),
            buckets=_SECONDS,
            registry=registry,
        )
        size = Counter(
            "tieringd_gateway_fetch_bytes",
            "Bytes of Fetch responses, by source",
            ("source",),
            registry=registry,
        )
        self._seconds = [seconds.labels(one) for one in Source]
        self._bytes = [size.labels(one) for one in Source]
        self.topic_bytes = Counter(
            "tieringd_gateway_topic_archived_bytes",
            "Bytes of archived records in Fetch responses",
            ("topic", "source"),
            registry=by_topic,
        )
        self.topic_fetches = Counter(
            "tieringd_gateway_topic_archived_fetches",
            "Partitions in Fetch responses that were answered with archived records",
            ("topic", "source"),
            registry=by_topic,
        )
        self.all = (seconds, size, self.topic_bytes, self.topic_fetches)
        registry.register(self)

    def count_fetch(self, reader: Reader, source: Source, size_bytes: int, seconds: float) -> None:
        """Count one Fetch response."""
        at = _AT[source]
        self._seconds[at].observe(seconds)
        self._bytes[at].inc(size_bytes)
        tally = self._tally(reader, size_bytes + 1)
        tally.fetches[at] += 1
        tally.bytes[at] += size_bytes

    def count_topic(self, topic: str, source: Source, size_bytes: int) -> None:
        """Count the archived records of one partition in a response."""
        self.topic_bytes.labels(topic, source).inc(size_bytes)
        self.topic_fetches.labels(topic, source).inc()

    def count_throttled(self, reader: Reader, seconds: float) -> None:
        """Count a response after which its reader had to wait."""
        self._place_of(reader).throttled_seconds += seconds

    def count_store_request(self, operation: str) -> None:
        """Count a request to the object store for the reader that caused it, if a reader did."""
        reader = READER.get()
        if reader is not None and operation in _STORE_READS:
            self._place_of(reader).store_requests += 1
            if self.prices is not None:
                self.on_cost(reader.principal, self.prices.read_cost(1))

    def collect(self) -> Iterator[Metric]:
        """Yield the counts by reader."""
        tallies = {**self._places, _OTHERS: self._others}
        fetches, size = (
            CounterMetricFamily(
                f"tieringd_gateway_reader_{name}",
                f"{meaning}; only the heaviest readers have series, the rest is together",
                labels=("principal", "client_id", "source"),
            )
            for name, meaning in (("fetches", "Fetch responses"), ("bytes", "Bytes of Fetch responses"))
        )
        throttled, cost = (
            CounterMetricFamily(f"tieringd_gateway_reader_{name}", meaning, labels=("principal", "client_id"))
            for name, meaning in (
                ("throttled_seconds", "Seconds for which a reader was told to wait because of a limit"),
                (
                    "store_cost_dollars",
                    "Estimate by list prices of the object store's requests that a reader has caused",
                ),
            )
        )
        for reader, tally in tallies.items():
            for source, at in _AT.items():
                if tally.fetches[at]:
                    fetches.add_metric((*reader, source), tally.fetches[at])
                    size.add_metric((*reader, source), tally.bytes[at])
            throttled.add_metric(reader, tally.throttled_seconds)
            if self.prices is not None:
                cost.add_metric(reader, self.prices.read_cost(tally.store_requests))
        yield from (fetches, size, throttled)
        if self.prices is not None:
            yield cost

    def _place_of(self, reader: Reader) -> ReaderTally:
        return self._places.get(reader, self._others)

    def _tally(self, reader: Reader, weight: float) -> ReaderTally:
        """Return where to count, and give a reader a place if it is heavy enough."""
        self._counted += 1
        if self._counted % _HALVED_AFTER == 0:
            self._halve()
        tally = self._places.get(reader)
        if tally is None and len(self._places) < READERS_MAX:
            tally = self._places[reader] = ReaderTally()
        if tally is not None:
            tally.weight += weight
            return tally
        candidate = self._candidates.pop(reader, 0.0) + weight
        lightest = min(self._places, key=lambda one: self._places[one].weight)
        if candidate > self._places[lightest].weight:
            left = self._places.pop(lightest)
            self._others.add(left)
            self._note(lightest, left.weight)
            tally = self._places[reader] = ReaderTally(weight=candidate)
            return tally
        self._note(reader, candidate)
        return self._others

    def _note(self, reader: Reader, weight: float) -> None:
        self._candidates[reader] = weight
        if len(self._candidates) > _CANDIDATES:
            self._candidates.pop(next(iter(self._candidates)))

    def _halve(self) -> None:
        for tally in self._places.values():
            tally.weight /= 2
        self._candidates = {reader: weight / 2 for reader, weight in self._candidates.items()}
