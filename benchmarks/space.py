"""
What does planning the space of ten thousand partitions cost, in time and in memory?

Each partition has 200 closed segments of unequal sizes and an active one, as a scan of the disk
leaves them. Three plans are made: what retention allows is enough (phase 1), the laps must go on to
topics with settings of their own (phase 4), and everything that is durable goes (phase 5). The
facts for the plan, one `SpacePartition` for each partition, are made anew each time and belong to
the figures; the segments do not, as the daemon holds them anyway. The slowest plan counts.

    python -m benchmarks.space [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from pathlib import Path
from statistics import median

from benchmarks.harness import machine, write_json
from tieringd.model.partition import TopicPartition
from tieringd.model.segment import LocalSegment
from tieringd.policies.space_plan import Phase, SpaceDemand, SpacePartition, SpacePlan, plan_space

PARTITIONS, SEGMENTS = 10_000, 200
_PARTITIONS_PER_TOPIC = 100
_ROUNDS, _QUICK_ROUNDS = 9, 3
_SEGMENT_BYTES = 128 << 20
_RECORDS = 1000
"""Offsets in a segment."""
_LAST_PHASES = {
    "phase 1": Phase.RETENTION,
    "phase 4": Phase.EXPLICIT_TARGETS,
    "phase 5": Phase.ACTIVE_SEGMENT,
}

_Log = tuple[TopicPartition, tuple[LocalSegment, ...]]


def main() -> None:
    """Measure, print the table, and write the JSON file if there is to be one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.space", description="Plan the space of ten thousand partitions."
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    options = parser.parse_args()
    where = machine().rstrip(", ")
    logs = make_logs()
    samples = measure_seconds(logs, rounds=_QUICK_ROUNDS if options.quick else _ROUNDS)
    memory = {name: measure_bytes(logs, name) / PARTITIONS for name in samples}
    print(f"{PARTITIONS:,} partitions with {SEGMENTS} closed segments each, {where}\n")
    print(f"{'ends in':10} {'min s':>8} {'median s':>9} {'max s':>8} {'bytes/partition':>16}")
    for name, seconds in samples.items():
        print(
            f"{name:10} {min(seconds):8.3f} {median(seconds):9.3f} {max(seconds):8.3f} {memory[name]:16.0f}"
        )
    figures = {
        "plan_seconds": max(median(seconds) for seconds in samples.values()),
        "bytes_per_partition": max(memory.values()),
    }
    print()
    for name, value in figures.items():
        print(f"{name:32} {value:10.3f}")
    if options.json:
        write_json(options.json, name="space", machine=where, figures=figures, ratios={})


def make_logs() -> list[_Log]:
    """Return the partitions with their segments, as a scan of the log directories leaves them."""
    sizes = random.Random(20240601)

    def segment(number: int) -> LocalSegment:
        is_active = number == SEGMENTS
        base_offset = number * _RECORDS
        return LocalSegment(
            base_offset=base_offset,
            next_offset=None if is_active else base_offset + _RECORDS,
            size_bytes=sizes.randrange(_SEGMENT_BYTES // 2, _SEGMENT_BYTES),
            path="",
            inode=number,
            modified_ns=1,
        )

    return [
        (
            TopicPartition(*_name(number)),
            tuple(segment(index) for index in range(SEGMENTS + 1)),
        )
        for number in range(PARTITIONS)
    ]


def _name(number: int) -> tuple[str, int]:
    topic, partition = divmod(number, _PARTITIONS_PER_TOPIC)
    return f"topic{topic:03d}", partition


def facts(logs: list[_Log]) -> list[SpacePartition]:
    """Return what a plan is made from: all durable but the newest segments, and half with own targets."""
    return [
        SpacePartition(
            topic_partition=name,
            segments=segments,
            log_start_offset=0,
            durable_next_offset=(SEGMENTS - number % 3) * _RECORDS,
            retention_next_offset=(10 + number % 10) * _RECORDS,
            local_retention_next_offset=(20 + number % 50) * _RECORDS,
            has_explicit_target=number % 4 < 2,
        )
        for number, (name, segments) in enumerate(logs)
    ]


def make_plan(logs: list[_Log], name: str, *, used_bytes: int) -> SpacePlan:
    """Make the plan that ends in the phase of *name*, and see that it does."""
    share = {"phase 1": 0.02, "phase 4": 0.8, "phase 5": 1.0}[name]
    demand = SpaceDemand(
        used_bytes=used_bytes,
        target_bytes=int(used_bytes * (1 - share)),
        segment_bytes=_SEGMENT_BYTES,
        overage_coefficient=1,
    )
    plan = plan_space(facts(logs), demand)
    last = max(one.phase for one in plan.phases if one.removals)
    assert last is _LAST_PHASES[name], f"the plan ends in {last!r}"
    return plan


def measure_seconds(logs: list[_Log], *, rounds: int) -> dict[str, list[float]]:
    """Make the plans in turn, *rounds* times; return the seconds each took."""
    used_bytes = sum(segment.size_bytes for _, segments in logs for segment in segments)
    samples: dict[str, list[float]] = {name: [] for name in _LAST_PHASES}
    for _ in range(rounds):
        for name, seconds in samples.items():
            before = time.perf_counter()
            make_plan(logs, name, used_bytes=used_bytes)
            seconds.append(time.perf_counter() - before)
    return samples


def measure_bytes(logs: list[_Log], name: str) -> int:
    """Return the most memory that was allocated at any moment of making a plan."""
    used_bytes = sum(segment.size_bytes for _, segments in logs for segment in segments)
    tracemalloc.start()
    try:
        plan = make_plan(logs, name, used_bytes=used_bytes)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert plan.removed_bytes > 0
    return peak


if __name__ == "__main__":
    main()
