"""Topics on a real broker in which a few keys are written over and over, and what is in their archive."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from tests.e2e.archives import (
    archived_manifest,
    archived_manifests,
    assert_whole,
    base_of_active,
    read_records,
)
from tests.e2e.sample_topics import ISOLATIONS, SEGMENTS, consumed
from tests.support.daemon import run_command
from tieringd.config import load_config

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from tests.e2e.sample_topics import SeenRecord
    from tests.support.kafka import KafkaCluster
    from tests.support.s3_bucket import S3Bucket
    from tieringd.config import Config
    from tieringd.model.manifest import PartitionManifest

KEYS = 9
VALUE_BYTES = 50_000
SECRET = b"secret-key-of-someone"


def config_of(path: Path) -> Config:
    """Return a configuration as a job has it."""
    return load_config(path, environ=os.environ)


@dataclass(frozen=True)
class KeyedTopic:
    """A topic of small segments on a broker, and the objects of its archive."""

    kafka: KafkaCluster
    name: str
    objects: S3Bucket

    async def create(self) -> None:
        """Create it."""
        await self.kafka.create_topic(self.name, configs=SEGMENTS)

    async def write(self, *, seed: int, records: int = 120, codec: str | None = None) -> None:
        """
        Write values and deletions of a few keys, some in transactions that end segments later, well or not.

        One key is deleted for good at once. The last record is an ordinary one.
        """
        random = Random(seed)
        transactional_id = f"{self.name}-{seed}"
        async with (
            self.kafka.producer(max_batch_size=300_000, compression_type=codec, linger_ms=5) as plain,
            self.kafka.producer(transactional_id=transactional_id, max_batch_size=300_000) as in_doubt,
        ):
            for value in (b"to be deleted", None):
                await plain.send_and_wait(self.name, value, key=b"deleted", partition=0)
            for turn in range(4):
                await in_doubt.begin_transaction()
                sent = []
                for number in range(records // 4):
                    key = b"key-%d" % random.randrange(KEYS)
                    key = None if number == 7 else SECRET if number % 10 == 1 else key
                    value = None if number % 11 == 5 else random.randbytes(VALUE_BYTES)
                    producer = in_doubt if number % 3 == 0 else plain
                    sent.append(await producer.send(self.name, value, key=key, partition=0))
                for each in sent:
                    await each
                await (in_doubt.abort_transaction() if turn % 2 else in_doubt.commit_transaction())
        await self.kafka.until_stable(self.name)
        await self.kafka.produce(self.name, [b"end"])

    @property
    def manifest(self) -> PartitionManifest:
        """Return the stored manifest."""
        return archived_manifest(self.objects, self.name)

    @property
    def is_archived(self) -> bool:
        """Say whether the archive reaches to the active segment."""
        directory = self.kafka.log_dir() / f"{self.name}-0"
        active = base_of_active(directory)
        manifests = archived_manifests(self.objects, self.name)
        return [one.next_offset for one in manifests.values()] == [active]

    async def consumed(self, next_offset: int = 1 << 62) -> dict[str, list[SeenRecord]]:
        """Return what consumers of each isolation level get below *next_offset*."""
        found = {one: await consumed(self.kafka, self.name, one) for one in ISOLATIONS}
        return {
            isolation: [one for one in some if one.offset < next_offset] for isolation, some in found.items()
        }


def archived_records(config: Path, topic: str) -> dict[str, list[SeenRecord]]:
    """Return what `tieringd read` gives of the archive, by isolation level."""
    return {one: read_records(config, topic, "--isolation", one) for one in ISOLATIONS}


def without(records: dict[str, list[SeenRecord]], keys: Collection[bytes]) -> dict[str, list[SeenRecord]]:
    """Return the records of each isolation level that have none of *keys*."""
    return {isolation: [one for one in some if one.key not in keys] for isolation, some in records.items()}


def assert_sound(config: Path) -> Any:
    """Assert that a deep scrub and a deep verification find no fault; return the scrub's report."""
    done = run_command("archive", "scrub", "--deep", "--json", "--config", str(config))
    report = json.loads(done.stdout)
    assert (done.returncode, report["findings"]) == (0, []), done.stderr.decode()
    assert_whole(config)
    return report


def archive_once(config: Path) -> None:
    """Archive all that is closed, with one `run --once`."""
    done = run_command("run", "--once", "--config", str(config))
    assert done.returncode == 0, done.stderr.decode()
