"""Stores made from a configuration: each backend's settings, and stores of other packages."""

from __future__ import annotations

import os
import sys

import pytest
from crc32c import crc32c

from tests.fakes.memory_store import MemoryStore
from tests.unit.config.texts import SMALLEST, parsed
from tieringd import processors
from tieringd.errors import ConfigError
from tieringd.metrics import Metrics
from tieringd.storage.file_root import make_marker
from tieringd.storage.store_opening import (
    StoreCheck,
    azure_settings,
    gcs_settings,
    opened_store,
    place_of,
    s3_settings,
    store_limits,
)

ON = SMALLEST + "cloud_storage_enabled: true\n"
GOOGLE = "cloud_storage_backend: google\ncloud_storage_bucket: archive-of-google\ncloud_storage_region: eu\n"
AZURE = (
    "cloud_storage_azure_storage_account: account\ncloud_storage_azure_container: archive-of-azure\n"
    "cloud_storage_azure_shared_key: a2V5\n"
)


@pytest.mark.parametrize("usable", [1, 3])
def test_connections_are_counted_for_each_processor_that_may_be_used(monkeypatch, usable):
    """The pool is shared by reads and writes; a process that may use few of a host's processors has few."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    monkeypatch.setattr(processors, "_quotas", lambda *_: ())
    config = parsed(ON + AZURE + "cloud_storage_max_connections: 7\n")
    assert store_limits(config).max_concurrent_requests == 7 * usable
    assert azure_settings(config).max_connections == 7 * usable


def test_azure_is_reached_with_its_key():
    """Account, container and key are handed on, and parts are cut as configured."""
    settings = azure_settings(
        parsed(ON + AZURE + "cloud_storage_storage_class: Cool\ncloud_storage_prefix: a/b\n")
    )
    assert (settings.storage_account, settings.container) == ("account", "archive-of-azure")
    assert (settings.credentials, settings.shared_key, settings.prefix) == ("shared_key", "a2V5", "a/b")
    assert settings.endpoint == "https://account.blob.core.windows.net:443"
    assert (settings.access_tier, settings.single_put_bytes, settings.block_bytes) == (
        "Cool",
        4 << 30,
        64 << 20,
    )


def test_azure_is_reached_with_an_identity():
    """The source names the identity, and its client id goes with it."""
    text = (
        ON
        + AZURE.replace("cloud_storage_azure_shared_key: a2V5\n", "")
        + "cloud_storage_credentials_source: azure_vm_instance_metadata\n"
        + "cloud_storage_azure_managed_identity_id: some-id\n"
    )
    settings = azure_settings(parsed(text))
    assert (settings.credentials, settings.shared_key) == ("azure_vm_instance_metadata", None)
    assert settings.managed_identity_id == "some-id"


def test_gcs_is_reached_by_its_own_api_with_an_account_s_file(tmp_path):
    """Google's own endpoint is the default, and the key of encryption goes with each object."""
    text = f"{ON}{GOOGLE}cloud_storage_gcs_credentials_file: {tmp_path}/key.json\n"
    config = parsed(f"{text}cloud_storage_sse: kms\ncloud_storage_sse_kms_key_id: projects/p\n")
    settings = gcs_settings(config)
    assert config.store_kind == "gcs"
    assert (settings.bucket, settings.api_root) == ("archive-of-google", "https://storage.googleapis.com")
    assert settings.credentials_source == "config_file"
    assert settings.service_account_file == f"{tmp_path}/key.json"
    assert settings.kms_key_name == "projects/p"


def test_gcs_with_the_machine_s_identity_asks_its_metadata():
    """No file is read then."""
    config = parsed(ON + GOOGLE + "cloud_storage_credentials_source: gcp_instance_metadata\n")
    settings = gcs_settings(config)
    assert (settings.credentials_source, settings.service_account_file) == ("gcp_instance_metadata", None)


def test_gcs_with_hmac_keys_is_reached_as_s3_is():
    """Google's S3-compatible API takes HMAC keys, at Google's endpoint."""
    config = parsed(ON + GOOGLE + "cloud_storage_access_key: GOOG1\ncloud_storage_secret_key: hidden\n")
    settings = s3_settings(config)
    assert config.store_kind == "s3"
    assert settings.endpoint_url == "https://storage.googleapis.com:443"
    assert (settings.access_key, settings.secret_key) == ("GOOG1", "hidden")
    assert "hidden" not in repr(settings)


def test_s3_is_reached_with_a_role():
    """Keys that were left in the file are not used, and encryption and class go with each segment."""
    text = (
        f"{ON}cloud_storage_backend: aws\ncloud_storage_bucket: archive\ncloud_storage_region: eu-central-1\n"
        "cloud_storage_credentials_source: aws_instance_metadata\ncloud_storage_access_key: AKIA\n"
        "cloud_storage_secret_key: hidden\ncloud_storage_sse: kms\ncloud_storage_sse_kms_key_id: key/1\n"
        "cloud_storage_storage_class: STANDARD_IA\n"
    )
    settings = s3_settings(parsed(text))
    assert (settings.credentials_source, settings.access_key, settings.secret_key) == (
        "aws_instance_metadata",
        None,
        None,
    )
    assert (settings.encryption, settings.kms_key_id) == ("aws:kms", "key/1")
    assert settings.storage_class == "STANDARD_IA"
    assert (settings.multipart_threshold_bytes, settings.multipart_part_bytes) == (4 << 30, 64 << 20)


def plugged_in(tmp_path, monkeypatch, *, value: str):
    """Make it look as if a package that offers a store named `mine` were installed."""
    info = tmp_path / "my_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tieringd.object_stores]\nmine = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    return parsed(ON + "cloud_storage_backend: plugin\ncloud_storage_plugin: mine\n")


async def open_memory_store(config) -> MemoryStore:
    """Open a store as a plug-in does; it has the whole configuration to go by."""
    assert config.cloud_storage_plugin == "mine"
    return MemoryStore()


async def test_store_of_another_package_is_opened_by_its_entry_point(tmp_path, monkeypatch):
    """The store is used as any other, with the same retries around it."""
    config = plugged_in(tmp_path, monkeypatch, value=f"{__name__}:open_memory_store")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    async with opened_store(config, Metrics()) as store:
        await store.put("a", b"b", crc32c=crc32c(b"b"))
        assert (await store.get("a"))[0] == b"b"


async def test_store_that_no_package_offers_is_a_fault_of_the_configuration(tmp_path, monkeypatch):
    """The error names those that there are."""
    config = plugged_in(tmp_path, monkeypatch, value="nothing:here")
    other = config.model_copy(update={"cloud_storage_plugin": "yours"})
    with pytest.raises(ConfigError, match=r"no installed package provides the object store yours.*: mine"):
        async with opened_store(other, Metrics()):
            pass


async def test_store_that_cannot_be_loaded_is_a_fault_of_the_configuration(tmp_path, monkeypatch):
    """The error names the package's entry."""
    config = plugged_in(tmp_path, monkeypatch, value="no_such_module:open")
    with pytest.raises(ConfigError, match=r"mine cannot be loaded.*no_such_module:open"):
        async with opened_store(config, Metrics()):
            pass


async def test_file_store_is_tried_through_two_openings(tmp_path):
    """One opening sees at once what the other writes, and nothing is left behind."""
    make_marker(tmp_path)
    config = parsed(ON + f"cloud_storage_backend: file\ncloud_storage_file_root: {tmp_path}\n")
    async with opened_store(config, Metrics()) as store:
        await StoreCheck(config, store)()
        assert (await store.list_page("")).objects == ()
    with pytest.raises(ConfigError, match="it replaced an object that was only to be created"):
        await StoreCheck(config, MemoryStore())()


async def test_connections_of_an_open_store_are_shown_by_every_process_that_opens_one(tmp_path):
    """An endpoint without a broker has them as well as a daemon: what is under way, of how many."""
    make_marker(tmp_path)
    config, metrics = (
        parsed(ON + f"cloud_storage_backend: file\ncloud_storage_file_root: {tmp_path}\n"),
        Metrics(),
    )
    async with opened_store(config, metrics) as store:
        value = metrics.registry.get_sample_value
        assert value("tieringd_store_connections_limit") == store_limits(config).max_concurrent_requests
        store.in_flight = 3
        assert value("tieringd_store_requests_in_flight") == 3
        store.in_flight = 0


AWS_ELSEWHERE = (
    "cloud_storage_bucket: archive\ncloud_storage_region: r\ncloud_storage_access_key: k\n"
    "cloud_storage_secret_key: s\ncloud_storage_api_endpoint: host\n"
)
METADATA = "cloud_storage_credentials_source: gcp_instance_metadata\n"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("cloud_storage_backend: file\ncloud_storage_file_root: /srv/archive\n", "file:///srv/archive"),
        (GOOGLE + METADATA + "cloud_storage_prefix: a/b\n", "google://archive-of-google/a/b"),
        (AZURE, "azure://account/archive-of-azure"),
        (AWS_ELSEWHERE, "aws://archive at https://host:443"),
    ],
)
def test_each_place_has_a_name(text, place):
    """Store, bucket, prefix and endpoint: two places have different names."""
    assert place_of(parsed(ON + text)) == place
