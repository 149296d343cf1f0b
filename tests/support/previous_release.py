"""The release before this one: its source tree, and its daemon with today's dependencies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.daemon import Daemon
from tests.support.processes import Server

PREVIOUS = "2096571"
"""There is no tag yet."""
_ROOT = Path(__file__).parents[2]


def previous_release(place: Path) -> Path:
    """Write the source tree of the previous release to *place*, and return it."""
    packed = subprocess.run(
        ["git", "-C", _ROOT, "archive", "--format=tar", PREVIOUS], check=True, capture_output=True
    ).stdout
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "--extract", "--directory", place], input=packed, check=True)
    return place


class DaemonOfTree(Daemon):
    """`tieringd run` of some source tree, as a process of its own."""

    def __init__(self, config: Path, output: Path, *, source: Path) -> None:
        super().__init__(config, output)
        command = [sys.executable, "-m", "tieringd", "run", "--config", str(config)]
        self.server = Server(["env", f"--chdir={source}", *command], output=output)
