"""
A YAML text as plain values, with the line of every key and every fault of the text itself.

Only a plain subset of YAML is accepted: mappings, lists and scalars. Words are read as in YAML 1.2, so
`no` is text and `0123` is not an octal number. Anchors, aliases and tags are refused. `${NAME}` in a
value is replaced after YAML has found the end of the value. So the content of a variable can never
change the structure, and stays text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

Place: TypeAlias = tuple[str | int, ...]
"""The keys and list positions that lead to a value, from the root."""

_STR, _NULL, _BOOL, _INT, _FLOAT = (
    f"tag:yaml.org,2002:{name}" for name in ("str", "null", "bool", "int", "float")
)
_PATTERNS: dict[str, str] = {
    _NULL: r"~|null|Null|NULL|",
    _BOOL: r"true|True|TRUE|false|False|FALSE",
    _INT: r"[-+]?(0|[1-9][0-9]{0,18})",
    _FLOAT: r"[-+]?[0-9]{1,18}\.[0-9]{1,18}([eE][-+]?[0-9]{1,3})?",
}
_SUBSTITUTION = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$\{")


class EnvironmentText(str):
    """Text that holds the value of an environment variable, so messages do not repeat it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault: its place, and how to mend it."""

    line: int | None
    place: Place
    message: str

    def located(self, source: str) -> str:
        """Return the line that an operator reads."""
        parts = [
            f"{source}:{self.line}" if self.line is not None else source,
            dotted(self.place),
            self.message,
        ]
        return ": ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Document:
    """The content of a text: *data*, the line of each place in it, and the faults found so far."""

    data: dict[str, Any] | None
    """None if the text is not a mapping. Then there is nothing to check."""
    lines: Mapping[Place, int]
    problems: tuple[Problem, ...]
    variables: Mapping[Place, tuple[str, ...]] = field(default_factory=dict)
    """The environment variables in the value of each place that has any."""

    def line_of(self, place: Place) -> int:
        """Return the line of *place*, or of the nearest section around it that is in the file."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)


def dotted(place: Place) -> str:
    """Return a place as an operator writes it: `broker.log_dirs[1]`, `topics[a.b].redpanda.remote.write`."""
    text = ""
    for index, step in enumerate(place):
        if isinstance(step, int) or (index == 1 and place[0] == "topics"):
            text += f"[{step}]"
        else:
            text += f".{step}" if text else step
    return text


def resolve_plain(value: Any) -> Any:
    """Return text from the environment as YAML would read it, and any other value unchanged."""
    if not isinstance(value, EnvironmentText):
        return value
    for tag in (_BOOL, _INT, _FLOAT):
        if re.fullmatch(_PATTERNS[tag], value):
            return _resolved(tag, value)
    return value


def read_document(text: str, environ: Mapping[str, str]) -> Document:
    """Read *text*. A syntax error gives a document without data and with one problem."""
    try:
        root = yaml.compose(text, Loader=_Loader)
        reader = _NodeReader(environ)
        data = reader.read(root, ()) if root is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else None
        return Document(None, {}, (Problem(line, (), f"not valid YAML: {_explained(error)}"),))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return Document(None, {}, (Problem(line, (), "not valid YAML: a control character is not allowed"),))
    except RecursionError:
        return Document(None, {}, (Problem(None, (), "not a configuration: it is nested too deeply"),))
    if data is None and not reader.problems:
        return Document(
            None, {}, (Problem(None, (), "is empty; it needs at least broker and state_directory"),)
        )
    if not isinstance(data, dict):
        reader.problems.append(Problem(1, (), "must hold properties, one `name: value` on each line"))
        data = None
    return Document(data, reader.lines, tuple(reader.problems), reader.variables)


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases, and with only the scalars of this module."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "found an alias", event.start_mark)
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern in _PATTERNS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), None)


@dataclass(slots=True)
class _NodeReader:
    """Turns nodes into values, and records lines and faults."""

    environ: Mapping[str, str]
    lines: dict[Place, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    variables: dict[Place, tuple[str, ...]] = field(default_factory=dict)

    def read(self, node: yaml.Node, place: Place) -> Any:
        """Return the value of *node*: a dict, a tuple or a scalar."""
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return tuple(self._item(item, (*place, index)) for index, item in enumerate(node.value))
        return self._scalar(node, place)

    def _item(self, node: yaml.Node, place: Place) -> Any:
        self.lines[place] = node.start_mark.line + 1
        return self.read(node, place)

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem(line, place, "a property's name must be text"))
                continue
            key = key_node.value
            here = (*place, key)
            if key in values:
                self.problems.append(
                    Problem(line, here, f"is set twice; the first is in line {self.lines[here]}")
                )
                continue
            self.lines[here] = line
            values[key] = self.read(value_node, here)
        return values

    def _scalar(self, node: yaml.Node, place: Place) -> Any:
        line = node.start_mark.line + 1
        text = node.value
        if node.tag == _STR:
            return self._substituted(text, line, place)
        if node.tag in _PATTERNS and re.fullmatch(_PATTERNS[node.tag], text):
            return _resolved(node.tag, text)
        self.problems.append(Problem(line, place, "a value that begins with ! must be in quotes"))
        return None

    def _substituted(self, text: str, line: int, place: Place) -> str:
        if "${" not in text:
            return text

        def replace(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            if match[1] is None:
                message = (
                    "a variable is written ${ followed by its name and }; write $${ for the two characters "
                    "themselves"
                )
            elif match[1] in self.environ:
                self.variables[place] = (*self.variables.get(place, ()), match[1])
                return self.environ[match[1]]
            else:
                message = f"the environment variable {match[1]} is not set"
            self.problems.append(Problem(line, place, message))
            return ""

        return EnvironmentText(_SUBSTITUTION.sub(replace, text))


def _resolved(tag: str, text: str) -> float | bool | None:
    """Return the value of *text*, which the pattern of *tag* matches."""
    if tag == _NULL:
        return None
    if tag == _BOOL:
        return text.lower() == "true"
    return int(text) if tag == _INT else float(text)


def _explained(error: yaml.MarkedYAMLError) -> str:
    """Return the fault in words. The text around it is left out, as it may be a secret."""
    problem = error.problem or "unreadable"
    context = error.context or ""
    if "alias" in problem or "alias" in context:
        return "aliases are not supported; put a topic pattern that begins with * in quotes"
    if "tag" in problem or "tag" in context or "directive" in context:
        return "a value that begins with ! or % must be in quotes"
    if "but got '{'" in problem:
        return f"{problem}; put ${{NAME}} in quotes inside [ ]"
    if "'\\t'" in problem:
        return f"{problem}; indent with spaces, not with tabs"
    return problem
