"""A real Prometheus that scrapes a test's daemons, and answers queries as Grafana sends them."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import yaml

from tests.support.ports import free_ports
from tests.support.processes import Server
from tests.support.promtool import require_prometheus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_PATIENCE_SECONDS = 180
_POLL_SECONDS = 0.05
_SCRAPE_INTERVAL = "1s"
"""
Also the time that an answer may take.

With 200 ms, on a slow and busy machine, an endpoint that asks its workers was never in time, and down.
"""
_EVALUATION_INTERVAL = "200ms"


class Prometheus:
    """A client of one Prometheus server, by its HTTP API."""

    def __init__(self, server: Server, url: str) -> None:
        self._server = server
        self._url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of an instant query: rows with labels in `metric`, and the value in `value`."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def until_rows(self, expression: str) -> list[dict[str, Any]]:
        """
        Return the result of an instant query as soon as it has rows.

        A scrape that was answered late leaves none until the next one.
        """
        found: list[dict[str, Any]] = []

        def has_rows() -> bool:
            found[:] = self.query(expression)
            return bool(found)

        self.until(has_rows, f"{expression} has rows")
        return found

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer. If Prometheus refuses the query, fail with its message."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_PATIENCE_SECONDS) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def until(self, is_so: Callable[[], object], what: str | Callable[[], str]) -> None:
        """Wait until *is_so* is true; after a timeout fail with *what*, or with its result at that time."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not is_so():
            if time.monotonic() >= deadline:
                raise AssertionError(f"it did not come that {what if isinstance(what, str) else what()}")
            time.sleep(_POLL_SECONDS)

    def is_ready(self) -> bool:
        """Return whether Prometheus is ready."""
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=_PATIENCE_SECONDS):
                return True
        except OSError:
            return False


@contextmanager
def running_prometheus(
    directory: Path, targets: Sequence[str], *, rules: Sequence[Path] = ()
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes *targets* (host:port) as the job tieringd, once a second."""
    (port,) = free_ports(1)
    config = {
        "global": {"scrape_interval": _SCRAPE_INTERVAL, "evaluation_interval": _EVALUATION_INTERVAL},
        "rule_files": [str(one) for one in rules],
        "scrape_configs": [
            {"job_name": job, "metrics_path": path, "static_configs": [{"targets": list(targets)}]}
            for job, path in (("tieringd", "/metrics"), ("tieringd-partitions", "/metrics/partitions"))
        ],
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    server = Server(
        [
            require_prometheus(),
            f"--config.file={path}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        output=directory / "prometheus.log",
    )
    prometheus = Prometheus(server, f"http://127.0.0.1:{port}")
    server.launch()
    try:
        server.wait_until(prometheus.is_ready)
        yield prometheus
    finally:
        server.kill()
