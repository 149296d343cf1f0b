"""The places of pins: what an earlier configuration has left there is not lost."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.fakes.log_writer import LogWriter
from tieringd.broker.pins import PinDirectory
from tieringd.config import parse_config
from tieringd.daemon.assembly import left_pin_directories, pin_candidates


@pytest.fixture
def log_dir(tmp_path):
    path = tmp_path / "logs"
    path.mkdir()
    return path


def config_of(tmp_path, log_dir, *, broker="", more=""):
    return parse_config(
        f"""\
broker: {{kind: kafka, log_dirs: [{log_dir}], bootstrap: ['127.0.0.1:1'] {broker}}}
state_directory: {tmp_path / "state"}
{more}
""",
        source="test",
        environ={},
    )


@pytest.mark.parametrize(
    ("broker", "more"), [("", ""), (", pin_directory: /nowhere", ""), ("", "pin_segments: false")]
)
@pytest.mark.parametrize("place", ["state/pins/{}", ".logs.tieringd-pins"])
def test_pins_in_a_place_that_is_not_used_any_more_are_found(tmp_path, log_dir, place, broker, more):
    """They may hold the only copy of what the store does not have, and nothing else would remove them."""
    writer = LogWriter(log_dir)
    writer.closed_segment()
    left = PinDirectory(str(tmp_path / place.format(quote(str(log_dir), safe=""))))
    left.make(writer.partition, writer.local_log().closed_segments[0])
    config = config_of(tmp_path, log_dir, broker=broker, more=more)
    used = [PinDirectory(str(tmp_path / "used"))]
    assert left_pin_directories(config, used) == [left]
    assert left_pin_directories(config, [left]) == []


def test_empty_places_are_left_alone(tmp_path, log_dir):
    """The trial of a link makes such directories, also where no link leads to."""
    config = config_of(tmp_path, log_dir)
    for place in pin_candidates(config, log_dir):
        PinDirectory(place)
        (tmp_path / place).mkdir(parents=True)
    assert left_pin_directories(config, []) == []
