"""A daemon whose clock a test steps: the swarm relies on it."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from pathlib import Path

from tests.support.daemon import directory_config, running_daemon, write_config
from tests.support.stepped_clock import SteppedDaemon

_HOURS = 3600


def test_clock_of_one_daemon_is_stepped_and_set_right(tmp_path):
    """Its log has the wrong time, forward and back, while it runs; the test's own clock stays right."""
    config = write_config(
        tmp_path / "tieringd.yaml",
        directory_config([tmp_path / "logs"], tmp_path / "archive", tmp_path / "state"),
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "archive").mkdir()
    with running_daemon(config, start=SteppedDaemon) as daemon:
        assert isinstance(daemon, SteppedDaemon)
        pid = daemon.server.pid

        def hours_off() -> int:
            """Return how wrong the clock is, as the daemon's last reload was logged."""
            before = len(daemon.events("configuration reloaded"))
            daemon.send_signal(signal.SIGHUP)
            daemon.until(lambda: len(daemon.events("configuration reloaded")) > before, "it is reloaded")
            told = datetime.fromisoformat(daemon.events("configuration reloaded")[-1]["timestamp"])
            return round((told - datetime.now(UTC)).total_seconds() / _HOURS)

        assert hours_off() == 0
        for hours in (5, -30, 0):
            daemon.step(hours * _HOURS)
            daemon.until(lambda hours=hours: hours_off() == hours, f"the clock is {hours} hours off")
        assert daemon.server.pid == pid
        # What waits by the clock that only runs forward goes on.
        daemon.until_rounds(3)
        assert "Traceback" not in daemon.output_text()
    assert not Path(f"/proc/{pid}").exists()
