"""What the archivers of a daemon begin with."""

from __future__ import annotations

from tests.fakes.archive import archive_in, observed
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tieringd.archiving.manifest_upkeep import FollowedManifests
from tieringd.config import parse_config
from tieringd.daemon.assembly import ArchiverFactory
from tieringd.formats.object_keys import manifest_key
from tieringd.metrics import Metrics
from tieringd.model.partition import Leadership
from tieringd.topics.topic_registry import TopicRegistry, partition_counts


async def test_archiver_of_a_new_partition_reads_no_manifest(tmp_path):
    """The registry tells it that the bucket has none, once the topic's manifest is stored."""
    text = f"broker: {{kind: none, log_dirs: [{tmp_path}/log]}}\nstate_directory: {tmp_path}/state\n"
    config = parse_config(text, source="test", environ={})
    store = MemoryStore()
    archive, writer = archive_in(store), LogWriter(tmp_path / "log", "orders", 0)
    registry = TopicRegistry(store, archive.manifests)
    make = ArchiverFactory(
        config,
        Metrics(),
        archive,
        FakeBroker(writer),
        followed_manifests=FollowedManifests(archive.manifests, steady_ms=archive.clock.steady_ms),
        registry=registry,
    )
    archiver = make(Leadership(writer.identified, 0))
    await registry.refresh(None)
    await registry.ensure(partition_counts([writer.identified]))
    store.requests.clear()
    await archiver.step(observed(writer))
    key = manifest_key(writer.identified)
    assert [operation for operation, asked in store.requests if asked == key] == ["put"]
