"""The command's groups are listed without being imported; what is listed is what is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.unit.cli.commands import invoked
from tieringd import __version__
from tieringd.cli import completion
from tieringd.cli.main import COMMANDS, loaded_command

HEAVY = (
    "aiobotocore",
    "aiohttp",
    "aiokafka",
    "azure",
    "botocore",
    "gcloud",
    "kio",
    "numpy",
    "pyspark",
)
MAX_MODULES = 350
"""Help, with rich, imported 328 modules when this was written; a command imports a thousand."""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_listed_with_the_first_line_of_its_own_help(name):
    """The list's line for a command is the first paragraph of that command's help."""
    own = loaded_command(name).help or ""
    assert " ".join(own.split("\n\n")[0].split()) == COMMANDS[name].help


@pytest.mark.parametrize("arguments", [["version"], ["--version"], ["--help"]])
def test_version_and_help_import_no_command(arguments):
    """Version and help import no SDK and no configuration, and the number of modules stays small."""
    script = (
        "import sys, json\n"
        "from tieringd.cli.main import app\n"
        "try:\n    app(sys.argv[1:])\n"
        "except SystemExit:\n    print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True
    )
    modules = json.loads(done.stderr)
    assert not [one for one in modules if one.split(".")[0] in HEAVY]
    own = {one.split(".")[1] for one in modules if one.startswith("tieringd.")}
    assert own <= {"cli", "errors", "timeouts"}
    assert len(modules) < MAX_MODULES


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", {"run", "doctor", "archive", "version"}),
        ("archive ", {"describe", "quarantine"}),
        ("archive quarantine ", {"list", "restore", "purge"}),
        ("archive describe --", {"--config", "--format"}),
        ("archive describe orders --format ", {"table", "json", "yaml"}),
        ("spark scrub --fo", {"--format"}),
        ("read --p", {"--partition", "--progress"}),
    ],
)
def test_completion_imports_no_command(words, found):
    """
    Completion loads few modules and no command, at each level and for values of an option.

    The number of modules bounds the time.
    """
    script = (
        "import sys, json\n"
        "from tieringd.cli.main import app\n"
        "try:\n    app(prog_name='tieringd')\n"
        "except SystemExit:\n    print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
    )
    line = f"tieringd {words}"
    at = len(line.split()) - (not line.endswith(" "))
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"_TIERINGD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(at)},
    )
    assert found <= set(done.stdout.split())
    modules = json.loads(done.stderr)
    assert not [one for one in modules if one.split(".")[0] in (*HEAVY, "structlog")]
    assert len(modules) < MAX_MODULES


def test_the_outline_for_completion_is_that_of_the_commands():
    """`python -m tieringd.cli.completion` writes it."""
    outlines = {
        name: completion.outline_of(loaded_command(name), choices=completion.choices_of) for name in COMMANDS
    }
    assert json.loads(completion.OUTLINE.read_text()) == outlines


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_the_version_is_printed(argument):
    """Both spellings print the version alone."""
    assert invoked(argument).output == f"{__version__}\n"


def test_an_unknown_command_is_a_usage_error():
    """A name that is no command exits with 2 and is named."""
    done = invoked("archvie")
    assert done.exit_code == 2
    assert "archvie" in done.errors
