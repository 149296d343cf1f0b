"""`tieringd doctor`: what it finds, that nothing it tries lasts, and its exit codes."""

from __future__ import annotations

import json
import socket
import time

import pytest
import yaml

from tests.support.daemon import directory_config, write_config
from tests.unit.cli.commands import invoked
from tieringd.broker.pins import pin_root
from tieringd.daemon import doctor
from tieringd.storage.file_root import make_marker


@pytest.fixture
def host(tmp_path):
    """Give a function that writes a configuration with a Kafka log directory and a file store."""
    log_dir = tmp_path / "kafka" / "data"
    (log_dir / "orders-0").mkdir(parents=True)
    (log_dir / "meta.properties").write_text("version=1\nnode.id=1\ncluster.id=abc\n")
    (tmp_path / "archive").mkdir()
    make_marker(tmp_path / "archive")
    (tmp_path / "state").mkdir()

    def write(**changes):
        config = directory_config([log_dir], tmp_path / "archive", tmp_path / "state")
        del config["log_retention_ms"]
        config["broker"] = {
            "kind": "kafka",
            "log_dirs": [str(log_dir)],
            "bootstrap": [f"127.0.0.1:{unused.getsockname()[1]}"],
        }
        return write_config(tmp_path / "tieringd.yaml", config | changes)

    # The port stays taken, so that no other process listens there.
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield write


def tree(root) -> dict[str, int]:
    """Return all paths with their numbers of links, without the locks that a file store keeps."""
    return {
        str(one): one.stat().st_nlink if one.is_file() else 0
        for one in root.rglob("*")
        if one.suffix != ".lock"
    }


def findings(done) -> dict[str, dict]:
    return {one["check"]: one for one in json.loads(done.output)}


def test_everything_is_tried_and_nothing_lasts(host, tmp_path):
    """Objects, links and directories that were made are gone; a broker that is away is exit 1."""
    config = host()
    before = tree(tmp_path)
    done = invoked("doctor", "--config", config, "--format", "json", "--timeout", "60")
    assert tree(tmp_path) == before
    found = findings(done)
    outcomes = {name: one["outcome"] for name, one in found.items()}
    assert outcomes == {
        "store_read": "ok",
        "store_write": "ok",
        "store_checksum": "ok",
        "store_conditional_write": "ok",
        "clock": "ok",
        "broker": "away",
        "log_directory": "ok",
        "pins": "ok",
        "free_space": outcomes["free_space"],
        "state_directory": "ok",
        "descriptors": outcomes["descriptors"],
        "inotify_max_user_watches": "ok",
        "inotify_max_user_instances": "ok",
    }
    assert done.exit_code == 1
    assert "hard link was made" in found["pins"]["message"]


def test_without_a_broker_a_sound_host_is_exit_0(host, tmp_path):
    """A warning does not change that; the text names each check, and its sum is the last line."""
    broker = {"kind": "none", "log_dirs": [str(tmp_path / "kafka" / "data")]}
    done = invoked("doctor", "--config", host(broker=broker, log_retention_ms=-1))
    assert done.exit_code == 0, done.output
    assert "ok       store_write: file://" in done.output
    assert done.output.splitlines()[-1].startswith("12 checks: ")
    done = invoked("doctor", "--config", tmp_path / "tieringd.yaml", "--format", "yaml")
    assert {one["check"] for one in yaml.safe_load(done.output)} >= {"store_read", "pins"}


def test_a_missing_archive_is_told_with_what_to_do(host, tmp_path):
    """
    A missing parent means that the disk is not mounted.

    The first start creates an archive below a parent.
    """
    done = invoked(
        *("doctor", "--format", "json", "--timeout", "20"),
        *("--config", host(cloud_storage_file_root=str(tmp_path / "disk" / "archive"))),
    )
    assert done.exit_code == 1
    assert findings(done)["store_read"]["outcome"] == "fault"
    remedy = findings(done)["store_read"]["remedy"]
    assert remedy
    shown = invoked("doctor", "--timeout", "20", "--config", tmp_path / "tieringd.yaml").output
    assert remedy in " ".join(shown.replace("->", "").split())
    assert all(len(line) < 80 for line in shown.splitlines() if str(tmp_path) not in line)
    done = invoked(
        *("doctor", "--format", "json", "--timeout", "20"),
        *("--config", host(cloud_storage_file_root=str(tmp_path / "new"))),
    )
    assert findings(done)["store_read"]["outcome"] == "warning"
    assert not (tmp_path / "new").exists()


def test_trial_of_pins_does_not_hide_a_first_start(host, tmp_path, monkeypatch):
    """Pins are tried in the state directory, whose emptiness shows that there is no archive yet."""
    begins_at_first_start = doctor._begins_at_first_start

    def long_trial(*arguments):
        root = pin_root(*arguments)
        time.sleep(0.3)
        return root

    def late_look(config):
        time.sleep(0.1)
        return begins_at_first_start(config)

    monkeypatch.setattr(doctor, "pin_root", long_trial)
    monkeypatch.setattr(doctor, "_begins_at_first_start", late_look)
    config = host(cloud_storage_file_root=str(tmp_path / "new"))
    done = invoked("doctor", "--format", "json", "--timeout", "20", "--config", config)
    assert str(tmp_path / "state") in findings(done)["pins"]["message"]
    assert findings(done)["store_read"]["outcome"] == "warning"


def test_directory_of_a_new_filesystem_is_an_empty_state_directory(host, tmp_path):
    """The daemon takes it for one as well."""
    (tmp_path / "state" / "lost+found").mkdir()
    config = host(cloud_storage_file_root=str(tmp_path / "new"))
    done = invoked("doctor", "--format", "json", "--timeout", "20", "--config", config)
    assert findings(done)["store_read"]["outcome"] == "warning"


def test_an_unreadable_log_directory_is_a_fault(host, tmp_path):
    """The other checks go on."""
    broker = {"kind": "none", "log_dirs": [str(tmp_path / "nowhere")]}
    done = invoked("doctor", "--config", host(broker=broker, log_retention_ms=-1), "--format", "json")
    assert done.exit_code == 1
    assert findings(done)["log_directory"]["outcome"] == "fault"
    assert findings(done)["store_write"]["outcome"] == "ok"
