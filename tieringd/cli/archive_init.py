"""`tieringd archive init`: a directory becomes the archive of a file store."""

from __future__ import annotations

import typer

from tieringd.cli.options import ConfigFile, loaded
from tieringd.daemon.file_archive import init_file_root


def init(config: ConfigFile) -> None:
    """
    Begin an archive in the file store's directory, or accept the one that is there.

    See first that the right disk is mounted. A daemon begins its archive itself, at its first start; this is
    for every other new directory: another disk, the target of a copy, or jobs without a daemon. A daemon that
    runs on this directory is to be restarted afterwards.
    """
    settings = loaded(config, needs_broker=False)
    root_id, before = init_file_root(settings)
    typer.echo(f"{settings.cloud_storage_file_root} is the archive {root_id}")
    if before not in {None, root_id}:
        typer.echo(f"It takes the place of {before}, which {settings.state_directory} has named so far.")
