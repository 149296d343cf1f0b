"""
Prepare the archive's answer to a client's next Fetch before the client sends it.

A client that reads old records fetches from where its last answer ended. While the client receives that
answer, the next one is prepared. The broker still decides whether the client may have it: the gateway
sends the client's own request on the client's own connection, for the last archived offsets below the
broker's log. If the broker finds these out of range, it would find every archived offset before them out
of range too, for this client and at this leader epoch. The gateway relies on this for a second; then it
asks the broker again. A prepared answer with records that a client has deleted since, on any connection, is
never sent. After any other response of the broker, and for any other request of the client,
the request goes to the broker as usual.

Preparation begins once a client has fetched from where an answer ended, and stops when it has not.

A client whose Fetch arrives during the preparation waits no longer than it asked, and no longer than the
broker's permit lasts. Then the answer has what is read by then; the reads of the rest go on, and the
preparation of the next answer takes them over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.fetch import AskedFetch, asked_of, with_offsets
from tieringd.formats.kafka_wire.request_header import InspectedApi, RequestHead
from tieringd.gateway.archive_answers import ArchiveAnswers
from tieringd.gateway.combined_answers import fetched_ahead, longest_wait_seconds
from tieringd.gateway.frames import ClientResponse, PendingRequest
from tieringd.gateway.responses import ArchivableResponse
from tieringd.metrics.readers import READER, Reader
from tieringd.storage.threads import SMALL_BYTES

PERMIT_SECONDS: Final = 1.0
"""How long an out-of-range response of the broker is taken as its response to later requests."""


_PERMIT_LEFT_SECONDS: Final = 0.02
"""How long before the permit's end an awaited answer is due, so that it goes out in time."""
_GRACE_SECONDS: Final = 1.0
"""How much later than that the preparation may end. Only a defect takes longer."""


@dataclass(eq=False, frozen=True, slots=True)
class _Expected:
    """The Fetch that the client is expected to send next."""

    head: RequestHead
    """The head of the Fetch before it."""
    asked: AskedFetch
    last: AskedFetch
    """The same Fetch for the last offsets that the archive has below the broker's log."""
    request_for_last: bytes


@dataclass(frozen=True, slots=True)
class _Permit:
    """The broker found some offsets out of range, and so all archived offsets before them."""

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
    The next Fetch of one connection. Belongs to that connection and its loop.

    *on_known* is called when a held-back request may be claimed again, *on_broken* with the fault of a
    Fetch that cannot be read, *on_failed* after a defect of the program.
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
        on_failed: Callable[[BaseException], None],
        permit_seconds: float = PERMIT_SECONDS,
        reader: Callable[[], Reader | None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._permit_seconds = permit_seconds
        self._archive = archive
        self._timeout_seconds = timeout_seconds
        self._bytes_max = bytes_max
        self._on_known = on_known
        self._on_broken = on_broken
        self._on_failed = on_failed
        self._reader = reader
        self._expected: _Expected | None = None
        self._is_followed = False
        self._asked: _Expected | None = None
        """What the broker was asked and has not answered yet. The client may have moved on meanwhile."""
        self._asked_at = 0.0
        self._permit: _Permit | None = None
        self._task: asyncio.Task[None] | None = None
        self._due: asyncio.Future[None] | None = None
        """Done when the answer of `_task` is due."""
        self._ending: set[asyncio.Task[None]] = set()
        """Preparations that are of no use any more, and let their reads go on."""
        self._ready: ClientResponse | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        """Runs while `claim` holds back a request: the client waits no longer than it asked."""
        self.is_awaited = False
        """Whether `claim` held back a request, and `on_known` has not been called since."""

    def expect(self, pending: PendingRequest, sent: ClientResponse) -> None:
        """Record the answer *sent* to *pending*. After a Fetch, the next Fetch is derived from it."""
        if pending.head.api_key != InspectedApi.FETCH:
            return
        self._drop()
        if self.is_awaited:
            # A held-back request waits for an answer that is no longer expected. It is released in a
            # later turn, after the caller has sent the current answer.
            self._loop.call_soon(self._tell)
        if not sent.next_fetches or pending.request is None or len(pending.request) > SMALL_BYTES:
            # Reading a large request several times would hold up other connections.
            return
        frame, head = memoryview(pending.request), pending.head
        asked = asked_of(frame, head)
        last_offsets = {key: one.last_offset for key, one in sent.next_fetches.items()}
        self._expected = _Expected(
            head,
            asked.at({key: one.next_offset for key, one in sent.next_fetches.items()}),
            asked.at(last_offsets),
            with_offsets(frame, head, last_offsets),
        )

    def begin(self) -> None:
        """
        Prepare the expected answer, if the broker's permit covers it and it is not prepared already.

        Call this when the last answer was sent: preparing earlier would delay that answer.
        """
        expected, permit = self._expected, self._permit
        is_idle = self._task is None and self._ready is None
        if expected is None or permit is None or not (is_idle and self._is_followed):
            return
        # An answer that is due at once would only make the client ask again at once.
        if permit.expires_at - _PERMIT_LEFT_SECONDS > self._loop.time() and permit.covers(expected):
            self._due = self._loop.create_future()
            self._task = self._loop.create_task(self._prepare(expected, self._due))
            self._task.add_done_callback(self._on_done)
            if self._patience is not None:
                # A request was held back before the permit was there.
                due_at = min(self._patience.when(), permit.expires_at - _PERMIT_LEFT_SECONDS)
                self._patience.cancel()
                self._patience = self._loop.call_at(due_at, self._end_wait)

    def to_ask(self) -> tuple[RequestHead, bytes] | None:
        """Return the request to send to the broker now, if any. The caller sends it and calls `is_asked`."""
        expected = self._expected
        if expected is None or not self._is_followed or self._asked is not None:
            return None
        permit = self._permit
        is_fresh = permit is not None and permit.expires_at - self._loop.time() > self._permit_seconds / 2
        if is_fresh and permit is not None and permit.covers(expected):
            return None
        return expected.head, expected.request_for_last

    def is_asked(self) -> None:
        """Record that the broker was asked. `is_answered` must follow."""
        self._asked, self._asked_at = self._expected, self._loop.time()

    def is_answered(self, question: ArchivableResponse | None) -> None:
        """Take the broker's response; None if the archive has nothing to add to it."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        out_of_range = {(one.topic, one.index) for one in question.out_of_range} if question else set()
        if out_of_range != asked.last.partitions.keys():
            self._permit = None
            self._give_up()
            return
        # The permit counts from the request: the response may have waited in the socket.
        self._permit = _Permit(asked.head.version, asked.last, self._asked_at + self._permit_seconds)
        self.begin()
        if self._task is None and self._ready is None:
            self._give_up()

    def claim(self, frame: memoryview, head: RequestHead) -> ClientResponse | None:
        """
        Return the answer to a Fetch that has arrived, if it is ready. None lets the request go to the broker.

        If `is_awaited` is true afterwards, the answer is being prepared: call this again after `on_known`.

        Raises:
            ProtocolViolation: The frame is no Fetch request.
        """
        expected = self._expected
        if expected is None:
            return None
        if len(frame) > SMALL_BYTES:
            self._drop()
            return None
        asked = asked_of(frame, head)
        self._is_followed = head.version == expected.head.version and asked == expected.asked
        self.begin()
        is_late = self._task is not None and not self._is_permitted
        if self._is_followed and not is_late and self._ready is None:
            self.is_awaited = self._asked is expected or self._task is not None
        if self.is_awaited:
            if self._patience is None:
                self._patience = self._loop.call_at(self._due_at(asked), self._end_wait)
            return None
        # The timer that ends the permit is late where this process stood still.
        is_good = self._is_followed and self._is_permitted and not self._has_deleted(asked)
        found = self._ready if is_good else None
        if found is not None:
            self._ready = None
        if self._is_followed:
            self._let_end()
        self._drop()
        return found and found.addressed_to(head.correlation_id)

    def _has_deleted(self, asked: AskedFetch) -> bool:
        """Say whether clients have deleted records that were there when the answer was prepared."""
        return any(
            one.fetch_offset < self._archive.deleted_before(*key) for key, one in asked.partitions.items()
        )

    @property
    def _is_permitted(self) -> bool:
        return self._permit is not None and self._permit.expires_at > self._loop.time()

    def close(self) -> None:
        """Drop all state. No callback is called any more."""
        self.is_awaited = False
        self._drop()
        for task in self._ending:
            task.cancel()

    def _due_at(self, asked: AskedFetch) -> float:
        """Return until when a client waits whose Fetch has just arrived."""
        due_at = self._loop.time() + longest_wait_seconds(asked)
        if self._task is None or self._permit is None:
            return due_at
        return min(due_at, self._permit.expires_at - _PERMIT_LEFT_SECONDS)

    def _end_wait(self) -> None:
        """Let the preparation end with what is read. Without one, the request goes to the broker."""
        if self._task is None or self._due is None or self._due.done():
            self._give_up()
            return
        self._due.set_result(None)
        self._patience = self._loop.call_later(_GRACE_SECONDS, self._give_up)

    def _let_end(self) -> None:
        """Let a preparation that is late end by itself: its reads go on, for the client's own Fetch."""
        task, self._task = self._task, None
        if task is None:
            return
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        if self._due is not None and not self._due.done():
            self._due.set_result(None)

    async def _prepare(self, expected: _Expected, due: asyncio.Future[None]) -> None:
        READER.set(self._reader())
        found = await fetched_ahead(
            expected.asked,
            expected.head,
            self._archive,
            timeout_seconds=self._timeout_seconds,
            bytes_max=self._bytes_max(),
            due=due,
        )
        if found is None:
            return
        permit = self._permit
        is_permitted = permit is not None and self._is_permitted and permit.covers(expected)
        if permit is None or not is_permitted or self._expected is not expected:
            found.release()
            return
        self._ready = found
        self._timer = self._loop.call_at(permit.expires_at, self._give_up)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        is_current = self._task is task
        if is_current:
            self._task = None
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ProtocolViolation) and is_current:
            self._on_broken(str(error))
        elif error is not None and (is_current or task in self._ending):
            self._on_failed(error)
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
        """Stop expecting a Fetch, and release the answer that is ready."""
        self._expected = None
        for timer in (self._timer, self._patience):
            if timer is not None:
                timer.cancel()
        self._timer = self._patience = None
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.release()
