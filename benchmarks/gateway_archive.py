"""
What `benchmarks.gateway` reads from: a topic in a broker, its twin in an archive, and the store by itself.

The twin has the same records. All of them but one a partition are archived and trimmed, so a reader gets
them through the gateway from the archive, and the last one from the broker.
"""

from __future__ import annotations

import asyncio
import http.client
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from confluent_kafka import Consumer, Producer, TopicPartition

from tests.support.daemon import NewDaemon, kafka_config, running_daemon, write_config
from tests.support.gateways import BrokerBehind
from tests.support.s3_bucket import S3Bucket
from tests.support.seaweedfs import running_seaweedfs, s3_client
from tests.support.topic_config import set_topic_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.support.daemon import Daemon
    from tests.support.seaweedfs import SeaweedFS

LOCAL, TIERED = "local", "tiered"
PARTITIONS = 4
VALUE_BYTES = 1024
_SEGMENT_BYTES = 64 << 20
_BUCKET = "benchmark"
_PIECE_BYTES = 1 << 20
_PATIENCE_SECONDS = 300


class Twins:
    """A broker with both topics, a store, and a daemon with a gateway that may be started anew."""

    def __init__(
        self, directory: Path, behind: BrokerBehind, store: SeaweedFS, *, gateway: Mapping[str, object]
    ) -> None:
        self.behind = behind
        self.store = store
        self._cache = directory / "cache"
        self._runs = 0
        self._path = directory / "tieringd.yaml"
        self._config = kafka_config(
            behind.cluster,
            store,
            directory / "state",
            bucket=_BUCKET,
            prefix="benchmark",
            cloud_storage_cache_directory=str(self._cache),
            cloud_storage_reconciliation_interval_ms=10_000,
            topics={TIERED: {"remote.storage.enable": True, "local.retention.bytes": 1}},
            gateway=behind.gateway_config | dict(gateway),
        )

    @property
    def store_port(self) -> int:
        """Return the port of the store itself."""
        return urlsplit(self.store.endpoint_url).port or 80

    @contextmanager
    def daemon(self, store_port: int | None = None) -> Iterator[Daemon]:
        """
        Run the daemon with an empty cache; go on when its gateway knows of the archive.

        It reaches the store at *store_port*, by default directly.
        """
        shutil.rmtree(self._cache, ignore_errors=True)
        self._runs += 1
        port = self.store_port if store_port is None else store_port
        config = write_config(self._path, self._config | {"cloud_storage_api_endpoint_port": port})
        with running_daemon(config, config.with_suffix(f".{self._runs}.log"), start=NewDaemon) as daemon:
            daemon.until(lambda: daemon.status()["rounds"], "the first round is over")
            yield daemon

    def write(self, records: int) -> None:
        """Write both topics, and roll every segment."""
        for topic in (LOCAL, TIERED):
            _write(self.behind.cluster.bootstrap, topic, records)
        set_topic_config(self.behind.cluster.bootstrap, TIERED, "segment.ms", "1")
        time.sleep(0.1)
        for topic in (LOCAL, TIERED):
            _write(self.behind.cluster.bootstrap, topic, PARTITIONS)

    def wait_until_trimmed(self, daemon: Daemon) -> None:
        """Return when the broker has only the last record of each archived partition."""
        consumer = Consumer({"bootstrap.servers": self.behind.cluster.bootstrap, "group.id": "none"})
        names = [TopicPartition(TIERED, number) for number in range(PARTITIONS)]

        def is_trimmed() -> bool:
            bounds = [consumer.get_watermark_offsets(one, timeout=20) for one in names]
            return all(end - begin == 1 for begin, end in bounds)

        daemon.until(is_trimmed, "both topics are archived and trimmed", seconds=_PATIENCE_SECONDS)
        consumer.close()

    def archived_bytes(self) -> int:
        """Return the size of all archived objects with records."""
        client = s3_client(self.store.endpoint_url)
        found = client.get_paginator("list_objects_v2").paginate(Bucket=_BUCKET)
        sizes = [
            one["Size"] for page in found for one in page.get("Contents", ()) if one["Key"].endswith(".log")
        ]
        client.close()
        return sum(sizes)

    def urls(self, store_port: int) -> list[list[str]]:
        """Return a URL that needs no credentials for each archived object, by partition."""
        client = s3_client(f"http://127.0.0.1:{store_port}")
        with S3Bucket(self.store.endpoint_url, bucket=_BUCKET, prefix="benchmark") as bucket:
            keys = [key for key in bucket.keys() if key.endswith(".log")]  # noqa: SIM118 it is no mapping
        by_partition: dict[str, list[str]] = {}
        for key in keys:
            url = client.generate_presigned_url(
                "get_object", Params={"Bucket": _BUCKET, "Key": f"benchmark/{key}"}, ExpiresIn=86_400
            )
            by_partition.setdefault(key.split("/")[-2], []).append(url)
        client.close()
        return list(by_partition.values())


@contextmanager
def running_twins(directory: Path, **gateway: object) -> Iterator[Twins]:
    """Run the broker and the store; *gateway* are further settings of the daemon's gateway."""
    behind = asyncio.run(BrokerBehind.start(directory / "broker", heap_mib=1024))
    try:
        for topic in (LOCAL, TIERED):
            configs = {"segment.bytes": str(_SEGMENT_BYTES), "file.delete.delay.ms": "100"}
            asyncio.run(behind.cluster.create_topic(topic, partitions=PARTITIONS, configs=configs))
        with running_seaweedfs(directory / "seaweedfs") as store:
            store.create_bucket(_BUCKET)
            yield Twins(directory, behind, store, gateway=gateway)
    finally:
        asyncio.run(behind.cluster.kill())


class BareGets:
    """Every archived object by a GET that looks at nothing, a connection for each partition."""

    def __init__(self, urls: list[list[str]], size_bytes: int) -> None:
        self._urls = urls
        self._size_bytes = size_bytes
        self._threads = ThreadPoolExecutor(len(urls))

    def upload(self) -> None:
        """Get everything once."""
        got = sum(self._threads.map(_got_bytes, self._urls))
        assert got == self._size_bytes, f"{got} bytes came, and {self._size_bytes} are stored"

    def sent(self) -> Mapping[str, bytes]:
        """Return nothing: what came was not kept."""
        return {}

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


def _got_bytes(urls: list[str]) -> int:
    place = urlsplit(urls[0])
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    room, got = memoryview(bytearray(_PIECE_BYTES)), 0
    for url in urls:
        connection.request("GET", url.removeprefix(f"http://{place.netloc}"))
        answer = connection.getresponse()
        assert answer.status == http.client.OK, f"{url} is answered {answer.status}"
        while size := answer.readinto(room):
            got += size
    connection.close()
    return got


def _write(bootstrap: str, topic: str, records: int) -> None:
    """Write records of 1 KiB in batches of up to 1 MB, not compressed, in turns to all partitions."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 50,
            "batch.size": 1_000_000,
            "queue.buffering.max.kbytes": 200_000,
        }
    )
    for number in range(records):
        value = b"%012d" % number + b"v" * (VALUE_BYTES - 12)
        while True:
            try:
                producer.produce(topic, value, partition=number % PARTITIONS)
            except BufferError:
                producer.poll(0.1)
            else:
                break
    assert producer.flush(120) == 0, f"{topic} could not be written"
