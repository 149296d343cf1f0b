"""
Child processes of tests, the demo and benchmarks: found, started, waited for, ended.

Plain functions: nothing here knows pytest. Each process is ended by its own id.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.warm_start import WarmProcess

_POLL_SECONDS = 0.05


class ServerStartError(RuntimeError):
    """A server ended or stayed silent instead of becoming ready; the message ends with its output."""


def program(name: str) -> str:
    """
    Return the path of a program that was installed beside this interpreter.

    Raises:
        FileNotFoundError: It is not there; the message says how to install it.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; run `make install-dev`, which installs it")
    return str(path)


class Server:
    """One server process; what it prints goes to a file."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: Path,
        start: Callable[..., subprocess.Popen[bytes] | WarmProcess] | None = None,
    ) -> None:
        """
        Take what to run.

        Args:
            command: The program and its arguments; only its name counts when *start* is given.
            output: The file that standard output and standard error are appended to.
            start: What starts the process, given `stdout` and `stderr`; a new program without it.
        """
        self.command = list(command)
        self.output = output
        self._start = start or self._started
        self._process: subprocess.Popen[bytes] | WarmProcess | None = None

    @property
    def pid(self) -> int:
        """Return the process id; the server must be running."""
        assert self._process is not None, f"{self.command[0]} is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Say whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Start the process; it is not ready yet."""
        assert self._process is None, f"{self.command[0]} is already running"
        with self.output.open("ab") as output:
            self._process = self._start(stdout=output.fileno(), stderr=output.fileno())

    def _started(self, *, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            # A Ctrl-C that ends the tests must leave it to them to stop the server.
            start_new_session=True,
        )

    def wait_until(self, is_ready: Callable[[], bool], *, timeout_seconds: float = 60) -> None:
        """
        Return when *is_ready* says so.

        Raises:
            ServerStartError: The process ended, or was not ready in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while not is_ready():
            if not self.is_running:
                raise ServerStartError(f"{self.command[0]} ended while starting:\n{self._output_tail()}")
            if time.monotonic() > deadline:
                raise ServerStartError(f"{self.command[0]} is not ready:\n{self._output_tail()}")
            time.sleep(_POLL_SECONDS)

    def pause(self) -> None:
        """Freeze the process: it keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; the process must be running."""
        assert self._process is not None, f"{self.command[0]} is not running"
        self._process.send_signal(number)

    def wait(self, timeout_seconds: float) -> int:
        """
        Wait until the process ends, and return its exit code: negative after a signal.

        Raises:
            subprocess.TimeoutExpired: It is still running.
        """
        assert self._process is not None, f"{self.command[0]} is not running"
        code = self._process.wait(timeout_seconds)
        self._process = None
        return code

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        self.stop(grace_seconds=0)

    def stop(self, *, grace_seconds: float = 10) -> None:
        """End the process with SIGTERM, and with SIGKILL when it takes longer than allowed."""
        if self._process is None:
            return
        if grace_seconds > 0:
            # A paused process would keep the SIGTERM for later.
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(grace_seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
        else:
            self._process.kill()
        self._process.wait()
        self._process = None

    def _output_tail(self) -> str:
        return self.output.read_text(errors="replace")[-3000:]
