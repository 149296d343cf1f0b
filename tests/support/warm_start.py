"""
Real `tieringd` processes that start in milliseconds.

The process of a command spends most of its time importing SDKs. Here one process, the stem, imports all of
`tieringd` once, and forks a new process for each command. A forked process runs the same `main` with its
own arguments, environment, working directory and files. It has its own id, receives signals, and ends with
its own exit code. It does not test the import itself, because the stem has imported even modules that a
command imports only when needed, nor the freeing of what was imported. A test of these starts a new
interpreter with `tests.support.daemon.command`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import AsyncExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_START_TIMEOUT_SECONDS = 120
_NOT_IMPORTED = {
    "tieringd.__main__",
    "tieringd.cli.spark",
    "tieringd.compiled.batch_walk",
    "tieringd.compiled.machine_code",
    "tieringd.spark",
}
"""Spark's parts start threads when they are imported, which do not survive a fork. Few daemons load numba."""


class WarmProcess:
    """A command that was forked from the stem, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket, args: Sequence[str]) -> None:
        self.args = list(args)
        # A plain descriptor, closed by a finalizer: a test may drop an ended server without reading its exit
        # code.
        self._answers = connection.detach()
        self._close = weakref.finalize(self, os.close, self._answers)
        self.pid = self._number()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """
        Wait until the process ends, and return its exit code, which is negative after a signal.

        Raises:
            subprocess.TimeoutExpired: The process is still running.
        """
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._number()
            self._close()
        return self.returncode

    def _number(self) -> int:
        """Read the next of the two lines that the stem sends: the process id, then the exit code."""
        line = b""
        while not line.endswith(b"\n"):
            got = os.read(self._answers, 1)
            assert got, f"the process that waits for {self.args} has ended"
            line += got
        return int(line)

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process has not ended."""
        if self.poll() is None:
            # It may end in between. The process that waits for it may not have sent its exit code yet.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


STEM_OPTION: Final = "--stem"
"""The first argument of a stem; the second is the address of its socket."""


class Stem:
    """A handle of a stem, a process that has everything imported: *module*, run as one with *arguments*."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tieringd-stem-")
        self.address = str(Path(self._directory.name) / "socket")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, STEM_OPTION, self.address, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line == b"ready\n", f"the stem of {module} did not start: {line!r}"
        atexit.register(self.close)

    def start(self, arguments: Sequence[str], files: Sequence[int], **how: Any) -> WarmProcess:
        """Fork a process that runs `tieringd` with *arguments* and the standard streams *files*."""
        return started(self.address, arguments, files, **how)

    def close(self) -> None:
        """End the stem, if it has not ended. Commands that it forked keep running."""
        atexit.unregister(self.close)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(_START_TIMEOUT_SECONDS)
        self._directory.cleanup()


def started(address: str, arguments: Sequence[str], files: Sequence[int], **how: Any) -> WarmProcess:
    """
    Have the stem at *address* fork a process with *arguments* and the standard streams *files*.

    Raises:
        OSError: There is no stem.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_START_TIMEOUT_SECONDS)
    try:
        connection.connect(address)
        request = json.dumps({"arguments": list(arguments), **how}).encode()
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], list(files))
        connection.sendall(request)
    except OSError:
        connection.close()
        raise
    connection.settimeout(None)
    return WarmProcess(connection, ["tieringd", *arguments])


_stem: Stem | None = None
_stem_lock = threading.Lock()


def start_command(
    *arguments: str,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
    environ: Mapping[str, str] | None = None,
) -> WarmProcess:
    """
    Start `tieringd` with *arguments*, with nothing on its standard input.

    Args:
        arguments: The command line without the program's name.
        stdout: A file descriptor, or `subprocess.DEVNULL`.
        stderr: Likewise.
        environ: The whole environment; None is that of this process.
    """
    global _stem  # noqa: PLW0603 one for a process, started at the first use
    with _stem_lock:
        _stem = _stem or Stem("tests.support.warm_start")
    with open(os.devnull, "r+b") as null:  # noqa: PTH123 a descriptor is wanted
        files = [null.fileno(), *(null.fileno() if one < 0 else one for one in (stdout, stderr))]
        return _stem.start(
            arguments,
            files,
            environ=dict(os.environ if environ is None else environ),
            directory=str(Path.cwd()),
        )


def run_to_end(
    *arguments: str, environ: Mapping[str, str] | None = None, timeout_seconds: float
) -> subprocess.CompletedProcess[bytes]:
    """
    Run `tieringd` with *arguments* to its end, and return its exit code and output.

    Raises:
        subprocess.TimeoutExpired: The process was still running, and was killed.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start_command(*arguments, stdout=output.fileno(), stderr=errors.fileno(), environ=environ)
        try:
            code = process.wait(timeout_seconds)
        except BaseException:
            process.kill()
            process.wait()
            raise
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(process.args, code, output.read(), errors.read())


def _import_package(name: str) -> None:
    """Import all modules of a package, so that forked commands need not import them."""
    for module in pkgutil.iter_modules(import_module(name).__path__, f"{name}."):
        if module.name in _NOT_IMPORTED:
            continue
        if module.ispkg:
            _import_package(module.name)
        else:
            import_module(module.name)


def serve(address: str) -> dict[str, Any]:
    """Fork a process for each connection. In the forked process, return the command to run."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(64)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            readable, _, _ = select.select([listener, sys.stdin], [], [], 1)
            # Reaping comes first: it makes the processor time of what has ended a part of this process's.
            _reap()
            if sys.stdin in readable:
                os._exit(0)
            if listener not in readable:
                continue
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return _accepted(connection)
            connection.close()


def _reap() -> None:
    """Reap the forked waiting processes that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _accepted(connection: socket.socket) -> dict[str, Any]:
    """
    Fork the command's own process, and return its request there.

    This process is the parent. It sends the command's process id, waits, and sends its exit code. If the
    requesting process ends before, the command is killed.
    """
    size, files, _, _ = socket.recv_fds(connection, 4, 3)
    data = b""
    while len(data) < int.from_bytes(size, "big"):
        got = connection.recv(1 << 20)
        if not got:
            os._exit(1)  # The requesting process has ended.
        data += got
    request: dict[str, Any] = json.loads(data)
    pid = os.fork()
    if pid == 0:
        connection.close()
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, 256)
        return request
    for file in files:
        os.close(file)
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(f"{pid}\n".encode())
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(pid, signal.SIGKILL)  # The tests have ended, or dropped the process without ending it.
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """Set this process's environment and directory to those of the process that asked for it."""
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["directory"])
    time.tzset()


def _become_tieringd(request: dict[str, Any]) -> None:
    """Set this process's arguments, environment and directory as `python -m tieringd` would have them."""
    become(request)
    package = Path(str(import_module("tieringd").__file__)).parent
    sys.argv = [str(package / "__main__.py"), *request["arguments"]]


async def _read_descriptions() -> None:
    """
    Make an S3 client and drop it, so that forked commands find what it reads.

    The SDK reads the description of the API from files and keeps it for all clients of a process. That is a
    third of a short command's processor time.
    """
    from tieringd.storage.s3.client import open_client  # noqa: PLC0415 the tests' own process needs no SDK
    from tieringd.storage.store_settings import S3Settings  # noqa: PLC0415 likewise

    settings = S3Settings(bucket="none", endpoint_url="http://127.0.0.1:9", access_key="a", secret_key="b")
    async with AsyncExitStack() as resources:
        await open_client(settings, resources)


def end(code: int) -> None:
    """
    End this process as an interpreter does, but for what the stem has imported.

    Threads are waited for, handlers of the end are called, garbage is finalised, and the streams are written
    out. An interpreter would then free every object. For that each page that is still shared with the stem is
    copied, which took two fifths of a short command's processor time. Returns where a stream cannot be
    written: the interpreter has an exit code of its own for it.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


if __name__ == "__main__":
    _import_package("tieringd")
    import_module("typer.rich_utils")  # Typer imports it for a help page and for an error.
    import_module("asyncio").run(_read_descriptions())
    gc.collect()
    gc.freeze()
    _become_tieringd(serve(sys.argv[2]))
    __package__ = "tieringd"
    try:
        import_module("tieringd.cli.main").main()
    except SystemExit as ending:
        if isinstance(ending.code, int):
            end(ending.code)
        raise
