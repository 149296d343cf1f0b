"""`tieringd generate`: the package's files for the systems that watch tieringd, and those that run it."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from textwrap import indent
from typing import Annotated, Final

import typer
import yaml

import tieringd
from tieringd.errors import ConfigError

generate_app = typer.Typer(
    help="Print files for monitoring systems and the documentation, or write manifests for Kubernetes.",
    no_args_is_help=True,
)

RUNBOOK: Final = "file:///usr/share/doc/tieringd/runbook.md"
"""The runbook's URL in the shipped alert rules; `--runbook` replaces it."""
_TARGET: Final = "localhost:9640"
_IMAGE: Final = "registry.example.com/tieringd"
"""The image in the shipped manifests; `--image` replaces it."""
_IMAGE_NAME: Final = re.compile(r"([\w.-]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*", re.ASCII)
"""The name of an image, with its registry's port if need be, and without a tag or a digest."""
_PLAIN_TARGET: Final = re.compile(r"[\w.-]+:\d+", re.ASCII)
"""A host and a port that are the same text in YAML. An address of IPv6 would be a list."""
_OVERLAYS: Final = ("redpanda", "statefulset", "strimzi")
_RESOURCE: Final = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: tieringd
spec:
"""


@generate_app.callback()
def _group() -> None:
    """Print alert rules, a scrape configuration, dashboards and pages, or write manifests for Kubernetes."""


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
    lines = "".join(f"          - {_in_yaml(one)}\n" for one in target or [_TARGET])
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


@generate_app.command("kubernetes")
def kubernetes(
    overlay: Annotated[
        str | None, typer.Argument(help="How the brokers run; without it, the ways are listed.")
    ] = None,
    directory: Annotated[
        Path, typer.Option("--directory", help="Where to write the files; no file there is replaced.")
    ] = Path("kubernetes"),
    image: Annotated[str, typer.Option("--image", help="The image's name, without a tag.")] = _IMAGE,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Name the files, and write none of them.")
    ] = False,
) -> None:
    """
    Write the manifests for one way to run brokers on Kubernetes, for `kubectl apply --kustomize`.

    Raises:
        BadParameter: The image has a tag, or is no image's name.
        ConfigError: There is no such way, or a file exists already or cannot be written.
    """
    if not _IMAGE_NAME.fullmatch(image):
        raise typer.BadParameter(
            f"--image {image!r} is not an image's name without a tag, such as {_IMAGE}. The tag is in the "
            f"manifests, {tieringd.__version__}: change it there"
        )
    if overlay is None:
        for one in _OVERLAYS:
            typer.echo(one)
        return
    if overlay not in _OVERLAYS:
        raise ConfigError(f"there is no overlay {overlay}", hint=f"Choose one of: {', '.join(_OVERLAYS)}")
    root = _place("kubernetes")
    texts = {
        directory / path: root.joinpath(*path.parts).read_text(encoding="utf-8").replace(_IMAGE, image)
        for path in _files_of(root, overlay)
    }
    # Two overlays may share a directory, and what both are built on.
    new = {path: text for path, text in texts.items() if not _has(path, text)}
    for path, text in new.items():
        if not dry_run:
            _write(path, text)
        typer.echo(path)


@generate_app.command("docs")
def docs(
    page: Annotated[
        str | None, typer.Argument(help="The page's name, such as runbook; without it, the names are listed.")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--directory", help="Write all pages there instead, over those of another release."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Name the files, and write none of them.")
    ] = False,
) -> None:
    """
    Print a page of the documentation, or write all pages to a directory: alerts link to the runbook there.

    Raises:
        ConfigError: There is no such page, or one cannot be written.
    """
    pages = {one.name: one for one in _docs().iterdir() if one.name.endswith(".md")}
    if directory is not None:
        for name in sorted(pages):
            if not dry_run:
                _replace(directory / name, pages[name].read_text(encoding="utf-8"))
            typer.echo(directory / name)
    elif page is None:
        for name in sorted(pages):
            typer.echo(name.removesuffix(".md"))
    elif f"{page}.md" in pages:
        typer.echo(pages[f"{page}.md"].read_text(encoding="utf-8"), nl=False)
    else:
        raise ConfigError(f"there is no page {page}", hint="tieringd generate docs lists the pages")


def _in_yaml(target: str) -> str:
    """Return a target as it stands in the scrape configuration."""
    return target if _PLAIN_TARGET.fullmatch(target) else json.dumps(target)


def _docs() -> Traversable:
    packaged = _place("docs")
    return packaged if packaged.is_dir() else Path(tieringd.__file__).parents[1] / "docs"


def _files_of(root: Traversable, overlay: str) -> list[Path]:
    """Return the files of an overlay and of what it is built on, as paths below *root*."""
    found, waiting = [], [overlay]
    while waiting:
        name = waiting.pop()
        kustomization = yaml.safe_load(root.joinpath(name, "kustomization.yaml").read_text(encoding="utf-8"))
        built_on = [*kustomization.get("resources", ()), *kustomization.get("components", ())]
        waiting += [one.removeprefix("../") for one in built_on if one.startswith("../")]
        found += _files_below(root.joinpath(name), Path(name))
    return sorted(found)


def _files_below(place: Traversable, path: Path) -> list[Path]:
    return [
        each
        for one in place.iterdir()
        for each in (_files_below(one, path / one.name) if one.is_dir() else [path / one.name])
    ]


def _has(path: Path, text: str) -> bool:
    """
    Say whether the file at *path* has this *text* already.

    Raises:
        ConfigError: Something else is there.
    """
    if not path.exists():
        return False
    if not path.is_file() or path.read_bytes() != text.encode():
        raise ConfigError(
            f"{path} exists already with other content, and nothing was written",
            hint="Name a new --directory",
        )
    return True


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", hint="Name another --directory"
        ) from error


def _replace(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", hint="Name another --directory"
        ) from error


def _text(*path: str) -> str:
    return _place(*path).read_text(encoding="utf-8")


def _place(*path: str) -> Traversable:
    """Return a file of `deploy/`, which is inside an installed package and beside it in a checkout."""
    packaged = files(tieringd).joinpath("deploy")
    root = packaged if packaged.is_dir() else Path(tieringd.__file__).parents[1] / "deploy"
    return root.joinpath(*path)
