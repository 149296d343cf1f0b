"""The owner of a file store's directory: it is recorded, adopted, recognised or refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.daemon import directory_config, write_config
from tieringd.config import load_config
from tieringd.daemon.file_archive import claim_file_root, init_file_root, note_first_start
from tieringd.daemon.state_lock import sole_owner
from tieringd.errors import BucketNotFound, ConfigError
from tieringd.formats.object_keys import TopicKey, topic_manifest_key
from tieringd.storage.file_root import make_marker, marker_of
from tieringd.storage.file_tree import ROOT_MARKER

if TYPE_CHECKING:
    from pathlib import Path


class Host:
    """A host with log directories, a state directory and the path of an archive, which is not there yet."""

    def __init__(self, directory: Path, **changes) -> None:
        self.root, self.state, self.logs = directory / "archive", directory / "state", directory / "logs"
        self.logs.mkdir(parents=True)
        self.config = load_config(
            write_config(
                directory / "tieringd.yaml",
                directory_config([self.logs], self.root, self.state, **changes),
            ),
            environ={},
        )

    def start(self) -> None:
        """Do what a daemon does first."""
        note_first_start(self.config)
        with sole_owner(self.config):
            claim_file_root(self.config)

    def ran_before_markers(self) -> None:
        """Leave the state directory as an older release did."""
        with sole_owner(self.config):
            pass

    def store_manifest(self, cluster: str, *, topic: str = "orders", prefix: str = "") -> None:
        path = self.root / prefix / topic_manifest_key(TopicKey(cluster, topic, "i" * 22))
        path.parent.mkdir(parents=True)
        path.write_bytes(b"{}")


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def test_first_start_begins_the_archive_and_the_next_one_knows_it(host):
    """The directory is made, and both starts agree on its id."""
    host.start()
    root_id = marker_of(host.root)
    assert root_id
    host.start()
    assert marker_of(host.root) == root_id


@pytest.mark.parametrize("reached", ["nothing", "lock", "marker"])
def test_first_start_that_was_interrupted_is_still_one(host, reached):
    """A process may be killed between any two steps of it."""
    note_first_start(host.config)
    if reached != "nothing":
        host.ran_before_markers()
    if reached == "marker":
        host.root.mkdir()
        make_marker(host.root)
    host.start()
    assert marker_of(host.root)


def test_first_start_fails_where_the_disk_has_no_place(tmp_path):
    """Only the last directory is made; when the others are there, the next start is the first."""
    host = Host(tmp_path, cloud_storage_file_root=str(tmp_path / "disk" / "archive"))
    with pytest.raises(BucketNotFound, match="Mount the disk of the archive"):
        host.start()
    assert not (tmp_path / "disk").exists()
    (tmp_path / "disk").mkdir()
    host.start()
    assert marker_of(tmp_path / "disk" / "archive")


def test_state_directory_on_a_new_disk_is_empty(host):
    """A file system of its own has lost+found from the beginning."""
    (host.state / "lost+found").mkdir(parents=True)
    host.start()
    assert marker_of(host.root)


def empty(root: Path) -> None:
    (root / ROOT_MARKER).unlink()


def gone(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


def another(root: Path) -> None:
    make_marker(root, replaces=True)


def damaged(root: Path) -> None:
    (root / ROOT_MARKER).write_text('{"version": 2, "id": "from the future"}')


@pytest.mark.parametrize("replaced", [empty, gone, another, damaged])
def test_start_refuses_another_root_until_it_is_accepted(host, replaced):
    """No start makes good for a missing or a foreign marker; `archive init` does."""
    host.start()
    known = marker_of(host.root)
    replaced(host.root)
    for _ in range(2):
        with pytest.raises(BucketNotFound, match="archive init"):
            host.start()
    root_id, before = init_file_root(host.config)
    assert (before, root_id) == (known, marker_of(host.root))
    assert root_id != known
    host.start()


@pytest.mark.parametrize("prefix", ["", "a/prefix"])
def test_archive_from_before_is_adopted_once(tmp_path, prefix):
    """
    An archive with manifests of our cluster is adopted once.

    They prove nothing if the marker is lost later.
    """
    host = Host(tmp_path, cloud_storage_prefix=prefix)
    host.ran_before_markers()
    host.store_manifest("local", prefix=prefix)
    host.start()
    (host.root / ROOT_MARKER).unlink()
    with pytest.raises(BucketNotFound):
        host.start()


@pytest.mark.parametrize("cluster", [None, "another"])
def test_place_that_does_not_prove_to_be_ours_is_refused(host, cluster):
    """A daemon has run here before, so an empty directory is a disk that is not mounted."""
    host.ran_before_markers()
    host.root.mkdir()
    if cluster:
        host.store_manifest(cluster)
    with pytest.raises(BucketNotFound, match="a daemon ran here before"):
        host.start()
    assert marker_of(host.root) is None


@pytest.mark.parametrize("topic", ["orders", "others"])
def test_archive_of_redpanda_from_before_is_known_by_its_topics(tmp_path, topic):
    """Redpanda's files do not have the cluster's id, so its topics show whose archive it is."""
    broker = {"kind": "redpanda", "log_dirs": [str(tmp_path / "logs")], "bootstrap": ["localhost:9092"]}
    host = Host(tmp_path, broker=broker)
    (host.logs / "kafka" / "orders" / "0_7").mkdir(parents=True)
    host.ran_before_markers()
    host.store_manifest("of-redpanda", topic=topic)
    if topic == "orders":
        host.start()
    else:
        with pytest.raises(BucketNotFound):
            host.start()


def test_second_host_takes_the_archive_as_it_is(host, tmp_path):
    """A marker is enough for a state directory that knows nothing of this path."""
    host.start()
    second = Host(tmp_path / "second", cloud_storage_file_root=str(host.root))
    second.ran_before_markers()
    second.start()
    (host.root / ROOT_MARKER).unlink()
    with pytest.raises(BucketNotFound):
        second.start()


def test_reader_begins_nothing_and_knows_a_root_again(host):
    """The archive-only gateway reads a directory without a marker; one that lost its marker is no bucket."""
    host.root.mkdir()
    claim_file_root(host.config, only_reads=True)
    assert marker_of(host.root) is None
    make_marker(host.root)
    host.ran_before_markers()
    claim_file_root(host.config, only_reads=True)
    (host.root / ROOT_MARKER).unlink()
    with pytest.raises(BucketNotFound):
        claim_file_root(host.config, only_reads=True)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1, "roots": 3}', '{"version": 9, "roots": {}}'])
def test_damaged_note_is_told_and_not_taken_for_none(host, text):
    """A damaged note that counted as none would make the next mount point an archive."""
    host.start()
    note = host.state / "file_roots.json"
    assert json.loads(note.read_text())["roots"] == {str(host.root): marker_of(host.root)}
    note.write_text(text)
    with pytest.raises(ConfigError, match=r"file_roots.json .* archive init"):
        host.start()


def test_init_without_a_state_directory_notes_nothing(host):
    """Jobs and copies need no daemon's directory; called again, it changes nothing."""
    root_id, before = init_file_root(host.config)
    assert (init_file_root(host.config), before) == ((root_id, None), None)
    assert not host.state.exists()


def test_init_is_for_directories_only(host):
    """A bucket is made by its provider."""
    with pytest.raises(ConfigError, match="cloud_storage_backend is aws"):
        init_file_root(host.config.model_copy(update={"cloud_storage_backend": "aws"}))
    assert not host.root.exists()
