"""The tree of errors: what each class says, carries and is."""

from __future__ import annotations

import inspect
import re

import pytest

from tieringd import errors
from tieringd.errors import (
    ConfigError,
    CorruptDataError,
    LocalFileError,
    RetryableError,
    StorageError,
    StorageUnavailable,
    TieringError,
)

CLASSES = [one for _, one in inspect.getmembers(errors, inspect.isclass)]
EXTRA = {
    LocalFileError: {"path": "/logs/a-0"},
}
"""What a class's constructor asks for beside the message."""


def made(kind: type[TieringError], **fields: object) -> TieringError:
    return kind("the disk is full", **EXTRA.get(kind, {}), **fields)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_error_says_its_message_and_its_hint(kind):
    """Every class reads as its message, then what to do, if there is anything to do."""
    assert str(made(kind)) == "the disk is full"
    assert made(kind).hint is None
    advised = made(kind, hint="Free some space")
    assert str(advised) == "the disk is full. Free some space"
    assert (advised.message, advised.hint) == ("the disk is full", "Free some space")
    assert advised.args == ("the disk is full",)


def drawn_tree() -> dict[str, str]:
    """Return the parent of each class as the module's drawing has it."""
    parents, path = {}, []
    for line in inspect.getdoc(errors).splitlines():
        found = re.match(r"([│├└─ ]*)([A-Z]\w+)( |$)", line)
        if found and ("─" in found[1] or found[2] == "TieringError"):
            del path[len(found[1]) // 4 :]
            parents[found[2]] = path[-1] if path else "Exception"
            path.append(found[2])
    return parents


def test_tree_is_the_one_that_is_drawn():
    """The drawing at the head of the module names every class, under its parent."""
    assert drawn_tree() == {one.__name__: one.__bases__[0].__name__ for one in CLASSES}
    assert len(CLASSES) > 15


def test_retrying_is_decided_by_class():
    """Errors that may be tried again are exactly those under RetryableError."""
    retryable = {one.__name__ for one in CLASSES if issubclass(one, RetryableError)}
    assert retryable == {
        "RetryableError",
        "StorageUnavailable",
        "ManifestEdited",
        "BrokerUnavailable",
        "LeadershipChanged",
        "LocalFileError",
    }


def test_config_error_carries_every_problem():
    """All faults are there at once; without any there is an empty tuple."""
    assert ConfigError("t.yaml has 2 problems", problems=("a", "b")).problems == ("a", "b")
    assert ConfigError("wrong").problems == ()


def test_storage_unavailable_knows_whether_a_write_may_have_happened():
    """The outcome is known by default, and there is no time to wait for."""
    plain = StorageUnavailable("timed out")
    assert (plain.retry_after_seconds, plain.outcome_unknown) == (None, False)
    told = StorageUnavailable("slow down", retry_after_seconds=1.5, outcome_unknown=True)
    assert (told.retry_after_seconds, told.outcome_unknown) == (1.5, True)


@pytest.mark.parametrize(
    "kind", [one for one in CLASSES if issubclass(one, StorageError)], ids=lambda kind: kind.__name__
)
def test_storage_error_names_the_object(kind):
    """A final answer of the store is about one key, or about none."""
    assert kind("no", key="a/b").key == "a/b"
    assert kind("no").key is None


def test_error_about_a_file_carries_its_path():
    """The path is a field, so that a caller does not parse the text."""
    assert LocalFileError("cannot be read", path="/logs/a-0/0.log").path == "/logs/a-0/0.log"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param({}, "wrong CRC", id="nothing known"),
        pytest.param({"source": "0.log"}, "wrong CRC (in 0.log)", id="file"),
        pytest.param({"position": 0}, "wrong CRC (position 0)", id="position zero is a position"),
        pytest.param({"offset": 0}, "wrong CRC (offset 0)", id="offset zero is an offset"),
        pytest.param(
            {"offset": 7, "position": 99, "source": "0.log", "hint": "Run scrub"},
            "wrong CRC. Run scrub (in 0.log, position 99, offset 7)",
            id="everything",
        ),
    ],
)
def test_corrupt_data_says_where(fields, text):
    """The text names the file or object, the byte and the offset, as far as they are known."""
    assert str(CorruptDataError("wrong CRC", **fields)) == text


def test_corrupt_data_is_located_without_losing_anything():
    """A caller that knows the file names it, and message, place and hint stay."""
    found = CorruptDataError("wrong CRC", position=99, offset=7, hint="Run scrub")
    located = found.located("0.log")
    assert str(located) == "wrong CRC. Run scrub (in 0.log, position 99, offset 7)"
    assert (located.source, located.position, located.offset) == ("0.log", 99, 7)
    assert found.source is None
