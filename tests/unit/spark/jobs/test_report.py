"""What a job says at its end: the same for people and for programs."""

from __future__ import annotations

import json

from tieringd.spark.jobs.report import Report, Table

REPORT = Report(
    "scrub",
    {"size_bytes": 12, "gb_per_second": 1.25, "share": 0.00042, "nothing": 0.0, "prices": None},
    (
        Table("topics", ("topic", "faults"), (("orders", 2), ("a", None))),
        Table("findings", ("key",), (("k1",), ("k2",)), is_detail=True),
        Table("orphans", ("key",), ()),
    ),
    ("the object is missing", "the index is missing"),
)


def test_text_has_figures_tables_and_faults():
    """Columns stand under each other; empty tables and details are left out."""
    assert (
        REPORT.as_text()
        == """\
size_bytes     12
gb_per_second  1.250
share          0.00042
nothing        0.000
prices         -

topics
topic   faults
orders  2
a       -

fault: the object is missing
fault: the index is missing
"""
    )


def test_json_has_everything():
    """Each table is a list of objects, an empty one too."""
    assert json.loads(REPORT.as_json()) == {
        "job": "scrub",
        "figures": {
            "size_bytes": 12,
            "gb_per_second": 1.25,
            "share": 0.00042,
            "nothing": 0.0,
            "prices": None,
        },
        "tables": {
            "topics": [{"topic": "orders", "faults": 2}, {"topic": "a", "faults": None}],
            "findings": [{"key": "k1"}, {"key": "k2"}],
            "orphans": [],
        },
        "faults": ["the object is missing", "the index is missing"],
    }


def test_report_of_nothing_is_short():
    """A job without figures, tables or faults."""
    assert Report("usage", {}).as_text() == "\n"
    assert json.loads(Report("usage", {}).as_json())["faults"] == []
