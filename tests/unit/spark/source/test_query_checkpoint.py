"""The offsets at which a query on the archive ended, for the query on the broker that goes on."""

from __future__ import annotations

import json

import pytest

from tests.unit.cli.commands import invoked
from tieringd.errors import CorruptDataError, LocalFileError, TieringError
from tieringd.spark.source.query_checkpoint import ended_at

OFFSET = {"orders": {"0": 23, "2": 42}, "@topicIds": {"orders": "W1xN"}, "@begins": {"orders": {"2": 0}}}
ABOUT = '{"batchWatermarkMs":0,"conf":{}}'


@pytest.fixture
def checkpoint(tmp_path):
    """Give a directory as Spark leaves it after two batches."""
    for name in ("offsets", "commits"):
        (tmp_path / name).mkdir()
    write(tmp_path, 0, OFFSET | {"orders": {"0": 1}})
    write(tmp_path, 10, OFFSET)
    return tmp_path


def write(checkpoint, batch, *offsets, has_ended=True):
    lines = ["v1", ABOUT, *map(json.dumps, offsets)]
    (checkpoint / "offsets" / f"{batch}").write_text("\n".join(lines))
    (checkpoint / "offsets" / f".{batch}.crc").write_bytes(b"crc")
    if has_ended:
        (checkpoint / "commits" / f"{batch}").write_text('v1\n{"nextBatchWatermarkMs":0}')


def test_offsets_are_those_after_the_last_batch(checkpoint):
    """The offsets have the form of `startingOffsets` of Spark's Kafka source, and nothing more."""
    assert ended_at(checkpoint) == {"orders": {"0": 23, "2": 42}}


def test_partitions_of_which_nothing_is_archived_begin_at_0(checkpoint):
    """Kafka's source wants every partition named. The broker's earliest offset may move before it begins."""
    assert ended_at(checkpoint, partitions=4) == {"orders": {"0": 23, "1": 0, "2": 42, "3": 0}}


def test_batch_that_has_not_ended_is_an_error(checkpoint):
    """The batch's records may be in the sink or not, and only the query itself can tell."""
    write(checkpoint, 11, OFFSET, has_ended=False)
    with pytest.raises(TieringError, match=r"batch 11 .* has not ended.*availableNow"):
        ended_at(checkpoint)


@pytest.mark.parametrize(
    ("offsets", "told"),
    [
        pytest.param([{"logOffset": 0}], "has 0 sources tieringd or kafka", id="of files"),
        pytest.param([{"orders": {"0": 5}}, {"audit": {"0": 5}}], "has 2 sources", id="two of Kafka"),
        pytest.param([OFFSET, OFFSET], "has 2 sources tieringd", id="two"),
    ],
)
def test_other_queries_are_refused(checkpoint, offsets, told):
    """The error names the sources of the query."""
    write(checkpoint, 11, *offsets)
    with pytest.raises(TieringError, match=told):
        ended_at(checkpoint)


def test_query_of_the_kafka_source_ended_somewhere_as_well(checkpoint):
    """A query on the archive takes over there, where the broker has trimmed what was not read."""
    write(checkpoint, 11, {"orders": {"1": 7, "0": 5}})
    assert ended_at(checkpoint) == {"orders": {"0": 5, "1": 7}}


def test_batch_that_has_not_ended_may_be_left_out(checkpoint):
    """Only the sink's owner can tell whether the sink has anything of the batch, so an option says it."""
    write(checkpoint, 11, {"orders": {"0": 99}}, has_ended=False)
    assert ended_at(checkpoint, last_ended=True) == {"orders": {"0": 23, "2": 42}}
    for path in (checkpoint / "commits").iterdir():
        path.unlink()
    with pytest.raises(TieringError, match="no batch has ended"):
        ended_at(checkpoint, last_ended=True)


def test_other_source_of_the_query_is_passed_over(checkpoint):
    """A query may join the archive with something else."""
    write(checkpoint, 11, {"orders": {"0": 5}}, OFFSET)
    assert ended_at(checkpoint) == {"orders": {"0": 23, "2": 42}}


def test_files_of_another_version_are_refused(checkpoint):
    """Nothing is guessed."""
    (checkpoint / "offsets" / "10").write_text("v3\n{}\n{}")
    with pytest.raises(CorruptDataError, match="version v1"):
        ended_at(checkpoint)


def test_file_that_is_no_text_is_refused(checkpoint):
    """A damaged file is named."""
    (checkpoint / "offsets" / "10").write_bytes(b"v1\n\xff\xfe")
    with pytest.raises(CorruptDataError, match=r"is not text.*offsets/10"):
        ended_at(checkpoint)


def test_directory_without_a_checkpoint(tmp_path):
    """A directory without a checkpoint is refused, whether it has an `offsets` directory or not."""
    with pytest.raises(LocalFileError, match="checkpoint cannot be read"):
        ended_at(tmp_path)
    (tmp_path / "offsets").mkdir()
    with pytest.raises(TieringError, match="no batch has begun"):
        ended_at(tmp_path)


def test_command_prints_the_offsets(checkpoint):
    """The command prints the offsets as one line, for a script."""
    assert invoked("spark", "offsets", str(checkpoint), "--partitions", "3").output == (
        '{"orders": {"0": 23, "1": 0, "2": 42}}\n'
    )
