"""
Write docs/log_events.md, the list of the events that the daemon logs: `python -m deploy.log_event_page`.

The events are found in the sources: calls of a logger with a constant text. A test keeps the page true, so a
changed text is seen in review: operators search for these texts, and rules match them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "log_events.md"
LEVELS = ("critical", "error", "warning", "info", "debug")
HEAD = """\
# Log events

The daemon's log is JSON lines on standard error (`log.format`). Each has `event`, `level` and `timestamp`.
The texts below are stable, and the page is generated from the sources. Match on `event`, not on a whole line.

* `partition` is always a number, and `topic` names its topic.
* A warning or an error that comes again passes fifty times in a minute. The next one after that has
  `repeated`, the number of those that were left out.
* The error that ends the process is `ended by an error`, with `kind`, `hint` and `exit_code`.

"""


def events() -> Iterator[tuple[str, str, str]]:
    """Yield the level, the text and the field names of each event in the sources."""
    for path in sorted((ROOT / "tieringd").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            level = "error" if node.func.attr == "exception" else node.func.attr
            text = node.args[0]
            if level in LEVELS and isinstance(text, ast.Constant) and isinstance(text.value, str):
                fields = sorted(one.arg for one in node.keywords if one.arg not in {None, "exc_info"})
                yield level, text.value, ", ".join(f"`{one}`" for one in fields)


def page() -> str:
    """Return the page's text."""
    lines = [HEAD]
    known = set(events())
    for level in LEVELS:
        found = sorted((text, fields) for one, text, fields in known if one == level)
        if found:
            lines += [f"## {level}\n", "| event | fields |", "|---|---|"]
            lines += [f"| {text} | {fields} |" for text, fields in found]
            lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
