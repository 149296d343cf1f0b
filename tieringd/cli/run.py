"""`tieringd run`: the daemon, or with `--once` a single pass of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any

import typer
import uvloop

from tieringd.archiving.partition_status import PassResult
from tieringd.cli.gateway_worker import WORKER_COMMAND
from tieringd.cli.logging import configure_logging, fatal_errors_logged, set_level
from tieringd.cli.options import AdminHost, ConfigFile, loaded, with_admin_host
from tieringd.config import Config
from tieringd.daemon.app import run_daemon, run_once


def run(
    config: ConfigFile,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Upload all eligible segments, trim, and exit; the exit code is 0 when nothing remains.",
        ),
    ] = False,
    admin_host: AdminHost = None,
) -> None:
    """Archive the partitions that the broker on this host leads."""

    def load() -> Config:
        return with_admin_host(loaded(config), admin_host)

    loaded_config = load()
    configure_logging(loaded_config.log)
    with fatal_errors_logged(loaded_config.log):
        if not once:
            _on_uvloop(
                run_daemon(
                    loaded_config,
                    load=load,
                    on_change=lambda changed: set_level(changed.log),
                    worker_command=WORKER_COMMAND,
                )
            )
            return
        result: PassResult = _on_uvloop(run_once(loaded_config))
    if not _report(result):
        raise typer.Exit(1)


def _report(result: PassResult) -> bool:
    """Print on standard error what a pass did and what it left; return whether it left nothing."""
    statuses = result.statuses
    failed = {one: status for one, status in statuses.items() if status.fault or status.pending_segments}
    uploaded = sum(status.uploaded for status in statuses.values())
    trimmed = sum(status.trimmed for status in statuses.values())
    typer.echo(
        f"{len(statuses)} partitions: {uploaded} segments uploaded, {trimmed} trimmed, {len(failed)} "
        f"partitions unfinished, {len(result.problems)} not archived",
        err=True,
    )
    for leadership, status in sorted(failed.items(), key=lambda item: item[0].partition):
        reason = status.fault or f"{status.pending_segments} eligible segments are not uploaded"
        typer.echo(f"  {leadership.partition}: {reason}", err=True)
    for path, reason in sorted(result.problems.items()):
        typer.echo(f"  {path}: {reason}", err=True)
    return not failed and not result.problems


def _on_uvloop(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
