"""The shipped unit: what systemd says of it, and that pins work behind the mounts that it makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

import pytest

from tests.support.daemon import directory_config, write_config
from tieringd.config.model import Config
from tieringd.config.units import DURATION, parse_quantity
from tieringd.storage.file_root import make_marker

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "deploy/systemd/tieringd.service"
MAX_EXPOSURE = 25
"""In tenths. A plain unit has 96, and this one had 19 when this was written."""
MOUNTS = """
root=$1; config=$2; shift 2
mount --bind "$root" "$root.ro"
mount -o remount,ro,bind "$root.ro"
for one; do mount --bind "$one" "$root.ro${one#"$root"}"; done
# The read-only tree takes the place of the first one.
mount --rbind "$root.ro" "$root"
"""
"""ProtectSystem=strict, for one directory: the arguments after the configuration stay writable."""
needs_systemd_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not installed: the unit is not verified",
)


def section() -> dict[str, str]:
    """Return the unit's settings of [Service]."""
    parser = RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(UNIT)
    return dict(parser["Service"])


@pytest.fixture
def installed(tmp_path):
    """Give the unit with a program that exists on this machine."""
    path = tmp_path / "tieringd.service"
    path.write_text(UNIT.read_text().replace("/opt/tieringd/bin/tieringd", "/bin/true"))
    return path


@needs_systemd_analyze
def test_systemd_finds_nothing_wrong(installed):
    """No unknown setting, no value that does not parse."""
    done = subprocess.run(
        ["systemd-analyze", "verify", str(installed)], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd_analyze
def test_the_sandbox_stays_tight(installed):
    """The permissions that the pins need open nothing else."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={MAX_EXPOSURE}", str(installed)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_times_and_exit_codes_fit_the_daemon():
    """A stop waits for the uploads in hand, code 2 is final, and the watchdog outlasts a slow turn."""
    settings = section()
    shutdown_ms = Config.model_fields["shutdown_timeout_ms"].default
    assert parse_quantity(settings["TimeoutStopSec"], DURATION) >= 1.5 * shutdown_ms
    assert settings["Type"] == "notify"
    assert settings["RestartPreventExitStatus"] == "2"
    assert settings["ExecStartPre"].startswith("-"), "a finding of doctor must not stop the start"
    assert parse_quantity(settings["WatchdogSec"], DURATION) >= 60_000
    assert "AF_UNIX" in settings["RestrictAddressFamilies"], "the notify socket"


@pytest.mark.parametrize("is_shipped", [True, False], ids=["shipped", "without-its-paths"])
def test_pins_work_behind_the_mounts_of_the_unit(tmp_path, is_shipped):
    """
    ProtectSystem=strict makes all read-only, and each writable path a mount of its own.

    Without the unit's ReadWritePaths no link can be made, and doctor names the cause.
    """
    settings = section()
    paths = [one.lstrip("-") for one in settings["ReadWritePaths"].split()] if is_shipped else []
    state = Path("/var/lib") / settings["StateDirectory"]
    log_dir = tmp_path / "var/lib/kafka/data"
    log_dir.mkdir(parents=True)
    (log_dir / "meta.properties").write_text("version=1\nnode.id=1\ncluster.id=abc\n")
    tmp_path.with_name(f"{tmp_path.name}.ro").mkdir()
    (tmp_path / "archive").mkdir()
    make_marker(tmp_path / "archive")
    config = directory_config([log_dir], tmp_path / "archive", tmp_path / str(state).lstrip("/"))
    del config["log_retention_ms"]
    config["broker"] = {"kind": "kafka", "log_dirs": [str(log_dir)], "bootstrap": ["127.0.0.1:1"]}
    file = write_config(tmp_path / "tieringd.yaml", config)
    writable = [f"{tmp_path}{one}" for one in (*paths, state)] + [str(tmp_path / "archive")]
    for one in writable:
        Path(one).mkdir(parents=True, exist_ok=True)

    options = "--timeout 60 --format json"
    done = subprocess.run(
        [
            *("unshare", "--mount", "--map-root-user", "sh", "-ec"),
            f'{MOUNTS} exec {sys.executable} -m tieringd doctor --config "$config" {options}',
            *("sh", str(tmp_path), str(file), *writable),
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout, done.stderr
    found = {one["check"]: one for one in json.loads(done.stdout)}
    assert found["state_directory"]["outcome"] == "ok"
    assert found["store_write"]["outcome"] == "ok"
    if is_shipped:
        assert found["pins"]["outcome"] == "ok", found["pins"]
    else:
        assert found["pins"]["outcome"] == "warning"
        assert "another mount" in found["pins"]["message"]
        assert "ReadWritePaths" in found["pins"]["message"]
