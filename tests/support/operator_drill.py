"""
`make drill`: an operator's bad day on real parts, and what /readyz, `tieringd status` and the alerts showed.

Three Kafka brokers, SeaweedFS and Prometheus run on this machine. The daemon beside broker 1 runs behind a
read-only root without capabilities, as its unit has it, and its broker has a small disk. Then come an outage
of the store, a full disk, a failover, an upgrade from the previous release and back, and a recovery. What was
seen is written to docs/operator_drill.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import yaml

from tests.support.cluster import CLUSTER_PROPERTIES, cluster_admin, start_broker
from tests.support.daemon import Daemon, kafka_config, run_command, write_config
from tests.support.kafka import KafkaCluster
from tests.support.ports import free_ports
from tests.support.previous_release import PREVIOUS, previous_release
from tests.support.processes import Server
from tests.support.prometheus import running_prometheus
from tests.support.seaweedfs import running_seaweedfs
from tests.support.small_disks import small_disk_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.prometheus import Prometheus
    from tests.support.seaweedfs import SeaweedFS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operator_drill.md"
RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
BUCKET, TOPIC, OLD_TOPIC = "drill", "orders", "payments"
_MIB = 1 << 20
_DISK_BYTES = 320 * _MIB
_MIN_FREE_BYTES = 64 * _MIB
_LEFT_WHEN_FULL_BYTES = 40 * _MIB
_PATIENCE_SECONDS = 240
_SEGMENTS = {"segment.bytes": str(_MIB), "retention.ms": "-1", "file.delete.delay.ms": "100"}
_VALUES = [bytes([number]) * 100_000 for number in range(35)]
_SANDBOX = """
new=$1; shift; writable=$1; shift
mount --rbind / "$new"
mount -o remount,ro,bind "$new"
mount --bind "$new/tmp" "$new/tmp" && mount -o remount,ro,bind "$new/tmp"
for one in $writable; do mount --bind "$one" "$new$one"; done
exec chroot "$new" setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""
"""The unit's ProtectSystem=strict, NoNewPrivileges and empty CapabilityBoundingSet, by namespaces alone."""
HEADLINES = {
    "not durable": "sum(tieringd_daemon_upload_pending_bytes)",
    "oldest waits": "max(tieringd_daemon_upload_lag_seconds)",
    "pinned": "sum(tieringd_pinned_bytes)",
    "led": "sum(tieringd_led_partitions)",
}
"""Panels of the dashboard "overview", by the words of the page."""


class Sandboxed(Daemon):
    """`tieringd run` of some source tree as a process of its own, behind a read-only root if asked for."""

    def __init__(
        self, config: Path, output: Path, *, source: Path = ROOT, writable: tuple[Path, ...] = ()
    ) -> None:
        super().__init__(config, output)
        command = [sys.executable, "-m", "tieringd", "run", "--config", str(config)]
        environment = ["env", f"--chdir={source}"]
        if writable:
            new = config.with_suffix(".root")
            new.mkdir(exist_ok=True)
            outer = ["unshare", "--mount", "bash", "-euc", _SANDBOX, "sandbox", str(new)]
            command = [*environment, *outer, " ".join(map(str, writable)), *command]
        else:
            command = [*environment, *command]
        self.server = Server(command, output=output)


class Moments:
    """What was seen, moment by moment."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self._began = time.monotonic()
        self.sections: list[str] = []

    def alerts(self) -> list[str]:
        """Return the alerts that are pending or firing, with their state."""
        (group,) = self._prometheus.get("rules")["groups"]
        return [f"{one['name']} ({one['state']})" for one in group["rules"] if one["state"] != "inactive"]

    def until_alert(self, *names: str) -> None:
        """Wait until these alerts are pending or firing."""
        self._prometheus.until(
            lambda: all(any(one.startswith(f"{name} ") for one in self.alerts()) for name in names),
            lambda: f"{names} are there; these are: {self.alerts()}",
        )

    def until_quiet(self, *names: str) -> None:
        """Wait until none of these alerts is pending or firing."""
        self._prometheus.until(
            lambda: not any(one.startswith(tuple(f"{name} " for name in names)) for one in self.alerts()),
            lambda: f"{names} have ended; these are there: {self.alerts()}",
        )

    def seen(self, title: str, what: str, daemons: dict[str, Daemon]) -> None:
        """Record a moment: readiness, what a person is asked to do, the alerts, the dashboard's headlines."""
        lines = [
            f"## {title}",
            "",
            fill(what, 110, break_long_words=False, break_on_hyphens=False),
            "",
            "| daemon | `/readyz` | what `tieringd status` asks for |",
            "|---|---|---|",
        ]
        lines += [f"| {name} | {self._ready(one)} | {self._tasks(one)} |" for name, one in daemons.items()]
        found = self.alerts()
        alerts = f"Alerts: {', '.join(found) if found else 'none'}."
        lines += ["", fill(alerts, 110), ""]
        lines += [f"Dashboard: {', '.join(self._headlines())}.", ""]
        self.sections.append("\n".join(lines))
        say(f"{time.monotonic() - self._began:5.0f} s  {title}: {found}")

    def _headlines(self) -> Iterator[str]:
        for name, expression in HEADLINES.items():
            rows = self._prometheus.query(expression)
            yield f"{name} {float(rows[0]['value'][1]):.0f}" if rows else f"{name} has no series"

    @staticmethod
    def _ready(daemon: Daemon) -> str:
        try:
            status, text = daemon.get("/readyz")
        except OSError:
            return "no answer"
        return "200 ok" if status == 200 else f"{status} {shortened(text)}"

    @staticmethod
    def _tasks(daemon: Daemon) -> str:
        try:
            status, text = daemon.get("/status/overview")
        except OSError:
            return "no answer"
        if status != 200:
            return "there is no such page in this release"
        return shortened("; ".join(one["what"] for one in json.loads(text)["tasks"])) or "nothing"


def say(line: str) -> None:
    """Tell the person at the terminal how far the drill is."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def shortened(text: str) -> str:
    """Return a text as a cell of a table, without the ports and paths of this run."""
    text = " ".join(text.split()).replace("|", "/")
    for old in ("/tmp/", "127.0.0.1:"):
        while old in text:
            begin = text.index(old)
            rest = text[begin + len(old) :]
            tail = next((one for one, letter in enumerate(rest) if letter in " :;,)"), len(rest))
            text = text[:begin] + "..." + rest[tail:]
    return text if len(text) <= 160 else text[:157] + "..."


async def until(is_so: Callable[[], object], what: str) -> None:
    """Wait until *is_so* is true, while this loop turns."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"it did not come that {what}"
        await asyncio.sleep(0.1)


class Drill:
    """The day: each method is one part of it."""

    def __init__(self, directory: Path, disk: Path, kafka: KafkaCluster, store: SeaweedFS) -> None:
        self._directory, self._disk, self._kafka, self._store = directory, disk, kafka, store
        self._ports = free_ports(4)
        self.daemons: dict[int, Daemon] = {}
        self.moments: Moments

    @property
    def targets(self) -> list[str]:
        """Return where the daemons beside the three brokers are scraped."""
        return [f"127.0.0.1:{port}" for port in self._ports[:3]]

    def config(self, node_id: int, name: str, prefix: str, topic: str, port: int) -> Path:
        """Write the configuration of a daemon beside a broker."""
        changes: dict[str, Any] = {
            "topics": {topic: {"redpanda.remote.write": True}},
            "admin": {"port": port},
            "cloud_storage_segment_upload_timeout_ms": 2000,
            "cloud_storage_manifest_upload_timeout_ms": 2000,
            "storage_min_free_bytes": _MIN_FREE_BYTES if name == "node-1" else 0,
            "storage_space_alert_free_threshold_percent": 0,
        }
        state = self._directory / f"state-{name}"
        state.mkdir(exist_ok=True)
        document = kafka_config(
            self._kafka, self._store, state, bucket=BUCKET, prefix=prefix, node_id=node_id, **changes
        )
        return write_config(self._directory / f"{name}.yaml", document)

    def started(self, node_id: int) -> Daemon:
        """Start the daemon beside a broker; that of broker 1 in the unit's sandbox."""
        path = self.config(node_id, f"node-{node_id}", "day", TOPIC, self._ports[node_id - 1])
        log = self._directory / f"node-{node_id}-{time.monotonic_ns()}.log"
        state = self._directory / f"state-node-{node_id}"
        writable = (state, self._kafka.log_dir(1).parent) if node_id == 1 else ()
        daemon = Sandboxed(path, log, writable=writable)
        daemon.launch()
        daemon.wait_until_listening()
        self.daemons[node_id] = daemon
        return daemon

    def close(self) -> None:
        """End the daemons that run."""
        for daemon in self.daemons.values():
            daemon.server.kill()

    def seen(self, title: str, what: str) -> None:
        """Record a moment of the three daemons."""
        self.moments.seen(title, what, {f"broker {one}": self.daemons[one] for one in sorted(self.daemons)})

    def until_durable(self) -> None:
        """Wait until all daemons are ready and nothing waits."""
        for daemon in self.daemons.values():
            daemon.until(
                lambda daemon=daemon: daemon.get("/readyz")[0] == 200,
                "it is ready",
                seconds=_PATIENCE_SECONDS,
            )
            daemon.until(
                lambda daemon=daemon: daemon.metric("tieringd_daemon_upload_pending_bytes") == 0,
                "nothing waits",
                seconds=_PATIENCE_SECONDS,
            )

    async def one_broker(self) -> None:
        """Begin with the daemon of broker 1 alone."""
        daemon = self.started(1)
        await self._kafka.create_topic(
            TOPIC, replicas=[[1, 2, 3]], configs=_SEGMENTS | {"min.insync.replicas": "1"}
        )
        await self._kafka.produce(TOPIC, _VALUES, max_batch_size=200_000)
        daemon.until(lambda: (daemon.next_offset(TOPIC) or 0) > 0, "the first segments are archived")
        self.until_durable()
        pins = daemon.metric("tieringd_pins_available")
        assert pins == 1, "pins do not work behind the sandbox"
        self.moments.until_alert("TieringdDown")
        self.moments.until_quiet("TieringdNotReady", "TieringdStalled", "TieringdAbsent")
        self.moments.seen(
            "One broker, behind the unit's sandbox",
            "The root is read-only but for the state and the directory above the log directory. The daemon "
            "has no capabilities. It archives, and its pins work. The daemons of the other two brokers do "
            "not run yet, so Prometheus misses them.",
            {"broker 1": daemon},
        )

    async def three_brokers(self) -> None:
        """Start the other daemons."""
        self.started(2)
        self.started(3)
        self.until_durable()
        self.moments.until_quiet("TieringdDown", "TieringdNotReady", "TieringdStalled")
        self.seen("Three brokers", "A daemon beside each broker; everything that is closed is durable.")

    async def outage(self) -> None:
        """Take the store away, and give it back."""
        self._store.pause()
        try:
            await self._kafka.produce(TOPIC, _VALUES, max_batch_size=200_000)
            self.moments.until_alert("TieringdNotReady", "TieringdStoreErrors")
            self.seen(
                "The store does not answer",
                "Producers go on, and what they write waits on the broker's disk.",
            )
        finally:
            self._store.resume()
        self.until_durable()
        self.moments.until_quiet("TieringdNotReady")
        self.seen(
            "The store is back", "All that waited was uploaded. The rate of errors is over five minutes."
        )

    async def full_disk(self) -> None:
        """Fill the disk of broker 1, and empty it."""
        filler = self._disk / "filler"
        found = os.statvfs(self._disk)
        filler.write_bytes(bytes(found.f_bavail * found.f_frsize - _LEFT_WHEN_FULL_BYTES))
        self.moments.until_alert("TieringdDiskDegraded", "TieringdProducersHeldBack")
        self.seen("The disk of broker 1 is full", "Writes are refused on every broker until it has room.")
        filler.unlink()
        # The other daemons learn of it after ten seconds.
        for daemon in self.daemons.values():
            daemon.until(
                lambda daemon=daemon: not daemon.metric("tieringd_degraded_brokers"),
                "it knows of no such disk",
            )
        self.moments.until_quiet("TieringdDiskDegraded", "TieringdProducersHeldBack")
        self.seen("The disk has room again", "The quotas are as they were.")

    async def failover(self) -> None:
        """Kill broker 1, which leads the topic, with its daemon's broker away; then start it again."""
        node = self._kafka.brokers[0]
        async with cluster_admin(self._kafka, 2, 3) as admin:
            await node.kill()
            state = await admin.until(TOPIC, lambda one: one.leader in {2, 3}, "another broker leads")
            leader = self.daemons[state.leader]
            async with self._kafka.producer(max_batch_size=200_000) as producer:
                for value in _VALUES:
                    await producer.send_and_wait(TOPIC, value)
            before = leader.next_offset(TOPIC) or 0
            await until(
                lambda: (leader.next_offset(TOPIC) or 0) > max(before - 1, 0), "the new leader archives"
            )
            self.moments.until_alert("TieringdNotReady")
            self.seen(
                "Broker 1 is dead", f"Broker {state.leader} leads, and its daemon goes on with the archive."
            )
            await start_broker(self._kafka, node)
            await admin.until_in_sync(TOPIC)
        self.until_durable()
        self.moments.until_quiet("TieringdNotReady")
        self.seen("Broker 1 is back", "It follows, and its daemon is ready.")

    async def upgrade(self, source: Path) -> None:
        """Archive with the previous release, go on with this one, and try to go back."""
        await self._kafka.create_topic(OLD_TOPIC, replicas=[[2]], configs=_SEGMENTS)
        await self._kafka.produce(OLD_TOPIC, _VALUES, max_batch_size=200_000)
        path = self.config(2, "upgrade", "upgrade", OLD_TOPIC, self._ports[3])

        def running(name: str, tree: Path) -> Daemon:
            daemon = Sandboxed(path, self._directory / f"upgrade-{name}.log", source=tree)
            daemon.launch()
            daemon.wait_until_listening()
            self.daemons[4] = daemon
            return daemon

        def end(daemon: Daemon) -> None:
            del self.daemons[4]
            daemon.server.kill()

        old = running("old", source)
        assert old.get("/status/overview")[0] == 404, "this is not the previous release"
        old.until(lambda: (old.next_offset(OLD_TOPIC) or 0) > 20, "the previous release archives")
        self.moments.seen(
            "The previous release", f"Commit {PREVIOUS}, with today's dependencies.", {"old": old}
        )
        end(old)
        new = running("new", ROOT)
        await self._kafka.produce(OLD_TOPIC, _VALUES, max_batch_size=200_000)
        new.until(lambda: (new.next_offset(OLD_TOPIC) or 0) > 50, "this release goes on")
        self.moments.seen("Upgraded", "The same state directory and the same archive.", {"new": new})
        end(new)
        again = running("again", source)
        await self._kafka.produce(OLD_TOPIC, _VALUES, max_batch_size=200_000)
        again.until(
            lambda: again.partition(OLD_TOPIC).get("fault") or (again.next_offset(OLD_TOPIC) or 0) > 90,
            "the previous release goes on, or says why not",
        )
        fault = again.partition(OLD_TOPIC).get("fault")
        self.moments.seen(
            "And back",
            f"It says: {shortened(fault)}" if fault else "The previous release goes on with the archive.",
            {"old": again},
        )
        end(again)
        last = running("last", ROOT)
        last.until(lambda: (last.next_offset(OLD_TOPIC) or 0) > 90, "this release goes on")
        self.moments.seen("This release again", "Nothing was lost between.", {"new": last})
        end(last)

    async def recovery(self) -> None:
        """Write the archive into the cluster under another name, and compare the counts."""
        path = self._directory / "node-2.yaml"
        self._checked("archive", "verify", "--deep", "--config", str(path))
        done = self._checked(
            "recover", "cluster", TOPIC, "--prefix", "drill-", "--replication-factor", "1",
            "--config", str(path), "--format", "json",
        )  # fmt: skip
        (row,) = json.loads(done)
        self.seen(
            "Recovered",
            f"`recover cluster --prefix drill-` wrote {row['records']} records; verify found no fault.",
        )

    @staticmethod
    def _checked(*arguments: str) -> bytes:
        done = run_command(*arguments)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout


async def drill(directory: Path) -> str:
    """Run the day in *directory*, and return the page."""
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk_at(directory / "broker-1", _DISK_BYTES))
        store = stack.enter_context(running_seaweedfs(directory / "seaweedfs"))
        store.create_bucket(BUCKET)
        source = previous_release(directory / "previous")
        kafka = await KafkaCluster.start(directory, brokers=3, heap_mib=384, properties=CLUSTER_PROPERTIES)
        day = Drill(directory, disk, kafka, store)
        try:
            prometheus = stack.enter_context(
                running_prometheus(directory / "prometheus", day.targets, rules=[RULES])
            )
            day.moments = Moments(prometheus)
            await day.one_broker()
            await day.three_brokers()
            await day.outage()
            await day.full_disk()
            await day.failover()
            await day.upgrade(source)
            await day.recovery()
        finally:
            day.close()
            await kafka.kill()
        return page(day.moments.sections)


def page(sections: list[str]) -> str:
    """Return the page with its introduction."""
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    return (
        "# What an operator sees\n\n"
        + fill(
            "`make drill` wrote this page. It ran three Kafka brokers, SeaweedFS, a daemon beside each "
            f"broker and a Prometheus with the {len(rules)} shipped rules, and recorded each moment below. A "
            "rule that holds is pending for the time in its `for`, and then fires; the drill does not wait "
            "that long. TieringdDiskFillsSoon comes and goes, because this Prometheus has known the small "
            "disk for seconds only. Bytes and seconds are as in the dashboard `overview`.",
            110,
        )
        + "\n\n"
        + "\n".join(sections)
    )


def main() -> None:
    """Run the drill, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the directory with all logs")
    asked = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="tieringd-drill-"))
    text = ""
    try:
        text = asyncio.run(drill(directory))
    finally:
        if asked.keep or not text:
            say(f"logs: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    PAGE.write_text(text)
    say(str(PAGE))


if __name__ == "__main__":
    main()
