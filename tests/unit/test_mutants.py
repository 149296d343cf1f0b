"""The table of guards is in step with the code and with the document."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants.guards import GUARDS, ROOT, Edit, GuardNotFoundError
from tests.mutants.histories import WORLDS, parse_histories
from tests.mutants.run import DOCUMENT, histories_for, rows_of


def test_every_guard_is_found_exactly_once():
    """A guard whose text has moved makes the run fail, and this test first."""
    for guard in GUARDS:
        sources: dict[str, str] = {}
        for edit in guard.edits:
            source = sources.get(edit.file) or (ROOT / edit.file).read_text()
            sources[edit.file] = edit.applied(source)
        for file, source in sources.items():
            compile(source, file, "exec")


def test_guard_that_has_moved_is_told():
    """The message names the file and the text."""
    edit = Edit("tieringd/errors.py", "no such text", "")
    with pytest.raises(GuardNotFoundError, match=r"guard not found in tieringd/errors.py: 'no such text'"):
        edit.applied("something else")


def test_names_and_worlds_of_guards():
    """Names are unique, worlds exist, and there are as many guards as were asked for."""
    assert Counter(one.name for one in GUARDS).most_common(1)[0][1] == 1
    assert {world for one in GUARDS for world in one.worlds} <= WORLDS.keys()
    assert len(GUARDS) >= 25


def test_document_has_a_row_for_each_guard():
    """`make mutants` writes the table, and has to be run when a guard is added."""
    assert rows_of(DOCUMENT.read_text()).keys() == {one.name for one in GUARDS}


def test_known_history_comes_first_and_none_comes_twice():
    """The worlds take turns, twenty seeds at a time, after the history that caught the guard before."""
    texts = histories_for(GUARDS[0], seeds=120, known=("storm", 7))
    histories = list(parse_histories(texts))
    assert histories[0] == ("storm", 7)
    assert len(histories) == len(set(histories)) == 120
