"""Some faults of the swarm: the start of what `make swarm` runs for longer."""

# Long: three brokers twice; some faults of many kinds, then all is read and scrubbed.

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.swarm.report import Report
from tests.swarm.run import swarm

_KINDS = (
    "store refuses connections",
    "daemon is killed",
    "configuration is reloaded",
    "leaders move in a burst",
    "daemon is cut off from the store",
    "a partition moves to another log directory",
)
"""Kinds that are over soon. Those that wait for a broker's start or session are left to `make swarm`."""
_ENDS_SOON_SECONDS = 240


# Long: faults, each with a recovery, between the start of a cluster and a check of everything.
@pytest.mark.timeout(1800)
async def test_short_swarm_breaks_no_promise(tmp_path):
    """Each fault has its effect, each partition is archived on after each, and no promise is broken."""
    report = Report(seed=5)
    await swarm(tmp_path, report, kinds=_KINDS, faults=len(_KINDS))
    history = "\n".join(report.history)
    assert report.broken == [], history
    assert report.proven == dict.fromkeys(_KINDS, 1), history
    assert report.records > 0, history


def is_mounted(directory: Path) -> bool:
    """Return whether a file system is mounted below *directory*."""
    return str(directory) in Path("/proc/mounts").read_text()


def processes_of(directory: Path) -> list[str]:
    """Return the command lines and the directories of processes that have to do with *directory*."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            working = str((process / "cwd").readlink())
        except OSError:
            continue  # It has ended meanwhile.
        if str(directory) in command + working:
            found.append(f"{command} in {working}")
    return found


# Long: three brokers start and end.
@pytest.mark.timeout(1800)
async def test_signal_ends_a_swarm_in_order(tmp_path, monkeypatch):
    """SIGTERM in a fault ends brokers, daemons, store and mount, and prints the history."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.swarm.run", "--kind", "daemon hangs"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert running.stdout is not None
    printed = b""
    try:
        while b"0: daemon hangs" not in printed:
            line = await running.stdout.readline()
            assert line, printed
            printed += line
        assert is_mounted(tmp_path)
        assert processes_of(tmp_path)
        running.send_signal(signal.SIGTERM)
        rest, _ = await asyncio.wait_for(running.communicate(), _ENDS_SOON_SECONDS)
    finally:
        if running.returncode is None:
            running.kill()
    assert running.returncode == 128 + signal.SIGTERM, rest
    assert rest.count(b"0: daemon hangs") == 1, "the history is printed again"
    assert b"ended by SIGTERM" in rest
    # The process that waits for a daemon's end, and tells its exit code, ends a moment after it.
    deadline = time.monotonic() + _ENDS_SOON_SECONDS
    while (left := processes_of(tmp_path)) and time.monotonic() < deadline:  # noqa: ASYNC110 no event
        await asyncio.sleep(0.1)
    assert left == []
    assert not is_mounted(tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing was broken, so no logs are kept"
