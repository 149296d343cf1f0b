"""`--dry-run`: every command that changes something has it, says what would change, and changes nothing."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.core import TyperGroup

from tests.support.daemon import write_config
from tests.unit.cli.commands import TOPIC, invoked, make_site, tieringd
from tieringd.cli.main import COMMANDS, loaded_command

READS_ONLY = {
    *("status", "read", "doctor", "lag", "explain", "logdirs describe", "recover list", "space plan"),
    *("groups list", "groups describe"),
    *("space ballast show", "topic describe-storage", "topic show"),
    *(f"archive {name}" for name in ("topics", "describe", "manifest", "verify", "cat", "quarantine list")),
    *(f"config {name}" for name in ("check", "show", "schema", "docs")),
    *(f"generate {name}" for name in ("prometheus-rules", "scrape-config", "grafana-dashboard")),
    *("spark scrub", "spark usage", "spark offsets", "endpoint user list"),
}
OTHERWISE = {
    "run": "a daemon; `space plan`, `lag` and `explain` say what it would do",
    "gateway": "a server, which only reads",
    "demo": "it works in a new directory of its own",
    "archive scrub": "it changes nothing without --fix",
    "spark rebuild": "it changes nothing without --write",
    "spark merge": "the records stay as they are, and the daemon does the same by itself",
    "spark export": "it writes only to the target that is named, and goes on where it ended",
    "spark submit-file": "it writes the one file that is named",
}
"""Commands that change something, or run for ever, and why they have no --dry-run."""


def commands(command, *words):
    """Yield each command with its words."""
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from commands(inner, *words, name)
    else:
        yield " ".join(words), command


ALL = {words: one for name in COMMANDS for words, one in commands(loaded_command(name), name)}


def test_every_command_that_changes_something_can_be_tried():
    """A command is in one of three lists: it only reads, it has the option, or a reason why not."""
    tried = {words for words, one in ALL.items() if any("--dry-run" in found.opts for found in one.params)}
    assert tried | (READS_ONLY & ALL.keys()) | OTHERWISE.keys() == ALL.keys()
    assert not tried & (READS_ONLY | OTHERWISE.keys())
    assert not READS_ONLY & OTHERWISE.keys()


@pytest.fixture
def site(tmp_path):
    """Give an archive with a topic, a ballast file, and an object in quarantine."""
    site = make_site(tmp_path)
    changes = {
        "tune_ballast_file": True,
        "ballast_file_path": str(tmp_path / "ballast"),
        "ballast_file_size": 65536,
    }
    config = yaml.safe_load(site.config.read_text()) | changes
    write_config(site.config, config)
    assert tieringd("run", "--once", "--config", site.config).exit_code == 0
    archive = config["cloud_storage_file_root"]
    write_config(tmp_path / "target.yaml", config | {"cloud_storage_file_root": str(tmp_path / "target")})
    assert invoked("archive", "init", "--config", tmp_path / "target.yaml").exit_code == 0
    write_config(tmp_path / "new.yaml", config | {"cloud_storage_file_root": f"{archive}-new"})
    return site


def everything(root):
    """Return what lies under *root*: names, sizes and bytes, without the locks that a reader takes."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
        if ".tieringd-tmp" not in path.parts and path.suffix != ".lock"
    }


TRIED = [
    ("topic", "pause", TOPIC),
    ("topic", "resume", TOPIC),
    ("topic", "manage", TOPIC),
    ("space", "ballast", "create"),
    ("groups", "reset", "billing", "--topic", TOPIC, "--to", "earliest"),
    ("archive", "claim"),
    ("archive", "init", "--config", "{root}/new.yaml"),
    ("archive", "copy", "--to", "{root}/target.yaml"),
    ("archive", "move", "--to", "{root}/target.yaml"),
    ("archive", "quarantine", "restore", "--all"),
    ("archive", "quarantine", "purge", "--all"),
]
CHANGES_NOTHING_HERE = {"resume", "manage", "claim", "restore", "purge"}
"""Without --dry-run as well: what they would change is already so in this archive."""


@pytest.mark.parametrize("arguments", TRIED, ids=lambda words: " ".join(words[:3]))
def test_dry_run_changes_nothing(site, arguments):
    """A dry run changes no file of archive, log or state. The same command without the option changes one."""
    words = [one.format(root=site.root) for one in arguments]
    if "--config" not in words:
        words += ["--config", str(site.config)]
    before = everything(site.root)
    done = invoked(*words, "--dry-run")
    assert done.exit_code == 0, done.errors
    assert "nothing was changed" in done.output
    assert everything(site.root) == before
    if not CHANGES_NOTHING_HERE & set(words):
        assert invoked(*words).exit_code == 0
        assert everything(site.root) != before


def test_dry_run_of_a_release_keeps_the_ballast(site):
    """A dry run of a release prints how much would be freed."""
    assert invoked("space", "ballast", "create", "--config", site.config).exit_code == 0
    done = invoked("space", "ballast", "release", "--dry-run", "--config", site.config)
    assert done.output.startswith("64KiB would be freed")
    assert (site.root / "ballast").stat().st_size == 65536


def test_dry_run_of_a_copy_says_what_is_missing(site):
    """The target has nothing at first, and what the source has afterwards."""
    words = ("archive", "copy", "--to", site.root / "target.yaml", "--config", site.config)
    (row,) = invoked(*words, "--dry-run", "--format", "json").json()
    assert (row["topic"], row["target_next_offset"]) == (TOPIC, None)
    assert invoked(*words).exit_code == 0
    (row,) = invoked(*words, "--dry-run", "--format", "json").json()
    assert row["target_next_offset"] == row["next_offset"] == 24


def test_dry_run_of_a_quarantine_names_the_objects(site):
    """A dry run names each object that would be moved or deleted, and moves none."""
    root = yaml.safe_load(site.config.read_text())["cloud_storage_file_root"]
    key = "quarantine/objects/abc/left-behind"
    path = site.root / root / key
    path.parent.mkdir(parents=True)
    path.write_bytes(b"left behind")
    listed = json.loads(
        invoked("archive", "quarantine", "list", "--config", site.config, "--format", "json").output
    )
    for command in ("restore", "purge"):
        done = invoked("archive", "quarantine", command, "--all", "--dry-run", "--config", site.config)
        assert f"{len(listed)} objects would be" in done.output
        assert all(one["key"] in done.output for one in listed)
        assert path.exists()
