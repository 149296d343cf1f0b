"""
From a file to a `Config`, or to one error with every fault in it.

There are three passes, in this order: the text (`yaml_source`), each value by itself (the classes of
`model`), and the rules between values (`checks`). A fault in one pass does not stop it, and does not
hide faults elsewhere in later passes. Faulty values are left out of the next pass, and so is every
finding that depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import ValidationError

from tieringd.config.checks import find_contradictions, find_doubts
from tieringd.config.fields import described
from tieringd.config.model import WITHOUT_BROKER, Config
from tieringd.config.naming import explain_unknown, nearest_place, why_not_applicable
from tieringd.config.rule_violation import RuleViolation
from tieringd.config.yaml_source import Document, Place, Problem, read_document
from tieringd.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_Data: TypeAlias = dict[str, Any]
_SMALLEST: _Data = {"broker": {"kind": "none", "log_dirs": ("/",)}, "state_directory": "/"}
"""Stands in for required values that are faulty. No finding that depends on them is shown."""

_MESSAGES = {
    "missing": "is required",
    "tuple_type": "must be a list, one `- item` on each line, not {given}",
    "model_type": "must be a section with properties below it, not {given}",
    "dict_type": "must be a section with properties below it, not {given}",
}
"""By pydantic's name of the fault. Faults of single values are worded by their kinds."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where a value was written: a line of the file, and the environment variables in it."""

    line: int
    variables: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and where each of its values was written."""

    config: Config
    origins: Mapping[Place, Origin]
    """Origins of the values, by place in the file. Values that the file does not set are not included."""


def load_config(path: Path, *, environ: Mapping[str, str], needs_broker: bool = True) -> Config:
    """
    Return the configuration in the file *path*.

    Without *needs_broker* the broker section may be missing, for commands that use only the bucket.

    Raises:
        ConfigError: The file cannot be read, or anything in it is wrong.
    """
    return load_with_origins(path, environ=environ, needs_broker=needs_broker).config


def load_with_origins(path: Path, *, environ: Mapping[str, str], needs_broker: bool = True) -> Loaded:
    """
    Return the configuration in the file *path*, and where each of its values was written.

    Raises:
        ConfigError: As with `load_config`.
    """
    source = str(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise _error(source, [f"{source}: this file does not exist"]) from error
    except IsADirectoryError as error:
        raise _error(source, [f"{source}: this is a directory; name the file in it"]) from error
    except OSError as error:
        raise _error(source, [f"{source}: this file cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise _error(source, [f"{source}:{line}: this line is not UTF-8 text"]) from None
    return parse_with_origins(text, source=source, environ=environ, needs_broker=needs_broker)


def parse_config(text: str, *, source: str, environ: Mapping[str, str], needs_broker: bool = True) -> Config:
    """
    Return the configuration in *text*. *source* names it in messages.

    Raises:
        ConfigError: Anything is wrong. All faults are in `problems`, in the order of the lines.
    """
    return parse_with_origins(text, source=source, environ=environ, needs_broker=needs_broker).config


def parse_with_origins(
    text: str, *, source: str, environ: Mapping[str, str], needs_broker: bool = True
) -> Loaded:
    """
    Return the configuration in *text*, and where each of its values was written.

    Raises:
        ConfigError: As with `parse_config`.
    """
    document = read_document(text, environ)
    problems = list(document.problems)
    if document.data is not None:
        suspects = {problem.place for problem in problems if problem.place}
        data, notes = _applicable(document, document.data)
        if not needs_broker:
            data = {"broker": WITHOUT_BROKER} | data
        found, at_fault = _read_values(document, data)
        problems += [one for one in found if not _rests_on((one.place,), suspects)]
        config = _without(data, suspects | at_fault)
        suspects |= at_fault | {nearest_place(place) for place in at_fault}
        problems += _problems(find_contradictions(config), document, suspects)
        if not problems:
            doubts = _problems(find_doubts(config), document, suspects)
            remarked = config.with_remarks(warnings=_located(doubts, source), notes=_located(notes, source))
            return Loaded(remarked, {place: _origin(document, place) for place in document.lines})
    raise _error(source, _located(problems, source))


def _origin(document: Document, place: Place) -> Origin:
    return Origin(document.lines[place], document.variables.get(place, ()))


def _applicable(document: Document, data: _Data) -> tuple[_Data, list[Problem]]:
    """Return *data* without properties that only the broker can act on, and a note on each of these."""
    kept = dict(data)
    places: list[Place] = [(name,) for name in data]
    topics = data.get("topics")
    if isinstance(topics, dict):
        kept["topics"] = {
            topic: dict(properties) if isinstance(properties, dict) else properties
            for topic, properties in topics.items()
        }
        places += [
            ("topics", topic, name)
            for topic, properties in topics.items()
            if isinstance(properties, dict)
            for name in properties
        ]
    notes: list[Problem] = []
    for place in places:
        reason = why_not_applicable(place)
        if reason is not None:
            _remove(kept, place)
            notes.append(Problem(document.line_of(place), place, f"not applicable: {reason}"))
    return kept, notes


def _read_values(document: Document, data: _Data) -> tuple[list[Problem], set[Place]]:
    """Read each value by itself. Return the faults and their places."""
    try:
        Config.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
    else:
        return [], set()
    meant = {nearest_place(_place(one)) for one in details if one["type"] == "extra_forbidden"}
    problems: list[Problem] = []
    for detail in details:
        place = _place(detail)
        if detail["type"] != "missing" or place not in meant:
            problems.append(Problem(document.line_of(place), place, _message(detail, place)))
    return problems, {_place(detail) for detail in details}


def _place(detail: ErrorDetails) -> Place:
    return tuple(step for step in detail["loc"] if step != "[key]")


def _message(detail: ErrorDetails, place: Place) -> str:
    """Return pydantic's finding in plain words, which never repeat the value."""
    given = described(detail["input"])
    match detail["type"]:
        case "value_error":
            return str(detail["ctx"]["error"])
        case "extra_forbidden":
            return explain_unknown(place)
        case kind:
            message = _MESSAGES.get(kind, detail["msg"])
            return message.format(given=given)


def _without(data: _Data, places: Iterable[Place]) -> Config:
    """Return the configuration of *data* without faulty values, and with required values filled in."""
    kept = deepcopy(data)
    for place in places:
        _remove(kept, place)
    broker = kept.get("broker", {})
    if broker != WITHOUT_BROKER:
        broker = {**_SMALLEST["broker"], **broker}
    return Config.model_validate({**_SMALLEST, **kept, "broker": broker})


def _remove(data: _Data, place: Place) -> None:
    """Remove the innermost property around *place*, because half a list would be another value."""
    section = data
    for step in place[:-1]:
        inner = section.get(str(step))
        if not isinstance(inner, dict):
            section.pop(str(step), None)
            return
        section = inner
    section.pop(str(place[-1]), None)


def _problems(findings: Iterable[RuleViolation], document: Document, suspects: set[Place]) -> list[Problem]:
    return [
        Problem(document.line_of(one.places[0]), one.places[0], one.message)
        for one in findings
        if not _rests_on(one.places, suspects)
    ]


def _rests_on(places: Iterable[Place], suspects: set[Place]) -> bool:
    """Say whether one of *places* is, contains or lies in one of *suspects*."""
    return any(
        place[: len(suspect)] == suspect or suspect[: len(place)] == place
        for place in places
        for suspect in suspects
    )


def _located(problems: Iterable[Problem], source: str) -> tuple[str, ...]:
    ordered = sorted(problems, key=lambda problem: problem.line or 0)
    return tuple(problem.located(source) for problem in ordered)


def _error(source: str, problems: Iterable[str]) -> ConfigError:
    lines = tuple(problems)
    count = "one problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigError(f"{source} has {count}", problems=lines, hint="Nothing was changed; correct the file")
