"""`tieringd spark erase`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tieringd.cli.spark.options import (
    Conf,
    ConfigFile,
    DeleteAfter,
    DryRun,
    Format,
    Master,
    NamedTopics,
    OutputFormat,
    ReportFile,
)
from tieringd.cli.spark.running import run_job
from tieringd.cli.spark.session import optional_parts
from tieringd.errors import ConfigError
from tieringd.spark.jobs.erased_keys import KeyEncoding, decoded_key, read_keys


def erase(
    topics: NamedTopics,
    config: ConfigFile,
    requested_by: Annotated[
        str,
        typer.Option(
            help="The person who requested the erasure; stored in the bucket with the record of the erasure."
        ),
    ],
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key; '' is the empty one. May be given several times. Other users of this machine may "
            "see it in the list of processes, and under spark-submit in Spark's pages and logs; use "
            "--keys-file to hide it.",
            show_default=False,
        ),
    ] = None,
    keys_file: Annotated[
        Path | None, typer.Option(help="A file with one key per line.", show_default=False)
    ] = None,
    key_encoding: Annotated[
        KeyEncoding, typer.Option(help="The encoding of the keys, in the options and in the file.")
    ] = KeyEncoding.TEXT,
    reason: Annotated[
        str, typer.Option(help="The reason; stored with the record of the erasure.", show_default=False)
    ] = "",
    delete_after: DeleteAfter = None,
    dry_run: DryRun = False,
    master: Master = None,
    conf: Conf = None,
    output: Format = OutputFormat.TEXT,
    report: ReportFile = None,
) -> None:
    """
    Remove every record with one of the given keys from the archives of topics, permanently.

    This includes old versions, tombstones, and records of aborted transactions. Try it with --dry-run
    first, which stores no record of the erasure. Brokers, exports and copies of the bucket are not
    changed: see the documentation. Exit 1 when an object of these topics may still have a record with
    one of the keys.
    """
    if not requested_by.strip():
        raise ConfigError(
            "--requested-by is empty",
            hint="The record of the erasure needs the name of the person who requested it",
        )
    keys = _keys(key or (), keys_file, key_encoding)
    with optional_parts():
        from tieringd.spark.jobs import erase as job  # noqa: PLC0415 - commands that need no Spark begin sooner
        from tieringd.spark.jobs import key_search  # noqa: PLC0415 - likewise

    run_job(
        partial(key_search.search, topics=topics, keys=keys)
        if dry_run
        else partial(
            job.erase,
            topics=topics,
            keys=keys,
            requested_by=requested_by,
            reason=reason,
            delete_after_ms=delete_after,
        ),
        config=config,
        master=master,
        conf=conf,
        output=output,
        report=report,
    )


def _keys(texts: Sequence[str], path: Path | None, encoding: KeyEncoding) -> frozenset[bytes]:
    """
    Return the keys of the command line and of the file *path*, if there is one.

    Raises:
        ConfigError: No key was given, or one that is not valid in *encoding*.
    """
    keys = {decoded_key(text, encoding) for text in texts}
    if path is not None:
        keys |= read_keys(path, encoding)
    if not keys:
        raise ConfigError(
            "no key is given: nothing can be erased",
            hint="Give one or more keys with --key, or a file with one key per line with --keys-file",
        )
    return frozenset(keys)
