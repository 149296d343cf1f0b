"""Secrets of a catalogue: our errors never have them, whatever the catalogue's own errors say."""

from __future__ import annotations

import pytest

from tests.support.exports import file_config
from tieringd.errors import ConfigError, StorageUnavailable
from tieringd.spark.jobs.export.iceberg_table import IcebergTable, without_secrets
from tieringd.spark.jobs.export.iceberg_target import IcebergTarget

SECRETS = {"s3.secret-access-key": "hunter2", "token": "it's\\me", "uri": "sql://me:p%40ss@host/db"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("wrong key hunter2", "wrong key ***"),
        (str(SECRETS), "{'s3.secret-access-key': '***', 'token': \"***\", 'uri': 'sql://me:***@host/db'}"),
        ("p@ss does not fit", "*** does not fit"),
        ("GET /?token=it%27s%5Cme was refused", "GET /?token=*** was refused"),
        ("no host", "no host"),
    ],
)
def test_secrets_are_hidden_however_they_are_written(text, told):
    """A secret is hidden as it is written, as Python shows it, and as it stands in a URL."""
    assert without_secrets(text, SECRETS) == told


@pytest.mark.parametrize(
    ("properties", "text", "told"),
    [
        pytest.param(
            {"uri": "https://h/api?sig=TOPSECRET&v=1"},
            "GET https://h/api?sig=TOPSECRET&v=1 failed: TOPSECRET",
            "GET https://h/api?*** failed: ***",
            id="query string",
        ),
        pytest.param(
            {"s3.signer.headers": "Bearer HHH"}, "header Bearer HHH, HHH", "header ***, ***", id="headers"
        ),
        pytest.param({"header.X-Api": "APIVAL"}, "X-Api: APIVAL", "X-Api: ***", id="header"),
        pytest.param(
            {"credential": "client:s3cr"},
            "client:s3cr, client_id=client, Basic Y2xpZW50OnMzY3I=, secret=s3cr",
            "***, ***_id=***, Basic ***, secret=***",
            id="id and secret",
        ),
        pytest.param(
            {"s3.secret-access-key": "ab/c+d"}, "q=ab%2Fc%2Bd&r=ab/c%2Bd", "q=***&r=***", id="quoted"
        ),
    ],
)
def test_parts_of_secrets_are_hidden(properties, text, told):
    """Halves, header values and query strings, in the forms that requests have."""
    assert without_secrets(text, properties) == told


def test_secrets_may_be_in_properties_of_properties():
    """Secrets are hidden in nested properties, as pyiceberg's configuration file has them."""
    properties = {"auth": {"type": "oauth2", "oauth2": {"client_secret": "hunter2", "port": 80}}}
    assert without_secrets("80: hunter2 was refused", properties) == "80: *** was refused"


def test_connection_string_is_a_secret():
    """Azure's has the key of the account."""
    properties = {"adls.connection-string": "AccountName=me;AccountKey=hunter2"}
    assert without_secrets("malformed: AccountName=me;AccountKey=hunter2", properties) == "malformed: ***"


def test_what_is_no_url_has_no_password():
    """An empty secret hides nothing either."""
    assert without_secrets("as it is", {"uri": "http://[", "token": ""}) == "as it is"


@pytest.mark.parametrize("is_of_the_environment", [False, True])
def test_catalogue_that_cannot_be_opened_tells_no_secret(tmp_path, monkeypatch, is_of_the_environment):
    """Pyiceberg shows all of its properties; they may be of the command, or of its own configuration."""
    properties = {"s3.secret-access-key": "hunter2"}
    if is_of_the_environment:
        monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__S3__SECRET_ACCESS_KEY", "hunter2")
        properties = {}
    target = IcebergTarget("shop", properties)
    with (
        pytest.raises(ConfigError, match="shop cannot be opened") as raised,
        target.opened(file_config(tmp_path / "archive")),
    ):
        pass
    assert "hunter2" not in str(raised.value)


def test_catalogue_that_is_no_table_of_properties_is_an_error_of_configuration(tmp_path, monkeypatch):
    """Pyiceberg takes it for one, and fails in its own ways."""
    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP", "hunter2")
    with (
        pytest.raises(ConfigError, match="shop cannot be opened") as raised,
        IcebergTarget("shop").opened(file_config(tmp_path / "archive")),
    ):
        pass
    assert "hunter2" not in str(raised.value)


class Telling:
    """A catalogue that has its password in what it says."""

    name = "shop"
    properties = SECRETS

    def load_table(self, _identifier):
        raise OSError("hunter2 is not the password")


def test_catalogue_that_fails_tells_no_secret():
    """An error of a catalogue names no secret, whatever kind of error it is."""
    with pytest.raises(StorageUnavailable, match=r"OSError\('\*\*\* is not the password'\)"):
        IcebergTable(Telling(), ("redpanda", "orders")).opened("hour")
