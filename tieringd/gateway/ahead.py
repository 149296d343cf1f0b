"""
What a client will fetch next, made ready before it asks.

A client that reads old records fetches from where its last answer ended. While it takes that answer, the
next one is prepared. Whether it may have it is still the broker's word: it is asked, by the client's own
request on the client's own connection, for the last archived offsets below its log. When it finds those out
of range, it would find every archived one before them out of range too, for this client and at this leader
epoch. That holds for a second; then it is asked again. Whatever else it says, and whatever else the client
asks, goes the ordinary way.

A client is prepared for once it has gone on from where an answer ended, and no longer when it has not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.fetch import AskedFetch, asked_of, with_offsets
from tieringd.formats.kafka_wire.request_header import Api
from tieringd.gateway.answers import fetched_ahead

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from tieringd.formats.kafka_wire.request_header import RequestHead
    from tieringd.gateway.archive_answers import ArchiveAnswers
    from tieringd.gateway.pending import Answer, PendingRequest
    from tieringd.gateway.responses import Question

PERMIT_SECONDS: Final = 1.0
"""How long the broker's word is taken for what it would say now."""


@dataclass(eq=False, frozen=True, slots=True)
class _Expected:
    """The Fetch that comes next."""

    head: RequestHead
    """Of the one before it."""
    asked: AskedFetch
    last: AskedFetch
    """The same for the last offsets that the archive has below the broker's log."""
    request_for_last: bytes


@dataclass(frozen=True, slots=True)
class _Permit:
    """That the broker has found some offsets out of range, and so all archived ones before them."""

    version: int
    last: AskedFetch
    expires_at: float

    def covers(self, expected: _Expected) -> bool:
        if self.version != expected.head.version:
            return False
        given = self.last.partitions
        return all(
            key in given
            and given[key].current_leader_epoch == one.current_leader_epoch
            and one.fetch_offset <= given[key].fetch_offset
            for key, one in expected.asked.partitions.items()
        )


class FetchAhead:
    """
    One connection's next Fetch. Of one connection, and of its loop.

    *on_known* is called when a request that waits may come again, *on_broken* with what was wrong.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        archive: ArchiveAnswers,
        *,
        timeout_seconds: float,
        bytes_max: Callable[[], float],
        on_known: Callable[[], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._archive = archive
        self._timeout_seconds = timeout_seconds
        self._bytes_max = bytes_max
        self._on_known = on_known
        self._on_broken = on_broken
        self._expected: _Expected | None = None
        self._is_followed = False
        self._asked: _Expected | None = None
        """What the broker has not answered yet; perhaps not what is expected any more."""
        self._asked_at = 0.0
        self._permit: _Permit | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready: Answer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_awaited = False
        """Whether a request was held back by `claim`, and `on_known` has not been called since."""

    def expect(self, pending: PendingRequest, sent: Answer) -> None:
        """Note what was just sent in answer to *pending*: after a Fetch, the next one follows from it."""
        if pending.head.api_key != Api.FETCH:
            return
        self._drop()
        if self.is_awaited:
            # It waits for what is not expected any more. Not at once: the answer is not on its way yet.
            self._loop.call_soon(self._tell)
        if not sent.onward or pending.request is None:
            return
        frame, head = memoryview(pending.request), pending.head
        following = with_offsets(frame, head, {key: one.next_offset for key, one in sent.onward.items()})
        for_last = with_offsets(frame, head, {key: one.last_offset for key, one in sent.onward.items()})
        self._expected = _Expected(
            head, asked_of(memoryview(following), head), asked_of(memoryview(for_last), head), for_last
        )

    def begin(self) -> None:
        """
        Prepare what is expected, if the broker's word is there, and unless it is done or under way.

        To be called when the last answer has gone: what was done before would hold that up.
        """
        expected, permit = self._expected, self._permit
        is_idle = self._task is None and self._ready is None
        if expected is None or permit is None or not (is_idle and self._is_followed):
            return
        if permit.expires_at > self._loop.time() and permit.covers(expected):
            self._task = self._loop.create_task(self._prepare(expected, permit.expires_at))
            self._task.add_done_callback(self._on_done)

    def to_ask(self) -> tuple[RequestHead, bytes] | None:
        """Return what the broker should be asked now; the caller does it, and calls `is_asked`."""
        expected = self._expected
        if expected is None or not self._is_followed or self._asked is not None:
            return None
        permit = self._permit
        is_fresh = permit is not None and permit.expires_at - self._loop.time() > PERMIT_SECONDS / 2
        if is_fresh and permit is not None and permit.covers(expected):
            return None
        return expected.head, expected.request_for_last

    def is_asked(self) -> None:
        """Note that the broker was asked; `is_answered` is due."""
        self._asked, self._asked_at = self._expected, self._loop.time()

    def is_answered(self, question: Question | None) -> None:
        """Take the broker's answer; None where the archive has nothing to say to it."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        out_of_range = {(one.topic, one.index) for one in question.out_of_range} if question else set()
        if out_of_range != asked.last.partitions.keys():
            self._permit = None
            self._give_up()
            return
        # It may have lain in the socket for long.
        self._permit = _Permit(asked.head.version, asked.last, self._asked_at + PERMIT_SECONDS)
        self.begin()
        if self._task is None and self._ready is None:
            self._give_up()

    def claim(self, frame: memoryview, head: RequestHead) -> Answer | None:
        """
        Return the answer to a Fetch that has come, if it is ready; None lets the request go to the broker.

        But when `is_awaited` is true afterwards, the answer is under way: the request is to come again.

        Raises:
            ProtocolViolation: It is no Fetch request.
        """
        expected = self._expected
        if expected is None:
            return None
        self._is_followed = head.version == expected.head.version and asked_of(frame, head) == expected.asked
        self.begin()
        is_late = self._task is not None and not self._is_permitted
        if self._is_followed and not is_late and self._ready is None:
            self.is_awaited = self._asked is expected or self._task is not None
        if self.is_awaited:
            return None
        found = self._ready if self._is_followed else None
        if found is not None:
            self._ready = None
        self._drop()
        return found and found.addressed_to(head.correlation_id)

    @property
    def _is_permitted(self) -> bool:
        return self._permit is not None and self._permit.expires_at > self._loop.time()

    def close(self) -> None:
        """Give everything up; nothing is called any more."""
        self.is_awaited = False
        self._drop()

    async def _prepare(self, expected: _Expected, expires_at: float) -> None:
        found = await fetched_ahead(
            expected.asked,
            expected.head,
            self._archive,
            timeout_seconds=self._timeout_seconds,
            bytes_max=self._bytes_max(),
        )
        # What is not expected any more is cancelled, and does not come here.
        if found is not None:
            self._ready = found
            self._timer = self._loop.call_at(expires_at, self._give_up)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        is_current = self._task is task
        if is_current:
            self._task = None
        error = None if task.cancelled() else task.exception()
        if error is not None and is_current:
            self._on_broken(str(error))
        if error is not None and not isinstance(error, ProtocolViolation):
            # A fault of ours: the loop's exception handler reports it.
            raise error
        if error is not None or not is_current:
            return
        if self._ready is None:
            self._give_up()
        else:
            self._tell()

    def _give_up(self) -> None:
        self._drop()
        self._tell()

    def _tell(self) -> None:
        if self.is_awaited:
            self.is_awaited = False
            self._on_known()

    def _drop(self) -> None:
        """Expect nothing, and release what is ready."""
        self._expected = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.release()
