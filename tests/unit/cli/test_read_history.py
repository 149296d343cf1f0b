"""`tieringd read` of a topic that continues an older archive whose manifest is lost."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes.archive import archive_in
from tests.fakes.file_archive import FileArchive
from tests.support.daemon import directory_config, write_config
from tests.unit.cli.commands import invoked
from tieringd.errors import ObjectNotFound
from tieringd.formats.history_link import HistoryLink
from tieringd.formats.object_keys import TopicKey
from tieringd.storage.file import FileStore


@pytest.fixture
def read(tmp_path):
    """Return a function that reads the offsets of the topic, which begins itself at offset 6."""
    archive = FileArchive(tmp_path)
    old = archive.filled(segments=2, batches=1, cluster="old-cluster")
    new = archive.filled(
        segments=1, batches=1, first_offset=6, topic_id="AAAAAAAAAAAAAAAAAAAAAQ", cluster="new-cluster"
    )
    new_key, old_key = (
        TopicKey(one.identified.cluster, "orders", one.identified.topic_id) for one in (new, old)
    )

    async def link():
        store = FileStore(archive.root)
        await archive_in(store).history.link(HistoryLink(new_key, old_key, ((0, 6),)))
        await store.close()

    asyncio.run(link())
    archive.forget(old)
    config = write_config(
        tmp_path / "tieringd.yaml", directory_config([tmp_path / "logs"], archive.root, tmp_path / "state")
    )

    def read(*options):
        done = invoked(
            *("read", "orders", "--partition", "0", "--from-cluster", "new-cluster", "--archive-only"),
            *("--config", config, "--format", "json", *options),
        )
        assert done.exit_code == 0, done.errors
        return [json.loads(line)["offset"] for line in done.output.splitlines()]

    return read


@pytest.mark.parametrize("options", [(), ("--offset", "0"), ("--offset", "5"), ("--timestamp", "0")])
def test_read_of_a_lost_archive_names_its_manifest(read, options):
    """The read would begin at the topic's own start otherwise, and say nothing."""
    with pytest.raises(ObjectNotFound, match=r"manifest.* is missing: .*old-cluster.* before offset 6"):
        read(*options)


def test_read_behind_a_lost_archive_goes_on(read):
    """The topic's own records do not need it."""
    assert read("--offset", "6") == [6, 7, 8]
