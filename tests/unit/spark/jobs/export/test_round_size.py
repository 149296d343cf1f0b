"""A round of an export: it is no larger than its size, however many partitions there are."""

from __future__ import annotations

import pytest

from tests.fakes.counted_calls import CountedCalls
from tests.support.exports import ArchivedLogs, ParquetDirectory, in_this_process
from tieringd.archive.manifest_store import ManifestStore
from tieringd.spark.jobs.export.rounds import export_topic
from tieringd.spark.jobs.export.state import ExportRules

PARTITIONS = 12


@pytest.fixture
async def logs(tmp_path):
    """Give partitions of several segments; the last of them has half as many."""
    logs = ArchivedLogs.made(tmp_path / "source", partitions=PARTITIONS)
    for writer in logs.writers:
        for _ in range(3 if writer.name.partition == PARTITIONS - 1 else 6):
            writer.append(b"x" * 1000, b"y" * 1000)
            writer.roll()
    await logs.archive()
    yield logs
    logs.bucket.close()


@pytest.fixture
def rounds(logs, tmp_path):
    """Return a function that exports all in rounds, and gives the portions of each round."""
    directory = ParquetDirectory.made(tmp_path / "target")

    def exported(**rules):
        rounds = []

        def run(work, portions):
            rounds.append(portions)
            return in_this_process(work, portions)

        outcome = export_topic(
            logs.topic(), directory.topic(), ExportRules(**rules), archive=lambda: logs.bucket, run=run
        )
        assert outcome.error is None
        assert directory.seen() == logs.written()
        return rounds

    yield exported
    directory.bucket.close()


async def test_round_is_not_larger_with_more_partitions(rounds):
    """Each partition had a portion in each round: ten thousand made it eighty times its size."""
    found = rounds(portion_bytes=4_200, round_bytes=16_900)
    sizes = [sum(one.size_bytes for one in portions) for portions in found]
    assert max(sizes) <= 16_900
    assert min(sizes[:-1]) >= 12_000, "a round is filled as far as whole portions fit"


async def test_every_partition_has_its_turn(rounds):
    """Partitions with the most left come first, so that none waits for all of another one."""
    found = rounds(portion_bytes=4_200, round_bytes=16_900)
    assert {one.partition.partition for portions in found[:3] for one in portions} == set(
        range(PARTITIONS - 1)
    )


async def test_portion_that_is_larger_than_a_round_is_one(rounds):
    """Such a portion would never be exported otherwise."""
    assert {len(portions) for portions in rounds(portion_bytes=4_200, round_bytes=1_000)} == {1}


async def test_round_asks_for_manifests_together(rounds, monkeypatch):
    """One by one, ten thousand took five minutes in each round."""
    loads = CountedCalls.of(monkeypatch, ManifestStore, "load")
    assert len(rounds()) == 1
    assert loads.most_at_once == PARTITIONS
