"""`tieringd gateway --archive-only`: serve a bucket to Kafka clients, with no broker behind it."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
import uvloop

from tieringd.cli.gateway_worker import WORKER_COMMAND
from tieringd.cli.logging import configure_logging, fatal_errors_logged, set_level
from tieringd.cli.options import AdminHost, ConfigFile, loaded, with_admin_host
from tieringd.config import Config
from tieringd.daemon.archive_endpoint import run_archive_endpoint
from tieringd.daemon.workers.endpoint_workers import run_endpoint_workers
from tieringd.errors import ConfigError


def gateway(
    config: ConfigFile,
    archive_only: Annotated[
        bool, typer.Option("--archive-only", help="Serve the bucket alone, without a broker.")
    ] = False,
    from_cluster: Annotated[
        str | None,
        typer.Option(
            "--from-cluster", help="Serve the topics of this cluster only, if the bucket has several."
        ),
    ] = None,
    admin_host: AdminHost = None,
) -> None:
    """
    Serve archived topics to ordinary Kafka clients, read-only; ends on SIGTERM.

    The command needs the bucket and an address to listen on. Without gateway.users_file, clients do not
    authenticate.
    """
    if not archive_only:
        raise ConfigError(
            "the gateway beside a broker is part of `tieringd run`",
            hint="Set gateway.enabled: true in its configuration, or give --archive-only to serve the "
            "bucket alone",
        )

    def load() -> Config:
        return with_admin_host(loaded(config, needs_broker=False), admin_host)

    def on_change(changed: Config) -> None:
        set_level(changed.log)

    loaded_config = load()
    configure_logging(loaded_config.log)
    with fatal_errors_logged(loaded_config.log), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if loaded_config.gateway.workers:
            work = run_endpoint_workers(
                loaded_config, WORKER_COMMAND, from_cluster=from_cluster, load=load, on_change=on_change
            )
        else:
            work = run_archive_endpoint(
                loaded_config, from_cluster=from_cluster, load=load, on_change=on_change
            )
        runner.run(work)
