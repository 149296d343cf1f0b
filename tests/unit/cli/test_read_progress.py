"""Progress of a long read: seldom, on standard error, and with an end."""

from __future__ import annotations

from tieringd.cli.read import ReadProgress
from tieringd.formats.records import Record


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def record(offset: int) -> Record:
    return Record(offset, 0, 0, b"k" * 100, b"v" * 900, ())


def noted(progress, clock, count, *, first=0, end_offset=10_000, seconds_each=0.001):
    for offset in range(first, first + count):
        clock.seconds += seconds_each
        progress.note(record(offset), end_offset=end_offset)


def test_long_read_says_how_far_it_is(capsys):
    """Every two seconds a line with the share, the rate and the time that is left; a sum at the end."""
    clock = Clock()
    progress = ReadProgress(is_shown=True, clock=clock)
    noted(progress, clock, 5120)
    progress.end()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "offset 2047 of 10000 (20%): 2048 records, 1MB/s, about 8 s left",
        "offset 4095 of 10000 (41%): 4096 records, 1MB/s, about 6 s left",
        "5120 records, 5.12MB, in 5 s",
    ]


def test_share_counts_from_where_the_read_began(capsys):
    """The second half of a log is not half done when it begins."""
    clock = Clock()
    progress = ReadProgress(is_shown=True, clock=clock)
    noted(progress, clock, 2048, first=8000, end_offset=12_096)
    assert capsys.readouterr().err.startswith("offset 10047 of 12096 (50%): ")


def test_read_without_an_end_has_no_share(capsys):
    """One that follows tells what it read; records may come seldom, and each reads the clock."""
    clock = Clock()
    progress = ReadProgress(is_shown=True, clock=clock)
    noted(progress, clock, 3, end_offset=None, seconds_each=1.5)
    assert capsys.readouterr().err == "offset 1: 2 records, 667B/s\n"


def test_short_read_and_one_that_is_not_told_say_nothing(capsys):
    """Output that goes to a file or a pipe is not disturbed."""
    clock = Clock()
    short = ReadProgress(is_shown=True, clock=clock)
    noted(short, clock, 1000)
    short.end()
    quiet = ReadProgress(is_shown=False, clock=clock)
    noted(quiet, clock, 9000)
    quiet.end()
    assert capsys.readouterr().err == ""
