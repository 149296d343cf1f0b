"""
One demo from start to end: run the daemon, show its work, stop it, and compare what it stored.

The session runs the real command in a process of its own, and observes it only from outside, as a user does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.live import Live

from tieringd.cli.demo.comparison import Comparison, compare
from tieringd.cli.demo.journal import Journal
from tieringd.cli.demo.view import PartitionView, partition_views, table
from tieringd.config import Config, load_config
from tieringd.daemon.archive import Archive, opened_archive
from tieringd.errors import TieringError

if TYPE_CHECKING:
    from rich.console import Console

_REFRESH_SECONDS = 0.5
_PLAIN_REFRESH_SECONDS = 5.0
_STOP_SECONDS = 30.0
_LOG_TAIL_LINES = 15
_DIFFERENCES_NAMED = 20


class DemoError(TieringError):
    """The demo failed before its end."""


class Writer(Protocol):
    """Writes the demo's data to the broker or its directory, and notes it in the journal."""

    async def write(self) -> None:
        """Write for a limited time, and return."""


@dataclass(frozen=True, slots=True)
class DemoSetup:
    """The files and settings of one demo."""

    title: str
    config_file: Path
    environ: Mapping[str, str]
    """Variables that the configuration file refers to."""
    daemon_log: Path
    settle_seconds: float = 60.0
    """Maximum time after the end of the writing in which nothing more is stored and trimmed."""


async def run_session(setup: DemoSetup, journal: Journal, writer: Writer, console: Console) -> Comparison:
    """
    Run the demo, and return what was read back with its differences.

    Raises:
        DemoError: The daemon ended by itself, stopped storing and trimming before all was done, or did
            not stop with exit code 0.
    """
    config = load_config(setup.config_file, environ=setup.environ)
    async with opened_archive(config) as archive:
        daemon = await _started(setup)
        try:
            await _watched(setup, config, archive, journal, writer, daemon, console)
            await _stopped(setup, daemon)
        finally:
            if daemon.returncode is None:
                daemon.kill()
                await daemon.wait()
        total = Comparison()
        with console.status("reading everything back"):
            # A new snapshot: the daemon may have trimmed more before it stopped.
            for view in await partition_views(config, archive, journal):
                await compare(archive, view, journal.partitions[view.partition], total)
        return total


def summary(total: Comparison, *, seconds: float) -> str:
    """Return the text of the report: what was verified, and the differences if there are any."""
    mib = 1 << 20
    archived = f"{total.segments} segments ({total.archived_bytes / mib:.1f} MiB) in the archive"
    lines = [
        f"  {archived}: objects have the sizes and CRC32Cs of their manifest, batches their own CRCs",
        f"  {total.archived_records} records read from the archive: offset, time, key, value, headers equal",
        f"  {total.local_records} records of active segments read from the local disk: equal",
        f"  {total.trimmed_bytes / mib:.1f} MiB trimmed; no gap between the archive and the local log",
        f"  the daemon ended on SIGTERM with exit code 0; {seconds:.0f} s in all",
    ]
    if total.equal_segments:
        lines.insert(1, f"  {total.equal_segments} segments have the SHA-256 of the closed file")
    if not total.differences:
        return "\n".join(["Verified", *lines])
    named = [f"  {one}" for one in total.differences[:_DIFFERENCES_NAMED]]
    if len(total.differences) > len(named):
        named.append(f"  and {len(total.differences) - len(named)} more")
    return "\n".join(["DIFFERENCES", *named, "", "Found", *lines])


async def _started(setup: DemoSetup) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "tieringd", "run", "--config", str(setup.config_file))
    with setup.daemon_log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, env={**os.environ, **setup.environ}
        )


async def _watched(
    setup: DemoSetup,
    config: Config,
    archive: Archive,
    journal: Journal,
    writer: Writer,
    daemon: asyncio.subprocess.Process,
    console: Console,
) -> None:
    """
    Show the partitions until the writer is done and every segment that it closed is stored and trimmed.

    Raises:
        DemoError: The daemon ended, or nothing changed for `settle_seconds`.
    """
    writing = asyncio.create_task(writer.write())
    live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
    shown_at, patience = 0.0, _Patience(setup)
    try:
        if live is not None:
            live.start()
        while True:
            views = await partition_views(config, archive, journal)
            phase = "settling" if writing.done() else "writing"
            shown = table(views, title=f"{setup.title}: {phase}")
            if live is not None:
                live.update(shown, refresh=True)
            elif time.monotonic() - shown_at >= _PLAIN_REFRESH_SECONDS:
                console.print(shown, "")
                shown_at = time.monotonic()
            if writing.done():
                writing.result()
                if len(views) == len(journal.partitions) and all(view.is_settled for view in views):
                    return
                patience.check(views)
            if daemon.returncode is not None:
                raise DemoError(f"the daemon ended with code {daemon.returncode}:\n{_tail(setup)}")
            await asyncio.sleep(_REFRESH_SECONDS)
    finally:
        if live is not None:
            live.stop()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


class _Patience:
    """Notices that the daemon has stored and trimmed nothing more for `settle_seconds`."""

    def __init__(self, setup: DemoSetup) -> None:
        self._setup = setup
        self._latest: object = None
        self._deadline = 0.0

    def check(self, views: Sequence[PartitionView]) -> None:
        """
        Compare *views* with those before.

        Raises:
            DemoError: They have been the same for too long.
        """
        setup = self._setup
        # A daemon takes long to start on a busy machine: its first line counts as progress.
        latest = (views, setup.daemon_log.stat().st_size > 0)
        if latest != self._latest:
            self._latest, self._deadline = latest, time.monotonic() + setup.settle_seconds
        elif time.monotonic() > self._deadline:
            raise DemoError(
                f"the daemon stored and trimmed nothing more for {setup.settle_seconds:.0f} s, and not "
                f"all is done. The last lines of its log:\n{_tail(setup) or 'it is empty'}"
            )


async def _stopped(setup: DemoSetup, daemon: asyncio.subprocess.Process) -> None:
    daemon.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            code = await daemon.wait()
    except TimeoutError as error:
        raise DemoError(f"the daemon did not end on SIGTERM:\n{_tail(setup)}") from error
    if code != 0:
        raise DemoError(f"the daemon ended on SIGTERM with code {code}:\n{_tail(setup)}")


def _tail(setup: DemoSetup) -> str:
    lines = setup.daemon_log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:])
