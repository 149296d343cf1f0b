"""Words for people: links, commands, metrics and modules of pages exist; docstrings of tests are plain."""

from __future__ import annotations

import ast
import re
import shlex
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from deploy import licences
from deploy.log_event_page import PAGE as LOG_EVENT_PAGE
from deploy.log_event_page import page as log_event_page
from deploy.metrics_reference import PAGE, labels_by_name, rendered
from tieringd.cli.main import COMMANDS, app, loaded_command

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "tests/README.md",
    ROOT / "tests/golden/README.md",
]
WIDEST_LINE = 120
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
PLACES = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
LEADING_WORD = re.compile(
    r"(?:about|above|across|after|against|along|although|among|and|around|as|at|because|before|behind|"
    r"below|beneath|beside|besides|between|beyond|but|by|despite|down|during|except|for|from|however|"
    r"if|in|inside|into|near|nor|of|off|on|once|onto|or|out|outside|over|past|per|since|so|than|"
    r"though|through|throughout|till|to|toward|towards|under|unless|until|up|upon|via|whatever|when|"
    r"whenever|where|wherever|whether|whichever|while|whoever|with|within|without|yet)\b",
    re.IGNORECASE,
)
"""A preposition or conjunction. A sentence that begins with one names its subject late, or not at all."""
MAY_BEGIN_WITH_ONE = re.compile(rf'(?:\A|:|#.*)\s*r?"""\s*{LEADING_WORD.pattern}', re.IGNORECASE)


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """Return what GitHub makes of the headings of *page*."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> list[str]:
    """Return the commands of tieringd in code blocks and code spans, without comments and pipes."""
    text = page.read_text()
    lines = [line.strip() for _, block in BLOCK.findall(text) for line in block.splitlines()]
    spans = re.findall(r"`([^`]+)`", BLOCK.sub("", text))
    found = [one for one in [*lines, *spans] if one.startswith("tieringd ")]
    return list(dict.fromkeys(re.split(r" #| \| | > | \\$", one.replace(r"\|", "|"))[0] for one in found))


def alternatives(command: str) -> list[list[str]]:
    """Return the words after `tieringd`, once for each choice: `copy|move` are two commands."""
    words = [word.strip("[]") for word in shlex.split(command)[1:]]
    is_plain = re.compile(r"[a-z|-]+").fullmatch
    return [list(one) for one in product(*(word.split("|") if is_plain(word) else [word] for word in words))]


def unknown_words(words: list[str]) -> list[str]:
    """Return the subcommands and options among *words* that the command line does not have."""
    name, *rest = words
    if name.startswith("-"):
        return []
    found = loaded_command(name) if name in COMMANDS else get_command(app).get_command(None, name)
    while isinstance(found, TyperGroup) and rest:
        name, *rest = rest
        found = found.commands.get(name)
    if found is None:
        return [name]
    options = {option for one in found.params for option in (*one.opts, *one.secondary_opts)}
    return [word for word in rest if word.startswith("-") and word.partition("=")[0] not in options]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page):
    """A link leads to a file of this repository, and to a heading of that page if it names one."""
    for place in PLACES.findall(BLOCK.sub("", page.read_text())):
        if place.startswith("https://"):
            continue
        path, _, anchor = place.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), place
        assert not anchor or anchor in anchors(target), place


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_tests_that_a_page_names_exist(page):
    """A page that proves something by `file::test` names a test that there is."""
    for path, name in re.findall(r"`(tests/[\w/.]+\.py)::(\w+)`", page.read_text()):
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path} has no {name}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_exist(page):
    """Each command has the subcommands and options that the page gives it."""
    for command in commands(page):
        for words in alternatives(command):
            assert unknown_words(words) == [], command


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_lines_fit_a_screen(page):
    """Also at 3 a.m., in a terminal. Only rows of tables are as wide as they have to be."""
    lines = page.read_text().splitlines()
    assert [line for line in lines if len(line) > WIDEST_LINE and not line.startswith("|")] == []


def test_metrics_page_names_every_metric():
    """The page names no metric that is gone. Totals and Redpanda's names are named by their beginnings."""
    known = {name for name in labels_by_name() if not name.startswith("process_")}
    page = (ROOT / "docs/metrics.md").read_text()
    named = set(re.findall(r"`((?:tieringd|redpanda|vectorized)_[a-z_]+)(?:\{[a-z_,]+\})?`", page))
    assert named <= known
    assert {
        one for one in known - named if not one.startswith(("tieringd_daemon_", "redpanda_cloud_"))
    } == set()


def test_reference_of_metrics_is_what_the_code_says():
    """`make metrics-reference` writes it, with every metric that a daemon can have."""
    assert PAGE.read_text() == rendered()
    assert set(re.findall(r"^\| `([a-z_]+)`", rendered(), re.MULTILINE)) == set(labels_by_name())


def test_licences_are_those_of_the_packages_in_the_image():
    """`make lock` writes the page. A licence of a family that is not known here has to be looked at first."""
    rows = dict(re.findall(r"^\| ([\w.-]+) \| (.+) \|$", licences.PAGE.read_text(), re.MULTILINE))
    del rows["package"]
    assert list(rows) == licences.locked()
    assert rows == {package: licences.licence_of(package) for package in rows}
    known = re.compile(r"MIT|BSD|Apache|PSF|ISC|MPL-2\.0|LGPL-2\.1")
    assert [package for package, licence in rows.items() if not known.search(licence)] == []
    assert [package for package, licence in rows.items() if re.search(r"\b(A?GPL)", licence)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "docs"], ids=page_name)
def test_python_on_a_page_imports_what_there_is(page):
    """An import in a code block of Python names a module of tieringd and something in it."""
    for language, block in BLOCK.findall(page.read_text()):
        for node in ast.walk(ast.parse(block if language == "python" else "")):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tieringd"):
                module = import_module(node.module or "")
                assert all(hasattr(module, one.name) for one in node.names), node.module


# Long: it parses all of the source.
def test_log_events_page_has_every_event():
    """`python -m deploy.log_event_page` writes it."""
    assert LOG_EVENT_PAGE.read_text() == log_event_page()


def test_page_of_the_drill_names_alerts_that_there_are():
    """`make drill` writes it. A rule that is renamed makes the page a thing of the past."""
    shown = set(re.findall(r"\bTieringd[A-Z]\w+", (ROOT / "docs/operator_drill.md").read_text()))
    assert shown
    assert shown <= set(re.findall(r"alert: (\w+)", (ROOT / "deploy/prometheus/alerts.yml").read_text()))


def leading_words(source: str) -> list[tuple[int, str]]:
    """Return line and first word of the docstrings in *source* that begin with a `LEADING_WORD`."""
    if not MAY_BEGIN_WITH_ONE.search(source):
        return []  # To parse every file takes seconds.
    texts = [
        (node.body[0].lineno, ast.get_docstring(node))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node)
    ]
    return sorted((line, word.group()) for line, text in texts if (word := LEADING_WORD.match(text)))


def test_leading_word_of_a_docstring_is_found():
    """A module, a class, a method and a nested function are looked at, and the line is the docstring's."""
    source = '''"""On the moon."""
class Tests:
    """
    With a helper.
    """
    async def test_a(self):
        def inner():
            """After a crash nothing is lost."""
        """Nothing is lost after a crash."""
    def test_b(self):
        """Forty segments are stored."""
'''
    assert leading_words(source) == [(1, "On"), (3, "With"), (8, "After")]


def test_docstrings_of_tests_name_their_subject_first():
    """No docstring of a test begins with a preposition or a conjunction."""
    faults = [
        f"{path.relative_to(ROOT)}:{line}: the docstring begins with {word!r}; name its subject first"
        for path in sorted(ROOT.glob("tests/**/*.py"))
        for line, word in leading_words(path.read_text())
    ]
    assert faults == [], "\n".join(faults)
