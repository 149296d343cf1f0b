"""The link between the daemon and a worker: what passes, in which order, and what does not."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from tieringd.daemon.workers.link import Link
from tieringd.errors import CorruptDataError, RetryableError
from tieringd.formats.record_batch import OldMagicError


@asynccontextmanager
async def linked(handlers):
    """Give both sides of a link; the second one has *handlers*."""
    ours, theirs = socket.socketpair()
    sides = [
        await Link.over(ours, {}, other_side="the worker"),
        await Link.over(theirs, handlers, other_side="the daemon"),
    ]
    running = [asyncio.create_task(side.run()) for side in sides]
    try:
        yield sides
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)


def failing():
    """Raise an error that a module has made for itself."""
    raise OldMagicError("magic 1", source="a segment", position=7)


async def test_error_of_a_module_arrives_as_the_nearest_one_of_the_tree():
    """The link goes on: the asking side does not know the module's class."""
    async with linked({"fail": failing, "echo": lambda value: value}) as (asking, _):
        with pytest.raises(CorruptDataError, match="magic 1") as error:
            await asking.ask("fail")
        assert (error.value.source, error.value.position) == ("a segment", 7)
        assert await asking.ask("echo", 5) == 5


async def unsendable():
    """Return what cannot be pickled."""
    return lambda: None


async def test_answer_that_cannot_be_sent_is_an_error():
    """The asking side does not wait for ever."""
    async with linked({"unsendable": unsendable}) as (asking, _):
        with pytest.raises(RetryableError, match="unsendable failed by a defect"):
            await asking.ask("unsendable")


async def test_held_messages_are_taken_later_in_their_order():
    """Only the question whether a side is alive is answered at once."""
    taken = []
    async with linked({"note": taken.append, "pulse": lambda: None}) as (telling, holding):
        holding.hold()
        telling.tell("note", 1)
        telling.tell("note", 2)
        await telling.ask("pulse")
        assert taken == []
        holding.resume()
        telling.tell("note", 3)
        await telling.ask("pulse")
        assert taken == [1, 2, 3]
