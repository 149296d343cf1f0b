"""The configuration in effect: values, where they came from, and no secrets."""

import pytest

from tests.unit.config.texts import EXAMPLES, ON, SMALLEST, TIERED
from tieringd.config.describe import properties_of
from tieringd.config.effective import effective_settings
from tieringd.config.load import parse_with_origins
from tieringd.config.naming import SECTIONS
from tieringd.config.yaml_source import dotted


def settings(text, **environ):
    loaded = parse_with_origins(text, source="t.yaml", environ=environ)
    return {dotted(one.place): one for one in effective_settings(loaded)}


def test_every_property_is_shown_once():
    """Properties that the file does not set are in effect as well."""
    found = settings(SMALLEST)
    expected = [
        dotted((*place, one.name))
        for place, model in SECTIONS.items()
        if place[:1] != ("topics",)
        for one in properties_of(model)
        if not one.is_section
    ]
    assert list(found) == expected


def test_value_of_the_file_has_its_line():
    """Sections and lists have lines of their own."""
    found = settings(TIERED + "log:\n  level: debug\n")
    assert (found["log.level"].shown, found["log.level"].origin) == ("debug", "line 10")
    assert (found["log.format"].shown, found["log.format"].origin) == ("json", "default")
    dirs = found["broker.log_dirs"]
    assert (dirs.value, dirs.shown, dirs.origin) == (["/srv/logs"], "/srv/logs", "line 3")


def test_amount_is_shown_with_its_unit_and_held_as_a_number():
    """A person and a program read the same value."""
    one = settings(SMALLEST + "shutdown_timeout_ms: 90s\n")["shutdown_timeout_ms"]
    assert (one.shown, one.value, one.source) == ("90s", 90_000, "file")
    one = settings(SMALLEST + "retention_local_target_ms_default: -1\n")["retention_local_target_ms_default"]
    assert (one.shown, one.value) == ("null", None)


def test_value_of_the_environment_names_its_variables():
    """A list from the environment names the variables of all its items."""
    found = settings(
        SMALLEST.replace("[/srv/logs]", "['${A}/1', '/x', '${B}/${A}']") + "cluster_id: ${NAME}\n",
        A="/a",
        B="/b",
        NAME="mine",
    )
    assert (found["cluster_id"].shown, found["cluster_id"].origin) == ("mine", "line 5, from ${NAME}")
    assert found["broker.log_dirs"].value == ["/a/1", "/x", "/b/a"]
    assert found["broker.log_dirs"].variables == ("A", "B")
    assert found["broker.log_dirs"].source == "environment"


def test_topic_shows_what_is_set_for_it_and_no_more():
    """A topic's settings are only those that the file gives for it."""
    found = settings(SMALLEST + "topics:\n  a*:\n    local.retention.ms: 6h\n  b:\n")
    topics = {name: one for name, one in found.items() if name.startswith("topics")}
    assert list(topics) == ["topics[a*].local.retention.ms"]
    assert (topics["topics[a*].local.retention.ms"].shown, topics["topics[a*].local.retention.ms"].line) == (
        "6h",
        7,
    )


@pytest.mark.parametrize(
    ("name", "backend", "from_", "endpoint"),
    [
        ("aws keys", "aws", "cloud_storage_bucket, cloud_storage_region", "s3.us-west-2.amazonaws.com"),
        ("gcs hmac", "google", "cloud_storage_api_endpoint", "storage.googleapis.com"),
        ("gcs service account", "google", "cloud_storage_gcs_credentials_file", "storage.googleapis.com"),
        (
            "azure key",
            "azure",
            "cloud_storage_azure_storage_account, cloud_storage_azure_container",
            "archiveaccount.blob.core.windows.net",
        ),
    ],
)
def test_inferred_value_says_from_what(name, backend, from_, endpoint):
    """The backend, and the endpoint where it is not written down."""
    found = settings(ON + EXAMPLES[name], SECRET="s3cr3t")
    one = found["cloud_storage_backend"]
    assert (one.shown, one.origin) == (backend, f"inferred from {from_}")
    one = found["cloud_storage_api_endpoint"]
    assert one.shown == endpoint
    assert one.source == ("file" if "api_endpoint" in EXAMPLES[name] else "inferred")
    assert found["cloud_storage_url_style"].source == "inferred"


def test_nothing_is_inferred_where_nothing_says_anything():
    """No endpoint is inferred without a store."""
    found = settings(SMALLEST)
    assert not [one for one in found.values() if one.source == "inferred"]
    assert found["cloud_storage_backend"].shown == "not set"
    assert not [one for one in settings(TIERED).values() if one.source == "inferred"]


def test_secrets_are_masked():
    """A secret is shown as being there, whether it came from the file or the environment."""
    text = SMALLEST.replace(
        "kind: none",
        "kind: kafka\n  bootstrap: [h:1]\n"
        "  security: {protocol: SASL_SSL, sasl_username: u, sasl_password: hunter2}",
    )
    text += "cloud_storage_secret_key: hunter2\ncloud_storage_azure_shared_key: ${KEY}\n"
    found = settings(text, KEY="hunter2")
    assert "hunter2" not in str(found)
    for name in (
        "broker.security.sasl_password",
        "cloud_storage_secret_key",
        "cloud_storage_azure_shared_key",
    ):
        assert (found[name].shown, found[name].value) == ("(secret)", "(secret)")
    assert settings(SMALLEST)["cloud_storage_secret_key"].shown == "not set"
