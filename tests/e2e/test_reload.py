"""SIGHUP on the real daemon: what takes effect, what waits for a restart, and a file that is wrong."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.e2e.log_files import RECORDS, write_partition
from tests.support.daemon import directory_config, running_daemon, write_config

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return the configuration of a partition that is not archived yet."""
    write_partition(tmp_path / "logs", "orders-0", segments=3)
    (tmp_path / "state").mkdir()
    (tmp_path / "archive").mkdir()
    settings = directory_config([tmp_path / "logs"], tmp_path / "archive", tmp_path / "state")
    settings["topics"] = {"orders": {"redpanda.remote.write": False}}
    return write_config(tmp_path / "tieringd.yaml", settings)


WRONG = ("cloud_storage_bukket", "cloud_storage_max_connections")


def rewrite(path: Path, **changes) -> None:
    write_config(path, yaml.safe_load(path.read_text()) | changes)


def reloads(daemon) -> int:
    return len(daemon.events("configuration reloaded"))


def reload(daemon) -> None:
    count = reloads(daemon)
    daemon.send_signal(signal.SIGHUP)
    daemon.until(lambda: reloads(daemon) > count, "the configuration is reloaded")


def test_reload_takes_effect_without_a_restart(config, tmp_path):
    """A topic that is switched on is archived, and then trimmed to its new target."""
    with running_daemon(config) as daemon:
        daemon.until_rounds(2)
        assert daemon.status()["partitions"] == []

        rewrite(config, topics={"orders": {"redpanda.remote.write": True}})
        reload(daemon)
        daemon.until_next_offset("orders", 3 * RECORDS)

        limits = {"redpanda.remote.write": True, "retention.local.target.bytes": 1}
        rewrite(config, topics={"orders": limits}, log={"level": "warning"})
        reload_silently(daemon)
        daemon.until(
            lambda: len(list((tmp_path / "logs" / "orders-0").glob("*.log"))) == 1, "the log is trimmed"
        )
        changes = [one["change"] for one in daemon.events("configuration changed")]
        assert "topics[orders].redpanda.remote.write: false -> true" in changes
        assert not daemon.events("local log trimmed"), "what is below the new level is not written"


def reload_silently(daemon) -> None:
    daemon.send_signal(signal.SIGHUP)


def test_reload_says_what_needs_a_restart(config):
    """The reload changes nothing meanwhile."""
    with running_daemon(config) as daemon:
        rewrite(config, cloud_storage_max_connections=7)
        reload(daemon)
        (event,) = daemon.events("configuration change waits for a restart")
        assert event["change"] == "cloud_storage_max_connections: 20 -> 7"
        reload(daemon)
        assert len(daemon.events("configuration change waits for a restart")) == 2


def test_reload_of_a_wrong_file_keeps_the_configuration_in_use(config):
    """The log has every fault of the file, and the daemon goes on as before."""
    with running_daemon(config) as daemon:
        good = config.read_text()
        config.write_text(f"{good}\ncloud_storage_bukket: x\ncloud_storage_max_connections: none\n")
        daemon.send_signal(signal.SIGHUP)
        daemon.until(
            lambda: daemon.events("configuration is not reloaded: the new one is wrong"), "it is refused"
        )
        (event,) = daemon.events("configuration is not reloaded: the new one is wrong")
        assert [name in problem for name, problem in zip(WRONG, event["problems"], strict=True)] == [True] * 2
        daemon.until_rounds(2)

        config.write_text(good)
        reload(daemon)
        assert daemon.events("configuration reloaded")[-1]["applied"] == 0


def test_request_with_the_admin_token_reloads(config):
    """
    A request with the admin token reloads as SIGHUP does, and one without it changes nothing.

    The log does not show the token.
    """
    rewrite(config, admin={"port": 0, "token": "hush-admin_token"})
    with running_daemon(config) as daemon:
        daemon.until_rounds(1)
        rewrite(config, topics={"orders": {"redpanda.remote.write": True}})
        assert daemon.post_status("/reload") == 401
        assert reloads(daemon) == 0
        assert daemon.post_status("/reload", Authorization="Bearer hush-admin_token") == 202
        daemon.until_next_offset("orders", 3 * RECORDS)
        assert reloads(daemon) == 1
        assert "hush" not in daemon.output_text()
