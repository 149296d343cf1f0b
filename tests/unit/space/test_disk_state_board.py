"""The board: what daemons tell each other of their disks, and for how long it is believed."""

from __future__ import annotations

import asyncio

import pytest
from crc32c import crc32c
from structlog.testing import capture_logs

from tests.fakes.archive import Clock
from tieringd.errors import StorageUnavailable
from tieringd.formats.disk_state import PublishedDiskState, decode_disk_state, encode_disk_state
from tieringd.formats.object_keys import client_quotas_key, disk_state_key
from tieringd.model.disk_state import DiskState
from tieringd.space.degraded_mode import REFRESH_SECONDS, STALE_SECONDS, DiskStateBoard

pytestmark = pytest.mark.looptime

CLUSTER = "cluster"
OK, LOW, DEGRADED = DiskState


class PassingClock(Clock):
    """The wall clock of one host: the loop's time, and by how much it is wrong."""

    def __init__(self, ahead_seconds: float = 0) -> None:
        super().__init__()
        self.ahead_seconds = ahead_seconds

    def __call__(self) -> int:
        return self.now_ms + int((asyncio.get_running_loop().time() + self.ahead_seconds) * 1000)


@pytest.fixture
def make_board(store):
    """Give a function that returns the board of one broker."""

    def make(node_id, *, ahead_seconds=0.0):
        return DiskStateBoard(
            store,
            cluster=CLUSTER,
            node_id=node_id,
            now_ms=PassingClock(ahead_seconds),
            now=asyncio.get_running_loop().time,
        )

    return make


async def put(store, key, data):
    await store.put(key, data, crc32c=crc32c(data))


def puts(store):
    return [key for operation, key in store.requests if operation == "put"]


async def test_state_is_published_when_it_changes_and_once_a_minute(store, make_board):
    """An unchanged state costs one write a minute, a new one is written at once."""
    board = make_board(3)
    for state, pause, writes in (
        (OK, 0, 1),
        (OK, REFRESH_SECONDS - 1, 1),
        (OK, 1, 2),
        (DEGRADED, 1, 3),
        (DEGRADED, 1, 3),
        (OK, 1, 4),
    ):
        await asyncio.sleep(pause)
        await board.publish(state)
        assert len(puts(store)) == writes
    assert set(puts(store)) == {"meta/cluster/brokers/3/disk_state.json"}
    data, _ = await store.get(disk_state_key(CLUSTER, 3))
    assert decode_disk_state(data) == PublishedDiskState(CLUSTER, 3, OK, PassingClock()())


async def test_state_whose_write_failed_is_written_in_the_next_round(store, make_board):
    """A failed write is not taken for one that was made."""
    board = make_board(3)
    store.fail_next("put", lambda: StorageUnavailable("away"))
    with pytest.raises(StorageUnavailable):
        await board.publish(DEGRADED)
    await board.publish(DEGRADED)
    assert len(puts(store)) == 2


async def test_every_broker_sees_all_states(make_board):
    """Each broker reads what all publish, their own state included, without another read."""
    boards = {node_id: make_board(node_id) for node_id in (1, 2, 3)}
    for board, state in zip(boards.values(), (OK, DEGRADED, LOW), strict=True):
        await board.publish(state)
    for board, own in zip(boards.values(), (OK, DEGRADED, LOW), strict=True):
        assert (await board.read_board(own)).states == {1: OK, 2: DEGRADED, 3: LOW}


async def test_peer_is_read_only_when_it_has_changed(store, make_board):
    """A round over peers that say nothing new is one listing."""
    mine, peer = make_board(1), make_board(2)
    await peer.publish(LOW)
    await mine.read_board(OK)
    before = len(store.requests)
    await mine.read_board(OK)
    assert [operation for operation, _ in store.requests[before:]] == ["list_page"]
    await peer.publish(OK)
    assert (await mine.read_board(OK)).states == {1: OK, 2: OK}


async def test_our_own_state_in_the_bucket_is_not_believed(make_board):
    """A broker's own state from before a restart counts for nothing: it knows better, or does not know."""
    await make_board(1).publish(DEGRADED)
    again = make_board(1)
    assert (await again.read_board(None)).states == {}
    assert (await again.read_board(OK)).states == {1: OK}


@pytest.mark.parametrize("is_seen_to_change", [False, True])
async def test_state_that_is_not_refreshed_becomes_unknown(make_board, is_seen_to_change):
    """A peer whose daemon is gone is not taken for degraded for ever."""
    mine, peer = make_board(1), make_board(2)
    await peer.publish(DEGRADED)
    if is_seen_to_change:
        await mine.read_board(OK)
        await peer.publish(LOW)
        await peer.publish(DEGRADED)
    await mine.read_board(OK)
    await asyncio.sleep(STALE_SECONDS - 1)
    assert 2 in (await mine.read_board(OK)).states
    await asyncio.sleep(1)
    assert (await mine.read_board(OK)).states == {1: OK}


async def test_old_state_is_unknown_to_a_daemon_that_starts(make_board):
    """The first read of a state that was published long ago does not make it new."""
    await make_board(2).publish(DEGRADED)
    await asyncio.sleep(STALE_SECONDS)
    assert (await make_board(1).read_board(OK)).states == {1: OK}


@pytest.mark.parametrize(("state", "is_in_doubt"), [(OK, False), (LOW, False), (DEGRADED, True)])
async def test_old_state_is_in_doubt_until_it_was_watched(make_board, state, is_in_doubt):
    """The clock of a daemon that starts may be wrong, so a peer that was degraded may still be."""
    await make_board(2).publish(state)
    mine = make_board(1, ahead_seconds=3600)
    assert (await mine.read_board(OK)).is_in_doubt == is_in_doubt
    await asyncio.sleep(STALE_SECONDS - 1)
    assert (await mine.read_board(OK)).is_in_doubt == is_in_doubt
    await asyncio.sleep(1)
    assert not (await mine.read_board(OK)).is_in_doubt


async def test_state_that_became_old_is_in_no_doubt(make_board):
    """A daemon that has watched a peer for long does not wait once more when the peer's daemon is gone."""
    mine, peer = make_board(1), make_board(2)
    for _ in range(4):
        await peer.publish(DEGRADED)
        view = await mine.read_board(OK)
        assert (view.states, view.is_in_doubt) == ({1: OK, 2: DEGRADED}, False)
        await asyncio.sleep(REFRESH_SECONDS)
    await asyncio.sleep(STALE_SECONDS)
    view = await mine.read_board(OK)
    assert (view.states, view.is_in_doubt) == ({1: OK}, False)


@pytest.mark.parametrize("ahead_seconds", [3600, -3600])
async def test_peer_with_a_wrong_clock_counts_once_it_is_seen_to_live(make_board, ahead_seconds):
    """The timestamp of such a peer means nothing, so the peer counts only while its file changes."""
    mine, peer = make_board(1), make_board(2, ahead_seconds=ahead_seconds)
    await peer.publish(DEGRADED)
    assert (await mine.read_board(OK)).states == {1: OK}
    await asyncio.sleep(REFRESH_SECONDS)
    await peer.publish(DEGRADED)
    assert (await mine.read_board(OK)).states == {1: OK, 2: DEGRADED}
    await asyncio.sleep(STALE_SECONDS)
    assert (await mine.read_board(OK)).states == {1: OK}


async def test_peer_whose_state_was_removed_is_forgotten(store, make_board):
    """A peer that is not on the board is unknown, and is new when it comes back."""
    mine = make_board(1)
    await make_board(2).publish(DEGRADED)
    await mine.read_board(OK)
    await store.delete_many([disk_state_key(CLUSTER, 2)])
    assert (await mine.read_board(OK)).states == {1: OK}


async def test_damaged_state_is_unknown_and_said_once(store, make_board):
    """One peer's damaged object does not keep a daemon from reading the others."""
    mine = make_board(1)
    await make_board(3).publish(LOW)
    await put(store, disk_state_key(CLUSTER, 2), b"{}")
    with capture_logs() as lines:
        for _ in range(3):
            assert (await mine.read_board(OK)).states == {1: OK, 3: LOW}
    assert len(lines) == 1
    assert disk_state_key(CLUSTER, 2) in lines[0]["error"]


async def test_board_is_read_to_its_last_page(store, make_board):
    """A cluster with more brokers than a listing's page holds is seen whole, and other clusters are not."""
    count = 1100
    for node_id in range(2, count + 1):
        published = PublishedDiskState(CLUSTER, node_id, LOW, PassingClock()())
        await put(store, disk_state_key(CLUSTER, node_id), encode_disk_state(published))
    foreign = PublishedDiskState("other", 5000, LOW, PassingClock()())
    await put(store, disk_state_key("other", 5000), encode_disk_state(foreign))
    assert set((await make_board(1).read_board(OK)).states) == set(range(1, count + 1))


async def test_view_has_the_version_of_the_record_of_quotas(store, make_board):
    """A daemon reads the record only if it is there and has changed."""
    mine = make_board(1)
    assert (await mine.read_board(OK)).quotas_version is None
    await put(store, client_quotas_key(CLUSTER), b"any")
    version = (await store.head(client_quotas_key(CLUSTER))).version
    assert (await mine.read_board(OK)).quotas_version == version
