"""What commands print and take: formats, narrow terminals, full and closed outputs, times, topics."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
from datetime import UTC, datetime

import pytest
import typer
import yaml

from tests.support.daemon import command
from tests.unit.cli.commands import TOPIC, invoked, make_site, read_terminal, tieringd
from tieringd.cli.options import counted, moment
from tieringd.cli.recover.options import chosen_topics


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Give an archive with two segments of a topic."""
    site = make_site(tmp_path_factory.mktemp("site"))
    assert tieringd("run", "--once", "--config", site.config).exit_code == 0
    return site


def on_a_terminal(columns: int, *arguments: object) -> tuple[int, str]:
    """Run a command whose standard output is a terminal of *columns*; return its exit code and output."""
    ours, theirs = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if name != "LINES"}
    process = subprocess.Popen(
        command(*map(str, arguments)),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environ | {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "xterm"},
    )
    os.close(theirs)
    found = read_terminal(ours)
    _, errors = process.communicate(timeout=240)
    return process.returncode, found + errors.decode()


def test_a_narrow_terminal_loses_nothing(site):
    """Each name and value is there at 80 columns, on lines that fit; a wide one has a table."""
    code, text = on_a_terminal(80, "explain", TOPIC, "0", "--config", site.config)
    assert code == 0, text
    for name in ("base_offset", "place", "state", "because"):
        assert name in text
    assert "…" not in text
    lines = [line for line in text.splitlines() if "/" not in line]
    assert max(len(line) for line in lines) <= 80, text


def test_bytes_do_not_go_to_a_terminal(site):
    """A terminal would obey control bytes in the records."""
    code, text = on_a_terminal(80, "archive", "cat", TOPIC, "0", "--config", site.config)
    assert code == 2
    assert "redirect" in text


def test_a_full_standard_output_is_an_error_of_one_line(site):
    """There is no traceback at the interpreter's end."""
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run(
            command("archive", "topics", "--config", str(site.config)),
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == [
        "error: standard output cannot be written: No space left on device"
    ]


def test_a_closed_standard_output_ends_quietly(site):
    """A command ends quietly if its output is closed, as by `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command("archive", "cat", TOPIC, "0", "--config", str(site.config)),
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


def test_yaml_says_the_same_as_json(site):
    """YAML and JSON have the same content, for a listing and for a document."""
    for arguments in (("archive", "topics"), ("archive", "manifest", TOPIC, "0"), ("lag",)):
        done = invoked(*arguments, "--config", site.config, "--format", "yaml")
        assert (
            yaml.safe_load(done.output)
            == invoked(*arguments, "--config", site.config, "--format", "json").json()
        )


def test_lag_is_what_is_not_archived(site):
    """All closed segments are archived here; the active one counts in offsets only."""
    (row,) = invoked("lag", "pay.*", "--config", site.config, "--format", "json").json()
    assert (row["topic"], row["partition"]) == (TOPIC, 0)
    assert (row["lag_segments"], row["lag_bytes"], row["lag_seconds"]) == (0, 0, 0)
    assert row["lag_offsets"] == row["log_end_offset"] - row["archived_next_offset"] > 0
    assert invoked("lag", "none-*", "--config", site.config, "--format", "json").json() == []


def test_lag_that_cannot_be_read_has_no_figures(tmp_path):
    """A log that cannot be read shows dashes, and comes first; standard error says why, and the code is 1."""
    site = make_site(tmp_path)
    site.archive.mkdir()
    other = site.partition_directory.with_name(f"{TOPIC}-1")
    shutil.copytree(site.partition_directory, other)
    assert len(invoked("lag", "--config", site.config, "--format", "json").json()) == 2
    (other / "leader-epoch-checkpoint").write_text("nonsense")
    done = invoked("lag", "--config", site.config, "--format", "json")
    unknown, known = json.loads(done.output)
    assert done.exit_code == 1
    assert (unknown["partition"], unknown["log_end_offset"], unknown["archived_next_offset"]) == (
        1,
        None,
        None,
    )
    assert {unknown[name] for name in unknown if name.startswith("lag_")} == {None}
    assert (known["partition"], known["lag_segments"], known["problem"]) == (0, 2, None)
    assert "leader-epoch-checkpoint" in unknown["problem"]
    assert done.errors == f"{TOPIC}-1: {unknown['problem']}\n"
    table = invoked("lag", "--config", site.config)
    assert table.output.splitlines()[1].split() == [TOPIC, "1", *"------"]

    (other / "partition.metadata").write_text("nonsense")
    done = invoked("lag", "--config", site.config, "--format", "json")
    assert (done.exit_code, [row["partition"] for row in json.loads(done.output)]) == (1, [0])
    assert "partition.metadata" in done.errors


def test_lag_of_a_topic_is_told_without_faults_of_other_topics(tmp_path):
    """Lag of a named topic does not fail by another topic's directory, and fails by a whole log directory."""
    site = make_site(tmp_path)
    site.archive.mkdir()
    broken = site.partition_directory.with_name("other-0")
    broken.mkdir()
    (broken / "partition.metadata").write_text("nonsense")
    done = invoked("lag", TOPIC, "--config", site.config, "--format", "json")
    assert (len(done.json()), done.errors) == (1, "")
    for chosen in (), ("oth*",):
        done = invoked("lag", *chosen, "--config", site.config)
        assert (done.exit_code, "other-0/partition.metadata" in done.errors) == (1, True)

    (site.partition_directory.parent / "meta.properties").write_text("nonsense")
    done = invoked("lag", TOPIC, "--config", site.config)
    assert (done.exit_code, "meta.properties" in done.errors) == (1, True)
    assert "other-0" not in done.errors


def test_topics_are_chosen_by_patterns_everywhere(site):
    """Patterns choose topics in every command, and the options of former releases still work."""
    for chosen, found, code in (
        ((TOPIC,), 1, 0),
        (("pay*", "orders"), 1, 1),
        (("orders",), 0, 1),
        ((), 1, 0),
    ):
        for listing in ("archive", "topics"), ("recover", "list"):
            done = tieringd(*listing, *chosen, "--config", site.config, "--format", "json")
            assert (len(json.loads(done.output)), done.exit_code) == (found, code), (listing, chosen)
    assert invoked("archive", "verify", "pay*", "--config", site.config).exit_code == 0
    assert invoked("archive", "verify", "--topic", TOPIC, "--config", site.config).exit_code == 0
    rows = invoked("recover", "list", "--topics", "pay.*", "--config", site.config, "--format", "json").json()
    assert len(rows) == 1
    with pytest.raises(typer.BadParameter, match="name the topics"):
        chosen_topics(None, None)
    with pytest.raises(typer.BadParameter, match="name the topics"):
        chosen_topics(["a"], "a")


def test_times_are_read_as_they_are_printed():
    """ISO 8601, in UTC without a zone; milliseconds as before."""
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    wanted = round(noon.timestamp() * 1000)
    for text in ("2026-01-31T12:00:00Z", "2026-01-31T12:00", "2026-01-31T13:00:00+01:00", str(wanted)):
        assert moment(text) == wanted
    assert moment("2026-01-31") == wanted - 12 * 3_600_000
    with pytest.raises(typer.BadParameter, match="is no time"):
        moment("yesterday")


def test_one_variable_names_the_configuration_everywhere(site):
    """The variable names the configuration for each command, even if the file is an argument there."""
    for arguments in (("config", "check"), ("config", "show"), ("archive", "topics"), ("lag",)):
        assert tieringd(*arguments, TIERINGD_CONFIG=str(site.config)).exit_code == 0, arguments


@pytest.mark.parametrize(
    ("seconds_each", "lines"), [(0.5, ["4 topics read", "8 topics read"]), (0.01, [])], ids=["long", "short"]
)
async def test_items_that_take_long_to_read_are_counted(seconds_each, lines):
    """A line every two seconds says how many were read; a short read has none, and all items pass."""
    seconds, shown = [0.0], []

    async def numbers():
        for number in range(10):
            seconds[0] += seconds_each
            yield number

    found = counted(numbers(), "topics", show=shown.append, clock=lambda: seconds[0])
    assert [one async for one in found] == list(range(10))
    assert shown == lines
