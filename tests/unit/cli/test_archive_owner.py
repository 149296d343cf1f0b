"""The owner of an archive: two hosts or clusters over one directory, as operators meet it."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.builders import segment_bytes
from tests.support.daemon import directory_config, write_config
from tests.unit.cli.commands import invoked, tieringd
from tieringd.formats.archive_owners import ARCHIVE_OWNERS_KEY, BROKER

if TYPE_CHECKING:
    from pathlib import Path

BASES = (0, 12, 24)


class Host:
    """A host without a broker that archives `orders` into the directory *archive*."""

    def __init__(self, root: Path, archive: Path, **changes) -> None:
        self.root, self.archive = root, archive
        logs = root / "logs" / "orders-0"
        logs.mkdir(parents=True)
        for base_offset in BASES:
            (logs / f"{base_offset:020d}.log").write_bytes(
                segment_bytes(base_offset, value=root.name.encode())
            )
        self.config = write_config(
            root / "tieringd.yaml", directory_config([root / "logs"], archive, root / "state", **changes)
        )

    def run(self):
        return tieringd("run", "--once", "--config", self.config)

    def claim(self):
        return invoked("archive", "claim", "-c", self.config)


def objects(archive: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(archive)): path.read_bytes()
        for path in archive.rglob("*")
        if path.is_file() and ".tieringd" not in str(path.relative_to(archive))
    }


def owners(archive: Path) -> dict[str, str | None]:
    return json.loads((archive / ARCHIVE_OWNERS_KEY).read_bytes())["clusters"]


@pytest.fixture
def archive(tmp_path):
    return tmp_path / "archive"


def test_second_host_with_the_default_cluster_id_writes_nothing(tmp_path, archive):
    """Two logs in one archive would be a mix of both; the first host goes on."""
    first, second = Host(tmp_path / "a", archive), Host(tmp_path / "b", archive)
    assert first.run().exit_code == 0
    before = objects(archive)
    refused = second.run()
    assert refused.exit_code == 2, refused.errors
    assert "give each host its own cluster_id" in refused.errors
    assert objects(archive) == before
    assert first.run().exit_code == 0


@pytest.mark.parametrize("has_record", [True, False])
def test_second_cluster_writes_nothing_until_it_is_let_in(tmp_path, archive, has_record):
    """The second cluster writes nothing to a copied bucket either, or to one without recorded owners."""
    first = Host(tmp_path / "a", archive, cluster_id="east")
    assert first.run().exit_code == 0
    if not has_record:
        (archive / ARCHIVE_OWNERS_KEY).unlink()
    copied = tmp_path / "copied"
    shutil.copytree(archive, copied)
    before = objects(copied)
    second = Host(tmp_path / "b", copied, cluster_id="west")
    refused = second.run()
    assert refused.exit_code == 2
    assert "that of the cluster east" in refused.errors
    assert objects(copied) == before

    told = second.claim().output
    assert "is an archive of the cluster west" in told
    assert "It is one of the cluster east as well" in told
    assert second.run().exit_code == 0
    assert set(owners(copied)) == {"east", "west"}


def test_archive_of_an_older_release_is_adopted(tmp_path, archive):
    """The host has archived there before: its state directory is not empty. A new host is another matter."""
    first = Host(tmp_path / "a", archive)
    assert first.run().exit_code == 0
    (archive / ARCHIVE_OWNERS_KEY).unlink()
    (tmp_path / "a" / "state" / "host.json").unlink()
    new = Host(tmp_path / "b", archive)
    refused = new.run()
    assert refused.exit_code == 2
    assert "this host has never archived" in refused.errors
    assert not (archive / ARCHIVE_OWNERS_KEY).exists()
    assert first.run().exit_code == 0
    assert list(owners(archive)) == ["local"]


def test_lost_state_directory_is_made_good_by_a_command(tmp_path, archive):
    """The host cannot be told from another one before that."""
    host = Host(tmp_path / "a", archive)
    assert host.run().exit_code == 0
    before = owners(archive)["local"]
    shutil.rmtree(tmp_path / "a" / "state")
    refused = host.run()
    assert refused.exit_code == 2
    assert "If it does not, or this host's state_directory was lost" in refused.errors
    told = host.claim().output
    assert f"The host with the id {before} may not archive there any more" in told
    assert host.run().exit_code == 0
    assert owners(archive)["local"] != before
    assert host.claim().output.count("\n") == 1


def test_files_that_a_broker_has_left_behind_continue_its_archive(tmp_path, archive):
    """The cluster's id in the files is the owner, whichever host has them. Nothing needs to be claimed."""
    for name in ("a", "b"):
        host = Host(tmp_path / name, archive)
        (host.root / "logs" / "meta.properties").write_text("version=1\ncluster.id=q1\nnode.id=1\n")
        assert host.run().exit_code in {0, 1}
        assert owners(archive) == {"q1": BROKER}
