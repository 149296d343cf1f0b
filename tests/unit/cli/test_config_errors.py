"""What the commands say of a configuration that is wrong."""

from __future__ import annotations

import pytest

from tests.unit.cli.commands import tieringd

WRONG = """\
broker:
  kind: none
  log_dirs: [/srv/logs]
  bootstrap: localhost:9092
state_directory: /srv/state
cloud_storage_enabeld: true
retention_local_target_ms_default: 3 parsecs
"""
LINES = {4: "broker.bootstrap", 6: "cloud_storage_enabeld", 7: "retention_local_target_ms_default"}


@pytest.fixture
def wrong(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(WRONG)
    return path


def assert_every_fault_is_named(done, path):
    assert (done.exit_code, done.output) == (2, "")
    first, *problems = done.errors.splitlines()
    assert first == f"error: {path} has 3 problems. Nothing was changed; correct the file"
    for problem, (line, key) in zip(problems, LINES.items(), strict=True):
        assert problem.startswith(f"  {path}:{line}: {key}: ")
    assert "did you mean cloud_storage_enabled?" in problems[1]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["config", "check"], id="config check"),
        pytest.param(["run", "--config"], id="run"),
        pytest.param(["read", "orders", "--partition", "0", "-c"], id="read"),
    ],
)
def test_configuration_error_names_every_line_and_key(wrong, arguments):
    """Each command names all faults at once, in the order of the lines, and exits 2."""
    assert_every_fault_is_named(tieringd(*arguments, wrong), wrong)


def test_configuration_is_found_through_the_environment(wrong):
    """TIERINGD_CONFIG stands in for --config."""
    assert_every_fault_is_named(tieringd("archive", "topics", TIERINGD_CONFIG=str(wrong)), wrong)


def test_configuration_on_the_command_line_goes_before_the_environment(wrong, site):
    """The file on the command line goes before the one in the environment."""
    done = tieringd("archive", "topics", "-c", site.config, TIERINGD_CONFIG=str(wrong))
    assert done.exit_code == 0


def test_configuration_that_does_not_exist_is_named(tmp_path):
    """A wrong path is a configuration error too."""
    path = tmp_path / "nowhere.yaml"
    done = tieringd("config", "check", path)
    assert (done.exit_code, done.output) == (2, "")
    assert f"  {path}: this file does not exist\n" in done.errors


def test_configuration_without_a_fault_is_ok(site):
    """A good file is one line on standard output."""
    done = tieringd("config", "check", site.config)
    assert (done.exit_code, done.output, done.errors) == (0, f"{site.config}: ok\n", "")


def test_configuration_with_a_doubt_is_ok_and_warned_of(tmp_path):
    """A doubtful setting is a warning on standard error with its line, and the exit code is 0."""
    path = tmp_path / "doubtful.yaml"
    path.write_text(
        "broker:\n  kind: none\n  log_dirs: [/srv/logs]\nstate_directory: /srv/state\n"
        "cloud_storage_enable_remote_write: true\n"
    )
    done = tieringd("config", "check", path)
    assert (done.exit_code, done.output) == (0, f"{path}: ok\n")
    assert done.errors.startswith(f"warning: {path}:")


def test_configuration_takes_values_from_the_environment(tmp_path):
    """A variable that is not set is a fault that names it and its line; set, the file is good."""
    path = tmp_path / "t.yaml"
    path.write_text(
        "broker:\n  kind: none\n  log_dirs: [/srv/logs]\nstate_directory: ${TIERINGD_TEST_STATE}\n"
    )
    done = tieringd("config", "check", path)
    assert done.exit_code == 2
    assert f"{path}:4: state_directory: " in done.errors
    assert "TIERINGD_TEST_STATE" in done.errors
    assert tieringd("config", "check", path, TIERINGD_TEST_STATE="/srv/state").exit_code == 0
