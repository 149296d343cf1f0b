"""The `tieringd` command: its groups, and how errors become exit codes.

Exit codes: 0 all went well; 1 something failed or is wrong, and standard error says what;
2 the command line or the configuration is wrong.
"""

from __future__ import annotations

import os
import sys

import typer

from tieringd.cli.archive import archive_app
from tieringd.cli.config import config_app
from tieringd.cli.demo.command import demo
from tieringd.cli.explain import explain_partition
from tieringd.cli.gateway import gateway
from tieringd.cli.logdirs import logdirs_app
from tieringd.cli.logging import configure_logging
from tieringd.cli.read import read
from tieringd.cli.recover.commands import recover_app
from tieringd.cli.run import run
from tieringd.cli.space import space_app
from tieringd.cli.spark import spark_app
from tieringd.cli.topic import topic_app
from tieringd.config.model import LogConfig
from tieringd.errors import ConfigError, TieringError

app = typer.Typer(
    name="tieringd",
    help="Tiered storage beside a Kafka-API broker: closed segments to object storage and back.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)
app.command()(run)
app.command()(read)
app.command()(demo)
app.command()(gateway)
app.command(name="explain")(explain_partition)
app.add_typer(archive_app, name="archive")
app.add_typer(config_app, name="config")
app.add_typer(logdirs_app, name="logdirs")
app.add_typer(recover_app, name="recover")
app.add_typer(space_app, name="space")
app.add_typer(spark_app, name="spark")
app.add_typer(topic_app, name="topic")


@app.command()
def version() -> None:
    """Print the version."""
    from tieringd import __version__  # noqa: PLC0415 the package is half imported when this module loads

    typer.echo(__version__)


def main() -> None:
    """Run the command line."""
    # Standard output is for data. `run` puts its configuration's own log settings in this one's place.
    configure_logging(LogConfig(format="console", level="warning"))
    try:
        app()
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        for problem in error.problems:
            typer.echo(f"  {problem}", err=True)
        sys.exit(2)
    except TieringError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        # Whoever read our output has gone, as with `| head`. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
