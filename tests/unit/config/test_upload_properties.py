"""How uploads are paced and forced, and how segments are held until they are durable."""

from pathlib import Path

import pytest

from tests.unit.config.texts import SMALLEST, parsed, problems_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3600", 3600),
        ("'3600'", 3600),
        ("10m", 600),
        ("1h30m", 5400),
        ("1", 1),
        ("365d", 31_536_000),
        ("1.5m", 90),
        ("null", None),
        ("", None),
    ],
)
def test_upload_interval_is_held_in_seconds(text, expected):
    """A `_sec` property's bare number is in seconds, and no value lets records wait for their segment."""
    config = parsed(SMALLEST + f"cloud_storage_segment_max_upload_interval_sec: {text}\n")
    assert config.cloud_storage_segment_max_upload_interval_sec == expected
    assert parsed(SMALLEST).cloud_storage_segment_max_upload_interval_sec is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("500ms", "'ms' is not a unit of duration; use one of s, m, h, d, w"),
        ("1.5s", "'1.5s' is not a whole number of s"),
        ("10MiB", "'10MiB' is a size, and this is a duration: write for example 10m"),
        ("0", "must be from 1s to 365d, not 0"),
        ("366d", "must be from 1s to 365d, not '366d'"),
        ("-1", "must be from 1s to 365d, not -1"),
        ("soon", "'soon' is not a duration; write for example 10m"),
    ],
)
def test_upload_interval_that_cannot_be_read_says_why(text, words):
    """Milliseconds are no unit of a property in seconds, and neither nothing nor ever is an interval."""
    (problem,) = problems_of(SMALLEST + f"cloud_storage_segment_max_upload_interval_sec: {text}\n")
    assert problem.startswith("t.yaml:5: cloud_storage_segment_max_upload_interval_sec: ")
    assert words in problem


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("update_interval_ms", "1m", 60_000),
        ("update_interval_ms", "1", 1),
        ("p_coeff", "-2", -2.0),
        ("p_coeff", "-0.5", -0.5),
        ("p_coeff", "${COEFF}", -1.5),
        ("p_coeff", "0", 0.0),
        ("d_coeff", "0.25", 0.25),
        ("min_shares", "1", 1),
        ("max_shares", "1000", 1000),
    ],
)
def test_upload_controller_is_set_by_its_properties(name, text, expected):
    """Coefficients may be fractions, shares are whole, and the interval is a duration."""
    config = parsed(SMALLEST + f"cloud_storage_upload_ctrl_{name}: {text}\n", COEFF="-1.5")
    found = getattr(config, f"cloud_storage_upload_ctrl_{name}")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p_coeff", "2", "must be a number from -1e+06 to 0, not 2"),
        ("p_coeff", "strong", "must be a number from -1e+06 to 0, not 'strong'"),
        ("p_coeff", ".nan", "must be a number from -1e+06 to 0"),
        ("p_coeff", "-.inf", "must be a number from -1e+06 to 0"),
        ("p_coeff", "true", "must be a number from -1e+06 to 0"),
        ("d_coeff", "-1", "must be a number from 0 to 1e+06, not -1"),
        ("min_shares", "0", "must be from 1 to 1000, not 0"),
        ("min_shares", "1.5", "must be a whole number from 1 to 1000"),
        ("max_shares", "1001", "must be from 1 to 1000, not 1001"),
        ("update_interval_ms", "0", "must be from 1ms to 1d, not 0"),
    ],
)
def test_upload_controller_refuses_what_it_could_not_use(name, text, words):
    """A coefficient of the wrong sign would upload the less the more waits."""
    (problem,) = problems_of(SMALLEST + f"cloud_storage_upload_ctrl_{name}: {text}\n")
    assert problem.startswith(f"t.yaml:5: cloud_storage_upload_ctrl_{name}: {words}")


def test_upload_controller_has_the_defaults_of_the_system_it_is_from():
    """Twice the backlog in thousandths, between a tenth and all, every minute."""
    config = parsed(SMALLEST)
    names = ("update_interval_ms", "p_coeff", "d_coeff", "min_shares", "max_shares")
    values = [getattr(config, f"cloud_storage_upload_ctrl_{name}") for name in names]
    assert values == [60_000, -2.0, 0.0, 100, 1000]


def test_pins_are_on_and_bounded_unless_told_otherwise():
    """Ten gibibytes for each log directory; nothing at all is a bound as well."""
    config = parsed(SMALLEST)
    assert (config.pin_segments, config.pin_max_bytes, config.broker.pin_directory) == (
        True,
        10 * 2**30,
        None,
    )
    kafka = SMALLEST.replace("kind: none", "kind: kafka\n  bootstrap: [h:1]\n  pin_directory: /srv/pins")
    config = parsed(kafka + "pin_max_bytes: 0\n")
    assert (config.pin_max_bytes, config.broker.pin_directory) == (0, Path("/srv/pins"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pin_max_bytes: -1", "pin_max_bytes: must be at least 0B, not -1"),
        ("pin_max_bytes: 10s", "pin_max_bytes: '10s' is a duration, and this is a size"),
        ("pin_segments: always", "pin_segments: must be true or false"),
    ],
)
def test_pins_that_are_set_wrongly_say_why(line, words):
    """There is no unlimited budget: the disk is the broker's."""
    (problem,) = problems_of(SMALLEST + f"{line}\n")
    assert problem.startswith(f"t.yaml:5: {words}")


def test_pin_directory_is_an_absolute_path():
    """A daemon has no working directory of its own."""
    (problem,) = problems_of(SMALLEST.replace("kind: none", "kind: none\n  pin_directory: pins"))
    assert problem == "t.yaml:3: broker.pin_directory: must be an absolute path; 'pins' does not begin with /"
