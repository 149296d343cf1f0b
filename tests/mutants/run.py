"""
Take each guard out in turn and see that the simulation notices: `make mutants`.

    python -m tests.mutants.run [--seeds 1000] [--jobs 2] [--only NAME,NAME] [--write]

Every guard is taken out of a temporary copy of the tree. The history that caught the guard the last time, as
docs/reliability.md has it, is run first. With `--write` the table there is written anew. Ends with 1 where a
guard was not caught.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from shutil import copy2, copytree
from tempfile import TemporaryDirectory

from tests.mutants.guards import GUARDS, ROOT, Guard
from tests.simulation.gust import GUSTS
from tests.simulation.squall import THEMES

_THEMES = {"squall": THEMES, "gust": GUSTS}
DOCUMENT = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
_ROW = re.compile(r"^\| `(?P<name>[\w-]+)` \|.*\| (?:(?P<world>\w+) (?P<seed>\d+)|(?P<why>[^|]*)) \|$")


@dataclass(frozen=True)
class Caught:
    """How one guard fared."""

    guard: Guard
    world: str = ""
    seed: int = 0
    reason: str = ""
    histories: int = 0
    cpu_seconds: float = 0.0

    @property
    def is_caught(self) -> bool:
        """Say whether a history failed without the guard."""
        return bool(self.world)


def rows_of(text: str) -> dict[str, tuple[str, int] | None]:
    """Return which history caught each guard, as the table in *text* has it; None where none did."""
    # The document has other tables, whose rows look alike.
    lines = text.partition(BEGIN)[2].partition(END)[0].splitlines()
    rows = (_ROW.match(line) for line in lines)
    return {row["name"]: (row["world"], int(row["seed"])) if row["world"] else None for row in rows if row}


def without(guard: Guard, tree: Path) -> None:
    """
    Copy the tree to *tree* and take *guard* out there.

    Raises:
        GuardNotFoundError: The guard is not where the table says.
    """
    copytree(ROOT / "tieringd", tree / "tieringd")
    for needed in ("fakes", "mutants", "simulation"):
        copytree(ROOT / "tests" / needed, tree / "tests" / needed)
    for needed in (ROOT / "tests").glob("*.py"):
        copy2(needed, tree / "tests")
    for edit in guard.edits:
        path = tree / edit.file
        path.write_text(edit.applied(path.read_text()))


def histories_for(guard: Guard, *, seeds: int, known: tuple[str, int] | None) -> list[str]:
    """Return which histories to run, the likeliest first: one that caught it before, then its theme."""
    wanted = [f"{known[0]}:{known[1]}"] if known else []
    each = seeds // len(guard.worlds)
    if guard.theme:
        (world,) = guard.worlds
        themes = _THEMES[world]
        first = [one.name for one in themes].index(guard.theme)
        wanted.append(f"{world}:{','.join(map(str, range(first, each, len(themes))))}")
    for begin in range(0, each, 20):
        wanted += [f"{world}:{begin}-{min(begin + 20, each) - 1}" for world in guard.worlds]
    return wanted


def tried(guard: Guard, *, seeds: int, known: tuple[str, int] | None) -> Caught:
    """Take one guard out and run histories until one fails."""
    with TemporaryDirectory(prefix="mutant-") as directory:
        tree = Path(directory)
        without(guard, tree)
        done = _histories(tree, histories_for(guard, seeds=seeds, known=known))
    found = json.loads(done.stdout.splitlines()[-1])
    failure = found["failure"]
    caught = Caught(guard, histories=found["histories"], cpu_seconds=found["cpu_seconds"])
    if failure is None:
        return caught
    fault = _why_unsound(f"{failure['world']}:{failure['seed']}")
    if fault:
        return Caught(guard, reason=fault, histories=caught.histories, cpu_seconds=caught.cpu_seconds)
    return Caught(
        guard, failure["world"], failure["seed"], failure["reason"], caught.histories, caught.cpu_seconds
    )


def _why_unsound(history: str) -> str:
    """Return why a history shows nothing: it fails with every guard in its place. Empty when it holds."""
    done = _histories(ROOT, [history])
    found = json.loads(done.stdout.splitlines()[-1])["failure"]
    return "" if found is None else f"{history} fails with every guard in its place: {found['reason']}"


def _histories(tree: Path, wanted: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants.histories", *wanted],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in {0, 1} or not done.stdout.strip():
        raise RuntimeError(f"the histories ended with {done.returncode}: {done.stderr[-2000:]}")
    return done


def table(results: list[Caught]) -> list[str]:
    """Return the lines of the document's table."""
    lines = ["| Guard | What holds because of it | Where | Caught by seed |", "|---|---|---|---|"]
    for one in results:
        places = ", ".join(f"`{name}`" for name in dict.fromkeys(edit.file for edit in one.guard.edits))
        missed = f"not in {one.histories} histories" if one.histories else "not tried yet"
        by = f"{one.world} {one.seed}" if one.is_caught else missed
        lines.append(f"| `{one.guard.name}` | {one.guard.promise} | {places} | {by} |")
    return lines


def write_table(results: list[Caught]) -> None:
    """Put the table between the markers of the document; a guard that was not tried keeps its row."""
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    rows, after = rest.split(END)
    tried_now = {one.guard.name: line for one, line in zip(results, table(results)[2:], strict=True)}
    kept = {row["name"]: line for line in rows.splitlines() if (row := _ROW.match(line))}
    found = [tried_now.get(one.name, kept.get(one.name)) for one in GUARDS]
    lines = "\n".join([*table([]), *filter(None, found)])
    DOCUMENT.write_text(f"{before}{BEGIN}\n{lines}\n{END}{after}")


def main() -> int:
    """Run the mutants that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="histories per guard, of all its worlds")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="names of guards, with commas")
    parser.add_argument("--write", action="store_true", help="write the table of docs/reliability.md anew")
    options = parser.parse_args()
    names = set(filter(None, options.only.split(",")))
    chosen = [one for one in GUARDS if not names or one.name in names]
    known = rows_of(DOCUMENT.read_text())
    results: list[Caught] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(tried, one, seeds=options.seeds, known=known.get(one.name)) for one in chosen]
        for run in as_completed(runs):
            one = run.result()
            results.append(one)
            if options.write:
                # At once: a run of hours that is cut short has not been for nothing.
                write_table(results)
            said = f"caught by {one.world} {one.seed}" if one.is_caught else "NOT CAUGHT"
            said = f"{said}: {one.reason[:110]!r}" if one.reason else said
            said = f"{said} ({one.histories} histories, {one.cpu_seconds} s)"
            print(f"{one.guard.name}: {said}", flush=True)  # noqa: T201 - the run tells how it goes
    results.sort(key=lambda one: GUARDS.index(one.guard))
    missed = [one.guard.name for one in results if not one.is_caught]
    said = f"{len(results) - len(missed)} of {len(results)} guards caught"
    print(f"{said}; missed: {', '.join(missed) or 'none'}")  # noqa: T201 - likewise
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
