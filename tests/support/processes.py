"""
Child processes of tests, the demo and benchmarks: find programs, start, wait, and end.

Plain functions and classes, independent of pytest. Each process is ended by its own id.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.support.warm_start import WarmProcess

_POLL_SECONDS = 0.05
_STOP_POLL_SECONDS = 0.001
_STOP_TIMEOUT_SECONDS = 60


class ServerStartError(RuntimeError):
    """A server ended, or did not become ready in time. The message ends with the server's output."""


def program(name: str) -> str:
    """
    Return the path of a program that is installed beside this interpreter.

    Raises:
        FileNotFoundError: The program is not installed; the message says how to install it.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; run `make install-dev`, which installs it")
    return str(path)


def is_alive(pid: int) -> bool:
    """Say whether a process runs: it has not ended, and waits for no parent to read its exit code."""
    return _state(Path(f"/proc/{pid}")) not in {"", "Z", "X"}


def pause(pid: int) -> None:
    """
    Stop a process's execution (SIGSTOP), and wait until each of its threads stands still.

    On a busy machine its other threads go on until the one that takes the signal gets a processor.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _STOP_TIMEOUT_SECONDS
    while not all(_state(thread) in {"", "Z", "X", "T"} for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(_STOP_POLL_SECONDS)


def _state(process: Path) -> str:
    """Return the letter by which the kernel names the state of a process or thread; empty without one."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until_ended(pids: Sequence[int], *, timeout_seconds: float = 180) -> None:
    """
    Wait until none of these processes runs.

    Raises:
        TimeoutError: One of them still runs.
    """
    deadline = time.monotonic() + timeout_seconds
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes still run: {[pid for pid in pids if is_alive(pid)]}")
        time.sleep(_POLL_SECONDS)


class Server:
    """One server process. Its output goes to a file."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: Path,
        start: Callable[..., subprocess.Popen[bytes] | WarmProcess] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        Describe a server; `launch` starts it.

        Args:
            command: The program and its arguments. With *start* only the program's name is used, in messages.
            output: The file to which standard output and standard error are appended.
            start: A function that starts the process, with arguments `stdout` and `stderr`. None runs
                *command*.
            environment: Variables that *command* gets in addition to those of this process.
        """
        self.command = list(command)
        self.output = output
        self._start = start or self._started
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | WarmProcess | None = None

    @property
    def pid(self) -> int:
        """Return the process id; the server must be running."""
        assert self._process is not None, f"{self.command[0]} is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Return whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Start the process, without waiting for it."""
        assert self._process is None, f"{self.command[0]} is already running"
        with self.output.open("ab") as output:
            self._process = self._start(stdout=output.fileno(), stderr=output.fileno())

    def _started(self, *, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=os.environ | self._environment,
            # In a session of its own the server gets no Ctrl-C. The tests stop it.
            start_new_session=True,
        )

    def wait_until(self, is_ready: Callable[[], bool], *, timeout_seconds: float = 180) -> None:
        """
        Wait until *is_ready* is true.

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
        """Stop the process's execution (SIGSTOP). Its connections stay open, and it answers nothing."""
        pause(self.pid)

    def resume(self) -> None:
        """Continue a paused process."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; the process must be running."""
        assert self._process is not None, f"{self.command[0]} is not running"
        self._process.send_signal(number)

    def wait(self, timeout_seconds: float) -> int:
        """
        Wait until the process ends, and return its exit code, which is negative after a signal.

        Raises:
            subprocess.TimeoutExpired: The process is still running.
        """
        assert self._process is not None, f"{self.command[0]} is not running"
        code = self._process.wait(timeout_seconds)
        self._process = None
        return code

    def kill(self) -> None:
        """Kill the process, as a crash does."""
        self.stop(grace_seconds=0)

    def stop(self, *, grace_seconds: float = 60) -> None:
        """End the process with SIGTERM, and with SIGKILL after *grace_seconds*. 0 sends SIGKILL at once."""
        if self._process is None:
            return
        if grace_seconds > 0:
            # A paused process would handle the SIGTERM only later.
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
