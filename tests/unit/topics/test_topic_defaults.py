"""Topic defaults: what a topic begins with, recorded once."""

from __future__ import annotations

import pytest

from tests.fakes.log_writer import CLUSTER
from tests.fakes.store import store_unavailable
from tests.fakes.topics import topic_config
from tests.unit.config.texts import TIERED, parsed
from tieringd.errors import StorageUnavailable
from tieringd.formats.object_keys import TopicKey, topic_manifest_key
from tieringd.formats.topic_manifest import TieringDefaults
from tieringd.topics.each_topic import TopicFaults
from tieringd.topics.topic_defaults import TopicDefaultsRecorder
from tieringd.topics.topic_registry import TopicRegistry

DAY_MS = 86_400_000
ON = topic_config()
OFF = topic_config(remote_write=False, remote_read=False)
DEFAULTS = TieringDefaults(remote_write=True, remote_read=True)


def key(topic: str) -> TopicKey:
    return TopicKey(CLUSTER, topic, topic.ljust(22, "A"))


class HalfRegistry(TopicRegistry):
    """Cannot record the topic `second` until it is mended."""

    is_broken = True

    async def record_defaults(self, key: TopicKey, defaults: TieringDefaults) -> None:
        if self.is_broken and key.topic == "second":
            raise store_unavailable("put")
        await super().record_defaults(key, defaults)


@pytest.fixture
def registry(store, archive):
    return TopicRegistry(store, archive.manifests)


@pytest.fixture
def defaults_recorder(broker, registry):
    return TopicDefaultsRecorder(broker, registry)


def target_of(registry: TopicRegistry, topic: str) -> tuple[int | None, int | None]:
    recorded = registry.manifest(key(topic)).defaults
    return recorded.local_target_ms, recorded.local_target_bytes


@pytest.fixture
async def known_cluster(defaults_recorder):
    """A cluster whose topics were recorded before."""
    await defaults_recorder.step({key("old"): ON}, DEFAULTS)


async def test_topics_that_were_there_before_us_begin_with_the_cluster_values(
    defaults_recorder, registry, broker
):
    """The retention of such topics says nothing of a local target, so they keep their local properties."""
    broker.configs = {"old": {"retention.ms": "5000"}}
    await defaults_recorder.step({key("old"): ON, key("older"): ON}, DEFAULTS)
    assert target_of(registry, "old") == target_of(registry, "older") == (None, None)


@pytest.mark.usefixtures("known_cluster")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param({}, (None, None), id="nothing"),
        pytest.param({"retention.ms": "5000"}, (5000, None), id="time"),
        pytest.param({"retention.bytes": "7000"}, (None, 7000), id="size"),
        pytest.param({"retention.ms": "-1"}, (-1, None), id="no-limit"),
        pytest.param(
            {"retention.ms": "5000", "retention.local.target.ms": "100"}, (None, None), id="own-time"
        ),
        pytest.param({"retention.bytes": "5000", "local.retention.bytes": "-2"}, (None, None), id="own-size"),
        pytest.param({"retention.local.target.ms": "100"}, (None, None), id="own-time-alone"),
        pytest.param(
            {"retention.ms": "5000", "retention.bytes": "7000", "retention.local.target.ms": "100"},
            (None, 7000),
            id="each-kind-by-itself",
        ),
    ],
)
async def test_new_topic_with_tiering_on_begins_with_its_retention(
    defaults_recorder, registry, broker, overrides, expected
):
    """Nothing is recorded if the creator of a topic set a local target, or if it has no total."""
    broker.configs = {"new": overrides}
    await defaults_recorder.step({key("new"): ON}, DEFAULTS)
    assert target_of(registry, "new") == expected


@pytest.mark.usefixtures("known_cluster")
async def test_record_has_an_effect_while_the_topic_has_no_local_target(defaults_recorder, registry, broker):
    """The record is in force at once. So is a target of the creator, until it is removed."""
    strict = parsed(TIERED + "retention_local_strict: true\n")
    broker.configs = {
        "total": {"retention.ms": f"{9 * DAY_MS}"},
        "both": {"retention.ms": f"{9 * DAY_MS}", "retention.local.target.ms": "100"},
    }
    await defaults_recorder.step({key("total"): ON, key("both"): ON}, DEFAULTS)

    def target_ms(topic, without=None):
        properties = {name: value for name, value in broker.configs[topic].items() if name != without}
        return strict.topic(topic, properties, registry.manifest(key(topic))).local_retention_target.target_ms

    assert target_ms("total") == 9 * DAY_MS
    assert target_ms("both") == 100
    assert target_ms("both", without="retention.local.target.ms") == DAY_MS, "the cluster's value"


@pytest.mark.usefixtures("known_cluster")
async def test_new_topic_without_tiering_keeps_its_local_properties_when_it_is_toggled(
    defaults_recorder, registry, broker
):
    """The rules are for topics created with tiering on."""
    broker.configs = {"new": {"retention.ms": "5000"}}
    await defaults_recorder.step({key("new"): OFF}, DEFAULTS)
    assert target_of(registry, "new") == (None, None)
    await defaults_recorder.step({key("new"): ON}, DEFAULTS)
    assert target_of(registry, "new") == (None, None)


@pytest.mark.usefixtures("known_cluster")
async def test_another_daemon_of_the_cluster_knows_new_topics_too(store, archive, registry, broker):
    """The bucket's content counts, not the process that wrote it."""
    other = TopicRegistry(store, archive.manifests)
    await other.refresh(CLUSTER)
    broker.configs = {"new": {"retention.ms": "5000"}}
    await TopicDefaultsRecorder(broker, other).step({key("new"): ON}, DEFAULTS)
    assert target_of(other, "new") == (5000, None)


async def test_first_recording_that_is_cut_off_takes_nothing_for_new(store, archive, broker):
    """A topic counts as new only after all earlier topics have been recorded."""
    broker.configs = {"second": {"retention.ms": "5000"}}
    registry = HalfRegistry(store, archive.manifests)
    defaults_recorder = TopicDefaultsRecorder(broker, registry)
    with pytest.raises(StorageUnavailable):
        await defaults_recorder.step({key("first"): ON, key("second"): ON}, DEFAULTS)
    assert registry.has_records
    registry.is_broken = False
    await defaults_recorder.step({key("second"): ON}, DEFAULTS)
    assert target_of(registry, "second") == (None, None)


async def test_topic_that_fails_at_the_first_recording_keeps_no_other_from_it(
    store, archive, registry, defaults_recorder, broker
):
    """The others are recorded, a later one counts as new, and the failed one never does."""
    broker.configs = {name: {"retention.ms": "5000"} for name in ("second", "third", "new")}
    store.add(topic_manifest_key(key("second")), b"{")
    with pytest.raises(TopicFaults) as failed:
        await defaults_recorder.step({key(name): ON for name in ("first", "second", "third")}, DEFAULTS)
    assert failed.value.faults.keys() == {key("second")}
    assert target_of(registry, "third") == (None, None)
    await archive.manifests.ensure_topic(key("new"), partition_count=1)
    store.remove(topic_manifest_key(key("second")))
    await defaults_recorder.step({key("second"): ON, key("new"): ON}, DEFAULTS)
    assert target_of(registry, "second") == (None, None)
    assert target_of(registry, "new") == (5000, None)
