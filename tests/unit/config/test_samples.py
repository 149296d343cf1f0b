"""The samples and the reference page."""

import re
from pathlib import Path

import pytest

from tieringd.config import Config, load_config
from tieringd.config.naming import SECTIONS, property_names
from tieringd.config.reference import render

ROOT = Path(__file__).parents[3]
SAMPLES = sorted((ROOT / "config").glob("*.yaml"))
ENVIRON = {
    "TIERINGD_DEMO_DIR": "/srv/demo",
    "TIERINGD_SASL_PASSWORD": "p",
    "TIERINGD_ACCESS_KEY": "k",
    "TIERINGD_SECRET_KEY": "s",
}
EXAMPLES = {"broker", "state_directory"}
"""Required properties of full.yaml, which hold examples; the rest are defaults."""


def test_samples_are_the_ones_that_this_release_can_run():
    """A sample for a broker of a later release would not load."""
    assert [path.name for path in SAMPLES] == [
        "azure.yaml",
        "embedded.yaml",
        "full.yaml",
        "google.yaml",
        "kafka.yaml",
        "redpanda.yaml",
    ]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_sample_loads_without_a_warning(path):
    """An operator can start from any sample as it is."""
    assert load_config(path, environ=ENVIRON).warnings == ()


def test_embedded_sample_trims_soon_and_stays_in_its_directory():
    """The demo shows trimming, and writes nothing anywhere else."""
    config = load_config(ROOT / "config/embedded.yaml", environ=ENVIRON)
    topic = config.topic("any", {})
    assert (topic.remote_write, topic.remote_read) == (True, True)
    assert topic.local_retention_target.target_ms == 1000
    assert topic.local_retention_target.target_bytes == 2 * 2**20
    assert config.backend == "file"
    assert config.cloud_storage_file_root is not None
    for path in (*config.broker.log_dirs, config.state_directory, config.cloud_storage_file_root):
        assert path.parent == Path("/srv/demo")


def test_kafka_sample_says_what_its_comments_say():
    """The endpoint implies the backend and path style; topics override by name and pattern."""
    config = load_config(ROOT / "config/kafka.yaml", environ=ENVIRON)
    assert (config.backend, config.url_style) == ("aws", "path")
    assert config.endpoint_url == "https://s3.storage.example.com:9000"
    assert config.topic("payments-audit", {}).remote_write
    assert config.topic("payments-audit", {}).local_retention_target.target_bytes == 50 * 2**30
    assert config.topic("payments-eu", {}).local_retention_target.target_ms == 86_400_000
    assert config.topic("clicks", {}).remote_read
    assert not config.topic("other", {}).remote_write


def test_full_sample_names_every_property():
    """The sample has every property of a release, commented out if there is no default."""
    text = (ROOT / "config/full.yaml").read_text()
    named = set(re.findall(r'^[ #]*"?([a-z_.]+)"?:', text, re.MULTILINE))
    for model in SECTIONS.values():
        assert set(property_names(model)) - named == set()


def test_full_sample_holds_the_defaults():
    """A value in full.yaml changes nothing against leaving it out."""
    config = load_config(ROOT / "config/full.yaml", environ={})
    for name, field in Config.model_fields.items():
        if name not in EXAMPLES:
            assert getattr(config, name) == field.get_default(call_default_factory=True), name
    for name, field in type(config.broker).model_fields.items():
        if not field.is_required() and name != "bootstrap":
            assert getattr(config.broker, name) == field.default, name


def test_full_sample_comments_out_only_what_has_no_default():
    """Every property with a default is written as it would be set."""
    config = load_config(ROOT / "config/full.yaml", environ={})
    left_out = set(Config.model_fields) - config.model_fields_set
    with_default = {name for name in left_out if Config.model_fields[name].default is not None}
    assert with_default == {"cluster_id"}
    assert "cloud_storage_url_style" not in left_out
    for section in (config.admin, config.log, config.broker, config.broker.security):
        assert section.model_fields_set == set(type(section).model_fields)


def test_reference_page_is_current():
    """docs/configuration.md is what the classes say; write render()'s text there when they change."""
    assert (ROOT / "docs/configuration.md").read_text() == render()


def test_reference_page_explains_every_property():
    """Each property has a row with a type, and a meaning of its own."""
    rows = re.findall(
        r"^\| `([a-z_.]+)` \| ([^|]+) \| ([^|]*) \| ([^|]*) \| ([^|]+) \|$", render(), re.MULTILINE
    )
    assert [name for name, *_ in rows] == [
        name for model in SECTIONS.values() for name in property_names(model)
    ]
    assert all(kind and meaning not in ("", "None") for _, kind, _, _, meaning in rows)
    described = {name: (kind, default, reload) for name, kind, default, reload, _ in rows}
    assert described["state_directory"] == ("absolute path", "required", "restart")
    assert described["cloud_storage_bucket"] == ("text", "not set", "restart")
    assert described["redpanda.remote.write"] == ("true or false", "`null`", "live")
    assert described["topics"] == ("section, see below", "", "")
    assert described["retention_local_target_ms_default"] == ("duration, at least 1ms, or -1", "`1d`", "live")
    assert described["format"] == ("one of `json`, `console`", "`json`", "restart")
