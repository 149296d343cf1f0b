"""The check of a daemon's archive: nothing is written before it has passed, and it is made once."""

from __future__ import annotations

import json

import pytest
from crc32c import crc32c

from tests.support.daemon import directory_config, write_config
from tieringd.archive.owner_record import OwnerRecord
from tieringd.config import load_config
from tieringd.daemon.archive import opened_archive
from tieringd.daemon.archive_owner import ArchiveCheck, claimant_of, cluster_on_disk, note_host
from tieringd.daemon.file_archive import claim_file_root, note_first_start
from tieringd.errors import ConfigError, StorageUnavailable
from tieringd.formats.archive_owners import BROKER
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
    """However often it is made; it passes when an operator has let the cluster in."""
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
