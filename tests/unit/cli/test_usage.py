"""The command line itself: help for everything, and what a wrong one ends with."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

import tieringd
from tests.unit.cli.commands import from_the_start, invoked
from tieringd.cli import main


def tree(command, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    """Return every command and group, by the words that lead to it."""
    found = {path: command}
    for name, inner in getattr(command, "commands", {}).items():
        found |= tree(inner, (*path, name))
    return found


COMMANDS = tree(typer.main.get_command(main.app))
for name in main.COMMANDS:
    COMMANDS |= tree(main.loaded_command(name), (name,))


def test_commands_are_those_of_this_release():
    """A command that goes, comes or changes its name is a change that operators must hear of."""
    assert {" ".join(path) for path in COMMANDS} == {
        "",
        "space",
        "space ballast",
        "space ballast create",
        "space ballast release",
        "space ballast show",
        "groups",
        "groups list",
        "groups describe",
        "groups reset",
        "groups delete",
        "space plan",
        "generate",
        "generate grafana-dashboard",
        "generate docs",
        "generate kubernetes",
        "generate prometheus-rules",
        "generate scrape-config",
        "spark",
        "spark compact",
        "spark erase",
        "spark export",
        "spark merge",
        "spark offsets",
        "spark rebuild",
        "spark scrub",
        "spark submit-file",
        "spark usage",
        "run",
        "read",
        "recover",
        "recover cluster",
        "recover directory",
        "recover list",
        "demo",
        "gateway",
        "endpoint",
        "endpoint user",
        "endpoint user add",
        "endpoint user list",
        "endpoint user remove",
        "explain",
        "init",
        "doctor",
        "lag",
        "status",
        "version",
        "archive",
        "archive init",
        "archive claim",
        "archive topics",
        "archive describe",
        "archive manifest",
        "archive verify",
        "archive cat",
        "archive scrub",
        "archive quarantine",
        "archive quarantine list",
        "archive quarantine restore",
        "archive quarantine purge",
        "archive delete",
        "archive resolve",
        "archive undelete",
        "archive copy",
        "archive move",
        "config",
        "config check",
        "config docs",
        "config schema",
        "config show",
        "logdirs",
        "logdirs describe",
        "topic",
        "topic delete-records",
        "topic describe-storage",
        "topic show",
        "topic pause",
        "topic resume",
        "topic release",
        "topic manage",
    }


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_says_what_the_command_does_and_takes(path):
    """Help exits 0, begins with the command's own sentence, and explains every option and argument."""
    done = invoked(*path, "--help")
    text = " ".join(done.output.split())
    command = COMMANDS[path]

    assert (done.exit_code, done.errors) == (0, "")
    assert command.help is not None
    assert command.help.split("\n")[0] in text
    for inner in getattr(command, "commands", ()):
        assert inner in text
    for parameter in command.params:
        assert any(option in text for option in parameter.opts), parameter.name
        assert getattr(parameter, "hidden", False) or getattr(parameter, "help", None), parameter.name


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_is_readable_at_80_columns(path):
    """No word is cut, no paragraph has lines of another width, and no character is lost."""
    done = CliRunner().invoke(main.app, [*path, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert "…" not in done.output
    assert all(one.isprintable() for one in done.output.splitlines())
    for paragraph in COMMANDS[path].help.split("\n\n"):
        assert paragraph.startswith(("*", "-")) or "\n" not in paragraph


@pytest.mark.parametrize(
    "path", [path for path, one in COMMANDS.items() if hasattr(one, "commands")], ids=" ".join
)
def test_group_without_a_command_prints_its_help_and_exits_2(path):
    """A group without a command is a wrong command line, and its help is the answer."""
    done = invoked(*path)
    assert done.exit_code == 2
    assert (done.output + done.errors).strip() == invoked(*path, "--help").output.strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["nonsense"], "nonsense", id="command"),
        pytest.param(["archive", "nonsense"], "nonsense", id="subcommand"),
        pytest.param(["run", "--onec", "-c", "f"], "--onec", id="option"),
        pytest.param(["run"], "--config", id="no configuration"),
        pytest.param(["archive", "topics"], "--config", id="no configuration of the archive"),
        pytest.param(["config", "check"], "file", id="no file"),
        pytest.param(["config", "check", "a", "b"], "b", id="two files"),
        pytest.param(["read", "-c", "f", "-p", "0"], "topic", id="no topic"),
        pytest.param(["read", "a", "-c", "f"], "--partition", id="no partition"),
        pytest.param(["read", "a", "-c", "f", "-p", "-1"], "--partition", id="negative partition"),
        pytest.param(["read", "a", "-c", "f", "-p", "x"], "--partition", id="partition in words"),
        pytest.param(["read", "a", "-c", "f", "-p", "0", "--offset", "-1"], "--offset", id="negative offset"),
        pytest.param(["read", "a", "-c", "f", "-p", "0", "--count", "-1"], "--count", id="negative count"),
        pytest.param(
            ["read", "a", "-c", "f", "-p", "0", "--isolation", "dirty"], "--isolation", id="isolation"
        ),
        pytest.param(
            ["read", "a", "-c", "f", "-p", "0", "--offset", "1", "--timestamp", "2"],
            "--offset or --timestamp, not both",
            id="offset and time",
        ),
        pytest.param(["archive", "manifest", "a", "-c", "f"], "partition", id="no partition of a manifest"),
        pytest.param(["archive", "manifest", "a", "x", "-c", "f"], "partition", id="manifest of x"),
        pytest.param(["archive", "cat", "a", "-c", "f", "--", "-1"], "partition", id="cat of -1"),
        pytest.param(["archive", "verify", "-c", "f", "--format", "xml"], "--format", id="format"),
        pytest.param(["demo", "-c", "f", "--seconds", "0"], "--seconds", id="no seconds"),
        pytest.param(["demo", "-c", "f", "--directory", "/"], "/ exists", id="demo in an existing directory"),
    ],
)
def test_wrong_command_line_exits_2_and_names_what_is_wrong(arguments, words):
    """The error is on standard error, names the argument, and nothing is on standard output."""
    done = invoked(*arguments)
    text = " ".join(done.errors.replace("│", " ").split())
    assert (done.exit_code, done.output) == (2, "")
    assert words in text
    assert text.startswith("Usage: ")


def test_wrong_command_line_exits_2_as_a_process():
    """A shell sees the same."""
    done = from_the_start("run", "--onec")
    assert (done.exit_code, done.output) == (2, "")
    assert "--onec" in done.errors


def test_version_is_the_packages_own():
    """One line on standard output, and nothing else."""
    done = from_the_start("version")
    assert (done.exit_code, done.output, done.errors) == (0, f"{tieringd.__version__}\n", "")
