"""Sizes and durations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.config.units import (
    DURATION,
    SECONDS,
    SIZE,
    format_duration,
    format_seconds,
    format_size,
    parse_quantity,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1048576", 1048576),
        ("-1", -1),
        ("512MiB", 512 * 2**20),
        ("10GiB", 10 * 2**30),
        ("1GB", 10**9),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("1.5 KiB", 1536),
        (" 7B ", 7),
    ],
)
def test_size_is_read_in_bytes(text, expected):
    """Binary units are powers of 1024 and decimal units powers of 1000."""
    assert parse_quantity(text, SIZE) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("250", 250),
        ("250ms", 250),
        ("30s", 30_000),
        ("0.5s", 500),
        ("1h30m", 5_400_000),
        ("1h 30m", 5_400_000),
        ("7d", 604_800_000),
        ("2w", 1_209_600_000),
    ],
)
def test_duration_is_read_in_milliseconds(text, expected):
    """A duration may have several units, and a bare number is in milliseconds."""
    assert parse_quantity(text, DURATION) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("250", 250),
        ("30s", 30),
        ("0.5m", 30),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("7d", 604_800),
        ("1w", 604_800),
    ],
)
def test_seconds_are_read_in_seconds(text, expected):
    """A bare number is in seconds, and a unit means what it always does."""
    assert parse_quantity(text, SECONDS) == expected


@pytest.mark.parametrize(
    ("text", "quantity", "message"),
    [
        pytest.param("250ms", SECONDS, "use one of s, m, h, d, w", id="milliseconds-in-seconds"),
        pytest.param("0.5s", SECONDS, "not a whole number of s", id="part-of-a-second"),
        pytest.param("10MiB", SECONDS, "is a size, and this is a duration", id="size-for-seconds"),
        pytest.param("10MiB", DURATION, "'10MiB' is a size, and this is a duration", id="size-for-duration"),
        pytest.param("30s", SIZE, "'30s' is a duration, and this is a size", id="duration-for-size"),
        pytest.param("10G", SIZE, "did you mean GB", id="half-a-unit"),
        pytest.param("10gib", SIZE, "did you mean GiB", id="wrong-case"),
        pytest.param("5x", DURATION, "use one of ms, s, m, h, d, w", id="no-such-unit"),
        pytest.param("1GiB5MiB", SIZE, "more than one unit", id="compound-size"),
        pytest.param("30m1h", DURATION, "the largest first", id="wrong-order"),
        pytest.param("1h1h", DURATION, "write each unit once", id="unit-twice"),
        pytest.param("0.5ms", DURATION, "not a whole number of ms", id="part-of-a-millisecond"),
        pytest.param("0.3B", SIZE, "not a whole number of B", id="part-of-a-byte"),
        pytest.param("", SIZE, "is not a size", id="nothing"),
        pytest.param("soon", DURATION, "is not a duration", id="a-word"),
        pytest.param("-5s", DURATION, "is not a duration", id="negative"),
        pytest.param("1e3s", DURATION, "'e' is not a unit of duration", id="exponent"),
        pytest.param("9" * 5000, SIZE, "is not a size", id="endless-digits"),
        pytest.param("1_000", SIZE, "is not a size", id="underscore"),
    ],
)
def test_quantity_that_cannot_be_read_says_why(text, quantity, message):
    """Each way to write a quantity wrongly has an answer that helps."""
    with pytest.raises(ValueError, match=message):
        parse_quantity(text, quantity)


@given(st.integers(min_value=0, max_value=2**62))
def test_formatted_quantity_reads_back(value):
    """The file accepts the quantities that pages show."""
    assert parse_quantity(format_duration(value), DURATION) == value
    assert parse_quantity(format_seconds(value), SECONDS) == value
    assert parse_quantity(format_size(value), SIZE) == value


@given(st.text(max_size=30), st.sampled_from([DURATION, SECONDS, SIZE]))
def test_any_text_is_a_quantity_or_a_value_error(text, quantity):
    """No text makes the parser fail in another way."""
    try:
        assert isinstance(parse_quantity(text, quantity), int)
    except ValueError as error:
        assert str(error)  # noqa: PT017 both outcomes are right


@pytest.mark.parametrize(("value", "shown"), [(0, "0ms"), (86_400_000, "1d"), (90_000, "90s")])
def test_duration_is_shown_in_its_largest_whole_unit(value, shown):
    """A default reads as an operator would write it."""
    assert format_duration(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0s"), (86_400, "1d"), (90, "90s"), (600, "10m"), (7200, "2h")]
)
def test_seconds_are_shown_in_their_largest_whole_unit(value, shown):
    """A bound of a property in seconds reads as an operator would write it."""
    assert format_seconds(value) == shown
