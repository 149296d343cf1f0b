"""The owner of a bucket, on an S3 server and on real brokers: another cluster, another host, another name."""

from __future__ import annotations

import json

import yaml

from tests.builders import segment_bytes
from tests.e2e.archives import archived_manifest, assert_whole
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import SEGMENTS
from tests.support.daemon import (
    directory_config,
    kafka_config,
    run_command,
    run_well,
    s3_properties,
    write_config,
)
from tieringd.formats.archive_owners import ARCHIVE_OWNERS_KEY, BROKER

_VALUES = [bytes([number]) * 100_000 for number in range(25)]


def owners(objects) -> dict[str, str | None]:
    return json.loads(objects.read(ARCHIVE_OWNERS_KEY))["clusters"]


def contents(objects) -> dict[str, bytes | None]:
    return {key: objects.read(key) for key in objects.keys()}  # noqa: SIM118 a method, not a mapping's


async def archived(kafka, config, topic) -> None:
    await kafka.create_topic(topic, configs=SEGMENTS)
    await kafka.produce(topic, _VALUES, max_batch_size=200_000)
    run_well("run", "--once", "--config", str(config))


async def test_second_cluster_writes_nothing_until_it_is_let_in(  # noqa: PLR0917 - fixtures
    kafka, fresh, seaweedfs, prefix, write_kafka_config, objects, topic, tmp_path
):
    """The daemon of another cluster ends at its start, and the bucket is as it was."""
    config = write_kafka_config(topics={topic: {"redpanda.remote.write": True}})
    await archived(kafka, config, topic)
    (ours,) = owners(objects)
    assert owners(objects) == {ours: BROKER}
    before = contents(objects)

    await fresh.create_topic(topic, configs=SEGMENTS)
    await fresh.produce(topic, _VALUES, max_batch_size=200_000)
    other = write_config(
        tmp_path / "other.yaml",
        kafka_config(
            fresh,
            seaweedfs,
            tmp_path / "other",
            bucket=BUCKET,
            prefix=prefix,
            topics={topic: {"redpanda.remote.write": True}},
        ),
    )
    for command in (("run", "--once"), ("run",)):
        refused = run_command(*command, "--config", str(other))
        assert refused.returncode == 2, refused.stderr.decode()
        assert f"is that of the cluster {ours}, and this daemon is of the cluster" in refused.stderr.decode()
    assert contents(objects) == before

    assert ours in run_well("archive", "claim", "--config", str(other)).decode()
    for each in (other, config):
        run_well("run", "--once", "--config", str(each))
    assert set(owners(objects).values()) == {BROKER}
    assert len(owners(objects)) == 2
    assert_whole(config)


async def test_server_under_another_name_is_no_target_of_a_move(
    kafka, write_kafka_config, objects, topic, tmp_path
):
    """The place is one, whatever its address: nothing is closed, and the daemon goes on."""
    config = write_kafka_config(topics={topic: {"redpanda.remote.write": True}})
    await archived(kafka, config, topic)
    before = contents(objects)
    settings = yaml.safe_load(config.read_text())
    assert settings["cloud_storage_api_endpoint"] == "127.0.0.1"
    alias = write_config(tmp_path / "alias.yaml", settings | {"cloud_storage_api_endpoint": "localhost"})
    for command in ("copy", "move"):
        refused = run_command("archive", command, "--to", str(alias), "--config", str(config))
        assert refused.returncode == 2, refused.stderr.decode()
        assert "are two names of one place" in refused.stderr.decode()
    assert contents(objects) == before
    assert not archived_manifest(objects, topic).is_closed
    run_well("run", "--once", "--config", str(config))


def test_second_host_without_a_broker_writes_nothing(seaweedfs, prefix, objects, tmp_path):
    """Both have the default cluster id, and state directories of their own."""
    configs = []
    for name in ("a", "b"):
        logs = tmp_path / name / "logs" / "orders-0"
        logs.mkdir(parents=True)
        for base_offset in (0, 12, 24):
            (logs / f"{base_offset:020d}.log").write_bytes(segment_bytes(base_offset, value=name.encode()))
        settings = directory_config([tmp_path / name / "logs"], tmp_path / "none", tmp_path / name / "state")
        del settings["cloud_storage_file_root"]
        place = s3_properties(seaweedfs, bucket=BUCKET, prefix=prefix)
        configs.append(write_config(tmp_path / f"{name}.yaml", settings | place))
    run_well("run", "--once", "--config", str(configs[0]))
    before = contents(objects)
    refused = run_command("run", "--once", "--config", str(configs[1]))
    assert refused.returncode == 2, refused.stderr.decode()
    assert "a host without a broker" in refused.stderr.decode()
    assert contents(objects) == before
    run_well("run", "--once", "--config", str(configs[0]))
