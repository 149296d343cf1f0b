"""The check of a daemon's archive: nothing is written before it has passed, and it is made once."""

from __future__ import annotations

import json

import pytest
from crc32c import crc32c

from tests.support.daemon import directory_config, write_config
from tieringd.archive.owner_record import OwnerRecord
from tieringd.config import load_config
from tieringd.config.load import parse_config
from tieringd.daemon.archive import opened_archive
from tieringd.daemon.file_archive import claim_file_root, note_first_start
from tieringd.daemon.ownership_check import ArchiveCheck, claimant_of, cluster_on_disk, note_host, own_cluster
from tieringd.errors import BrokerUnavailable, ConfigError, StorageUnavailable
from tieringd.formats.archive_owners import ARCHIVE_OWNERS_KEY, BROKER
from tieringd.policies.archive_ownership import Claimant
from tieringd.storage.file_root import marker_of


def config_in(directory, **changes):
    """Return the configuration of a host that has never run."""
    (directory / "logs").mkdir(exist_ok=True)
    settings = directory_config([directory / "logs"], directory / "archive", directory / "state", **changes)
    return load_config(write_config(directory / "tieringd.yaml", settings), environ={})


@pytest.fixture
def config(tmp_path):
    """Give the configuration of a host at its first start, as far as the check."""
    config = config_in(tmp_path)
    note_first_start(config)
    note_host(config)
    claim_file_root(config)
    return config


async def written(store) -> bool:
    """Say whether the store takes an object."""
    try:
        await store.put("some/object", b"x", crc32c=crc32c(b"x"))
    except StorageUnavailable:
        return False
    return True


async def test_nothing_is_written_before_the_check_has_passed(config):
    """A broker may tell the cluster's id late, and a store may answer late: all parts wait for the check."""
    async with opened_archive(config) as archive:
        check = ArchiveCheck(config, archive)
        assert not await written(archive.store)
        await check("local")
        assert await written(archive.store)
        # Another process may claim the archive now: this one does not ask again.
        await OwnerRecord(archive.store, place="p").admit(Claimant("local", "another"))
        await check("local")
        assert await written(archive.store)


async def test_check_that_fails_leaves_the_bucket_as_it_was(config):
    """
    A failed check writes nothing, however often it is made.

    It passes when an operator admits the cluster.
    """
    async with opened_archive(config) as other:
        await OwnerRecord(other.store, place="p").claim(Claimant("other", BROKER))
        async with opened_archive(config) as archive:
            check = ArchiveCheck(config, archive)
            before = [one.key for one in (await other.store.list_page("")).objects]
            for _ in range(2):
                with pytest.raises(ConfigError, match="that of the cluster other"):
                    await check("local")
                assert not await written(archive.store)
            assert [one.key for one in (await other.store.list_page("")).objects] == before
            await OwnerRecord(other.store, place="p").admit(claimant_of(config, "local"))
            await check("local")
            assert await written(archive.store)


def test_first_start_is_one_for_the_directory_as_well(tmp_path):
    """The note of the host does not make a state directory look used, nor does the other note."""
    config = config_in(tmp_path)
    note_first_start(config)
    note_host(config)
    claim_file_root(config)
    assert marker_of(tmp_path / "archive")
    assert claimant_of(config, "local").is_first_start
    assert claimant_of(config, "local") == claimant_of(config, "local")


def test_host_that_ran_before_is_known_by_its_state_directory(tmp_path):
    """An older release left its lock there."""
    config = config_in(tmp_path)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "lock").touch()
    assert not claimant_of(config, "local").is_first_start


@pytest.mark.parametrize("data", [b"", b"[]", b'{"version": 1}', b'{"version": 9, "id": "a"}'])
def test_damaged_note_of_the_host_is_refused_with_a_way_on(tmp_path, data):
    """Another id would make this host another one."""
    config = config_in(tmp_path)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "host.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"host.json.*tieringd archive claim"):
        claimant_of(config, "local")


@pytest.mark.parametrize(
    ("kind", "named", "on_disk", "told"),
    [
        pytest.param("none", None, None, ("local", False), id="neither"),
        pytest.param("none", "mine", None, ("mine", False), id="named"),
        pytest.param("none", None, "q1", ("q1", True), id="left behind by a broker"),
        pytest.param("none", "q1", "q1", ("q1", True), id="named as it is"),
        pytest.param("none", "mine", "q1", ("mine", False), id="named otherwise"),
        pytest.param("kafka", None, "q1", ("q1", True), id="broker"),
        pytest.param("kafka", None, None, (None, True), id="broker that has not told it"),
    ],
)
def test_owner_is_the_cluster_where_a_broker_tells_it(tmp_path, kind, named, on_disk, told):
    """No state directory is asked then: each broker has its own, and may lose it."""
    cluster, is_broker = told
    changes = {"cluster_id": named} if named else {}
    if kind == "kafka":
        broker = {"kind": "kafka", "log_dirs": [str(tmp_path / "logs")], "bootstrap": ["127.0.0.1:9092"]}
        changes["broker"] = broker
    config = config_in(tmp_path, **changes)
    if on_disk:
        text = f"version=1\ncluster.id={on_disk}\nnode.id=1\n"
        (tmp_path / "logs" / "meta.properties").write_text(text)
    assert cluster_on_disk(config) == cluster
    claimant = claimant_of(config, cluster or "told later")
    note = tmp_path / "state" / "host.json"
    assert (claimant.owner == BROKER) is is_broker is not note.exists()
    if not is_broker:
        assert json.loads(note.read_bytes())["id"] == claimant.owner


def test_file_that_only_opens_the_bucket_is_for_no_cluster(tmp_path):
    """The default of `cluster_id` would choose the topics of that cluster among those of several."""
    text = f"state_directory: {tmp_path}\n"
    config = parse_config(text, source="t.yaml", environ={}, needs_broker=False)
    assert cluster_on_disk(config) is None


async def test_broker_is_asked_for_the_cluster_only_where_its_files_do_not_tell(tmp_path):
    """A stopped broker's files tell its cluster. Without them a command ends, and takes no other cluster."""
    broker = {"kind": "kafka", "bootstrap": ["127.0.0.1:1"], "log_dirs": [str(tmp_path / "logs")]}
    config = config_in(tmp_path, broker=broker)
    with pytest.raises(BrokerUnavailable):
        await own_cluster(config)
    (tmp_path / "logs" / "meta.properties").write_text("version=1\ncluster.id=ours\nnode.id=1\n")
    assert await own_cluster(config) == "ours"


async def test_another_cluster_of_the_broker_is_checked_as_well(config):
    """A broker that is formatted anew beside its daemon is of another cluster: nothing is written."""
    async with opened_archive(config) as archive:
        check = ArchiveCheck(config, archive)
        await check("local")
        with pytest.raises(
            ConfigError, match="that of the cluster local, and this daemon is of the cluster new"
        ):
            await check("new")
        assert not await written(archive.store)
        await check("local")
        assert await written(archive.store)


async def test_lost_record_is_made_anew_by_the_host_that_has_claimed_the_archive(config):
    """The runbook says so. That the host once began with an empty state directory does not matter by then."""
    async with opened_archive(config) as archive:
        await ArchiveCheck(config, archive)("local")
        manifest = "meta/local/topics/orders_i/topic_manifest.json"
        await archive.store.put(manifest, b"{}", crc32c=crc32c(b"{}"))
        before = await OwnerRecord(archive.store, place="p").owners()
        await archive.store.delete_many([ARCHIVE_OWNERS_KEY])
    async with opened_archive(config) as archive:
        await ArchiveCheck(config, archive)("local")
        assert await OwnerRecord(archive.store, place="p").owners() == before
        assert await written(archive.store)


async def test_claim_of_one_archive_says_nothing_of_another(config):
    """A host of an older release may have archived there under the same cluster id."""
    async with opened_archive(config) as archive:
        await ArchiveCheck(config, archive)("local")
    assert not claimant_of(config, "local").is_first_start
    elsewhere = config.model_copy(update={"cloud_storage_prefix": "elsewhere/"})
    assert claimant_of(elsewhere, "local").is_first_start
