"""Standard output that is closed or full, for every command; progress on a terminal only."""

# Long: every command runs as a process of its own, on two kinds of outputs.

from __future__ import annotations

import os
import pty
import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.builders import segment_bytes
from tests.support.daemon import command, run_well, write_config
from tests.support.warm_start import start_command
from tests.unit.cli.commands import TOPIC, invoked, make_site, read_terminal, tieringd
from tests.unit.cli.test_dry_run import ALL

if TYPE_CHECKING:
    from pathlib import Path

ON_A_SITE = {
    "run": ("--once",),
    "lag": (),
    "explain": (TOPIC, "0"),
    "read": (TOPIC, "--partition", "0"),
    "status": (),
    "doctor": (),
    "logdirs describe": (),
    "recover list": (),
    "groups list": (),
    "groups reset": ("billing", "--topic", TOPIC, "--to", "earliest", "--dry-run"),
    "space plan": (),
    "space ballast show": (),
    "space ballast create": ("--dry-run",),
    "space ballast release": ("--dry-run",),
    "archive topics": (),
    "archive describe": (TOPIC,),
    "archive manifest": (TOPIC, "0"),
    "archive verify": (),
    "archive cat": (TOPIC, "0"),
    "archive scrub": (),
    "archive init": ("--dry-run",),
    "archive claim": ("--dry-run",),
    "archive copy": ("--to", "{root}/target.yaml", "--dry-run"),
    "archive move": ("--to", "{root}/target.yaml", "--dry-run"),
    "archive quarantine list": (),
    "archive quarantine restore": ("--all", "--dry-run"),
    "archive quarantine purge": ("--all", "--dry-run"),
    "topic show": (TOPIC,),
    "topic pause": (TOPIC, "--dry-run"),
    "topic resume": (TOPIC, "--dry-run"),
    "topic manage": (TOPIC, "--dry-run"),
    "topic describe-storage": (TOPIC,),
}
"""What each command is given to print something on the site, without its --config."""
WITHOUT_A_SITE = {
    "version": (),
    "config check": ("{root}/tieringd.yaml",),
    "config show": ("{root}/tieringd.yaml",),
    "config schema": (),
    "config docs": (),
    "generate prometheus-rules": (),
    "generate scrape-config": (),
    "generate grafana-dashboard": ("overview",),
    "generate kubernetes": (),
    "generate docs": ("runbook",),
}
ONLY_HELP = {
    "gateway": "a server that prints nothing",
    "demo": "tests/e2e/test_demo.py runs it",
    "init": "it writes a file; what it prints is in its help as well",
    "archive delete": "it takes a topic that its cluster has deleted",
    "archive undelete": "likewise",
    "archive resolve": "it takes a partition that waits for an operator",
    "groups describe": "it takes a group",
    "groups delete": "likewise",
    "topic release": "it takes a broker",
    "topic delete-records": "it takes a broker",
    "recover directory": "it takes a stopped broker",
    "recover cluster": "it takes a cluster",
    "endpoint user add": "tests/unit/cli/test_endpoint_users.py runs it, with a password and a file of users",
    "endpoint user remove": "likewise",
    "endpoint user list": "likewise",
    **{
        f"spark {name}": "it takes a Spark session, and prints through the same function"
        for name in (
            "scrub",
            "usage",
            "rebuild",
            "compact",
            "erase",
            "merge",
            "export",
            "offsets",
            "submit-file",
        )
    },
}
"""Commands of which only the help is printed here, and why."""
MAY_PRINT_NOTHING = {"run", "status", "logdirs describe", "archive quarantine list", "doctor"}
TABLE = {
    **{words: (*given, "--config", "{root}/tieringd.yaml") for words, given in ON_A_SITE.items()},
    **WITHOUT_A_SITE,
    **dict.fromkeys(ONLY_HELP, ("--help",)),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Give the directory of an archive with two segments of a topic, and of the configuration of a target."""
    root = tmp_path_factory.mktemp("site")
    site = make_site(root)
    changes = {
        "tune_ballast_file": True,
        "ballast_file_path": str(root / "ballast"),
        "ballast_file_size": 4096,
    }
    config = yaml.safe_load(site.config.read_text()) | changes
    write_config(site.config, config)
    write_config(root / "target.yaml", config | {"cloud_storage_file_root": str(root / "target")})
    assert tieringd("run", "--once", "--config", site.config).exit_code == 0
    assert invoked("archive", "init", "--config", root / "target.yaml").exit_code == 0
    return root


def test_every_command_is_in_the_table():
    """A new command has to say how it prints."""
    assert TABLE.keys() == ALL.keys() | {"version"}
    assert len(TABLE) == len(ON_A_SITE) + len(WITHOUT_A_SITE) + len(ONLY_HELP)


def outcomes(words, root, *outputs) -> list[tuple[int, str]]:
    """Run a command of the table on each of the file descriptors; return exit codes and errors."""
    arguments = [*words.split(), *(one.format(root=root) for one in TABLE[words])]
    processes = []
    for output in outputs:
        errors = root / f"errors-{output}"
        with errors.open("wb") as stderr:
            process = start_command(*arguments, stdout=output, stderr=stderr.fileno())
        processes.append((process, errors))
    return [(process.wait(240), errors.read_text()) for process, errors in processes]


@pytest.mark.parametrize("words", TABLE)
def test_output_that_cannot_be_written_is_no_traceback(words, root):
    """A full one is an error of one line; a closed one ends the command quietly, as `| head` does."""
    full = os.open("/dev/full", os.O_WRONLY)
    reader, closed = os.pipe()
    os.close(reader)
    on_full, on_closed = outcomes(words, root, full, closed)
    os.close(full)
    os.close(closed)
    for code, errors in (on_full, on_closed):
        assert "Traceback" not in errors
        assert "Exception ignored" not in errors
        assert words in MAY_PRINT_NOTHING or code == 1
    if words not in MAY_PRINT_NOTHING:
        assert on_full[1].endswith("error: standard output cannot be written: No space left on device\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_stream_leaves_the_exit_code_as_it_is(root, closed):
    """A stream that the shell has closed is for no output: the exit code tells what the command did."""
    (root / "wrong.yaml").write_text("nonsense: 1\n")

    def code(*arguments: str) -> tuple[int, bool]:
        done = subprocess.run(
            ["sh", "-c", f'"$@" {closed}', "sh", *command(*arguments)], check=False, stderr=subprocess.PIPE
        )
        return done.returncode, b"Traceback" in done.stderr

    assert code("version") == (0, False)
    assert code("config", "check", str(root / "wrong.yaml")) == (2, False)
    config = ("--config", str(root / "tieringd.yaml"))
    assert code("read", TOPIC, "--partition", "0", *config) == (0, False)
    assert code("topic", "show", "none", *config) == (1, False)


def errors_on_a_terminal(*arguments) -> str:
    """Run a command whose standard error is a terminal; return what it printed there."""
    ours, theirs = pty.openpty()
    process = start_command(*map(str, arguments), stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    found = read_terminal(ours)
    assert process.wait(240) == 0, found
    return found


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("archive", "verify"), "1 of 1 partitions verified"),
        (("archive", "cat", TOPIC, "0"), "written"),
        (("archive", "scrub"), TOPIC),
        (("archive", "copy", "--to", "{root}/fresh.yaml"), "copy: "),
    ],
)
def test_progress_is_shown_to_a_person_only(root, arguments, line):
    """A terminal gets lines of it; a file or a pipe gets none."""
    config = yaml.safe_load((root / "tieringd.yaml").read_text())
    target = write_config(
        root / "fresh.yaml", config | {"cloud_storage_file_root": str(root / f"to-{line[:1]}")}
    )
    assert invoked("archive", "init", "--config", target).exit_code == 0
    given = [*(one.format(root=root) for one in arguments), "--config", root / "tieringd.yaml"]
    assert line in errors_on_a_terminal(*given)
    if "copy" in given:
        write_config(target, config | {"cloud_storage_file_root": str(root / "to-another")})
        assert invoked("archive", "init", "--config", target).exit_code == 0
    assert tieringd(*given).errors == ""


def test_text_of_a_record_does_nothing_to_a_terminal(tmp_path):
    """A terminal obeys escape codes; a file gets what the record says."""
    site = make_site(tmp_path)
    (site.partition_directory / f"{0:020d}.log").write_bytes(segment_bytes(value="\x1b[2Jé\n\0".encode()))
    assert tieringd("run", "--once", "--config", site.config).exit_code == 0
    arguments = ("read", TOPIC, "--partition", "0", "--count", "1", "--format", "text")
    ours, theirs = pty.openpty()
    process = start_command(*arguments, "--config", str(site.config), stdout=theirs)
    os.close(theirs)
    assert read_terminal(ours).endswith("\tk0\t\\x1b[2Jé\\n\\x00\r\n")
    assert process.wait(240) == 0
    assert run_well(*arguments, "--config", str(site.config)).endswith("\tk0\t\x1b[2Jé\n\0\n".encode())
