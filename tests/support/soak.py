"""
`make soak STORE=s3 MINUTES=30`: a daemon in front of a real store that keeps failing.

A log directory is written to all the time; one in thirty requests to the store is refused,
reset, stalled, cut short or damaged on its way, over TLS. At the end every record is read back and compared
with what was written, and the daemon's memory and descriptors with what they were after a third of
the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from tests.support.azurite import running_azurite
from tests.support.certificate import write_certificate
from tests.support.daemon import azure_properties, directory_config, write_config
from tests.support.fake_gcs import running_fake_gcs
from tests.support.fault_proxy import (
    Answer,
    DamageRequest,
    NoAnswer,
    ResetAnswer,
    ResetRequest,
    StallAnswer,
    StallRequest,
    TruncateAnswer,
    fault_proxy,
)
from tests.support.gcs_metadata_server import running_metadata_server
from tests.support.seaweedfs import running_seaweedfs
from tests.support.tls_relay import presenting, relay
from tieringd.cli.demo.demo_session import DemoSetup, run_session, summary
from tieringd.cli.demo.journal import Journal
from tieringd.cli.demo.writer import LogDirectoryWriter
from tieringd.cli.logging import configure_logging
from tieringd.config.model import LogConfig
from tieringd.model.partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.fault_proxy import Fault, FaultProxy, ProxiedExchange
    from tieringd.cli.demo.comparison import Comparison

BUCKET = "soak"
PARTITIONS = tuple(TopicPartition("soak", number) for number in range(4))
_APPEND_PAUSE_SECONDS = 0.25  # About 600 MiB in half an hour, which the emulators hold in memory.
_FAULT_SHARE = 0.03
_SAMPLE_SECONDS = 5.0
_MEMORY_MIB = 48
_DESCRIPTORS = 16


@dataclass
class Weather:
    """Spoils a random part of the requests."""

    may_damage: bool
    """Whether the server verifies a checksum of what it receives. Azure's clients rely on TLS instead."""
    random: random.Random = field(default_factory=lambda: random.Random(7))
    is_over: bool = False

    def __call__(self, exchange: ProxiedExchange) -> Fault | None:
        """Return the fault for an exchange; mostly None."""
        if self.is_over or self.random.random() > _FAULT_SHARE:
            return None
        faults: list[Fault] = [
            Answer("429 Too Many Requests", headers={"Retry-After": "1"}),
            Answer("500 Internal Server Error"),
            Answer("503 Slow Down"),
            Answer("503 Service Unavailable", headers={"Retry-After": "2"}),
            ResetRequest(),
            NoAnswer(),
        ]
        if exchange.method in {"PUT", "POST"} and int(exchange.headers.get("content-length", "0")) > 1 << 10:
            faults += [ResetRequest(100), StallRequest(100), *([DamageRequest()] if self.may_damage else ())]
        if exchange.method == "GET":  # Only answers with a body can lose a part of it.
            faults += [ResetAnswer(1), TruncateAnswer(1), StallAnswer(1)]
        return self.random.choice(faults)


@dataclass
class Resources:
    """The daemon's memory and descriptors over time, from its own metrics."""

    daemon_log: Path
    seconds: float
    samples: list[tuple[float, float, float]] = field(default_factory=list)
    """Seconds since the start, resident MiB, open descriptors."""

    async def watch(self) -> None:
        """Sample every few seconds until cancelled. A daemon without an admin page yet is skipped."""
        started = time.monotonic()
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            found = await asyncio.to_thread(self._sample)
            if found:
                self.samples.append((time.monotonic() - started, *found))

    def _sample(self) -> tuple[float, float] | None:
        url = _admin_url(self.daemon_log)
        if url is None:
            return None
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return values["process_resident_memory_bytes"] / (1 << 20), values["process_open_fds"]

    def growth(self) -> tuple[float, float]:
        """Return the growth of the highest MiB and descriptors from the second third to the last third."""
        middle = [one for one in self.samples if self.seconds / 3 <= one[0] < self.seconds * 2 / 3]
        last = [one for one in self.samples if one[0] >= self.seconds * 2 / 3]
        assert middle, "the daemon told nothing of itself"
        assert last, "the daemon told nothing of itself at the end"
        return max(one[1] for one in last) - max(one[1] for one in middle), max(one[2] for one in last) - max(
            one[2] for one in middle
        )


def _spoiled(proxy: FaultProxy) -> str:
    counts = Counter(type(each.fault).__name__ for each in proxy.exchanges if each.fault is not None)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def _admin_url(daemon_log: Path) -> str | None:
    if not daemon_log.exists():
        return None
    for line in daemon_log.read_text().splitlines():
        if '"admin page listens"' in line:
            event = json.loads(line)
            return f"http://{event['host']}:{event['port']}"
    return None


@asynccontextmanager
async def serving_s3(directory: Path) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Run SeaweedFS; yield its URL and the properties of its bucket."""
    with running_seaweedfs(directory) as store:
        store.create_bucket(BUCKET)
        yield (
            store.endpoint_url,
            {
                "cloud_storage_backend": "aws",
                "cloud_storage_bucket": BUCKET,
                "cloud_storage_region": store.region,
                "cloud_storage_access_key": store.access_key,
                "cloud_storage_secret_key": store.secret_key,
            },
        )


@asynccontextmanager
async def serving_gcs(directory: Path) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Run fake-gcs-server, and a metadata server whose tokens expire soon."""
    async with running_metadata_server(expires_in=360) as metadata:
        os.environ["GCE_METADATA_HOST"] = metadata.host
        with running_fake_gcs(directory) as store:
            store.create_bucket(BUCKET)
            yield (
                store.endpoint,
                {
                    "cloud_storage_backend": "google",
                    "cloud_storage_bucket": BUCKET,
                    "cloud_storage_credentials_source": "gcp_instance_metadata",
                },
            )


@asynccontextmanager
async def serving_azure(directory: Path) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Run Azurite; yield its URL and the properties of its container."""
    with running_azurite(directory) as store:
        store.create_container(BUCKET)
        yield (
            store.endpoint.removesuffix(f"/{store.account}"),
            azure_properties(store, container=BUCKET),
        )


STORES = {"s3": serving_s3, "gcs": serving_gcs, "azure": serving_azure}


async def soak(
    directory: Path, name: str, *, seconds: float, console: Console
) -> tuple[Comparison, list[str]]:
    """Run the soak; return what was read back, and messages on the daemon's growth in resources."""
    certificate = write_certificate(directory / "server.pem")
    async with AsyncExitStack() as stack:
        (directory / name).mkdir()
        url, properties = await stack.enter_async_context(STORES[name](directory / name))
        proxy = await stack.enter_async_context(fault_proxy(url))
        tls_url = await stack.enter_async_context(relay(proxy.url, accept=presenting(certificate)))
        journal, daemon_log = Journal(PARTITIONS), directory / "daemon.log"
        config = directory_config(
            [directory / "logs"],
            directory,
            directory / "state",
            **properties,
            cloud_storage_api_endpoint="127.0.0.1",
            cloud_storage_api_endpoint_port=int(tls_url.rpartition(":")[2]),
            cloud_storage_trust_file=str(certificate),
            cloud_storage_segment_upload_timeout_ms="90s",
            cloud_storage_manifest_upload_timeout_ms="90s",
            retention_local_target_bytes_default="2MiB",
            retention_local_target_ms_default="1s",
        )
        del config["cloud_storage_file_root"]
        setup = DemoSetup(
            title=f"soak: {name}",
            config_file=write_config(directory / "tieringd.yaml", config),
            environ={},
            daemon_log=daemon_log,
            settle_seconds=120,  # A stall just before the end of the faults lasts 30 s.
        )
        proxy.weather = weather = Weather(may_damage=name != "azure")
        resources = Resources(daemon_log, seconds)
        writer = LogDirectoryWriter(
            directory / "logs", journal, seconds=seconds, pause_seconds=_APPEND_PAUSE_SECONDS
        )
        watching = asyncio.create_task(resources.watch())
        stack.callback(watching.cancel)

        @dataclass
        class WriterUntilCalm:
            async def write(self) -> None:
                await writer.write()
                weather.is_over = True
                if watching.done():
                    watching.result()
                watching.cancel()

        total = await run_session(setup, journal, WriterUntilCalm(), console)
        memory_mib, descriptors = resources.growth()
        console.print(
            f"{len(proxy.exchanges)} requests, of which were spoiled: {_spoiled(proxy)}",
            f"the last third beside the second: {memory_mib:+.1f} MiB, {descriptors:+.0f} descriptors",
            sep="\n",
        )
        wrong = []
        if memory_mib > _MEMORY_MIB:
            wrong.append(f"the daemon's memory grew by {memory_mib:.0f} MiB")
        if descriptors > _DESCRIPTORS:
            wrong.append(f"the daemon's descriptors grew by {descriptors:.0f}")
        return total, wrong


def main() -> int:
    """Run the soak and print what was verified; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.soak", description=__doc__)
    parser.add_argument("--store", choices=STORES, default="s3")
    parser.add_argument("--minutes", type=float, default=30)
    options = parser.parse_args()
    configure_logging(LogConfig(format="console", level="error"))
    console, started = Console(), time.monotonic()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tieringd-soak-")))
        total, wrong = asyncio.run(
            soak(directory, options.store, seconds=options.minutes * 60, console=console)
        )
    print(f"\n{summary(total, seconds=time.monotonic() - started)}")  # noqa: T201 the result
    for one in wrong:
        print(f"  WRONG: {one}")  # noqa: T201 likewise
    return 1 if total.differences or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
