"""
The real `tieringd` command as a process: the daemon, other commands, their configuration.

Plain functions and classes, independent of pytest. They observe a daemon only by its log and its admin
page, as an operator does.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import Server
from tests.support.warm_start import run_to_end, start_command

if TYPE_CHECKING:
    import signal
    import subprocess
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.support.azurite import Azurite
    from tests.support.kafka import KafkaCluster
    from tests.support.seaweedfs import SeaweedFS

_POLL_SECONDS = 0.02
_LONGEST_POLL_SECONDS = 0.1
"""The longest pause between polls. A poll takes the daemon's time, so a long wait polls less often."""
_COMMAND_TIMEOUT_SECONDS = 300
_PATIENCE_SECONDS = 180


def command(*arguments: str) -> list[str]:
    """Return the command line of `tieringd` in a new interpreter, which takes one or two seconds to start."""
    return [sys.executable, "-m", "tieringd", *arguments]


def run_command(
    *arguments: str, timeout_seconds: float = _COMMAND_TIMEOUT_SECONDS
) -> subprocess.CompletedProcess[bytes]:
    """Run a `tieringd` command as a process to its end and return its exit code and output."""
    return run_to_end(*arguments, timeout_seconds=timeout_seconds)


def run_well(*arguments: str, timeout_seconds: float = _COMMAND_TIMEOUT_SECONDS) -> bytes:
    """Run a `tieringd` command that must exit 0, and return its standard output."""
    done = run_command(*arguments, timeout_seconds=timeout_seconds)
    assert done.returncode == 0, f"tieringd {' '.join(arguments)}:\n{done.stderr.decode()}"
    return done.stdout


def run_json(*arguments: str, timeout_seconds: float = _COMMAND_TIMEOUT_SECONDS) -> Any:
    """Run a `tieringd` command that must exit 0, and return the JSON it prints."""
    return json.loads(run_well(*arguments, "--format", "json", timeout_seconds=timeout_seconds))


def directory_config(log_dirs: Sequence[Path], archive: Path, state: Path, **changes: Any) -> dict[str, Any]:
    """Return a configuration for log directories without a broker, with a directory as the bucket."""
    return {
        "broker": {"kind": "none", "log_dirs": [str(path) for path in log_dirs]},
        "state_directory": str(state),
        "cloud_storage_enabled": True,
        "cloud_storage_enable_remote_read": True,
        "retention_local_strict": True,
        "cloud_storage_enable_remote_write": True,
        "cloud_storage_backend": "file",
        "cloud_storage_file_root": str(archive),
        "cloud_storage_reconciliation_interval_ms": 100,
        "retention_local_target_ms_default": -1,
        # Records of the tests have any timestamps.
        "log_retention_ms": -1,
        # The disk of a machine that runs tests may have little room.
        "storage_min_free_bytes": 0,
        "storage_space_alert_free_threshold_percent": 0,
        "admin": {"port": 0},
    } | changes


def kafka_config(
    kafka: KafkaCluster,
    store: SeaweedFS | None,
    state: Path,
    *,
    bucket: str = "",
    prefix: str = "",
    node_id: int = 1,
    **changes: Any,
) -> dict[str, Any]:
    """
    Return a configuration for a broker and S3. It archives only the topics that *changes* select.

    Without *store*, *changes* have the properties of another store.
    """
    return {
        "broker": {
            "kind": "kafka",
            "log_dirs": [str(path) for path in kafka.brokers[node_id - 1].log_dirs],
            "bootstrap": [kafka.brokers[node_id - 1].bootstrap],
            "node_id": node_id,
        },
        "state_directory": str(state),
        "cloud_storage_enabled": True,
        "cloud_storage_enable_remote_read": True,
        "retention_local_strict": True,
        **({} if store is None else s3_properties(store, bucket=bucket, prefix=prefix)),
        # Producers must not be throttled because the machine of the tests has little free space.
        "storage_min_free_bytes": 0,
        "storage_space_alert_free_threshold_percent": 0,
        "cloud_storage_reconciliation_interval_ms": 200,
        "retention_local_target_ms_default": -1,
        "admin": {"port": 0},
    } | changes


def endpoint_properties(url: str) -> dict[str, Any]:
    """Return the properties of the address of a store's server."""
    host, port = url.removeprefix("http://").split(":")
    return {
        "cloud_storage_api_endpoint": host,
        "cloud_storage_api_endpoint_port": int(port),
        "cloud_storage_disable_tls": True,
    }


def azure_properties(store: Azurite, *, container: str) -> dict[str, Any]:
    """Return the properties of a container, without the address of its server."""
    return {
        "cloud_storage_backend": "azure",
        "cloud_storage_azure_container": container,
        "cloud_storage_azure_storage_account": store.account,
        "cloud_storage_azure_shared_key": store.key,
        "cloud_storage_url_style": "path",
    }


def s3_properties(store: SeaweedFS, *, bucket: str, prefix: str) -> dict[str, Any]:
    """Return the properties of a prefix of a bucket, with the address of its server."""
    return {
        "cloud_storage_backend": "aws",
        "cloud_storage_bucket": bucket,
        "cloud_storage_access_key": store.access_key,
        "cloud_storage_secret_key": store.secret_key,
        **endpoint_properties(store.endpoint_url),
        "cloud_storage_prefix": prefix,
    }


written_configs: list[dict[str, Any]] = []
"""The configurations that `write_config` wrote, oldest first. `tests.support.final_scrub` reads them."""


def write_config(path: Path, config: Mapping[str, Any]) -> Path:
    """Write a configuration file and return its path."""
    path.write_text(yaml.safe_dump(dict(config)))
    written_configs.append(dict(config))
    return path


class Daemon:
    """
    One `tieringd run`.

    Waiting polls, because a process reports no events. A wait that times out fails with the end of the
    daemon's log.
    """

    arguments: tuple[str, ...] = ("run",)
    """The command. A subclass may run another command that has an admin page as well."""

    def __init__(self, config: Path, output: Path, *options: str) -> None:
        arguments = [*self.arguments, "--config", str(config), *options]
        self.server = Server(
            ["tieringd", *arguments], output=output, start=partial(start_command, *arguments)
        )
        self._url = ""

    def launch(self) -> None:
        """Start the process; it is not ready yet."""
        self.server.launch()

    def wait_until_listening(self) -> None:
        """Wait until the admin page listens, and note its address."""
        self.until(lambda: self.events("admin page listens"), "the admin page listens")
        (event,) = self.events("admin page listens")
        self._url = f"http://{event['host']}:{event['port']}"

    @property
    def admin_port(self) -> int:
        """Return the port of the admin page."""
        return int(self._url.rpartition(":")[2])

    def output_text(self) -> str:
        """Return everything that the daemon has printed."""
        return self.server.output.read_text() if self.server.output.exists() else ""

    def log(self) -> list[dict[str, Any]]:
        """Return the events of the log, without a line that is still being written."""
        return self._parsed("")

    def _parsed(self, text: str) -> list[dict[str, Any]]:
        lines = self.output_text().splitlines(keepends=True)
        return [
            json.loads(line)
            for line in lines
            if line.startswith("{") and line.endswith("}\n") and text in line
        ]

    def events(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the events with this text and these fields."""
        found = self._parsed(json.dumps(name))
        return [one for one in found if one["event"] == name and fields.items() <= one.items()]

    def url(self, path: str) -> str:
        """Return the address of a page."""
        return self._url + path

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and the text of a page."""
        try:
            with urllib.request.urlopen(self._url + path, timeout=_PATIENCE_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def post_status(self, path: str, **headers: str) -> int:
        """Return the status of a POST to a page."""
        request = urllib.request.Request(self.url(path), data=b"", headers=headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE_SECONDS) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def status(self) -> dict[str, Any]:
        """Return the status page."""
        return json.loads(self.get("/status")[1])

    def partition(self, topic: str, number: int = 0) -> dict[str, Any]:
        """Return a partition's entry of the status page; empty without one."""
        lines = self.status()["partitions"]
        return next((one for one in lines if (one["topic"], one["partition"]) == (topic, number)), {})

    def until_segment_in_flight(self) -> None:
        """
        Wait until a segment's data is on its way to the object store.

        The age of the oldest upload alone may be that of a manifest.
        """
        self.until(
            lambda: (
                (self.metric("tieringd_oldest_upload_in_flight_seconds") or 0) > 0
                and any(
                    one["key"].endswith(".log")
                    for one in json.loads(self.get("/status/overview")[1])["uploads"]
                )
            ),
            "an upload of a segment is in flight",
        )

    def metric(self, name: str, **labels: str) -> float | None:
        """Return the sum of a metric's samples with these labels; None without any."""
        pages = ["/metrics", "/metrics/partitions"]
        # A metric is on one of the pages. To render the other one takes the daemon's time.
        for path in reversed(pages) if "topic" in labels else pages:
            # Only the lines of this metric are parsed. To parse the whole page would take most of a poll.
            lines = [line for line in self.get(path)[1].splitlines() if line.startswith(name)]
            families = text_string_to_metric_families("\n".join([*lines, ""]))
            values = [
                sample.value
                for family in families
                for sample in family.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            ]
            if values:
                return sum(values)
        return None

    def until(self, is_so: Callable[[], object], what: str, *, seconds: float = _PATIENCE_SECONDS) -> None:
        """Wait until *is_so* is true; fail if the daemon ends before, or after *seconds*."""
        deadline = time.monotonic() + seconds
        pause_seconds = _POLL_SECONDS
        while True:
            # What a daemon did just before it ended counts as well.
            is_running = self.server.is_running
            if is_so():
                return
            assert is_running, f"the daemon ended before {what}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"in {seconds} s it did not come that {what}:\n{self.tail()}"
            time.sleep(pause_seconds)
            pause_seconds = min(1.3 * pause_seconds, _LONGEST_POLL_SECONDS)

    def until_rounds(self, count: int) -> None:
        """Wait until *count* more rounds of reconciliation have succeeded."""
        wanted = self.status()["rounds"] + count
        self.until(lambda: self.status()["rounds"] >= wanted, f"{count} more rounds are done")

    def until_next_offset(self, topic: str, next_offset: int, number: int = 0) -> None:
        """Wait until the archive of a partition reaches *next_offset*."""
        self.until(
            lambda: self.next_offset(topic, number) == next_offset,
            f"the archive of {topic}-{number} reaches {next_offset}",
        )

    def next_offset(self, topic: str, number: int = 0) -> float | None:
        """Return the next offset of a partition's archive, from the metric."""
        return self.metric("tieringd_archive_next_offset", topic=topic, partition=str(number))

    def send_signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        self.server.send_signal(number)

    def wait(self, timeout_seconds: float = _PATIENCE_SECONDS) -> int:
        """Wait until the process ends and return its exit code."""
        return self.server.wait(timeout_seconds)

    def tail(self) -> str:
        """Return the end of the daemon's output."""
        return self.output_text()[-4000:]


class NewDaemon(Daemon):
    """
    One `tieringd run` in an interpreter of its own, as users run it.

    A forked daemon has more imported than it uses, and does not free what it does not use. So figures of
    memory, of the start and of CPU are measured with this one.
    """

    def __init__(self, config: Path, output: Path, *options: str) -> None:
        super().__init__(config, output, *options)
        self.server = Server(command(*self.arguments, "--config", str(config), *options), output=output)


@contextmanager
def running_daemon(
    config: Path, output: Path | None = None, *, start: type[Daemon] = Daemon
) -> Iterator[Daemon]:
    """Run a daemon in the context. Its log is *output*, or a file beside *config*."""
    daemon = start(config, output or config.with_suffix(".log"))
    daemon.launch()
    try:
        daemon.wait_until_listening()
        yield daemon
    finally:
        # A test of the daemon's end has ended it itself.
        daemon.server.kill()
