"""What admin tools see of an archive: settings of topics, and sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kio.schema.errors import ErrorCode

from tests.fakes.log_writer import LogWriter
from tests.support.archive_endpoints import archive_topic, asking
from tests.support.kafka_messages import fields_of, request_module
from tieringd.errors import StorageUnavailable
from tieringd.formats.object_keys import TopicKey
from tieringd.formats.topic_manifest import OriginalRetention

TOPIC, BROKER = 2, 4


def configs_request(version, *resources):
    """Return a request about types, names and keys."""
    module = request_module(32, version)
    return module.DescribeConfigsRequest(
        **fields_of(module.DescribeConfigsRequest, include_synonyms=True, include_documentation=True),
        resources=tuple(
            module.DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=keys)
            for kind, name, keys in resources
        ),
    )


def log_dirs_request(version, topics):
    module = request_module(35, version)
    if topics is not None:
        topics = tuple(
            module.DescribableLogDirTopic(topic=name, partitions=numbers) for name, numbers in topics
        )
    return module.DescribeLogDirsRequest(topics=topics)


@pytest.mark.parametrize("version", range(1, 5))
async def test_settings_of_a_topic_are_read_only(writer, archive, tmp_path, version):
    """Nothing is deleted here, and a recorded limit is shown."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    one = writer.identified
    await archive.manifests.change_topic(
        TopicKey(one.cluster, one.topic, one.topic_id),
        lambda found: replace(found, original_retention=OriginalRetention("86400000", None)),
    )
    async with asking(archive, tmp_path / "state") as client:
        answer = await client.ask(
            configs_request(
                version,
                (TOPIC, "orders", None),
                (TOPIC, "orders", ("retention.ms",)),
                (TOPIC, "none", None),
                (BROKER, "0", None),
                (BROKER, "7", None),
            )
        )
    whole, part, unknown, node, other = answer.results
    assert {setting.name: setting.value for setting in whole.configs} == {
        "cleanup.policy": "delete",
        "remote.storage.enable": "true",
        "retention.bytes": "-1",
        "retention.ms": "86400000",
    }
    assert all(setting.read_only for setting in whole.configs)
    assert [setting.name for setting in part.configs] == ["retention.ms"]
    assert unknown.error_code == ErrorCode.unknown_topic_or_partition
    assert (node.error_code, node.configs) == (ErrorCode.none, ())
    assert other.error_code == ErrorCode.invalid_request


@pytest.mark.parametrize("version", range(1, 6))
async def test_bucket_is_the_only_log_directory(archive, tmp_path, version):
    """The bucket has the bytes of each partition. A partition that cannot be read is left out."""
    sizes = {}
    for number in range(2):
        writer = LogWriter(tmp_path, "orders", number)
        writer.closed_segment(b"v" * 100 * (number + 1))
        sizes["orders", number] = (await archive_topic(writer, archive)).segments.total_bytes
    writer = LogWriter(tmp_path, "audit")
    writer.closed_segment()
    sizes["audit", 0] = (await archive_topic(writer, archive)).segments.total_bytes

    async def told(client, topics):
        (directory,) = (await client.ask(log_dirs_request(version, topics))).results
        assert (directory.error_code, directory.log_dir) == (ErrorCode.none, "remote:///nowhere/archive")
        return {
            (topic.name, one.partition_index): one.partition_size
            for topic in directory.topics
            for one in topic.partitions
        }

    async with asking(archive, tmp_path / "state") as client:
        assert await told(client, None) == sizes
        wanted = [("orders", (1, 5)), ("none", (0,))]
        assert await told(client, wanted) == {("orders", 1): sizes["orders", 1]}
    async with asking(archive, tmp_path / "other") as client:
        archive.store.fail_next("get", lambda: StorageUnavailable("away"), times=100)
        # The topics are known since the start; their manifests cannot be read.
        assert await told(client, None) == {}
