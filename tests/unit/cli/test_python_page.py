"""The example of docs/python.md, on a small archive."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.unit.cli.commands import TOPIC
from tests.unit.test_docs import BLOCK

PAGE = Path(__file__).parents[3] / "docs/python.md"


def test_example_reads_an_archive(site, capsys):
    """The example prints where each partition begins, its segments, and the size of its first batches."""
    (code,) = [block for language, block in BLOCK.findall(PAGE.read_text()) if language == "python"]
    definitions, call = code.split("asyncio.run(", 1)
    assert call.startswith("show(")
    names: dict[str, object] = {}
    exec(compile(definitions, str(PAGE), "exec"), names)
    asyncio.run(names["show"](str(site.config), TOPIC))
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("begins at 0 and has 2 segments")
    assert second.startswith("  its first batches have ")
