"""`tieringd demo`: the main job in under a minute, with no broker and no cloud account."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tieringd.cli.demo.demo_session import DemoSetup, run_session, summary
from tieringd.cli.demo.journal import Journal
from tieringd.cli.demo.writer import LogDirectoryWriter
from tieringd.config import load_config
from tieringd.model.partition import TopicPartition

PARTITIONS = (TopicPartition("orders", 0), TopicPartition("orders", 1), TopicPartition("page.views", 0))


def demo(
    config: Annotated[
        Path,
        typer.Option(
            "--config",
            "-c",
            help="The demo's configuration, such as config/embedded.yaml; it may use ${TIERINGD_DEMO_DIR}.",
            envvar="TIERINGD_CONFIG",
        ),
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            help="A new directory for the demo's files, kept afterwards; without it, a temporary directory."
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            help="How long to write records, and at least until each partition has a closed segment.", min=1
        ),
    ] = 15.0,
) -> None:
    """Write record batches, archive and trim them, read everything back, and compare."""
    if directory is not None and directory.exists():
        raise typer.BadParameter(f"{directory} exists; the demo needs a directory of its own")
    place: AbstractContextManager[str] = (
        nullcontext(str(directory))
        if directory is not None
        else tempfile.TemporaryDirectory(prefix="tieringd-demo-")
    )
    with place as path:
        _run(config, Path(path).resolve(), seconds)
        if directory is not None:
            typer.echo(
                "\nAll files are still there. To look around:\n  export "
                f"TIERINGD_DEMO_DIR={Path(path).resolve()} TIERINGD_CONFIG={config}\n  tieringd archive "
                "describe orders\n  tieringd read orders --partition 0 --count 3"
            )


def _run(config: Path, directory: Path, seconds: float) -> None:
    started = time.monotonic()
    setup = DemoSetup(
        title="tieringd on a log directory without a broker",
        config_file=config,
        environ={"TIERINGD_DEMO_DIR": str(directory)},
        daemon_log=directory / "daemon.log",
    )
    loaded = load_config(config, environ=setup.environ)
    if loaded.broker.kind != "none" or loaded.cloud_storage_file_root is None:
        raise typer.BadParameter(
            f"{config} is not a configuration for a log directory without a broker and a file store"
        )
    loaded.cloud_storage_file_root.mkdir(parents=True, exist_ok=True)
    journal = Journal(PARTITIONS)
    writer = LogDirectoryWriter(loaded.broker.log_dirs[0], journal, seconds=seconds)
    console = Console()
    total = asyncio.run(run_session(setup, journal, writer, console))
    typer.echo("\n" + summary(total, seconds=time.monotonic() - started))
    if total.differences:
        raise typer.Exit(1)
