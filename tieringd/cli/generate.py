"""`tieringd generate`: print the package's files for the systems that watch tieringd."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from textwrap import indent
from typing import Annotated, Final

import typer

import tieringd
from tieringd.errors import ConfigError

generate_app = typer.Typer(
    help="Print files for monitoring systems: alert rules, scrape configuration, dashboards.",
    no_args_is_help=True,
)

RUNBOOK: Final = "file:///usr/share/doc/tieringd/runbook.md"
"""The runbook's URL in the shipped alert rules; `--runbook` replaces it."""
_TARGET: Final = "localhost:9640"
_RESOURCE: Final = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: tieringd
spec:
"""


@generate_app.callback()
def _group() -> None:
    """Print files for the systems that watch tieringd: alert rules, scrape configuration, dashboards."""


@generate_app.command("prometheus-rules")
def prometheus_rules(
    runbook: Annotated[
        str, typer.Option("--runbook", help="The URL of the runbook; each alert links to its section there.")
    ] = RUNBOOK,
    as_resource: Annotated[
        bool,
        typer.Option("--as-resource", help="Print a PrometheusRule resource for the Prometheus Operator."),
    ] = False,
) -> None:
    """Print the alert rules, for a file that `rule_files` of Prometheus names."""
    rules = _text("prometheus", "alerts.yml").replace(RUNBOOK, runbook)
    typer.echo(f"{_RESOURCE}{indent(rules, '  ')}" if as_resource else rules, nl=False)


@generate_app.command("scrape-config")
def scrape_config(
    target: Annotated[
        list[str] | None,
        typer.Option("--target", help="host:port of a daemon's admin address; may be given several times."),
    ] = None,
    partitions: Annotated[
        bool,
        typer.Option(
            "--partitions",
            help="Print a job for the metrics of every topic and partition as well, which the dashboard of "
            "one topic needs.",
        ),
    ] = False,
) -> None:
    """Print a job for `scrape_configs` of Prometheus. The rules and dashboards ask for its name."""
    lines = "".join(f"          - {one}\n" for one in target or [_TARGET])
    text = _text("prometheus", "scrape.yml")
    if partitions:
        text += _text("prometheus", "scrape_partitions.yml")
    typer.echo(text.replace(f"          - {_TARGET}\n", lines), nl=False)


@generate_app.command("grafana-dashboard")
def grafana_dashboard(
    name: Annotated[
        str | None, typer.Argument(help="The dashboard's name; without it, the names are listed.")
    ] = None,
) -> None:
    """
    Print a dashboard as JSON, for Grafana's import or its provisioning directory.

    Raises:
        ConfigError: There is none of that name.
    """
    names = sorted(
        one.name.removesuffix(".json") for one in _place("grafana").iterdir() if ".json" in one.name
    )
    if name is None:
        for one in names:
            typer.echo(one)
    elif name in names:
        typer.echo(_text("grafana", f"{name}.json"), nl=False)
    else:
        raise ConfigError(f"there is no dashboard {name}", hint=f"Choose one of: {', '.join(names)}")


def _text(*path: str) -> str:
    return _place(*path).read_text(encoding="utf-8")


def _place(*path: str) -> Traversable:
    """Return a file of `deploy/`, which is inside an installed package and beside it in a checkout."""
    packaged = files(tieringd).joinpath("deploy")
    root = packaged if packaged.is_dir() else Path(tieringd.__file__).parents[1] / "deploy"
    return root.joinpath(*path)
