"""What the service manager hears of a daemon: a real process, and the datagrams that it sends."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import closing, contextmanager

import pytest

from tests.support.daemon import Daemon, directory_config, write_config
from tests.support.ports import free_ports
from tieringd.daemon.service_manager import ServiceManager

_WATCHDOG_SECONDS = 2.0
_PATIENCE_SECONDS = 180


class Manager:
    """The receiving end of sd_notify, as systemd has it."""

    def __init__(self, path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(_PATIENCE_SECONDS)

    def next(self) -> dict[str, str]:
        """Return the next message."""
        return dict(line.split("=", 1) for line in self._socket.recv(4096).decode().splitlines())

    def until(self, name: str) -> dict[str, str]:
        """Return the next message with *name*; messages before it are dropped."""
        while name not in (message := self.next()):
            pass
        return message

    def is_silent(self, seconds: float) -> bool:
        """Return whether no message comes within *seconds*, after those that have come already."""
        self._socket.setblocking(False)
        try:
            while True:
                self._socket.recv(4096)
        except BlockingIOError:
            self._socket.settimeout(seconds)
        try:
            self._socket.recv(4096)
        except TimeoutError:
            return True
        finally:
            self._socket.settimeout(_PATIENCE_SECONDS)
        return False

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path):
    with closing(Manager(tmp_path / "notify")) as found:
        yield found


@contextmanager
def process(config, tmp_path, monkeypatch):
    """Run a daemon as the manager starts it."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", str(round(_WATCHDOG_SECONDS * 1e6)))
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    daemon = Daemon(config, tmp_path / "daemon.log")
    daemon.launch()
    try:
        yield daemon
    finally:
        daemon.server.kill()


@pytest.fixture
def away(tmp_path):
    """Give a configuration whose store accepts connections and never answers, without its broker."""
    log_dir = tmp_path / "data"
    log_dir.mkdir()
    (log_dir / "meta.properties").write_text("version=1\nnode.id=1\ncluster.id=abc\n")
    store = socket.create_server(("127.0.0.1", 0))
    broker, listener, gateway = free_ports(3)
    config = directory_config([log_dir], tmp_path, tmp_path / "state")
    for name in ("cloud_storage_file_root", "log_retention_ms"):
        del config[name]
    config |= {
        "broker": {"kind": "kafka", "log_dirs": [str(log_dir)], "bootstrap": [f"127.0.0.1:{broker}"]},
        "cloud_storage_backend": "aws",
        "cloud_storage_bucket": "archive",
        "cloud_storage_access_key": "key",
        "cloud_storage_secret_key": "secret",
        "cloud_storage_api_endpoint": "127.0.0.1",
        "cloud_storage_api_endpoint_port": store.getsockname()[1],
        "cloud_storage_disable_tls": True,
        "gateway": {"enabled": True, "port": gateway, "broker": f"127.0.0.1:{listener}"},
    }
    with closing(store):
        yield write_config(tmp_path / "tieringd.yaml", config), gateway


# Long: waits for a silence of the watchdog that is longer than its limit.
def test_with_store_and_broker_away_the_gateway_listens_and_the_watchdog_is_fed(
    away, manager, tmp_path, monkeypatch
):
    """
    Ready means that clients can connect. A hanging process is silent; one that waits for its store is not.

    A stop while the store is still awaited ends with 0.
    """
    config, port = away
    with process(config, tmp_path, monkeypatch) as daemon:
        assert manager.until("READY")["STATUS"] == "running"
        with socket.create_connection(("127.0.0.1", port), timeout=180):
            pass
        assert "object store does not answer yet" not in daemon.output_text()
        for _ in range(4):
            manager.until("WATCHDOG")
        daemon.server.pause()
        assert manager.is_silent(_WATCHDOG_SECONDS)
        daemon.server.resume()
        manager.until("WATCHDOG")
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0


def test_a_reload_is_told_with_its_time_and_its_outcome(manager, tmp_path, monkeypatch):
    """A faulty file is ready again too: the daemon goes on, and its status says that nothing has changed."""
    (tmp_path / "logs").mkdir()
    text = directory_config([tmp_path / "logs"], tmp_path / "archive", tmp_path / "state")
    config = write_config(tmp_path / "tieringd.yaml", text)
    with process(config, tmp_path, monkeypatch) as daemon:
        manager.until("READY")
        daemon.until(lambda: daemon.events("admin page listens"), "the daemon listens")
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        daemon.send_signal(signal.SIGHUP)
        assert int(manager.until("RELOADING")["MONOTONIC_USEC"]) >= before
        assert manager.until("READY")["STATUS"] == "running"
        config.write_text("nonsense: true\n")
        daemon.send_signal(signal.SIGHUP)
        manager.until("RELOADING")
        assert "the last reload changed nothing" in manager.until("READY")["STATUS"]
        daemon.send_signal(signal.SIGTERM)
        assert manager.until("STOPPING")["STATUS"]
        assert daemon.wait() == 0


def test_without_a_manager_nothing_is_sent():
    """The watchdog of another process is not fed either."""
    ServiceManager({}).ready("running")
    assert ServiceManager({"WATCHDOG_USEC": "1000000"}).watchdog_seconds == 1
    other = {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid() + 1)}
    assert ServiceManager(other).watchdog_seconds == 0
    # The manager may be gone: the daemon does not depend on it.
    ServiceManager({"NOTIFY_SOCKET": "/nowhere/notify"}).ready("running")


def test_an_abstract_socket_is_reached(tmp_path):
    """The name of an abstract socket begins with @ in the variable, and with a zero byte in the kernel."""
    name = f"tieringd-test-{os.getpid()}"
    with closing(Manager(f"\0{name}")) as found:
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).ready("one\ntwo")
        assert found.next() == {"READY": "1", "STATUS": "one two"}
