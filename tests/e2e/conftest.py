"""A real broker, a real S3 server and the real command, shared by the tests of the whole."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.e2e.sample_topics import SAMPLE_TOPICS, write_sample_topics
from tests.support.cluster import DaemonsBeside
from tests.support.daemon import kafka_config, run_command, write_config
from tests.support.s3_bucket import S3Bucket
from tests.support.seaweedfs import FRUGAL, running_seaweedfs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.kafka import KafkaCluster
    from tests.support.seaweedfs import SeaweedFS

BUCKET = "e2e"
"""One for all tests, with a prefix for each: every bucket costs the server seven volumes."""


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """Give one running S3 server with a bucket; a test that stops it starts it again."""
    with running_seaweedfs(tmp_path_factory.mktemp("seaweedfs"), environment=FRUGAL) as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture
def prefix() -> str:
    """Give a key prefix that no other test uses."""
    return f"e2e/{uuid.uuid4().hex}"


@pytest.fixture
def topic() -> str:
    """Give a topic name that no other test uses, with every kind of character."""
    return f"a.b_c-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def objects(seaweedfs: SeaweedFS, prefix: str) -> Iterator[S3Bucket]:
    """Give the objects of this test, through a client that is not ours."""
    with S3Bucket(seaweedfs.endpoint_url, bucket=BUCKET, prefix=prefix) as bucket:
        yield bucket


@dataclass(frozen=True)
class SampleArchive:
    """The sample topics, archived once, with the log still whole on the broker."""

    config: Path
    prefix: str
    output: str
    """What `run --once` printed."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def samples(
    kafka: KafkaCluster, seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory
) -> SampleArchive:
    """Give the sample topics in the bucket, put there by one `run --once`."""
    await write_sample_topics(kafka)
    directory, prefix = tmp_path_factory.mktemp("samples"), "e2e/samples"
    topics = {name: {"redpanda.remote.write": True} for name in SAMPLE_TOPICS}
    config = kafka_config(kafka, seaweedfs, directory / "state", bucket=BUCKET, prefix=prefix, topics=topics)
    path = write_config(directory / "tieringd.yaml", config)
    done = run_command("run", "--once", "--config", str(path))
    assert done.returncode == 0, done.stderr.decode()
    return SampleArchive(path, prefix, done.stderr.decode())


@pytest.fixture
def sample_objects(seaweedfs: SeaweedFS, samples: SampleArchive) -> Iterator[S3Bucket]:
    """Give the objects of the sample archive, through a client that is not ours."""
    with S3Bucket(seaweedfs.endpoint_url, bucket=BUCKET, prefix=samples.prefix) as bucket:
        yield bucket


@pytest.fixture
def write_kafka_config(
    kafka: KafkaCluster, seaweedfs: SeaweedFS, prefix: str, tmp_path: Path
) -> Callable[..., Path]:
    """Give a function that writes a configuration for the broker and this test's part of the bucket."""

    def write(**changes: Any) -> Path:
        config = kafka_config(kafka, seaweedfs, tmp_path / "state", bucket=BUCKET, prefix=prefix, **changes)
        return write_config(tmp_path / "tieringd.yaml", config)

    return write


@pytest.fixture
def daemons_of(
    brokers: KafkaCluster, seaweedfs: SeaweedFS, prefix: str, tmp_path: Path
) -> Iterator[Callable[..., DaemonsBeside]]:
    """Give a function that sets up a daemon beside each of the three brokers, for this test's topics."""
    with ExitStack() as stack:

        def set_up(*topics: str, **changes: Any) -> DaemonsBeside:
            wanted = {"topics": {name: {"redpanda.remote.write": True} for name in topics}} | changes
            daemons = DaemonsBeside(
                brokers, seaweedfs, tmp_path, bucket=BUCKET, prefix=prefix, changes=wanted
            )
            return stack.enter_context(daemons)

        yield set_up
