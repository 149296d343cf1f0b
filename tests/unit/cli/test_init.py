"""`tieringd init`: a configuration that `config check` accepts, and the permissions that it needs."""

from __future__ import annotations

import json
import re

import pytest

from tests.unit.cli.commands import invoked
from tieringd.config import load_config
from tieringd.errors import ConfigError

SECRETS = dict.fromkeys(
    ("TIERINGD_ACCESS_KEY", "TIERINGD_SECRET_KEY", "TIERINGD_AZURE_KEY", "TIERINGD_SASL_PASSWORD"), "x"
)
STORES = {
    "aws": ["--store", "aws", "--bucket", "archive", "--region", "eu-central-1"],
    "minio": ["--store", "aws", "--bucket", "archive", "--endpoint", "minio:9000"],
    "google": ["--store", "google", "--bucket", "archive", "--region", "europe-west4"],
    "azure": ["--store", "azure", "--bucket", "archive", "--account", "kafkaarchive"],
    "file": ["--store", "file", "--bucket", "/srv/archive"],
}


@pytest.mark.parametrize("broker", ["kafka", "redpanda", "none"])
@pytest.mark.parametrize("credentials", ["instance", "keys"])
@pytest.mark.parametrize("store", STORES)
def test_what_it_writes_is_accepted_without_a_warning(tmp_path, store, credentials, broker):
    """The written configuration has no fault and no warning, for each store, broker and kind of login."""
    path = tmp_path / "tieringd.yaml"
    done = invoked(
        *("init", path, "--broker", broker, "--credentials", credentials, "--topic", "pay-*"), *STORES[store]
    )
    assert done.exit_code == 0, done.errors
    config = load_config(path, environ=SECRETS)
    assert config.warnings == ()
    assert config.notes == ()
    assert config.broker.kind == broker
    assert config.topic("pay-ments", {}).remote_write
    assert config.topic("orders", {}).remote_write is (broker == "none")
    # The broker's user has to read it, and it names secrets without having them.
    assert path.stat().st_mode & 0o777 == 0o644


def test_the_permissions_are_printed_for_the_user_and_the_bucket(tmp_path):
    """ACLs by prefix, and the bucket's policy as JSON that names the prefix."""
    path = tmp_path / "tieringd.yaml"
    done = invoked(
        *("init", path, "--user", "tiering", "--bootstrap", "b1:9094", "--topic", "pay-*"),
        *(*STORES["aws"], "--prefix", "kafka"),
    )
    assert done.exit_code == 0, done.errors
    assert (
        "kafka-acls --bootstrap-server b1:9094 --add --allow-principal User:tiering --operation Describe "
        "--operation DescribeConfigs --operation Delete --topic 'pay-' --resource-pattern-type prefixed"
    ) in done.output
    assert "--operation AlterConfigs --cluster" in done.output
    policy = json.loads(re.search(r"^\{.*^\}", done.output, re.DOTALL | re.MULTILINE)[0])
    assert policy["Statement"][1]["Resource"] == "arn:aws:s3:::archive/kafka/*"
    assert f"tieringd config check {path}" in done.output


def test_an_existing_file_stays(tmp_path):
    """An existing file is replaced only with `--force`; the error comes before the first question."""
    path = tmp_path / "tieringd.yaml"
    path.write_text("mine")
    for options in (STORES["file"], ("--ask",)):
        with pytest.raises(ConfigError, match="exists"):
            invoked("init", path, *options)
    assert path.read_text() == "mine"
    assert invoked("init", path, "--force", *STORES["file"]).exit_code == 0
    assert "file_root" in path.read_text()


def test_dry_run_prints_and_writes_nothing(tmp_path):
    """Standard output has the configuration alone."""
    path = tmp_path / "tieringd.yaml"
    done = invoked("init", path, "--dry-run", *STORES["file"])
    assert not path.exists()
    other = tmp_path / "other.yaml"
    other.write_text(done.output)
    assert load_config(other, environ=SECRETS).warnings == ()


def test_a_missing_answer_without_a_terminal_is_named(tmp_path):
    """There is no bucket by default."""
    done = invoked("init", tmp_path / "tieringd.yaml")
    assert done.exit_code == 2
    assert "--bucket" in done.errors


def test_a_faulty_answer_is_refused_before_anything_is_written(tmp_path):
    """
    The error names the fault that `config check` would name.

    A colon or a quote in a name breaks nothing.
    """
    path = tmp_path / "tieringd.yaml"
    with pytest.raises(ConfigError) as caught:
        invoked("init", path, "--log-dir", "relative/path", *STORES["file"])
    assert any("log_dirs" in problem for problem in caught.value.problems)
    assert not path.exists()
    assert invoked("init", path, "--log-dir", '/a: "b" #c', *STORES["file"]).exit_code == 0
    assert str(load_config(path, environ=SECRETS).broker.log_dirs[0]) == '/a: "b" #c'


def test_it_asks_for_what_no_option_gives(tmp_path):
    """A wrong choice is asked for again; an empty answer is the default."""
    path = tmp_path / "etc" / "tieringd" / "tieringd.yaml"
    answers = ["nats", "kafka", "/data/kafka", "", "", "file", "/srv/archive", "", "orders pay-*"]
    done = invoked("init", path, "--ask", typed="\n".join([*answers, ""]))
    assert done.exit_code == 0, done.output + done.errors
    config = load_config(path, environ=SECRETS)
    assert [str(one) for one in config.broker.log_dirs] == ["/data/kafka"]
    assert set(config.topics) == {"orders", "pay-*"}
