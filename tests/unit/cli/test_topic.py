"""`tieringd topic`: what an operator decides of a topic."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import yaml

from tests.builders import segment_bytes
from tests.support.daemon import write_config
from tests.unit.cli.commands import TOPIC, TOPIC_ID, invoked, tieringd
from tieringd.broker.log_dir import read_local_log, scan_log_dirs
from tieringd.broker.pins import PinDirectory
from tieringd.cli.options import loaded
from tieringd.daemon.archive import opened_archive
from tieringd.daemon.assembly import pin_candidates
from tieringd.errors import ConfigError
from tieringd.formats.object_keys import TopicKey
from tieringd.formats.topic_manifest import OriginalRetention

OURS = TopicKey("local", TOPIC, TOPIC_ID)
THEIRS = TopicKey("another-cluster", TOPIC, "AAAAAAAAAAAAAAAAAAAAAA")
RETENTION_MS = {OURS: "2592000000", THEIRS: "3600000"}


@pytest.fixture
def shared(own_site):
    """Return an archive that another cluster shares: its topic of the same name is the younger one."""
    assert tieringd("run", "--once", "--config", own_site.config).exit_code == 0

    async def fill():
        async with opened_archive(loaded(own_site.config), writer_id="a1") as archive:
            await archive.manifests.ensure_topic(THEIRS, partition_count=1)
            for number, (key, limit) in enumerate(RETENTION_MS.items()):
                kept = OriginalRetention(limit, None, effective_ms=int(limit), effective_bytes=-1)
                await archive.manifests.change_topic(
                    key,
                    lambda one, kept=kept, number=number: replace(
                        one,
                        created_at_ms=1_700_000_000_000 + number,
                        original_retention=kept,
                        retention_released=True,
                    ),
                )

    asyncio.run(fill())
    return own_site


def manifests(site):
    """Return the manifests of our topic and of the other cluster's."""

    async def load():
        async with opened_archive(loaded(site.config)) as archive:
            return [await archive.manifests.load_topic(key) for key in (OURS, THEIRS)]

    return asyncio.run(load())


def test_paused_topic_is_neither_uploaded_nor_trimmed(own_site):
    """A pass does nothing while a topic is paused. A resume reports the coverage, and the next pass works."""
    config = ("--config", own_site.config)
    assert tieringd("run", "--once", *config).exit_code == 0
    before = tieringd("archive", "describe", TOPIC, *config, "--format", "json").json()
    paused = tieringd("topic", "pause", TOPIC, *config)
    assert (paused.exit_code, "is paused" in paused.output) == (0, True)
    assert tieringd("topic", "show", TOPIC, *config, "--format", "json").json()["archiving"] == "paused"

    done = tieringd("run", "--once", *config)
    assert "0 partitions: 0 segments uploaded, 0 trimmed" in done.errors
    assert tieringd("archive", "describe", TOPIC, *config, "--format", "json").json() == before

    (row,) = tieringd("topic", "resume", TOPIC, *config, "--format", "json").json()
    assert row == {
        "partition": 0,
        "archive_next_offset": before[0]["next_offset"],
        "local_first_offset": row["local_first_offset"],
        "pinned_offsets": 0,
        "missing_offsets": 0,
    }
    assert "1 partitions: 0 segments uploaded" in tieringd("run", "--once", *config).errors


@pytest.mark.parametrize("are_pinned", [(24,), (24, 36), (), (36,)], ids=str)
def test_resume_counts_what_pins_hold(own_site, are_pinned):
    """Offsets that the broker deleted while the topic was paused are missing only where no pin holds them."""
    assert tieringd("run", "--once", "--config", own_site.config).exit_code == 0
    for base_offset in (36, 48):
        path = own_site.partition_directory / f"{base_offset:020d}.log"
        path.write_bytes(segment_bytes(base_offset))
    log_dir = own_site.partition_directory.parent
    (log_dir / "meta.properties").write_text("version=1\ncluster.id=local\nnode.id=1\n")
    text = yaml.safe_load(own_site.config.read_text())
    text["broker"] |= {"kind": "kafka", "bootstrap": ["127.0.0.1:1"]}
    config = ("--config", write_config(own_site.config, text))
    paused = invoked("topic", "pause", TOPIC, *config).output
    assert "what it deletes stays in pins up to pin_max_bytes" in paused

    pins = PinDirectory(pin_candidates(loaded(own_site.config), log_dir)[0])
    (local,) = scan_log_dirs([str(log_dir)]).partitions
    log = read_local_log(local)
    for segment in log.segments:
        if segment.base_offset in are_pinned:
            assert pins.make(local, segment)
    pins.note(log)
    for base_offset in (0, 12, 24, 36):
        for path in own_site.partition_directory.glob(f"{base_offset:020d}.*"):
            path.unlink()
    done = invoked("topic", "resume", TOPIC, *config, "--format", "json")
    pinned = 12 * len(are_pinned)
    assert done.json() == [
        {
            "partition": 0,
            "archive_next_offset": 24,
            "local_first_offset": 48,
            "pinned_offsets": pinned,
            "missing_offsets": 24 - pinned,
        }
    ]
    table = invoked("topic", "resume", TOPIC, *config).output
    assert ("become gaps" in table) == (pinned < 24)


@pytest.mark.parametrize("how", ["segment", "epochs", "metadata"])
@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--format", "json")], ids=str)
def test_resume_names_a_log_that_it_cannot_read(own_site, how, options):
    """The exit code is 1, and nothing is said of gaps in a log that was not compared."""
    config = ("--config", own_site.config)
    assert tieringd("run", "--once", *config).exit_code == 0
    directory = own_site.partition_directory
    if how == "segment":
        log = directory / f"{0:020d}.log"
        log.unlink()
        log.symlink_to(log)
    elif how == "epochs":
        (directory / "leader-epoch-checkpoint").write_text("garbage\n")
    else:
        metadata = directory / "partition.metadata"
        metadata.unlink()
        metadata.symlink_to(metadata)
    done = invoked("topic", "resume", TOPIC, *config, *options)
    assert (done.exit_code, f"{TOPIC}-0" in done.errors) == (1, True)
    assert "no gap" not in done.output
    assert "0 offsets" not in done.output
    assert "are not known" in done.errors


def test_unknown_topic_is_said(site):
    """A topic that the bucket does not hold cannot be paused."""
    done = tieringd("topic", "pause", "nothing", "--config", site.config)
    assert (done.exit_code, done.output) == (1, "")
    assert "no topic named nothing" in done.errors


def test_retention_that_is_not_managed_cannot_be_released(own_site):
    """There is nothing to give back, and the error says so."""
    tieringd("run", "--once", "--config", own_site.config)
    done = tieringd("topic", "release", TOPIC, "--config", own_site.config)
    assert done.exit_code == 2
    assert "is not managed" in done.errors
    assert (
        "manage its retention again if"
        in tieringd("topic", "manage", TOPIC, "--config", own_site.config).output
    )


def test_decisions_are_about_the_topic_of_this_cluster(shared):
    """The topic of another cluster keeps its manifest, although it has the name and is younger."""
    ours, theirs = manifests(shared)
    config = ("--config", shared.config)
    invoked("topic", "pause", TOPIC, *config)
    assert manifests(shared) == [replace(ours, archiving="paused"), theirs]
    invoked("topic", "manage", TOPIC, *config)
    invoked("topic", "resume", TOPIC, *config)
    assert manifests(shared) == [replace(ours, retention_released=False), theirs]
    released = invoked("topic", "release", TOPIC, "--dry-run", *config).output
    assert f"the broker would get retention.ms={RETENTION_MS[OURS]} " in released
    shown = invoked("archive", "resolve", f"{TOPIC}-0", *config, "--format", "json").json()
    assert shown["partition"] == f"{TOPIC}-0"


READS = {
    "show": ("topic", "show", TOPIC),
    "describe": ("archive", "describe", TOPIC),
    "manifest": ("archive", "manifest", TOPIC, "0"),
    "cat": ("archive", "cat", TOPIC, "0"),
    "read": ("read", TOPIC, "--partition", "0", "--archive-only"),
}


@pytest.mark.parametrize("name", READS)
def test_reading_of_a_name_in_several_clusters_takes_the_own_or_asks_for_one(shared, name):
    """A command that reads the bucket takes its own cluster's topic. Where none is, it names the clusters."""
    own = invoked(*READS[name], "--config", shared.config)
    assert (own.exit_code, bool(own.output)) == (0, True)
    text = yaml.safe_load(shared.config.read_text())
    text["cluster_id"] = "third"
    arguments = (*READS[name], "--config", write_config(shared.config.with_name("third.yaml"), text))
    with pytest.raises(ConfigError, match=r"another-cluster, local.*--from-cluster local"):
        invoked(*arguments)
    done = invoked(*arguments, "--from-cluster", "local")
    assert (done.exit_code, done.output) == (0, own.output)
    if name == "show":
        assert TOPIC_ID in done.output
