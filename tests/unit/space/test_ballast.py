"""The ballast keeper: real files, on a disk that is as full as a test says."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
from structlog.testing import capture_logs

from tests.fakes.filesystems import FakeDisk, FakeFilesystems
from tests.fakes.virtual_loop import virtually
from tieringd.broker.ballast_file import BallastFile
from tieringd.errors import ConfigError, LocalFileError
from tieringd.policies.disk_alert import AlertSettings
from tieringd.space.ballast import INTERVAL_SECONDS, Ballast, BallastSettings, BallastStatus

MIB = 2**20
SIZE = 10 * MIB
ALERTS = AlertSettings(alert_free_bytes=0, alert_free_percent=10, min_free_bytes=2 * MIB)
"""On a disk of 100 MiB: low at 10, well above 11; degraded at 2."""


def unsupported(_descriptor, _position, _size):
    """Refuse to reserve space, as some filesystems do."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


class Site:
    """A log directory, the ballast beside it, and the disk of both."""

    def __init__(self, root, metrics):
        (root / "logs").mkdir()
        self.path = root / "ballast"
        self.disk = FakeDisk((str(root),), 100 * MIB, 50 * MIB)
        self.metrics = metrics
        self.keeper = self.keeper_with()

    def keeper_with(self, **parts):
        """Return a keeper of the ballast with other *parts*."""
        given = {
            "log_dirs": [str(self.path.parent / "logs")],
            "filesystems": FakeFilesystems(self.disk),
            "settings": self.settings(releases=True),
            "metrics": self.metrics,
        }
        return Ballast([str(self.path)], **(given | parts))

    def settings(self, *, releases, size_bytes=SIZE):
        return BallastSettings(size_bytes=size_bytes, alerts=ALERTS, releases=releases)

    @property
    def wanted_bytes(self):
        return self.metrics.registry.get_sample_value("tieringd_ballast_wanted_bytes")

    async def step(self, free_mib):
        self.disk.free_bytes = free_mib * MIB
        await self.keeper.step()
        held = self.path.stat().st_size if self.path.exists() else 0
        assert self.metrics.registry.get_sample_value("tieringd_ballast_bytes") == held
        return held


@pytest.fixture
def site(tmp_path, metrics):
    return Site(tmp_path, metrics)


async def test_ballast_is_made_let_go_and_made_again(site):
    """The ballast goes when its disk is degraded. It comes back once the disk is all right with it."""
    held = [await site.step(free_mib) for free_mib in (50, 5, 3, 2, 5, 12, 21, 22)]
    assert held == [SIZE, SIZE, SIZE, 0, 0, 0, 0, SIZE]


async def test_ballast_stays_when_it_is_not_to_go_by_itself(site):
    """An operator decides then; a reload can change that."""
    await site.step(50)
    site.keeper.set_settings(site.settings(releases=False))
    assert await site.step(1) == SIZE
    site.keeper.set_settings(site.settings(releases=True))
    assert await site.step(1) == 0


async def test_ballast_that_was_released_by_hand_comes_back_only_with_room(site):
    """The daemon does not take at once what an operator has just made room with."""
    await site.step(50)
    assert await site.keeper.release() == SIZE
    assert await site.step(15) == 0
    assert await site.keeper.release() == 0
    assert await site.step(50) == SIZE


async def test_ballast_is_made_by_hand_where_there_is_room(site):
    """The command tells what there is then; on a full disk it makes nothing, and says what to do."""
    assert await site.keeper.show() == BallastStatus(str(site.path), 0, SIZE)
    site.disk.free_bytes = 21 * MIB
    with pytest.raises(LocalFileError, match=r"its disk would be low on space\. Free some disk space"):
        await site.keeper.create()
    assert not site.path.exists()
    site.disk.free_bytes = 22 * MIB
    assert await site.keeper.create() == BallastStatus(str(site.path), SIZE, SIZE)
    assert await site.keeper.show() == BallastStatus(str(site.path), SIZE, SIZE)
    site.disk.free_bytes = 12 * MIB
    assert (await site.keeper.create()).held_bytes == SIZE


async def test_ballast_gets_another_size(site):
    """A new size is taken over by the next round, larger and smaller."""
    await site.step(50)
    site.keeper.set_settings(site.settings(releases=True, size_bytes=20 * MIB))
    assert await site.step(40) == 20 * MIB
    assert site.wanted_bytes == 20 * MIB
    site.keeper.set_settings(site.settings(releases=True, size_bytes=MIB))
    assert await site.step(30) == MIB
    assert site.wanted_bytes == MIB


async def test_fault_is_said_once_and_ends_when_it_is_mended(site):
    """Something else in its place is the operator's, and is left alone."""
    site.path.write_bytes(b"precious")
    with capture_logs() as lines:
        await site.keeper.step()
        await site.keeper.step()
    assert len(lines) == 1
    assert "is not a ballast file" in lines[0]["error"]
    loop = ("tieringd_loop_last_success_timestamp_seconds", {"loop": "ballast"})
    assert site.metrics.registry.get_sample_value(*loop) is None
    assert site.path.read_bytes() == b"precious"
    assert site.wanted_bytes == SIZE
    for command in (site.keeper.show, site.keeper.create, site.keeper.release):
        with pytest.raises(ConfigError):
            await command()
    site.path.unlink()
    assert await site.step(50) == SIZE
    assert site.metrics.registry.get_sample_value(*loop) > 0


class Producers:
    """Writes of the broker's clients while the ballast is written: so much between two pieces of it."""

    def __init__(self, site, written_mib) -> None:
        self._disk, self.written_mib = site.disk, written_mib

    def grow(self, file: BallastFile) -> int:
        before = file.held_bytes()
        held = file.grow(allocate=unsupported, at_once_bytes=MIB)
        self._disk.free_bytes -= held - before + self.written_mib * MIB
        return held


@pytest.mark.parametrize(
    ("written_mib", "first", "second"),
    [pytest.param(2, 4, 4, id="low"), pytest.param(28, 1, 0, id="degraded")],
)
async def test_growth_in_pieces_ends_when_producers_take_the_room(site, written_mib, first, second):
    """A ballast grows only while its disk has room for all of it. It is let go as a whole one is."""
    producers = Producers(site, written_mib)
    site.keeper = site.keeper_with(grow=producers.grow)
    with capture_logs() as lines:
        held = [await site.step(29)]
        held.append(await site.step(site.disk.free_bytes // MIB))
    assert held == [first * MIB, second * MIB]
    assert ["does not get its whole size" in line.get("error", "") for line in lines].count(True) == 1
    assert [line for line in lines if line["event"] == "ballast file is made"] == []
    producers.written_mib = 0
    assert await site.step(50) == SIZE


async def test_command_says_that_the_ballast_did_not_get_its_whole_size(site):
    """An operator hears that the file is smaller, and for want of what."""
    keeper = site.keeper_with(grow=Producers(site, 40).grow)
    with pytest.raises(LocalFileError, match=r"does not get its whole size: with 9437184 bytes more"):
        await keeper.create()
    assert (await keeper.show()).held_bytes == MIB


async def test_disk_that_cannot_be_measured_keeps_its_ballast(site):
    """Nothing is let go because nothing is known."""
    await site.step(50)
    site.disk.is_readable = False
    with capture_logs() as lines:
        await site.keeper.step()
    assert "cannot be inspected" in lines[0]["error"]
    assert site.path.stat().st_size == SIZE


async def test_ballast_goes_also_while_another_disk_has_failed(site, tmp_path):
    """A broker with two disks goes on with one of them, which may need the room."""
    failing = tmp_path / "failing"
    failing.mkdir()
    keeper = site.keeper_with(log_dirs=[str(failing), str(tmp_path / "logs")])
    await keeper.step()
    assert site.path.exists()
    failing.rmdir()
    site.disk.free_bytes = 2 * MIB
    await keeper.step()
    assert not site.path.exists()


@virtually
async def test_keeper_checks_at_once_on_a_hint_and_every_interval(site):
    """A degraded disk does not wait for the next round."""
    task = asyncio.create_task(site.keeper.run())
    await asyncio.sleep(1)
    assert site.path.exists()
    site.disk.free_bytes = 0
    await asyncio.sleep(INTERVAL_SECONDS / 2)
    assert site.path.exists()
    site.keeper.hint()
    await asyncio.sleep(1)
    assert not site.path.exists()
    site.disk.free_bytes = 50 * MIB
    await asyncio.sleep(INTERVAL_SECONDS - 2)
    assert not site.path.exists()
    await asyncio.sleep(3)
    assert site.path.exists()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
