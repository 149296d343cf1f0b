"""Archivers that begin claim their partitions a few at a time, and first where something was closed last."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.fakes.archive import archive_in, archiver_of, observed
from tests.fakes.broker import FakeBroker
from tests.fakes.daemons import Daemon, stepped
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import AwayStore
from tests.fakes.virtual_loop import virtually
from tieringd.archiving.first_claims import CLAIMS_AT_ONCE, FirstClaims, closed_at_ns
from tieringd.errors import StorageUnavailable


class Claims:
    """Claims that last until they are told to end."""

    def __init__(self, at_once: int) -> None:
        self._turns = FirstClaims(at_once)
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    def ask(self, name: str, closed_at: int = 0) -> asyncio.Task[None]:
        self._ends[name] = asyncio.Event()
        return asyncio.create_task(self._claim(name, closed_at))

    async def _claim(self, name: str, closed_at: int) -> None:
        async with self._turns.turn(closed_at):
            self.begun.append(name)
            await self._ends[name].wait()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await asyncio.sleep(1)


@virtually
async def test_claims_begin_in_the_order_of_the_newest_closed_segments():
    """A claim that is under way keeps its turn. Among equals the one that asked first begins first."""
    claims = Claims(2)
    asked = [
        claims.ask(name, at) for name, at in (("a", 1), ("b", 0), ("c", 0), ("d", 7), ("e", 9), ("f", 0))
    ]
    await asyncio.sleep(1)
    assert claims.begun == ["a", "b"]
    for name in ("b", "a", "e", "d", "c", "f"):
        await claims.end(name)
    assert claims.begun == ["a", "b", "e", "d", "c", "f"]
    await asyncio.gather(*asked)


@virtually
async def test_cancelled_claim_passes_its_turn_on():
    """It may be cancelled while it waits, in the moment of its turn, or under way."""
    claims = Claims(1)
    under_way, waiting, next_one, last = (claims.ask(name) for name in "abcd")
    await asyncio.sleep(1)
    waiting.cancel()
    await asyncio.sleep(1)
    under_way.cancel()
    # The first turn of the loop ends it, which gives the turn to the next one; that one has not run yet.
    await asyncio.sleep(0)
    next_one.cancel()
    await asyncio.sleep(1)
    assert claims.begun == ["a", "d"]
    await claims.end("d")
    await last
    later = claims.ask("e")
    await claims.end("e")
    await later
    assert claims.begun == ["a", "d", "e"]
    for one in (under_way, waiting, next_one):
        with pytest.raises(asyncio.CancelledError):
            await one


def test_active_segment_does_not_count_as_closed(tmp_path):
    """A log whose only segment is active has none that waits."""
    writer = LogWriter(tmp_path)
    writer.append(b"a")
    assert closed_at_ns(writer.local_log()) == 0
    writer.closed_segment()
    log = writer.local_log()
    closed, active = replace(log.segments[0], modified_ns=5), replace(log.segments[-1], modified_ns=9)
    assert closed_at_ns(replace(log, segments=(closed, active))) == 5


class SlowStore(MemoryStore):
    """Takes half a second for each object, however many are put at once."""

    async def put(self, *arguments, **options):
        await asyncio.sleep(0.5)
        return await super().put(*arguments, **options)


@virtually
async def test_segment_that_waits_is_stored_before_idle_partitions_are_claimed(tmp_path):
    """The last of many partitions is the only one with a closed segment, which is among the first objects."""
    writers = [LogWriter(tmp_path, "orders", number) for number in range(10 * CLAIMS_AT_ONCE)]
    for writer in writers:
        writer.append(b"a")
    writers[-1].closed_segment()
    store = SlowStore()
    daemon = Daemon(tmp_path, store, writers)
    async with daemon.running():
        await daemon.round()
    keys = list(store.objects)
    manifests_before = [key for key in keys[: segment_at(keys)] if key.endswith("/manifest")]
    assert 0 < len(manifests_before) <= 4 * CLAIMS_AT_ONCE, len(keys)
    assert daemon.archived() == {str(writers[-1].name): [0]}


async def step_with_a_segment_closed_meanwhile(archiver, writer) -> asyncio.Task:
    """Begin a step, and close a segment a second later, which the newest observation has."""
    newest = [observed(writer)]
    step = asyncio.create_task(archiver.step(newest[-1], newest=lambda: newest[-1]))
    await asyncio.sleep(1)
    writer.closed_segment()
    newest.append(observed(writer))
    return step


@virtually
async def test_step_goes_on_with_what_was_seen_while_its_claim_waited(tmp_path):
    """A segment that is closed while the claim waits for its turn is stored by that step."""
    writer = LogWriter(tmp_path)
    writer.append(b"a")
    claims = FirstClaims(at_once=1)
    archive = archive_in(MemoryStore())
    archiver = archiver_of(writer, archive, FakeBroker(writer), first_claims=claims)
    async with claims.turn(0):
        step = await step_with_a_segment_closed_meanwhile(archiver, writer)
    assert (await step).uploaded == 1


@virtually
async def test_figures_after_a_claim_that_fails_are_of_what_was_seen_while_it_waited(tmp_path):
    """A wait may take hours in an outage, and alerts rest on the backlog of a partition that was followed."""
    writer, store = LogWriter(tmp_path), AwayStore()
    archive, broker = archive_in(store), FakeBroker(writer)
    writer.closed_segment()
    await archiver_of(writer, archive, broker).step(observed(writer))
    claims, known = FirstClaims(at_once=1), await archive.manifests.load(writer.identified)
    archiver = archiver_of(writer, archive, broker, first_claims=claims, known=known)
    async with claims.turn(0):
        step = await step_with_a_segment_closed_meanwhile(archiver, writer)
        store.is_away = True
    with pytest.raises(StorageUnavailable):
        await step
    assert archiver.backlog_bytes > 0


@virtually
async def test_rounds_while_claims_wait_bring_no_other_step(tmp_path):
    """
    The second round of a start shows each partition in another way: its topic is on record by then.

    Only claims that have begun before that leave a second step. None needs a third one.
    """
    partitions = 10 * CLAIMS_AT_ONCE
    writers = [LogWriter(tmp_path, "orders", number) for number in range(partitions)]
    for writer in writers:
        writer.append(b"a")
    daemon = Daemon(tmp_path, SlowStore(), writers)
    with stepped() as steps:
        async with daemon.running():
            await daemon.round()
    assert len(set(steps)) == partitions
    assert partitions < len(steps) <= partitions + 4 * CLAIMS_AT_ONCE


def segment_at(keys: list[str]) -> int:
    """Return the place of the first segment in *keys*."""
    return next(place for place, key in enumerate(keys) if key.endswith(".log"))
