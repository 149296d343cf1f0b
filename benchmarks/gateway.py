"""
What does reading through the gateway cost, and how fast is the archive behind it?

One real broker, a daemon with a gateway, a store, and librdkafka as the client. The same records are read
from the broker, from the broker through the gateway, and from the archive through the gateway, in turns,
and must be the same. Then the archive again with an empty cache, beside bare GETs of its objects: behind
a link as a store has it, and without. Without the link librdkafka is the limit, so a client reads as well
that takes next to nothing (`benchmarks.fetching_client`). Latency is that of one small fetch on one
connection. Everything shares the machine, so the CPU of gateway, broker, store and client counts against
throughput: with more cores it would not.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

from benchmarks.fetching_client import FetchingClient
from benchmarks.gateway_archive import LOCAL, PARTITIONS, TIERED, VALUE_BYTES, BareGets, running_twins
from benchmarks.gateway_clients import RdkafkaReader, RoundTrips, idle_connections
from benchmarks.harness import GIB, Figures, Worker, machine, print_table, process_cpu_seconds, write_json
from benchmarks.link import running_link

if TYPE_CHECKING:
    from benchmarks.gateway_archive import Twins
    from benchmarks.harness import Sample

_IDLE_CONNECTIONS = 1000
_LINK_MIB_PER_SECOND = 119
"""A gigabit: what a store gives a small machine."""
_LINK_LATENCY_MS = 10
_BLOCK = 200
"""Round trips on one connection before the other one has its turn."""


def measure_reads(twins: Twins, *, records: int, rounds: int) -> dict[str, Figures]:
    """Read in turns, and check that all ways give the same."""
    through, direct = twins.behind.port, twins.behind.cluster.broker.port
    ways = {"direct": (direct, LOCAL), "gateway": (through, LOCAL), "warm": (through, TIERED)}
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(
                Worker(RdkafkaReader, port, topic, PARTITIONS, records, gibibytes=_gibibytes(records))
            )
            for name, (port, topic) in ways.items()
        }
        seen = {name: worker.sent_files() for name, worker in workers.items()}
        assert len({repr(sorted(each.items())) for each in seen.values()}) == 1, "the reads differ"
        samples: dict[str, list[Sample]] = {name: [] for name in workers}
        for _ in range(rounds):
            for name, worker in workers.items():
                samples[name].append(worker.upload())
    return {name: Figures.of(each) for name, each in samples.items()}


def measure_cold(
    twins: Twins,
    store_port: int,
    *,
    records: int,
    rounds: int,
    client: type[RdkafkaReader | FetchingClient] = RdkafkaReader,
) -> tuple[Figures, Figures, float]:
    """
    Read the archive by *client* with an empty cache, and get its objects, in turns.

    Returns the figures of both, and the CPU seconds that the daemon took for each GiB.
    """
    size_bytes = twins.archived_bytes()
    gibibytes = size_bytes / GIB
    cold: list[Sample] = []
    bare: list[Sample] = []
    daemon_seconds: list[float] = []
    with (
        Worker(client, twins.behind.port, TIERED, PARTITIONS, records, gibibytes=gibibytes) as reader,
        Worker(BareGets, twins.urls(store_port), size_bytes, gibibytes=gibibytes) as gets,
    ):
        gets.upload()
        for _ in range(rounds):
            with twins.daemon(store_port) as daemon:
                before = process_cpu_seconds(daemon.server.pid)
                cold.append(reader.upload())
                daemon_seconds.append(process_cpu_seconds(daemon.server.pid) - before)
            bare.append(gets.upload())
    return Figures.of(cold), Figures.of(bare), median(daemon_seconds) / gibibytes


def _gibibytes(records: int) -> float:
    return records * VALUE_BYTES / GIB


def measure_round_trips(ports: dict[str, int], *, count: int) -> dict[str, tuple[float, float]]:
    """Fetch one record at a time, in turns; return the median and the 99th percentile of each way, in ms."""
    connections = {name: RoundTrips(port) for name, port in ports.items()}
    times: dict[str, list[float]] = {name: [] for name in ports}
    for connection in connections.values():
        list(connection.measure_ms(_BLOCK))
    for _ in range(count // _BLOCK):
        for name, connection in connections.items():
            times[name] += connection.measure_ms(_BLOCK)
    for connection in connections.values():
        connection.close()
    return {name: (median(each), quantiles(each, n=100)[98]) for name, each in times.items()}


def measure_idle(port: int, pid: int) -> tuple[float, float]:
    """Return the gateway's memory before and with idle connections, in MiB."""
    before = _resident_mib(pid)
    with idle_connections(port, _IDLE_CONNECTIONS):
        return before, _resident_mib(pid)


def _resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Measure, print, and write the JSON file if one is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less data and fewer rounds")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    records, rounds, trips = (400_000, 5, 2000) if options.quick else (2_000_000, 9, 20_000)
    with tempfile.TemporaryDirectory() as directory, running_twins(Path(directory)) as twins:
        ports = {"gateway": twins.behind.port, "direct": twins.behind.cluster.broker.port}
        with twins.daemon() as daemon:
            idle_before, idle_mib = measure_idle(ports["gateway"], daemon.server.pid)
            twins.write(records)
            twins.wait_until_trimmed(daemon)
            # Each partition has one record more than was asked for, behind its last roll.
            read = records + PARTITIONS
            reads = measure_reads(twins, records=read, rounds=rounds)
            trips_ms = measure_round_trips(ports, count=trips)
        cold_rounds = max(3, rounds // 2)
        with running_link(
            twins.store_port, mib_per_second=_LINK_MIB_PER_SECOND, latency_ms=_LINK_LATENCY_MS
        ) as link:
            reads["cold"], reads["bare GET"], _ = measure_cold(twins, link, records=read, rounds=cold_rounds)
        store_port = twins.store_port
        reads["cold, no link, librdkafka"], reads["bare, no link, librdkafka"], _ = measure_cold(
            twins, store_port, records=read, rounds=cold_rounds
        )
        reads["cold, no link"], reads["bare, no link"], cold_cpu = measure_cold(
            twins, store_port, records=read, rounds=cold_rounds, client=FetchingClient
        )
    print(f"{records} records of {VALUE_BYTES} bytes in {PARTITIONS} partitions, {rounds} rounds")
    print_table(reads, reference="direct")
    for name, (middle, high) in trips_ms.items():
        print(f"one record, {name:8}: median {middle:6.3f} ms, p99 {high:6.3f} ms")
    print(f"daemon's memory: {idle_before:.0f} MiB, with {_IDLE_CONNECTIONS} connections {idle_mib:.0f} MiB")
    speed = {name: each.throughput_median for name, each in reads.items()}
    ratios = {
        "passthrough_vs_direct": speed["gateway"] / speed["direct"],
        "warm_vs_direct": speed["warm"] / speed["direct"],
        "cold_vs_bare_get": speed["cold"] / speed["bare GET"],
        "cold_vs_bare_get_without_link": speed["cold, no link"] / speed["bare, no link"],
        "cold_by_librdkafka_vs_bare_get_without_link": (
            speed["cold, no link, librdkafka"] / speed["bare, no link, librdkafka"]
        ),
        "cold_cpu_s_per_gib": cold_cpu,
        "added_ms_p50": trips_ms["gateway"][0] - trips_ms["direct"][0],
        "added_ms_p99": trips_ms["gateway"][1] - trips_ms["direct"][1],
        "idle_connections_mib": idle_mib,
    }
    for name, value in ratios.items():
        print(f"{name} {value:.3f}")
    if options.json is not None:
        system = machine("confluent-kafka", "uvloop")
        write_json(options.json, name="gateway", machine=system, figures=reads, ratios=ratios)


if __name__ == "__main__":
    main()
