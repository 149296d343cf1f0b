"""The status page of a real daemon in Chromium, and `tieringd status` beside it."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys

import pytest
import yaml

from tests.e2e.log_files import RECORDS, segment_path, write_partition
from tests.support.chromium import browser_run
from tests.support.daemon import directory_config, running_daemon, write_config
from tests.support.ports import free_ports

WIDTHS = (1280, 500)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """Give a daemon that leads a damaged partition beside good ones, and its configuration."""
    root = tmp_path_factory.mktemp("status")
    for number in range(3):
        write_partition(root / "logs", f"orders-{number}", segments=3)
    damaged = segment_path(write_partition(root / "logs", "damaged-0", segments=2), 0)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    (port,) = free_ports(1)
    settings = directory_config([root / "logs"], root / "archive", root / "state")
    path = write_config(root / "tieringd.yaml", settings | {"admin": {"port": port}})
    with running_daemon(path) as daemon:
        for number in range(3):
            daemon.until_next_offset("orders", 3 * RECORDS, number)
        daemon.until(lambda: daemon.metric("tieringd_quarantined_partitions"), "the damage is seen")
        yield daemon, path


def test_browser_shows_what_the_daemon_says(daemon, tmp_path):
    """Chromium lays the page out under its own content policy, and every part is there with its text."""
    running, _ = daemon
    shown = browser_run("--dump-dom", running.url("/"), profile=tmp_path)
    assert re.search(r'id="state" class="state warn">Needs a person<', shown)
    assert "damaged-0: corrupt local data" in shown
    assert shown.count("<svg") == 4
    for name in ("figures", "tasks", "partitions", "disks", "errors"):
        assert f'id="{name}"' in shown


@pytest.mark.parametrize("width", WIDTHS)
def test_page_is_drawn_at_a_desk_and_on_a_phone(daemon, tmp_path, width):
    """A picture of that width comes out, and it is not one colour."""
    running, _ = daemon
    picture = tmp_path / "page.png"
    browser_run(f"--screenshot={picture}", f"--window-size={width},900", running.url("/"), profile=tmp_path)
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (width, 900)
    assert len(data) > 20_000


def test_command_says_the_same_on_one_screen(daemon):
    """No line is wider than a terminal, and its JSON is what the page is made of."""
    running, config = daemon

    def said(*arguments):
        command = [sys.executable, "-m", "tieringd", "status", "--config", str(config), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    text = said()
    assert "needs a person" in text
    assert "damaged-0: corrupt local data" in " ".join(text.split())
    assert max(map(len, text.splitlines())) < 80
    assert len(text.splitlines()) < 60
    document = json.loads(said("--format", "json"))
    assert yaml.safe_load(said("--format", "yaml")).keys() == document.keys()
    assert document["faults"] == {"corrupt": 1}
    assert document["led_partitions"] == running.metric("tieringd_led_partitions") == 4
    assert document["archived_bytes"] == running.metric("tieringd_daemon_archive_bytes")


def test_page_changes_nothing(daemon):
    """There is nothing to post to: the page is read-only."""
    running, _ = daemon
    for path in ("/", "/status", "/status/overview", "/metrics"):
        assert running.post_status(path) == 405
