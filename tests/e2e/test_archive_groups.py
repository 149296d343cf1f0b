"""
Consumer groups on a bucket without a broker: unmodified clients, two endpoints, and what dies of them.

The broker is only there to fill the bucket.
"""

# Long: endpoints and consumers are killed, and sessions have to expire.

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager

import pytest

from tests.e2e.archives import archived_manifest
from tests.e2e.endpoints import serving
from tests.e2e.sample_topics import SEGMENTS
from tests.support.daemon import run_command
from tests.support.processes import Server, pause

_PARTITIONS = 6
_RECORD = b"r" * 40_000
_PATIENCE_SECONDS = 300
_CONSOLE = "org.apache.kafka.tools.consumer.ConsoleConsumer"
_GROUP_TOOL = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"


class Member:
    """A consumer as a process, and what it has told."""

    def __init__(self, directory, name, *arguments):
        self.output = directory / f"{name}.jsonl"
        command = [sys.executable, "-m", "tests.support.group_member", *arguments]
        self.server = Server(command, output=self.output)
        self.server.launch()

    def told(self, kind=None):
        """Return what it has told, of one kind if that is given."""
        lines = self.output.read_text().splitlines(keepends=True) if self.output.exists() else []
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]
        return [one for one in found if kind in {None, one["kind"]}]

    def go_on(self):
        """Let it read more than a few records. It has told something by then, so it knows the signal."""
        self.server.send_signal(signal.SIGUSR1)

    def kill(self):
        """End it at once."""
        self.server.kill()


@contextmanager
def members(directory):
    """Give a function that starts members, and end them all."""
    started = []

    def start(name, *arguments):
        started.append(Member(directory, name, *arguments))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            one.kill()


@pytest.fixture
async def six_partitions(kafka, write_kafka_config, objects, topic):
    """Archive a topic of six partitions, and give the end of each in the archive."""
    config = write_kafka_config(topics={topic: {"remote.storage.enable": True}})
    await kafka.create_topic(topic, partitions=_PARTITIONS, configs=SEGMENTS)
    for partition in range(_PARTITIONS):
        await kafka.produce(topic, [_RECORD] * 120, partition=partition, max_batch_size=50_000)
    done = await asyncio.to_thread(run_command, "run", "--once", "--config", str(config))
    assert done.returncode == 0, done.stderr
    return {
        partition: archived_manifest(objects, topic, partition).next_offset
        for partition in range(_PARTITIONS)
    }


@pytest.fixture
def endpoint_of(seaweedfs, prefix, tmp_path):
    """Give a function that starts an endpoint of this test's part of the bucket."""
    with ExitStack() as stack:

        def start(name, **gateway):
            directory = tmp_path / name
            directory.mkdir()
            settings = {"port": 0, "consumer_groups": True, **gateway}
            return stack.enter_context(serving(seaweedfs, directory, prefix, gateway=settings))

        yield start


def until(is_so, what):
    """Wait until *is_so* is true: processes tell of themselves by what they print."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"not within {_PATIENCE_SECONDS} s: {what}"
        time.sleep(0.1)


def until_known(*endpoints):
    """Wait until each endpoint knows the others: what a client is told then stays so."""
    until(
        lambda: all(one.metric("tieringd_endpoint_live_endpoints") == len(endpoints) for one in endpoints),
        "each endpoint knows the other one",
    )


def until_all_read(consumers):
    """Wait until each member has read and committed, and let all of them read on."""
    for each in consumers:
        until(lambda each=each: each.told("committed"), "each member has committed")
    for each in consumers:
        each.go_on()


def read_by(consumers):
    """Return the offsets that were read, by partition."""
    found = defaultdict(set)
    for consumer in consumers:
        for one in consumer.told("read"):
            found[one["partition"]].add(one["offset"])
    return found


def require_no_repetition(consumers):
    """Check that no consumer begins before what had been committed when it was given the partition."""
    commits = sorted(
        (one["at"], int(number), offset)
        for consumer in consumers
        for one in consumer.told("committed")
        for number, offset in one["offsets"].items()
    )
    for consumer in consumers:
        since, is_first = {}, {}
        for one in consumer.told():
            if one["kind"] == "assigned":
                for number in one["partitions"]:
                    since[number], is_first[number] = one["at"], True
            elif one["kind"] == "read" and is_first.pop(one["partition"], False):
                number = one["partition"]
                before = [at for told, of, at in commits if of == number and told < since[number]]
                assert one["offset"] >= max(before, default=0), f"{one} was committed before: {before[-3:]}"


def moved_on(member, count=5):
    """Return a question: whether *member* has read so many more records than now."""
    now = len(member.told("read"))
    return lambda: len(member.told("read")) >= now + count


# Long: a lease and a session run out.
@pytest.mark.parametrize("library", ["librdkafka", "librdkafka-newer", "aiokafka"])
def test_group_survives_an_endpoint_and_a_member(six_partitions, endpoint_of, tmp_path, topic, library):
    """Each record is read, and none again that was committed before its partition changed hands."""
    # Members of the newer protocol do not choose it themselves: Kafka's 45 s would be waited for here.
    session = {"consumer_group_session_timeout_ms": 10_000}
    first, second = endpoint_of("first", **session), endpoint_of("second", **session)
    bootstrap = f"{first.bootstrap},{second.bootstrap}"
    # aiokafka asks only nodes of the metadata again: it has to learn of the second before the first dies.
    until_known(first, second)
    with members(tmp_path) as start:
        consumers = [start(f"member-{number}", library, bootstrap, "readers", topic) for number in range(3)]
        until_all_read(consumers)
        ends = {number: set(range(end)) for number, end in six_partitions.items()}
        goes_on = moved_on(consumers[1])
        os.kill(first.server.pid, signal.SIGKILL)
        until(
            lambda: goes_on() or read_by(consumers) == ends,
            "a member goes on after an endpoint was killed, or nothing is left to read",
        )
        consumers[0].kill()
        until(lambda: read_by(consumers) == ends, "every record was read")
        until(
            lambda: committed_by(consumers) == six_partitions,
            "all that was read is committed",
        )
        require_no_repetition(consumers)
        late = start("late", library, second.bootstrap, "readers", topic)
        for each in consumers[1:]:
            each.server.stop()
        until(lambda: len(assigned(late)) == _PARTITIONS, "a member that comes last has all partitions")
        assert late.told("read") == []


# Long: members read every record, one each 30 ms, over a kill.
def test_group_survives_a_worker(six_partitions, endpoint_of, tmp_path, topic):
    """Members at two workers of one endpoint share a group, and go on when a worker is killed."""
    endpoint = endpoint_of("only", workers=2)
    with members(tmp_path) as start:
        consumers = [
            start(f"member-{number}", "librdkafka", endpoint.bootstrap, "readers", topic)
            for number in range(3)
        ]
        until_all_read(consumers)
        os.kill(endpoint.status()["gateway_workers"][0]["pid"], signal.SIGKILL)
        ends = {number: set(range(end)) for number, end in six_partitions.items()}
        until(lambda: read_by(consumers) == ends, "every record was read")
        until(lambda: committed_by(consumers) == six_partitions, "all that was read is committed")
        require_no_repetition(consumers)


def committed_by(consumers):
    """Return the largest offset that each partition's commits have acknowledged."""
    found = {}
    for consumer in consumers:
        for one in consumer.told("committed"):
            for number, offset in one["offsets"].items():
                found[int(number)] = max(found.get(int(number), 0), offset)
    return found


def assigned(member):
    """Return the partitions that a member has now."""
    found = set()
    for one in member.told():
        if one["kind"] == "assigned":
            found |= set(one["partitions"])
        elif one["kind"] == "revoked":
            found -= set(one["partitions"])
    return found


# Long: a lease and a session run out.
def test_endpoint_that_stood_still_is_fenced(six_partitions, endpoint_of, tmp_path, topic):
    """SIGSTOP for longer than sessions last: what its member had asked before is refused afterwards."""
    first, second = endpoint_of("first"), endpoint_of("second")
    # The coordinator of the group stays the same one from here on.
    until_known(first, second)
    with members(tmp_path) as start:
        held = start("held", "librdkafka", f"{first.bootstrap},{second.bootstrap}", "readers", topic)
        until_all_read([held])
        # It has fetched what it reads next: the partitions of the coordinator stand still with that.
        until(moved_on(held), "the member reads on")
        coordinator = first if group_is_at(first) else second
        other_endpoint = second if coordinator is first else first
        with standing_still(coordinator.server.pid):
            until(lambda: stalls(held), "the member waits for the answer to a commit")
            # It stands still at once: after ten seconds it would go on and commit at the other endpoint.
            with standing_still(held.server.pid):
                until(
                    lambda: other_endpoint.metric("tieringd_endpoint_live_endpoints") == 1,
                    "the lease of the endpoint that stands still has ended",
                )
                other = start("other", "librdkafka", other_endpoint.bootstrap, "readers", topic)
                until(lambda: len(assigned(other)) == _PARTITIONS, "the other member has all partitions")
                other.go_on()
                until(moved_on(other, 20), "the other member reads")
                os.kill(coordinator.server.pid, signal.SIGCONT)
                until(lambda: coordinator.events("this process stood still"), "the endpoint goes on")
        consumers = [held, other]
        ends = {number: set(range(end)) for number, end in six_partitions.items()}
        until(lambda: read_by(consumers) == ends, "every record was read")
        until(lambda: committed_by(consumers) == six_partitions, "all that was read is committed")
        until(lambda: held.told("refused"), "the commit that the member had asked for is refused")
        require_no_repetition(consumers)


def group_is_at(endpoint):
    """Say whether an endpoint has begun a generation."""
    return bool(endpoint.events("a group's generation has begun"))


def stalls(member):
    """Say whether a member has told nothing for a second, after it has read more than it has committed."""
    told = member.told()
    return told[-1]["kind"] == "read" and time.monotonic() - told[-1]["at"] > 1


@contextmanager
def standing_still(pid):
    """Stop a process, and let it go on at the end."""
    pause(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# Long: each of Kafka's tools is a JVM.
def test_java_tools_work_with_groups(kafka, six_partitions, endpoint_of, topic):
    """The console consumer as a member, and kafka-consumer-groups: list, describe, reset, delete."""
    first, second = endpoint_of("first"), endpoint_of("second")

    def run(tool, *arguments, at=first):
        command = kafka.broker.command(tool, "--bootstrap-server", at.bootstrap, *arguments)
        return _run(command)

    count = str(sum(six_partitions.values()))
    consumed = run(
        _CONSOLE,
        *("--topic", topic, "--group", "java", "--from-beginning", "--max-messages", count),
        *("--timeout-ms", "180000"),
    )
    assert consumed.count(_RECORD.decode()) == int(count)
    assert "java" in run(_GROUP_TOOL, "--list", at=second).split()
    described = run(_GROUP_TOOL, "--describe", "--group", "java", at=second)
    rows = [line.split() for line in described.splitlines() if topic in line]
    assert {int(row[2]): int(row[3]) for row in rows} == six_partitions
    reset = ("--reset-offsets", "--group", "java", "--topic", topic, "--to-earliest", "--execute")
    run(_GROUP_TOOL, *reset)
    again = run(
        _CONSOLE, "--topic", topic, "--group", "java", "--max-messages", count, "--timeout-ms", "180000",
        at=second,
    )  # fmt: skip
    assert again.count(_RECORD.decode()) == int(count)
    newer = ("--group", "newer", "--consumer-property", "group.protocol=consumer", "--from-beginning")
    found = run(
        _CONSOLE, "--topic", topic, *newer, "--max-messages", count, "--timeout-ms", "180000", at=second
    )
    assert found.count(_RECORD.decode()) == int(count)
    assert "newer" in run(_GROUP_TOOL, "--list").split()
    run(_GROUP_TOOL, "--delete", "--group", "java")
    assert "java" not in run(_GROUP_TOOL, "--list").split()


def _run(command):

    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()
