"""Seeded histories of one broker and its daemons, with every promise checked throughout."""

# Long: dozens of whole histories of a broker.

from __future__ import annotations

import pytest

from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.fakes.virtual_loop import run_virtual
from tests.simulation.seeds import CHUNKS, run_history, seeds_of
from tests.simulation.world import World
from tieringd.broker.directory_broker import DirectoryBroker


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_promises_hold_in_every_history(tmp_path, chunk, quiet):
    """Nothing is lost and all is archived in the end, whatever fails, crashes or comes twice."""
    for seed in seeds_of(chunk, usual=75, share=0.35):
        log_dir = tmp_path / str(seed)
        log_dir.mkdir()
        world = World(seed, log_dir)
        run_history(world, seed, quiet, name=f"seed {seed}")
        assert world.promises.checks > len(world.events)


@pytest.mark.parametrize("seed", [3, 5, 8])
def test_history_of_a_seed_is_the_same_each_time(tmp_path, seed):
    """A seed that failed once fails again: every request comes in the same order."""
    histories = []
    for name in ("first", "again"):
        log_dir = tmp_path / name
        log_dir.mkdir()
        world = World(seed, log_dir)
        run_virtual(world.run(), seed=seed)
        histories.append(world.store.requests)

    assert histories[0] == histories[1]
    assert len(histories[0]) > 50


def test_worlds_logs_are_what_the_directory_says(tmp_path):
    """The simulated broker's answers are those of a walk over the same files."""
    writer = LogWriter(tmp_path)
    directory = DirectoryBroker([str(tmp_path)])

    async def compare() -> None:
        for producer_id, end in ((7, writer.commit), (8, writer.abort)):
            writer.append()
            writer.append(producer_id=producer_id)
            for _ in range(2):
                log = writer.local_log()
                fake = FakeBroker(writer)
                epochs = {writer.name: 0}
                found = await directory.log_bounds([log], leader_epochs=epochs)
                assert found == await fake.log_bounds([log], leader_epochs=epochs)
                writer.roll()
                end(producer_id)

    run_virtual(compare(), seed=0)
