"""Running `tieringd` as an operator does, and a small archive to run it on."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
from click.utils import strip_ansi
from typer.testing import CliRunner

from tests.builders import segment_bytes
from tests.support.daemon import command, directory_config, write_config
from tests.support.warm_start import run_to_end
from tieringd.cli.main import app

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.file_archive import FileArchive

TOPIC, TOPIC_ID = "pay.ments_eu-1", "wJalrXUtnFEMI-K7MDENGg"
BASES = (0, 12, 24)
"""Two closed segments of 12 records each, and the active one."""


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    exit_code: int
    output: str
    errors: str

    def json(self) -> Any:
        assert self.exit_code == 0, self.errors
        return json.loads(self.output)


def tieringd(*arguments: object, **environ: str) -> Done:
    """Run a command as a process to its end; *environ* is added to the environment."""
    return _done(run_to_end(*map(str, arguments), environ=_without_config() | environ, timeout_seconds=300))


def from_the_start(*arguments: object, **environ: str) -> Done:
    """Run a command under a new interpreter to its end, for a test of what that imports."""
    done = subprocess.run(
        command(*map(str, arguments)),
        check=False,
        capture_output=True,
        timeout=300,
        env=_without_config() | environ,
    )
    return _done(done)


def _without_config() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TIERINGD_CONFIG"}


def _done(done: subprocess.CompletedProcess[bytes]) -> Done:
    output, errors = (text.decode("utf-8", "surrogateescape") for text in (done.stdout, done.stderr))
    assert "Traceback" not in errors, errors
    return Done(done.returncode, output, errors)


def read_terminal(descriptor: int) -> str:
    """Return all that is printed on the terminal of *descriptor*, and close it."""
    found = b""
    try:
        while data := os.read(descriptor, 4096):
            found += data
    except OSError:
        pass  # The terminal's end is an error on Linux.
    finally:
        os.close(descriptor)
    return found.decode()


def invoked(*arguments: object, typed: str | None = None) -> Done:
    """
    Run a command inside this process, in a thread of its own; *typed* is its standard input.

    It is the same command without `main`, which makes exit codes of errors: those are raised here.
    The thread keeps the command's event loop away from the tests' own, and the log goes again where
    it went before.
    """
    environ = {"TIERINGD_CONFIG": "", "COLUMNS": "200", "NO_COLOR": "1"}
    log_before = structlog.get_config()
    try:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(
                CliRunner().invoke, app, [*map(str, arguments)], input=typed, env=environ
            ).result()
    finally:
        structlog.configure(**log_before)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Done(done.exit_code, strip_ansi(done.stdout), strip_ansi(done.stderr))


@dataclass(frozen=True)
class Site:
    """A log directory without a broker, an archive beside it, and the configuration of both."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "tieringd.yaml"

    @property
    def archive(self) -> Path:
        return self.root / "archive"

    @property
    def partition_directory(self) -> Path:
        return self.root / "logs" / f"{TOPIC}-0"

    def objects(self, pattern: str) -> list[Path]:
        """Return the files in the archive whose name matches."""
        return sorted(path for path in self.archive.rglob(pattern) if path.is_file())


def make_site(root: Path) -> Site:
    """Write a log of three segments, and a configuration that archives it into a directory."""
    site = Site(root)
    site.partition_directory.mkdir(parents=True)
    for base_offset in BASES:
        (site.partition_directory / f"{base_offset:020d}.log").write_bytes(segment_bytes(base_offset))
    (site.partition_directory / "partition.metadata").write_text(f"version: 0\ntopic_id: {TOPIC_ID}")
    (root / "state").mkdir()
    write_config(site.config, directory_config([root / "logs"], site.archive, root / "state"))
    return site


def write_bucket_config(archive: FileArchive, directory: Path) -> Path:
    """Write a configuration that only opens the bucket of *archive* into *directory*, and return its path."""
    state = directory / "state"
    state.mkdir(exist_ok=True)
    values = {
        "state_directory": str(state),
        "cloud_storage_enabled": True,
        "cloud_storage_backend": "file",
        "cloud_storage_file_root": str(archive.root),
    }
    return write_config(directory / "bucket.yaml", values)
