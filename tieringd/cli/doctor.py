"""`tieringd doctor`: try what the daemon will need on this host, and say how to mend what is missing."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import asdict
from itertools import chain, repeat
from textwrap import wrap
from typing import Annotated, Final

import typer

from tieringd.cli.options import ConfigFile, Format, OutputFormat, loaded, print_document
from tieringd.daemon.doctor import CheckOutcome, CheckResult, examined

_MARKS: Final = {
    CheckOutcome.OK: "ok",
    CheckOutcome.WARNING: "warning",
    CheckOutcome.AWAY: "away",
    CheckOutcome.FAULT: "FAULT",
}


def doctor(
    config: ConfigFile,
    output: Format = OutputFormat.TABLE,
    timeout_seconds: Annotated[
        float, typer.Option("--timeout", min=0.1, help="How many seconds a request may take.")
    ] = 10.0,
) -> None:
    """
    Try what the daemon will need on this host, and say how to mend what is missing.

    Nothing that is tried lasts: objects and links are removed again, and permissions are those that the
    broker lists. Run it as the daemon's user, best with the daemon's unit (docs/install_systemd.md).

    Exit codes: 0 nothing is wrong, or only warnings; 1 a fault, or a store or broker that is away;
    2 the configuration is wrong.
    """
    loaded_config = loaded(config)
    with asyncio.Runner() as runner:
        findings = runner.run(examined(loaded_config, timeout_seconds=timeout_seconds))
        if not output.is_data:
            for one in findings:
                _print(one)
            _print_sum(findings)
        else:
            print_document([asdict(one) for one in findings], output)
        code = int(any(one.outcome in (CheckOutcome.AWAY, CheckOutcome.FAULT) for one in findings))
        sys.stdout.flush()
        if any(one.check == "directories" and one.outcome is CheckOutcome.AWAY for one in findings):
            # A thread that waits for a dead filesystem cannot be ended, and would hold up the start.
            os._exit(code)
    raise typer.Exit(code)


def _print(one: CheckResult) -> None:
    typer.echo(f"{_MARKS[one.outcome]:<8} {one.check}: {one.subject}")
    for line in _wrapped(one.message, 70):
        typer.echo(f"         {line}")
    if one.remedy:
        # A command stays in one line, to be copied.
        is_command = one.remedy.startswith("kafka-acls ")
        lines = [one.remedy] if is_command else _wrapped(one.remedy, 67)
        for mark, line in zip(chain(["->"], repeat("  ")), lines, strict=False):
            typer.echo(f"         {mark} {line}")


def _wrapped(text: str, width: int) -> list[str]:
    return wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _print_sum(findings: list[CheckResult]) -> None:
    counts = [
        f"{sum(one.outcome is outcome for one in findings)} {outcome.value}"
        for outcome in CheckOutcome
        if any(one.outcome is outcome for one in findings)
    ]
    typer.echo(f"{len(findings)} checks: {', '.join(counts)}")
