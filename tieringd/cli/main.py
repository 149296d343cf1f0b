"""The `tieringd` command: its groups, and the exit codes of its errors.

Exit codes: 0 all went well; 1 something failed or is wrong, and standard error says what;
2 the command line or the configuration is wrong, and another try does not help.

A command's module is imported when that command is asked for, so that `tieringd version`,
help and completion do not wait for the object stores' SDKs.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from importlib import import_module
from inspect import cleandoc
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from tieringd.cli.completion import outlined_command
from tieringd.errors import ConfigError, TieringError

COMPLETING: Final = "_TIERINGD_COMPLETE"
"""The variable with which a shell's completion script calls the command."""


class CommandPlace(NamedTuple):
    """The module that defines a command, and the command's line in the list of commands."""

    module: str
    attribute: str
    """A function, or a `typer.Typer` with commands of its own."""
    help: str
    """The first sentence of the command's own help; a test keeps the two equal."""


COMMANDS: Final = {
    "run": CommandPlace(
        "tieringd.cli.run", "run", "Archive the partitions that the broker on this host leads."
    ),
    "status": CommandPlace(
        "tieringd.cli.status", "status", "Show the running daemon on one screen, and what to do about it."
    ),
    "read": CommandPlace(
        "tieringd.cli.read",
        "read",
        "Print a partition's records, one per line, from the first archived or the given offset.",
    ),
    "demo": CommandPlace(
        "tieringd.cli.demo.demo_command",
        "demo",
        "Write record batches, archive and trim them, read everything back, and compare.",
    ),
    "gateway": CommandPlace(
        "tieringd.cli.gateway",
        "gateway",
        "Serve archived topics to ordinary Kafka clients, read-only; ends on SIGTERM.",
    ),
    "endpoint": CommandPlace(
        "tieringd.cli.endpoint", "endpoint_app", "Handle the users of an archive-only endpoint."
    ),
    "groups": CommandPlace(
        "tieringd.cli.groups",
        "groups_app",
        "List, describe, reset and delete the consumer groups of archive-only endpoints.",
    ),
    "init": CommandPlace(
        "tieringd.cli.init",
        "init",
        "Write a first configuration, and print the permissions that it needs; asks what no option gives.",
    ),
    "doctor": CommandPlace(
        "tieringd.cli.doctor",
        "doctor",
        "Try what the daemon will need on this host, and say how to mend what is missing.",
    ),
    "lag": CommandPlace(
        "tieringd.cli.lag",
        "lag",
        "Show how far the archive is behind the broker on this host, for the partitions that it leads.",
    ),
    "explain": CommandPlace(
        "tieringd.cli.explain",
        "explain_partition",
        "Show for each segment where it is, why, and what would upload, trim or delete it.",
    ),
    "archive": CommandPlace(
        "tieringd.cli.archive",
        "archive_app",
        "Show what the bucket holds, delete it, and move it. Needs only the bucket.",
    ),
    "config": CommandPlace("tieringd.cli.config", "config_app", "Check and explain a configuration file."),
    "generate": CommandPlace(
        "tieringd.cli.generate",
        "generate_app",
        "Print files for monitoring systems and the documentation, or write manifests for Kubernetes.",
    ),
    "logdirs": CommandPlace(
        "tieringd.cli.logdirs",
        "logdirs_app",
        "Show the log directories of all brokers, with the bucket as one of them.",
    ),
    "recover": CommandPlace(
        "tieringd.cli.recover.commands",
        "recover_app",
        "Restore topics from the bucket, into a cluster or into the log directory of a stopped broker.",
    ),
    "space": CommandPlace(
        "tieringd.cli.space", "space_app", "Show the use of disk space, and handle the ballast file."
    ),
    "spark": CommandPlace(
        "tieringd.cli.spark",
        "spark_app",
        "Run jobs on the archive with Spark, on this machine or on a cluster. Needs only the bucket, and the "
        "package's spark extra.",
    ),
    "topic": CommandPlace(
        "tieringd.cli.topic",
        "topic_app",
        "Show a topic, pause and resume its archiving, delete its records, and release its retention.",
    ),
}


class LazyGroup(TyperGroup):
    """A group that lists its commands without importing them, and imports the one that runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command as help and completion need it: its name and its line of help."""
        if cmd_name in COMMANDS:
            return TyperCommand(name=cmd_name, help=COMMANDS[cmd_name].help)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that *args* names, and return it with its name and the arguments left."""
        name, command, rest = super().resolve_command(ctx, args)
        if name not in COMMANDS:
            return name, command, rest
        if COMPLETING in os.environ:
            # A person waits for the completion of a word: nothing that the command needs is imported.
            return name, outlined_command(name), rest
        return name, loaded_command(name), rest


def loaded_command(name: str) -> Any:
    """Import the command *name* of `COMMANDS`, and return it with its options and subcommands."""
    from tieringd.cli.logging import configure_logging  # noqa: PLC0415 imports structlog
    from tieringd.config.model import LogConfig  # noqa: PLC0415 imports pydantic

    # Standard output is for data. `run` and `gateway` replace this by their configuration's log settings.
    configure_logging(LogConfig(format="console", level="warning"))
    place = COMMANDS[name]
    found = getattr(import_module(place.module), place.attribute)
    if isinstance(found, typer.Typer):
        command: Any = typer.main.get_group(found)
    else:
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command()(found)
        command = typer.main.get_command(alone)
    command.name = name
    _join_lines(command)
    return command


def _join_lines(command: Any) -> None:
    """
    Make the help of *command* from its docstring: each paragraph is one line, for terminals of any width.

    The section of errors is left out: it is for readers of the code.
    """
    text = cleandoc(command.help or "").partition("\n\nRaises:")[0]
    command.help = re.sub(r"(?<!\n)\n(?![\n \-*])", " ", text)
    for one in getattr(command, "commands", {}).values():
        _join_lines(one)


app = typer.Typer(
    name="tieringd",
    cls=LazyGroup,
    help="Tiered storage beside a Kafka-API broker: closed segments to object storage and back.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _print_version(is_asked: bool | None) -> None:  # noqa: FBT001 typer calls it with the option's value
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool | None,  # None, not False: typer imports pydantic to convert a value
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = None,
) -> None:
    """Tiered storage beside a Kafka-API broker: closed segments to object storage and back."""


@app.command()
def version() -> None:
    """Print the version."""
    from tieringd import __version__  # noqa: PLC0415 the package is half imported when this module loads

    typer.echo(__version__)


def main() -> None:
    """Run the command line."""
    _open_closed_streams()
    _escape_what_output_lacks()
    try:
        try:
            app()
        finally:
            # Here, and not at the interpreter's end, where a full disk would be a traceback.
            sys.stdout.flush()
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        for problem in error.problems:
            typer.echo(f"  {problem}", err=True)
        sys.exit(2)
    except TieringError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        # The reader of our output has closed the pipe, as `| head` does. Python would fail again at exit.
        _discard_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EIO}:
            raise
        _discard_output()
        typer.echo(f"error: standard output cannot be written: {error.strerror}", err=True)
        sys.exit(1)


def _open_closed_streams() -> None:
    """Send nowhere what goes to a closed stream, as after `>&-`: Python has None in its place then."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 it stays open to the end
            setattr(sys, name, nowhere)


def _escape_what_output_lacks() -> None:
    """Write characters that the encoding of standard output lacks as escapes, as Python does on stderr."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Send what is left of standard output nowhere: Python would fail on it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
