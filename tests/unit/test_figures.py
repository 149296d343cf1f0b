"""What `make figures` chooses, and what it says of figures before and after, by hand-made ledgers."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from math import nan

import pytest

from benchmarks.figures import BENCHMARKS, Benchmark, Run, chosen_benchmarks, medians
from benchmarks.ledger import (
    Against,
    Figure,
    Verdict,
    compare,
    compare_all,
    load_ledger,
    needs_base,
    recorded,
    table,
    values_of,
    write_ledger,
)
from tests.support.affected import ROOT

SPEED = Figure(
    benchmark="upload",
    name="speed_vs_peer",
    value=2.0,
    unit="ratio",
    higher_is_better=True,
    noise_share=0.1,
    against=Against.LEDGER,
    commit="abc",
    machine="a machine",
    command="python -m benchmarks.upload",
)
CPU = replace(SPEED, name="cpu_percent", value=4.0, higher_is_better=False, against=Against.BASE, bound=5)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [(1.79, Verdict.LOSS), (1.81, Verdict.SAME), (2.19, Verdict.SAME), (2.21, Verdict.GAIN)],
)
def test_ratio_is_compared_with_the_ledger(after, verdict):
    """More is better: what is lower by more than a tenth is lost, though the previous commit did not run."""
    assert compare(SPEED, base=None, after=after).verdict is verdict


@pytest.mark.parametrize(
    ("base", "after", "verdict"),
    [
        (2.0, 1.7, Verdict.LOSS),
        (1.85, 1.7, Verdict.LOSS),  # It kept the ledger's line, which this one crosses.
        (1.7, 1.6, Verdict.SAME),
        (1.7, 1.5, Verdict.LOSS),
    ],
)
def test_loss_of_a_ratio_is_confirmed_beside_the_previous_commit(base, after, verdict):
    """A ratio that is as low for the previous commit in the same run is not lost by this one."""
    comparison = compare(SPEED, base=base, after=after)
    assert comparison.verdict is verdict
    assert ("the previous commit gives 1.7 now" in comparison.reason) == (verdict is Verdict.SAME)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (4.0, 4.41, Verdict.LOSS),
        (4.0, 4.39, Verdict.SAME),
        (4.0, 3.59, Verdict.GAIN),
        (8.0, 8.7, Verdict.SAME),  # A machine half as fast is no loss.
        (0.0, 0.5, Verdict.LOSS),
        (0.0, 0.0, Verdict.SAME),
    ],
)
def test_absolute_is_compared_with_the_previous_commit(before, after, verdict):
    """Less is better: what is a tenth higher than the previous commit in the same run is lost."""
    assert compare(CPU, base=before, after=after).verdict is verdict


def test_small_losses_do_not_add_up():
    """Each step is within noise of the one before; the one that crosses the ledger's line fails."""
    first, second = (compare(CPU, base=base, after=after) for base, after in ((4.0, 4.35), (4.35, 4.7)))
    assert (first.verdict, second.verdict) == (Verdict.SAME, Verdict.LOSS)
    assert second.reason == "slipped little by little from 4 at abc"


def test_both_beyond_the_ledger_may_be_the_machine():
    """A slow previous commit means no loss of this one, and the reason says so."""
    comparison = compare(replace(CPU, bound=None), base=6.0, after=6.1)
    assert comparison.verdict is Verdict.SAME
    assert "slower now, or it slipped earlier" in comparison.reason


def test_change_that_breaks_what_was_asked_fails_within_noise():
    """The previous commit kept the bound in the same run."""
    noisy = replace(CPU, noise_share=0.5)
    comparison = compare(noisy, base=4.9, after=5.1)
    assert comparison.verdict is Verdict.LOSS
    assert "asked was 5" in comparison.reason
    assert compare(noisy, base=5.1, after=5.2).verdict is Verdict.SAME


@pytest.mark.parametrize("values", [{}, {"speed_vs_peer": nan}])
def test_missing_figure_is_named(values):
    """A benchmark that gives a figure no longer, or no number for it, would hide a loss."""
    (comparison,) = compare_all([SPEED], base={}, after={"upload": values}, is_quick=True)
    assert (comparison.verdict, comparison.has_failed) == (Verdict.MISSING, True)
    (line,) = table([comparison])[1:]
    assert line.startswith("upload: speed_vs_peer")
    assert line.endswith("MISSING (the benchmark no longer gives it)")


def test_only_what_ran_is_compared():
    """A benchmark that was not chosen, and a figure that only whole runs give, are not missing."""
    whole = replace(SPEED, name="memory", is_in_quick_run=False)
    assert compare_all([SPEED, whole], base={}, after={}, is_quick=True) == []
    named = compare_all([SPEED, whole], base={}, after={"upload": {"speed_vs_peer": 2}}, is_quick=True)
    assert [one.figure.name for one in named] == ["speed_vs_peer"]
    named = compare_all([SPEED, whole], base={}, after={"upload": {"speed_vs_peer": 2}}, is_quick=False)
    assert [one.verdict for one in named] == [Verdict.SAME, Verdict.MISSING]


def test_new_and_shown_figures_fail_nothing():
    """There is nothing to compare a new benchmark with; a figure that a ratio stands for is shown."""
    assert compare(CPU, base=None, after=99).verdict is Verdict.NEW
    shown = compare(replace(SPEED, against=Against.NOTHING), base=None, after=0.1)
    assert (shown.verdict, shown.has_failed) == (Verdict.SHOWN, False)


def test_table_has_before_and_after_side_by_side():
    """The share says by how much the figure is better, whichever direction is."""
    comparisons = [compare(SPEED, base=None, after=2.1), compare(CPU, base=4.0, after=6.0)]
    head, first, second = (line.split() for line in table(comparisons))
    assert head == ["figure", "before", "after", "better", "by", "noise", "unit"]
    assert first == ["upload:", "speed_vs_peer", "2", "2.1", "+5.0", "%", "10", "%", "ratio", "same"]
    assert second[2:7] == ["4", "6", "-50.0", "%", "10"]
    assert "LOSS" in second


def test_previous_commit_runs_only_for_absolutes():
    """A benchmark of which all figures are ratios runs once."""
    assert needs_base([SPEED, CPU], "upload")
    assert not needs_base([SPEED], "upload")
    assert not needs_base([CPU], "space")


def test_values_of_a_document():
    """Tables of alternatives, single figures of a part, and ratios all have a name."""
    document = {
        "figures": {"plain: tieringd": {"throughput_median": 2.0}, "stalls: loop_stall_ms": 9.0},
        "ratios": {"speed_vs_peer": 1.5},
    }
    assert values_of(document) == {
        "plain: tieringd: throughput_median": 2.0,
        "loop_stall_ms": 9.0,
        "speed_vs_peer": 1.5,
    }


def test_medians_are_over_the_runs():
    """A figure that one run lacks has the median of the others."""
    runs = {"upload": [Run({"a": 1, "b": 5}, "m"), Run({"a": 9}, "m"), Run({"a": 2}, "m")]}
    assert medians(runs) == {"upload": {"a": 2, "b": 5}}


def test_record_changes_what_was_measured_alone(tmp_path):
    """The other entries stay as they are, and a file read back is the same."""
    ledger = recorded(
        [replace(SPEED, note="from a document"), CPU],
        {"upload": {"speed_vs_peer": 2.34567}},
        commit="def",
        machines={"upload": "this machine"},
        commands={"upload": "python -m benchmarks.upload --quick"},
    )
    assert ledger == [
        replace(
            SPEED,
            value=2.346,
            commit="def",
            machine="this machine",
            command="python -m benchmarks.upload --quick",
        ),
        CPU,
    ]
    write_ledger(ledger, tmp_path / "ledger.json")
    assert load_ledger(tmp_path / "ledger.json") == ledger
    assert "note" not in json.loads((tmp_path / "ledger.json").read_text())["figures"][0]


GRAPH = {
    "benchmarks.upload": {"tieringd.storage.s3"},
    "benchmarks.partitions": {"tests.support.daemon"},
    "benchmarks.space": {"tieringd.policies.space"},
    "tests.support.daemon": {"tests.support.warm_start", "tieringd.__main__"},
    "tests.support.warm_start": {"tieringd.cli"},
    "tieringd.cli": {"tieringd.__main__"},
    "tieringd.__main__": {"tieringd.storage.s3", "tieringd.archiving.rounds", "tieringd.policies.space"},
    "tieringd.archiving.rounds": {"tieringd.policies.upload_plan"},
}
KNOWN = {
    "upload": Benchmark((), 1),
    "partitions": Benchmark(("tieringd.archiving",), 1),
    "space": Benchmark((), 1),
}


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ("tieringd/storage/s3.py", {"upload"}),
        ("tieringd/policies/space.py", {"space"}),
        ("tieringd/policies/upload_plan.py", {"partitions"}),  # Imported by a package that the table names.
        ("tieringd/archiving/new.py", {"partitions"}),  # Lies in such a package.
        ("tests/support/daemon.py", {"partitions"}),
        ("benchmarks/space.py", {"space"}),
        ("pyproject.toml", {"upload", "partitions", "space"}),
        ("docs/performance.md", set()),
        ("tests/unit/test_figures.py", set()),
    ],
)
def test_benchmarks_are_chosen_by_what_they_measure(changed, names):
    """A daemon's command line imports everything, so the table says what of it a benchmark measures."""
    assert set(chosen_benchmarks([changed], GRAPH, KNOWN)) == names


def test_table_of_benchmarks_names_what_exists():
    """Each benchmark has a module, and so does each package that it measures."""
    for name, benchmark in BENCHMARKS.items():
        assert (ROOT / "benchmarks" / f"{name}.py").exists()
        assert all(find_spec(package) for package in benchmark.packages)


def test_ledger_of_this_repository_is_whole():
    """Each benchmark has figures, each figure has its source, and no name stands twice."""
    ledger = load_ledger()
    assert {one.benchmark for one in ledger} == set(BENCHMARKS)
    assert len({(one.benchmark, one.name) for one in ledger}) == len(ledger)
    assert all(one.commit and one.machine and one.command for one in ledger)
    assert all(0 < one.noise_share <= 1 for one in ledger)
