"""`tieringd space ballast`: show, create and release."""

from __future__ import annotations

import pytest

from tests.unit.cli.commands import invoked, tieringd

MIB = 2**20


@pytest.fixture
def config(own_site):
    """Give a configuration with a ballast file of 2 MiB."""
    with own_site.config.open("a") as file:
        file.write("tune_ballast_file: true\nballast_file_size: 2MiB\nballast_release_when_degraded: true\n")
    return own_site.config


def shown(config):
    return invoked("space", "ballast", "show", "--config", config, "--format", "json").json()


def test_ballast_is_made_shown_and_released(own_site, config):
    """The file is there after the one command and gone after the other, and each says what it did."""
    path = own_site.root / "state" / "ballast"
    expected = {
        "path": str(path),
        "enabled": True,
        "size_bytes": 2 * MIB,
        "held_bytes": 0,
        "release_when_degraded": True,
    }
    assert shown(config) == expected
    made = invoked("space", "ballast", "create", "--config", config)
    assert (made.exit_code, made.output) == (0, f"{path} holds 2MiB\n")
    assert shown(config) == expected | {"held_bytes": 2 * MIB}
    assert path.stat().st_size == 2 * MIB
    gone = invoked("space", "ballast", "release", "--config", config)
    assert (gone.exit_code, gone.output) == (0, "2MiB were freed\n")
    assert not path.exists()
    assert invoked("space", "ballast", "release", "--config", config).output == "there is no ballast file\n"


def test_ballast_is_shown_as_text(own_site, config):
    """The output without a format is for a person to read."""
    done = invoked("space", "ballast", "show", "--config", config)
    assert f"path                   {own_site.root / 'state' / 'ballast'}\n" in done.output


def test_default_place_is_beside_the_log_directory_where_the_state_is_elsewhere(own_site, config):
    """A state directory on another disk frees nothing for the log; a hidden file beside the log does."""
    other = own_site.root / "logs" / "state"
    config.write_text(config.read_text().replace(str(own_site.root / "state"), "/dev/shm/tieringd-state"))
    assert not other.exists()
    assert shown(config)["path"] == str(own_site.root / ".logs.tieringd-ballast")


def test_ballast_without_room_is_refused_with_the_reason(config):
    """The exit code tells a script, and standard error what to do."""
    config.write_text(config.read_text().replace("ballast_file_size: 2MiB", "ballast_file_size: 4096TiB"))
    done = tieringd("space", "ballast", "create", "--config", config)
    assert (done.exit_code, done.output) == (1, "")
    assert "its disk would be low on space. Free some disk space" in done.errors


def test_file_of_another_user_is_refused_as_a_fault_of_the_configuration(own_site, config):
    """Exit code 2: the path has to be changed."""
    precious = own_site.root / "precious"
    precious.write_text("data")
    with config.open("a") as file:
        file.write(f"ballast_file_path: {precious}\n")
    done = tieringd("space", "ballast", "release", "--config", config)
    assert done.exit_code == 2
    assert f"{precious} is not a ballast file" in done.errors
    assert precious.read_text() == "data"
