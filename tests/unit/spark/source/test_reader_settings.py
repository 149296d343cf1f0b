"""The place of the archive, from options and files: what is accepted, what is refused, what is secret."""

from __future__ import annotations

import pickle
import re

import pytest

from tieringd.config.access import StoreAccess
from tieringd.errors import ConfigError
from tieringd.spark.source.data_source import TieringdDataSource
from tieringd.spark.source.options import parse_options
from tieringd.spark.source.read_request import Request
from tieringd.spark.source.reader_settings import PROPERTIES, read_settings

KEYS = {"region": "eu-central-1", "accessKey": "AKIA", "secretKey": "sEcReT"}


def config_of(**options):
    return read_settings(options).config()


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        pytest.param("s3://my-bucket", ("aws", "my-bucket", ""), id="s3"),
        pytest.param("s3a://my-bucket/a/b/", ("aws", "my-bucket", "a/b"), id="s3a with a prefix"),
        pytest.param("gs://my-bucket/a", ("google", "my-bucket", "a"), id="gs"),
    ],
)
def test_path_is_a_bucket_and_a_prefix(path, wanted):
    """A path gives bucket and prefix under the schemes that users of Spark know."""
    config = config_of(path=path, **KEYS)
    assert (config.backend, config.cloud_storage_bucket, config.cloud_storage_prefix) == wanted


@pytest.mark.parametrize(
    "path",
    ["azure://account/container/a/b", "abfss://container@account.dfs.core.windows.net/a/b"],
    ids=["azure", "abfss"],
)
def test_path_is_a_container_and_a_prefix(path, monkeypatch):
    """Azure's own form as well."""
    monkeypatch.setenv("AZURE_KEY", "a2V5")
    config = config_of(path=path, cloud_storage_azure_shared_key="${AZURE_KEY}")
    assert config.backend == "azure"
    assert config.cloud_storage_azure_storage_account == "account"
    assert config.cloud_storage_azure_container == "container"
    assert config.cloud_storage_prefix == "a/b"


_ENDINGS = ("access_key", "secret_key", "shared_key")
CREDENTIALS = ("accessKey", "secretKey", *(name for name in PROPERTIES if name.endswith(_ENDINGS)))
SPARK_REDACTS = re.compile(r"(?i)secret|password|token|access[.]?key")
"""The default of `spark.redaction.regex`: options of such names are not shown in plans."""
PLACES = {"azure": "azure://account/container", "s3": "s3://bucket", "gs": "gs://bucket"}


def test_every_secret_of_the_configuration_is_among_the_credentials():
    """The tests below go over all of them."""
    secrets = {name for name, one in StoreAccess.model_fields.items() if "SecretStr" in str(one.annotation)}
    assert secrets
    assert secrets <= set(CREDENTIALS)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("name", sorted(one for one in CREDENTIALS if not SPARK_REDACTS.search(one)))
def test_credential_that_spark_would_show_is_refused(name, place):
    """The error says what to write instead of the key id, and does not contain it."""
    with pytest.raises(ConfigError, match=f"{name}.*in plans") as caught:
        read_settings({"path": place, name: "c2VjcmV0LXZhbHVl"})
    assert "c2VjcmV0LXZhbHVl" not in str(caught.value)
    # Spark asks for the schema first, and has a plan to show after it, with or without a reader.
    with pytest.raises(ConfigError, match=f"{name}.*in plans"):
        TieringdDataSource({"path": place, "subscribe": "orders", name: "c2VjcmV0LXZhbHVl"}).schema()
    assert read_settings({"path": place, name: "${NAME}"})


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("name", sorted(filter(SPARK_REDACTS.search, CREDENTIALS)))
def test_no_credential_is_shown(name, place):
    """Spark redacts the option by its name; neither what goes to executors nor an error shows the value."""
    given = {"path": place, name: "c2VjcmV0LXZhbHVl"}
    settings = read_settings(given)
    request = Request(parse_options(given | {"subscribe": "orders"}, is_streaming=True), settings, ("value",))
    assert "c2VjcmV0LXZhbHVl" not in f"{settings!r}{settings}{request!r}{settings.text}"
    with pytest.raises(ConfigError) as caught:
        read_settings(given | {"cloud_storage_region": "\0", "cloud_storage_disable_tls": "no such"}).config()
    assert "c2VjcmV0LXZhbHVl" not in str(caught.value)


def test_path_is_a_directory(tmp_path):
    """A `file` URL gives the root directory of the file store."""
    config = config_of(path=f"file://{tmp_path}")
    assert (config.backend, config.cloud_storage_file_root) == ("file", tmp_path)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        pytest.param("http://store:8333", "http://store:8333", id="http"),
        pytest.param("https://store", "https://store:443", id="https"),
    ],
)
def test_endpoint_is_a_url(endpoint, url):
    """An endpoint's URL gives the host, the port, and whether TLS is spoken."""
    assert config_of(path="s3://my-bucket", endpoint=endpoint, **KEYS).endpoint_url == url


def test_every_property_of_the_store_may_be_an_option():
    """Values are read as in a file: words, numbers with units, and text that looks like either."""
    config = config_of(
        cloud_storage_backend="aws",
        cloud_storage_bucket="my-bucket",
        CLOUD_STORAGE_REGION="eu",
        cloud_storage_disable_tls="true",
        cloud_storage_api_endpoint_port="9000",
        cloud_storage_initial_backoff_ms="2s",
        accessKey="12345",
        cloud_storage_secret_key="x: #y",
    )
    assert config.cloud_storage_disable_tls
    assert config.cloud_storage_api_endpoint_port == 9000
    assert config.cloud_storage_initial_backoff_ms == 2000
    assert config.cloud_storage_access_key == "12345"
    assert config.cloud_storage_secret_key.get_secret_value() == "x: #y"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        pytest.param({}, "path: no option says where the archive is", id="nothing"),
        pytest.param({"path": "my-bucket"}, "'://my-bucket' does not name an archive", id="no scheme"),
        pytest.param({"path": "hdfs://name/dir"}, "does not name an archive", id="another store"),
        pytest.param({"path": "azure://account"}, "does not name an archive", id="no container"),
        pytest.param({"path": "file://host/dir"}, "does not name an archive", id="another host"),
        pytest.param(
            {"path": "file:///archive#2"}, "with \\? or # does not name an archive", id="a fragment"
        ),
        pytest.param({"path": "azure://account/box?sig=x"}, "with \\? or # does not name", id="a query"),
        pytest.param({"path": "s3://b-1", "endpoint": "store:8333"}, "endpoint: must be a URL", id="no url"),
        pytest.param({"path": "s3://b-1", "endpoint": "http://s:x"}, "endpoint: must be a URL", id="no port"),
        pytest.param(
            {"path": "s3://b-1", "cloud_storage_bucket": "c"},
            "another option already sets cloud_storage_bucket",
            id="two buckets",
        ),
        pytest.param({"path": "s3://b-1", "config": "/c.yaml"}, "config: contradicts path", id="two places"),
        pytest.param({"config": "/nowhere/c.yaml"}, "/nowhere/c.yaml cannot be read: No such", id="no file"),
    ],
)
def test_place_that_cannot_be_understood(options, match):
    """The error names the option."""
    with pytest.raises(ConfigError, match=match):
        read_settings(options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        pytest.param({}, r"cloud_storage_secret_key \(option secretKey\): is required", id="no keys"),
        pytest.param(
            KEYS | {"cloud_storage_disable_tls": "perhaps"},
            "cloud_storage_disable_tls: must be true or false",
            id="wrong value",
        ),
        pytest.param(
            KEYS | {"credentialsSource": "azure_vm_instance_metadata"},
            r"cloud_storage_credentials_source \(option credentialsSource\): must be one of",
            id="another cloud's",
        ),
    ],
)
def test_settings_that_do_not_lead_to_a_store(options, match):
    """Every problem is in the message, under the names of options."""
    with pytest.raises(ConfigError, match=match):
        config_of(path="s3://my-bucket", **options)


def test_role_needs_no_keys():
    """Each process asks the service itself, so that nothing secret travels."""
    config = config_of(path="s3://my-bucket", region="eu", credentialsSource="aws_instance_metadata")
    assert config.cloud_storage_credentials_source == "aws_instance_metadata"


def test_variable_is_of_the_process_that_needs_it(monkeypatch):
    """The driver's value does not travel: an executor has its own, or says that it has none."""
    monkeypatch.setenv("ARCHIVE_SECRET", "the driver's")
    settings = read_settings({"path": "s3://my-bucket", **KEYS, "secretKey": "${ARCHIVE_SECRET}"})
    assert settings.config().cloud_storage_secret_key.get_secret_value() == "the driver's"
    travelled = pickle.dumps(settings)
    assert b"driver's" not in travelled

    monkeypatch.setenv("ARCHIVE_SECRET", "the executor's")
    arrived = pickle.loads(travelled)
    assert arrived.config().cloud_storage_secret_key.get_secret_value() == "the executor's"

    monkeypatch.delenv("ARCHIVE_SECRET")
    with pytest.raises(ConfigError, match=r"ARCHIVE_SECRET is not set\. Each process .*spark\.executorEnv"):
        arrived.config()


FILE = """\
# beside the broker
broker:
  kind: kafka
  log_dirs: [/var/lib/kafka]
  bootstrap: [broker:9092]
  security:
    protocol: SASL_SSL
    sasl_username: tieringd
    sasl_password: ${BROKER_PASSWORD}
cloud_storage_enabled: false
cloud_storage_bucket: my-bucket
cloud_storage_region: eu-central-1
cloud_storage_cache_size: 10GiB
cloud_storage_access_key: AKIA
cloud_storage_secret_key: "${ARCHIVE_SECRET}"
state_directory: /var/lib/tieringd
topics:
  orders: {redpanda.remote.write: true}
"""


def test_daemon_s_file_is_enough(tmp_path, monkeypatch):
    """Only what leads to the store is taken of it: no password of the broker is asked for, or travels."""
    path = tmp_path / "tieringd.yaml"
    path.write_text(FILE)
    monkeypatch.setenv("ARCHIVE_SECRET", "s")
    settings = read_settings({"config": str(path)})
    config = settings.config()
    assert (config.cloud_storage_bucket, config.cloud_storage_access_key) == ("my-bucket", "AKIA")
    assert not config.has_broker_section
    assert "sasl" not in settings.text
    assert "topics" not in settings.text


def test_fault_of_a_file_is_where_it_stands(tmp_path):
    """The line is the file's own, although other lines did not travel."""
    path = tmp_path / "tieringd.yaml"
    path.write_text(FILE.replace("my-bucket", "/"))
    with pytest.raises(ConfigError, match=r"tieringd\.yaml:11: cloud_storage_bucket"):
        config_of(config=str(path))


def test_text_that_is_no_configuration(tmp_path):
    """The parser says what is wrong with it."""
    path = tmp_path / "tieringd.yaml"
    path.write_text("cloud_storage_bucket: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        config_of(config=str(path))


def test_secrets_are_not_shown():
    """The settings and their errors repeat no secret value."""
    settings = read_settings({"path": "s3://my-bucket", **KEYS})
    assert "sEcReT" not in repr(settings)
    assert "AKIA" not in repr(settings)
    with pytest.raises(ConfigError) as raised:
        config_of(path="s3://my-bucket", **KEYS | {"region": "no region sEcReT"})
    assert "sEcReT" not in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        config_of(path="http://user:sEcReT@host/x")
    assert "sEcReT" not in str(raised.value)
