"""The store of a target: how its URL is understood, and how a write is known again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from crc32c import crc32c

from tests.fakes.dying_store import Dying, Killed
from tests.fakes.store import store_unavailable
from tests.fakes.trusting_store import TrustingStore
from tests.support.exports import file_config
from tieringd.config import parse_config
from tieringd.errors import ConfigError, StorageUnavailable
from tieringd.spark.bucket import Bucket
from tieringd.spark.jobs.export.parquet_target import ParquetTarget
from tieringd.spark.jobs.export.target_store import TargetStore, target_config
from tieringd.storage.resilient import ResilientStore

S3 = """\
state_directory: /nowhere
cloud_storage_bucket: archive
cloud_storage_region: eu-central-1
cloud_storage_prefix: logs
cloud_storage_access_key: key
cloud_storage_secret_key: secret
"""


@pytest.fixture
def bucket(tmp_path):
    bucket = Bucket(file_config(tmp_path / "bucket"))
    yield bucket
    bucket.close()


def config_of(text):
    return parse_config(text, source="test", environ={}, needs_broker=False)


def test_bucket_of_the_same_store_is_reached_as_the_archive_is():
    """A bucket of the archive's store has the archive's credentials. The URL gives bucket and prefix."""
    config = target_config("s3://lake/exports/orders/", config_of(S3))

    assert (config.cloud_storage_bucket, config.cloud_storage_prefix) == ("lake", "exports/orders")
    assert config.cloud_storage_access_key == "key"
    assert target_config("s3://lake", config_of(S3)).cloud_storage_prefix == ""


def test_url_with_credentials_is_refused_and_not_told():
    """The URL would be in every message that names the target."""
    with pytest.raises(ConfigError, match="a URL must not have credentials") as raised:
        target_config("s3://key:hunter2@lake/orders", config_of(S3))
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["azure://lake/orders?sig=hunter2", "https://lake/orders?sig=hunter2", "s3://lake/a#hunter2"]
)
def test_url_with_more_than_a_path_is_refused_and_not_told(url):
    """The rest of a URL may be an access token, and a prefix that ends early is another place."""
    with pytest.raises(ConfigError, match="cannot name a place for files") as raised:
        target_config(url, config_of(S3))
    assert "hunter2" not in str(raised.value)


def test_directory_can_be_a_target_of_any_archive():
    """A directory needs no credentials."""
    config = target_config("file:///data/lake", config_of(S3))

    assert (config.store_kind, config.cloud_storage_file_root) == ("file", Path("/data/lake"))
    assert config.cloud_storage_prefix == ""


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("gs://lake/orders", "cannot be reached with the credentials"),
        ("hdfs://lake/orders", "is not a place for Parquet files"),
        ("/data/lake", "is not a place for Parquet files"),
        ("s3:///orders", "is not a place for Parquet files"),
        ("file://host/lake", "names no directory"),
        ("file:///", "names no directory"),
        ("file:lake", "names no directory"),
    ],
)
def test_url_that_cannot_be_a_target_is_refused(url, text):
    """The error names the URL."""
    with pytest.raises(ConfigError, match=f"target: {url} {text}"):
        target_config(url, config_of(S3))


def test_unknown_partitioning_is_refused(tmp_path):
    """An unknown partitioning is refused before anything is asked of the store."""
    config = file_config(tmp_path / "archive")
    with (
        pytest.raises(ConfigError, match="support none, day or hour, not week"),
        ParquetTarget(f"file://{tmp_path}/lake", partition_by="week").opened(config),
    ):
        pass


def test_target_s_directory_is_made_where_only_it_is_missing(tmp_path):
    """A directory that it lies in is a disk that is not mounted."""
    config = file_config(tmp_path / "archive")
    with ParquetTarget(f"file://{tmp_path}/lake").opened(config) as place_of:
        assert place_of("orders").checkpoint().state is None
    assert (tmp_path / "lake").is_dir()


def test_object_is_swapped_only_by_a_writer_that_has_read_it(bucket):
    """The first write wants it absent."""
    store = TargetStore(bucket.store, bucket.run)

    first = store.swap("key", b"1", None)
    assert first is not None
    assert store.swap("key", b"2", None) is None
    second = store.swap("key", b"3", first)
    assert store.swap("key", b"4", first) is None
    assert store.read("key") == (b"3", second)


def test_trial_of_a_store_is_beside_the_data(bucket):
    """The rest of a trial whose job dies at any request does not break readers of the target."""
    for dies_at in itertools.count(1):
        try:
            TargetStore(Dying(bucket.store, dies_at, after_effect=True), bucket.run).check(config_of(S3))
            break
        except Killed:
            pass

    left = bucket.run(bucket.store.list_page("")).objects
    assert left
    assert all(one.key.startswith("_tieringd/") for one in left)
    TargetStore(bucket.store, bucket.run).check(config_of(S3))
    assert bucket.run(bucket.store.list_page("")).objects == left


def test_store_that_ignores_conditions_is_no_target(bucket):
    """Two runs would plan different portions, and both would write theirs."""

    class Careless(LosesAnswers):
        async def put(self, key, body, *, crc32c, condition=None):
            return await self.store.put(key, body, crc32c=crc32c)

    with pytest.raises(ConfigError, match="ignores the condition of a write"):
        TargetStore(Careless(bucket.store, takes_effect=True), bucket.run).check(config_of(S3))


class LosesAnswers:
    """A store whose answers to puts are lost; the put takes effect or not."""

    def __init__(self, store, *, takes_effect, is_known_to_fail=False):
        self.store = store
        self.takes_effect = takes_effect
        self.is_known_to_fail = is_known_to_fail

    def __getattr__(self, name):
        return getattr(self.store, name)

    async def put(self, key, body, **options):
        if self.takes_effect:
            await self.store.put(key, body, **options)
        raise StorageUnavailable("no answer", outcome_unknown=not self.is_known_to_fail)


def test_swap_whose_answer_is_lost_is_known_again(bucket):
    """A swap whose answer is lost counts as done if the stored object shows it."""
    store = TargetStore(LosesAnswers(bucket.store, takes_effect=True), bucket.run)
    version = store.swap("key", b"1", None)
    assert store.read("key") == (b"1", version)


@pytest.mark.parametrize("is_known_to_fail", [False, True])
def test_swap_that_took_no_effect_is_an_error(bucket, is_known_to_fail):
    """The next run finds what is there."""
    away = LosesAnswers(bucket.store, takes_effect=False, is_known_to_fail=is_known_to_fail)
    with pytest.raises(StorageUnavailable):
        TargetStore(away, bucket.run).swap("key", b"1", None)


def test_swap_without_an_answer_that_lost_to_another_is_known_to_have_lost(bucket):
    """The stored object is neither the one from before nor ours."""
    first = TargetStore(bucket.store, bucket.run).swap("key", b"1", None)

    class Overtaken(LosesAnswers):
        async def put(self, key, body, **options):
            await self.store.put(key, b"other", crc32c=crc32c(b"other"))
            raise StorageUnavailable("no answer", outcome_unknown=True)

    assert (
        TargetStore(Overtaken(bucket.store, takes_effect=True), bucket.run).swap("key", b"2", first) is None
    )


def test_file_is_stored_whole_and_once(bucket, tmp_path):
    """The first one stays: the archive has only less since. It is looked for by what its name begins with."""
    store = TargetStore(bucket.store, bucket.run)
    path = tmp_path / "file"
    for data in (b"a" * 3_000_000, b"b"):
        path.write_bytes(data)
        assert store.store_file("topic=t/part", path) == len(data)
        assert store.read("topic=t/part")[0] == b"a" * 3_000_000
    assert store.holds_any("topic=t/")
    assert not store.holds_any("topic=other/")


def test_file_that_arrived_damaged_is_replaced_by_the_next_task(bucket, tmp_path):
    """A task that cannot read its file back fails. The next task replaces a damaged file."""
    backend = TrustingStore()
    store = TargetStore(ResilientStore(backend, tries_checksums=True), bucket.run)
    path = tmp_path / "file"
    path.write_bytes(b"rows")
    backend.flips = 1
    backend.fail_next("head", lambda: store_unavailable("head"))
    with pytest.raises(StorageUnavailable, match="could not be read back"):
        store.store_file("part", path)
    assert store.read("part")[0] != b"rows"
    store.store_file("part", path)
    assert store.read("part")[0] == b"rows"
